"""Which slice of one tensor each rank holds, and the moves between two layouts.

A layout cuts some dims of a tensor over some axes of the mesh; ranks that differ on other axes hold copies:

    Layout((8, 4), (Cut(0, "tp"),)) on (dp 2, tp 2)        rows 0-3 | rows 4-7   (dp 0)
                                                           rows 0-3 | rows 4-7   (dp 1, copies)

Cuts apply in the order written, the second inside the slice that the first left. A slice is named by its box: one
(start, stop) a dim, in the whole tensor's indices. Undoing the last cut is an all-gather; its transpose is a
reduce-scatter. Nothing here knows what the tensor is for: parts, gradients and optimizer state all use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .mesh import Mesh

Box = tuple[tuple[int, int], ...]
"""(start, stop) for every dim."""


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes share, or None. Two boxes without dims (scalars) share the scalar."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in shared) else shared


def balanced(length: int, pieces: int, index: int) -> tuple[int, int]:
    """(start, stop) of piece `index` when `length` is cut in `pieces` that differ by at most one, larger first."""
    small, larger = divmod(length, pieces)
    start = index * small + min(index, larger)
    return start, start + small + (1 if index < larger else 0)


@dataclass(frozen=True)
class Cut:
    """One dim cut over the product of some axes, or factors of axes. `quantum` elements (an attention group, say) are
    never parted."""

    dim: int
    axes: tuple[str, ...]
    quantum: int = 1


@dataclass(frozen=True)
class Layout:
    """One tensor over all ranks.

    `cuts` say how it is sliced; `places` names the places on the pp axis that hold it at all (None: every one).
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    places: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for cut in self.cuts:
            if not 0 <= cut.dim < len(self.shape):
                raise ValueError(f"a cut of dim {cut.dim} in a tensor of {len(self.shape)} dims")
            if cut.quantum < 1 or self.shape[cut.dim] % cut.quantum:
                raise ValueError(f"dim {cut.dim} of size {self.shape[cut.dim]} is not made of {cut.quantum}s")
            if seen & set(cut.axes):
                raise ValueError(f"axis {sorted(seen & set(cut.axes))} cuts the same tensor twice")
            seen |= set(cut.axes)
        if self.places is not None and "pp" in seen:
            raise ValueError(
                "a layout at some places of pp cannot also be cut over pp: the slices of the others would be lost"
            )

    def then(self, cut: Cut) -> Layout:
        """This layout, every slice of it cut once more."""
        return replace(self, cuts=(*self.cuts, cut))

    def undo(self) -> Layout:
        """This layout without its last cut."""
        if not self.cuts:
            raise ValueError("this layout has no cut to undo")
        return replace(self, cuts=self.cuts[:-1])

    @property
    def cut_axes(self) -> frozenset[str]:
        return frozenset(axis for cut in self.cuts for axis in cut.axes)

    def holds(self, mesh: Mesh, rank: int) -> bool:
        return self.places is None or mesh.coordinate(rank).get("pp", 0) in self.places

    def box(self, mesh: Mesh, rank: int) -> Box | None:
        """What `rank` holds, or None when it holds nothing. An empty slice is a box with start == stop."""
        if not self.holds(mesh, rank):
            return None
        box = [(0, size) for size in self.shape]
        for cut in self.cuts:
            index = 0
            for axis in cut.axes:
                index = index * mesh.degree(axis) + mesh.index(rank, axis)
            start, stop = box[cut.dim]
            units = (stop - start) // cut.quantum
            if units * cut.quantum != stop - start:
                raise ValueError(f"the cut {cut} parts a quantum: the slice before it has {stop - start} elements")
            first, last = balanced(units, mesh.degree(*cut.axes), index)
            box[cut.dim] = (start + first * cut.quantum, start + last * cut.quantum)
        return tuple(box)

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...] | None:
        box = self.box(mesh, rank)
        return None if box is None else box_shape(box)

    def holders(self, mesh: Mesh) -> Iterator[tuple[int, Box]]:
        for rank in range(mesh.size):
            box = self.box(mesh, rank)
            if box is not None:
                yield rank, box

    def is_first_copy(self, mesh: Mesh, rank: int) -> bool:
        """Whether `rank` is the lowest rank that holds its slice: a sum over first copies counts each element once."""
        mine = self.box(mesh, rank)
        return mine is not None and next(r for r, box in self.holders(mesh) if box == mine) == rank


@dataclass(frozen=True)
class Move:
    """Elements `box` (in the whole tensor's indices) go from `source` to `target`; the two may be one rank."""

    source: int
    target: int
    box: Box


def moves(source: Layout, source_mesh: Mesh, target: Layout, target_mesh: Mesh) -> list[Move]:
    """The moves that turn one layout into another: every element of every target slice arrives exactly once.

    An element that a rank already holds stays there; the others come from the copies in turn, so that copies share
    the work. Ordered by (target, source), the same list on every rank.
    """
    if source.shape != target.shape:
        raise ValueError(f"a tensor of shape {source.shape} cannot move into one of shape {target.shape}")
    copies: dict[Box, list[int]] = {}
    for rank, box in source.holders(source_mesh):
        copies.setdefault(box, []).append(rank)
    found: list[Move] = []
    for rank, wanted in target.holders(target_mesh):
        own = source.box(source_mesh, rank) if rank < source_mesh.size else None
        kept = overlap(own, wanted) if own is not None else None
        for box, ranks in copies.items():
            shared = overlap(box, wanted)
            if shared is None:
                continue
            giver = rank if shared == kept and rank in ranks else ranks[rank % len(ranks)]
            found.append(Move(giver, rank, shared))
    return sorted(found, key=lambda move: (move.target, move.source, move.box))


def elements(box: Box) -> int:
    return math.prod(box_shape(box))
