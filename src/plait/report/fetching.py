"""Who fetches what when under ZeRO-3, drawn from the units and the order in which a step needs them.

    keeps        forward a   forward b   forward c   backward c   backward b   backward a
    dp 0  a ▉..  [012]       [012]       [012]       [012]        [012]        [012]         the unit at work, whole
          b ▉..                                      [0..]        [0..]        [0..]         its gradient's sum, own share
          c ▉..

Below the ranks stands what arrives while a unit is at work, and in whose place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..design.unit import Slot, Unit, gathers
from .svg import document, rect, text

BAR, HEIGHT, COLUMN = 84.0, 13.0, 104.0
LEFT, KEEPS, TOP = 64.0, 128.0, 66.0


@dataclass(frozen=True)
class Need:
    """A unit at work: `fetched` if it had to be gathered for it, in the place of `before` (None: nothing was there)."""

    work: str
    unit: Unit
    fetched: bool
    before: Unit | None


def needs(sequence: Sequence[tuple[str, Unit]]) -> list[Need]:
    """What a step needs in order, as (work, unit), with what is gathered for it."""
    held: dict[Slot, Unit] = {}
    found = []
    for place, (work, unit) in enumerate(sequence):
        before = held.get(unit.slot(kept=False))
        fetched = len(gathers([u for _, u in sequence[: place + 1]], kept=False)) > len(
            gathers([u for _, u in sequence[:place]], kept=False)
        )
        found.append(Need(work, unit, fetched, before if before != unit else None))
        held[unit.slot(kept=False)] = unit
    return found


def svg(sequence: Sequence[tuple[str, Unit]], names: dict[Unit, str], *, title: str) -> str:
    """One step of blocks that all ranks share, `names` in the order in which they are drawn."""
    steps = needs(sequence)
    shares = next(iter(names)).shares
    width = LEFT + KEEPS + len(steps) * COLUMN + 8
    row = max(len(names), 2) * (HEIGHT + 4) + 14
    drawn = [text(LEFT + 22, TOP - 12, "keeps")]
    drawn += [text(_x(place), TOP - 12, f"{need.work} {names[need.unit]}") for place, need in enumerate(steps)]
    for index in range(shares):
        y = TOP + index * row
        drawn.append(text(LEFT - 10, y + 11, f"dp {index}", "end"))
        for place, (unit, name) in enumerate(names.items()):
            level = y + place * (HEIGHT + 4)
            drawn += [text(LEFT + 4, level + 11, name), *_bar(LEFT + 22, level, unit, (index,))]
        for place, need in enumerate(steps):
            drawn += _bar(_x(place), y, need.unit, range(shares))
            if need.work == "backward":
                drawn += _bar(_x(place), y + HEIGHT + 4, need.unit, (index,))
    y = TOP + shares * row + 6
    for label, level in (("arrives", y), ("leaves", y + 20)):
        drawn.append(text(LEFT - 10, level + 11, label, "end"))
    for place in range(len(steps)):
        words, left = _meanwhile(steps, place, names)
        drawn += [text(_x(place), y + 11, words), text(_x(place), y + 31, left)]
    below = "Below a unit in backward: the sum of its gradient, of which each rank gets its share and no more."
    drawn.append(text(LEFT + 22, y + 60, below))
    return document(width, y + 72, title, drawn)


def _x(place: int) -> float:
    return LEFT + KEEPS + place * COLUMN


def _bar(x: float, y: float, unit: Unit, kept: Sequence[int]) -> list[str]:
    """A unit, in which the shares of the ranks `kept` are coloured."""
    found = [rect(x, y, BAR, HEIGHT, "idle")]
    for index in kept:
        start, stop = (edge * unit.share / unit.padded * BAR for edge in (index, index + 1))
        found.append(rect(x + start, y, stop - start, HEIGHT, f"slice{index}"))
    return found


def _meanwhile(steps: Sequence[Need], place: int, names: dict[Unit, str]) -> tuple[str, str]:
    """What is fetched while a unit is at work, one ahead, and what it takes the place of."""
    first = names[steps[0].unit] if place == 0 else ""
    following = steps[place + 1] if place + 1 < len(steps) else None
    fetched = following is not None and following.fetched
    ahead = names[following.unit] if following is not None and fetched else ""
    left = names[following.before] if following is not None and fetched and following.before is not None else ""
    arrives = f"{first} before, then {ahead}" if first else ahead
    return arrives or "nothing", left or "nothing"
