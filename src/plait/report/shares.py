"""Who keeps what under ZeRO, drawn from the units: a panel a stage, a row a rank, a bar for each of weights, gradients
and state, in which the rank's own share of a unit is coloured and what it does not keep is not."""

from __future__ import annotations

from collections.abc import Sequence

from ..design.sharding import ZERO, Quantity
from ..design.unit import Unit
from .svg import document, rect, text

BAR, HEIGHT, GAP = 150.0, 14.0, 14.0
LEFT, TOP, ROW = 84.0, 64.0, 24.0
QUANTITIES: tuple[tuple[str, Quantity, str], ...] = (
    ("weights", "stored", "slice1"), ("gradients", "grad", "slice2"), ("state", "state", "slice0"),
)  # fmt: skip
"""Name, what ZeRO cuts by that name, colour. ZeRO-1 sums shares of gradients too, but keeps whole ones for it."""


def kept(unit: Unit, quantity: Quantity, zero: int, index: int) -> tuple[float, float]:
    """From where to where of a unit a rank keeps, as shares of it."""
    whole = quantity not in ZERO[zero] or (quantity == "grad" and zero == 1)
    return (0.0, 1.0) if whole else (index / unit.shares, (index + 1) / unit.shares)


def svg(unit: Unit, *, title: str) -> str:
    """The stages of ZeRO side by side for one unit."""
    stages = sorted(ZERO)
    width = LEFT + len(QUANTITIES) * (BAR + GAP) + 8
    drawn = [text(LEFT + place * (BAR + GAP), TOP - 14, name) for place, (name, _, _) in enumerate(QUANTITIES)]
    y = TOP
    for zero in stages:
        drawn.append(text(16, y + 11, f"ZeRO-{zero}" if zero else "no ZeRO", "title"))
        y += ROW
        for index in range(unit.shares):
            drawn += _rank(unit, zero, index, y)
            y += ROW - 4
        y += 10
    return document(width, y + 2, title, drawn)


def _rank(unit: Unit, zero: int, index: int, y: float) -> Sequence[str]:
    found = [text(LEFT - 10, y + 11, f"dp {index}", "end")]
    for place, (_, quantity, colour) in enumerate(QUANTITIES):
        x = LEFT + place * (BAR + GAP)
        start, stop = kept(unit, quantity, zero, index)
        found += [rect(x, y, BAR, HEIGHT, "idle"), rect(x + start * BAR, y, (stop - start) * BAR, HEIGHT, colour)]
    return found
