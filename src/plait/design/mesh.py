"""Ranks on named axes.

A mesh is an ordered product of axes; the last axis varies fastest, so with (pp 2, dp 2, tp 2)

    rank = (pp * 2 + dp) * 2 + tp          tp neighbours are ranks 0 and 1, pp neighbours 0 and 4

tp is innermost because it talks most, pp outermost because it talks least. A group is what is left of the mesh when
some axes vary and the others stand still. The mesh knows ranks and numbers; processes and sockets are runtime/comm's.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

AXES = ("pp", "dp", "tp")
"""Every axis that a plan sets, in the order in which they are printed and laid out."""


@dataclass(frozen=True)
class Mesh:
    """Axis names and sizes, outermost first. `Mesh((("pp", 2), ("tp", 4)))` has 8 ranks."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise ValueError(f"the axes {names} are not all different")
        for name, size in self.axes:
            if size < 1:
                raise ValueError(f"axis {name} has size {size}; the least is 1")

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def degree(self, *names: str) -> int:
        """Product of the sizes of the named axes."""
        sizes = dict(self.axes)
        return math.prod(sizes[name] for name in names)

    def coordinate(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.size} ranks")
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate; an axis that is not named stands at 0."""
        unknown = set(coordinate) - set(self.names)
        if unknown:
            raise ValueError(f"this mesh has no axis {sorted(unknown)}, only {self.names}")
        rank = 0
        for name, size in self.axes:
            place = coordinate.get(name, 0)
            if not 0 <= place < size:
                raise ValueError(f"axis {name} has size {size}, so there is no place {place} on it")
            rank = rank * size + place
        return rank

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` on the named axes only, itself included, ascending."""
        unknown = set(names) - set(self.names)
        if unknown:
            raise ValueError(f"this mesh has no axis {sorted(unknown)}, only {self.names}")
        place = self.coordinate(rank)
        varying = [name for name in self.names if name in names]
        ranges = [range(self.degree(name)) for name in varying]
        return tuple(
            self.rank(**{**place, **dict(zip(varying, point, strict=True))}) for point in itertools.product(*ranges)
        )

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """Every group over the named axes, by its first rank: the same list on every rank."""
        return sorted({self.group(rank, *names) for rank in range(self.size)})

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes)
