"""What each rank keeps of every parameter, as boxes of the whole tensor, and which of them it writes to a checkpoint.

A slice that tp cuts is a box. A share of ZeRO is a stretch of such a slice laid flat, and a stretch is a few boxes:

    . . . . .
    . . a a a      head, the rest of a row        of a tensor of n dims at most 2 n - 1 of them, so that a file of one
    b b b b b      whole rows                     layout is read by any other without a word about ZeRO
    c c . . .      tail

Of copies one is written, so that each element is in the files once. Ranks of dp have copies of everything that ZeRO does
not cut; each writes a share of those, cut as a unit is, wherever a share ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .layout import Box, overlap
from .part import Parameter, Part
from .sharding import Quantity, Sharding
from .unit import Unit

Stretch = tuple[int, int]


@dataclass(frozen=True)
class Slice:
    """`box`, in the whole parameter's indices, stands in what a rank keeps of it, which is flat: its first element at
    `start`, the others `strides` further on."""

    box: Box
    start: int
    strides: tuple[int, ...]


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements `start` to `stop` of a tensor of `shape`, laid flat, as boxes in its indices, in order."""
    if start >= stop:
        return []
    rest = shape[1:]
    if (start, stop) == (0, math.prod(shape)):
        return [tuple((0, size) for size in shape)]
    inner = math.prod(rest)
    row, last = start // inner, (stop - 1) // inner
    found: list[Box] = []
    if row == last or start % inner:
        end = min(stop, (row + 1) * inner)
        found += [((row, row + 1), *box) for box in boxes_of(rest, start - row * inner, end - row * inner)]
        row += 1
    if row < (full := stop // inner):
        found.append(((row, full), *((0, size) for size in rest)))
        row = full
    if row * inner < stop and row <= last:
        found += [((row, row + 1), *box) for box in boxes_of(rest, 0, stop - row * inner)]
    return found


def quantity_of(parameter: Parameter) -> Quantity:
    """What is saved of a parameter: what its owner updates, and of a frozen one what it stores."""
    return "state" if parameter.first.trains else "stored"


def kept(sharding: Sharding, name: str, quantity: Quantity, rank: int) -> list[Slice]:
    """All that `rank` has of a parameter: the slice that it computes with or, where ZeRO cuts this quantity, its stretch
    of that. Empty where its place on pp does not use the parameter."""
    parameter = sharding.parameter(name)
    stretch = sharding.stretch(name, quantity, rank) if parameter.boxes(sharding.mesh, rank) else None
    stretch = stretch or (0, parameter.elements(sharding.mesh, rank))
    return _slices(sharding, parameter, rank, stretch, stretch[0], parameter.parts)


def _slices(
    sharding: Sharding, parameter: Parameter, rank: int, stretch: Stretch, origin: int, parts: Sequence[Part]
) -> list[Slice]:  # fmt: skip
    """The elements of `parts` in a stretch of the rank's slice, where element `origin` of the slice is the first that is
    kept. The parts stand side by side in it."""
    mesh, dim = sharding.mesh, parameter.first.dim
    shape = parameter.local_shape(mesh, rank)
    strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    pieces = boxes_of(shape, *stretch)
    found, at = [], 0
    for part in parameter.parts:
        box = part.compute.box(mesh, rank)
        if box is None:
            continue
        whole = part.within(box)
        width = whole[dim][1] - whole[dim][0] if whole else 0
        here = tuple((at, at + width) if side == dim else (0, size) for side, size in enumerate(shape))
        at += width
        for piece in pieces if part in parts else ():
            shared = overlap(piece, here)
            if shared is None:
                continue
            start = sum(first * stride for (first, _), stride in zip(shared, strides, strict=True))
            moved = tuple(
                (first - low + base, last - low + base)
                for (first, last), (low, _), (base, _) in zip(shared, here, whole, strict=True)
            )
            found.append(Slice(moved, start - origin, strides))
    return found


class Writers:
    """Who writes what of a sharding's parameters. `together` says that dp ranks have copies of what ZeRO does not cut,
    and share the work; else only the first of them has any."""

    def __init__(self, sharding: Sharding, *, together: bool = True) -> None:
        self._sharding, self._together = sharding, together
        self._first: dict[str, dict[Box, int]] = {}
        for part in sharding.parts:
            first = self._first.setdefault(part.name, {})
            for rank, box in part.state.holders(sharding.mesh):
                first.setdefault(box, rank)

    def writes(self, rank: int) -> dict[str, list[Slice]]:
        """By parameter, in the model's order, the slices that `rank` writes: over all ranks each element once."""
        sharding, mesh = self._sharding, self._sharding.mesh
        place = mesh.coordinate(rank)["pp"]
        held = [one for one in sharding.parameters if one.first.owner == place]
        stretches = {one.name: sharding.stretch(one.name, quantity_of(one), rank) for one in held}
        sizes = {
            name: sharding.parameter(name).elements(mesh, rank) if cut is None else cut[1] - cut[0]
            for name, cut in stretches.items()
        }
        whole = [name for name in sizes if stretches[name] is None]
        cut = [name for name in sizes if stretches[name] is not None]
        shares = self._shares(whole, sizes, rank, "dp") | self._shares(cut, sizes, rank, "replica")
        # Of what tp ranks have copies of, the first of them writes: the one that dp rank 0 of the same place would be.
        same = mesh.rank(**{**mesh.coordinate(rank), "dp": 0})
        found = {}
        for one in held:
            origin = (stretches[one.name] or (0, 0))[0]
            start, stop = shares[one.name]
            mine = [part for part in one.parts if self._writes_part(part, same)]
            found[one.name] = _slices(sharding, one, rank, (origin + start, origin + stop), origin, mine)
        return {name: slices for name, slices in found.items() if slices}

    def _writes_part(self, part: Part, rank: int) -> bool:
        box = part.state.box(self._sharding.mesh, rank)
        return box is not None and self._first[part.name][box] == rank

    def _shares(self, names: list[str], sizes: dict[str, int], rank: int, axis: str) -> dict[str, Stretch]:
        """Which stretch of what it has of each parameter is written by `rank`, of those that differ on `axis` and have
        copies."""
        mesh = self._sharding.mesh
        copies, index = mesh.degree(axis), mesh.index(rank, axis)
        if not self._together and axis == "dp":
            return {name: (0, 0 if index else sizes[name]) for name in names}
        unit = Unit("copies", 0, None, tuple(names), tuple(sizes[name] for name in names), copies)
        return {name: unit.stretch(name, index) for name in names}
