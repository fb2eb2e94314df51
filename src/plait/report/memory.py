"""The memory of every rank in characters: a bar as predicted, and below it one as measured."""

from __future__ import annotations

from collections.abc import Sequence

from ..design.records import MemoryBill
from .words import size

PIECES = (
    ("weights", "weights", "█"), ("master_weights", "master weights", "▓"), ("gradients", "gradients", "▒"),
    ("state", "optimizer state", "░"), ("units", "units on their way", "+"), ("activations", "kept for backward", "·"),
    ("working", "working set", "^"),
)  # fmt: skip
"""Field of a bill, its name, its character."""
MOST = 8
"""Ranks drawn."""
NARROW = 20


def draw(predicted: Sequence[MemoryBill], measured: Sequence[MemoryBill], width: int) -> str:
    """Two lines a rank, `width` characters wide, and what the characters mean."""
    pairs = list(zip(predicted, measured, strict=True))[:MOST]
    longest = max(bill.peak for pair in pairs for bill in pair) or 1
    room = max(NARROW, width - len("rank 00  predicted  ") - len("  1000.0 MiB"))
    lines = []
    for one, other in pairs:
        for number, (how, bill) in enumerate((("predicted", one), ("measured", other))):
            label = f"rank {bill.rank}" if number == 0 else ""
            lines.append(f"{label:8} {how:9}  {_bar(bill, longest, room):{room}}  {size(bill.peak)}")
    drawn = [bill for pair in pairs for bill in pair]
    used = [f"{mark} {name}" for field, name, mark in PIECES if any(getattr(bill, field) for bill in drawn)]
    if len(measured) > MOST:
        lines.append(f"and {len(measured) - MOST} more ranks")
    return "\n".join([*lines, "  ".join(used)])


def _bar(bill: MemoryBill, longest: int, room: int) -> str:
    """Each piece ends where the sum up to it does, so that roundings do not add up."""
    bar, reached = "", 0
    for field, _, mark in PIECES:
        reached += getattr(bill, field) or 0
        bar += mark * (round(room * reached / longest) - len(bar))
    return bar
