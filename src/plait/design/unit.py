"""Units: what ZeRO cuts and moves. The parameters of one block on one rank stand in one flat buffer, in order:

    block 3     [ norm | q | k | v | o | norm | gate | up | down | - ]     padded to equal shares
    dp rank     [      0       |       1       |       2       |   3 ]     cut wherever a share ends

What comes before the blocks is a unit, what comes after them another, and a parameter that several places use is one by
itself, so that its share is the same elements at all of them. A rank's share of a parameter is a stretch of what it
computes with: elements start to stop of the slice, flat. Rajbhandari et al., "ZeRO", 2019, section 5.

While ZeRO-3 trains, whole units stand in slots: two for the blocks, in turns, so that one is gathered while the other is
at work. Which unit is in which slot never changes, and the sequence of a step is known: so is every gather in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

Slot = Hashable
IN_FLIGHT = 2
"""Units whose gradients are being summed at one time; backward waits before a third begins."""
BEFORE, AFTER = "before the blocks", "after the blocks"


@dataclass(frozen=True)
class Unit:
    """Parameters of one stage that stand at one `place`, with the elements that a rank computes with; `shares` ranks
    share them. `rest` are the axes over which the gradients of a share are summed besides; `in_backward` says whether
    backward reads the weights (an embedding's not), `alone` whether several places use it, `trains` whether they have
    gradients: what is frozen is a unit by itself."""

    place: str
    stage: int
    block: int | None
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shares: int
    rest: tuple[str, ...] = ()
    in_backward: bool = True
    alone: bool = False
    trains: bool = True

    @property
    def name(self) -> str:
        axes = ".".join(axis for axis in self.rest if axis != "replica")
        return f"{self.place}{f', dp.{axes}' if axes else ''}{'' if self.trains else ', frozen'}"

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    @property
    def share(self) -> int:
        """Elements of each share, the padding counted."""
        return -(-self.elements // self.shares)

    @property
    def padded(self) -> int:
        return self.share * self.shares

    @cached_property
    def spans(self) -> Mapping[str, tuple[int, int]]:
        """Where each parameter stands in the buffer."""
        stops = list(accumulate(self.sizes))
        return {name: (stop - size, stop) for name, size, stop in zip(self.names, self.sizes, stops, strict=True)}

    def stretch(self, name: str, index: int) -> tuple[int, int]:
        """Share `index` of a parameter: (start, stop) in its own elements; start == stop where it has none."""
        first, last = self.spans[name]
        start = min(max(index * self.share, first), last)
        return start - first, max(min((index + 1) * self.share, last), start) - first

    def slot(self, *, kept: bool) -> Slot:
        """Where it stands while it is whole: by itself if it is kept until the step ends."""
        if kept or self.alone:
            return self.name
        where = ("blocks", self.block % 2) if self.block is not None else ("ends",)
        return (*where, self.rest, self.trains)


def gathers(sequence: Iterable[Unit], *, kept: bool) -> list[Unit]:
    """Which of the units that a step needs, in order, are gathered: those that are not in their slots (any more)."""
    held: dict[Slot, Unit] = {}
    found = []
    for unit in sequence:
        slot = unit.slot(kept=kept)
        if held.get(slot) != unit:
            held[slot] = unit
            found.append(unit)
    return found


def slot_sizes(units: Iterable[Unit], *, kept: bool) -> dict[Slot, int]:
    """Elements of every slot: of the largest unit that is ever in it."""
    sizes: dict[Slot, int] = {}
    for unit in units:
        slot = unit.slot(kept=kept)
        sizes[slot] = max(sizes.get(slot, 0), unit.padded)
    return sizes
