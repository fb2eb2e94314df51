"""Ranks on named axes.

A mesh is an ordered product of axes; the last axis varies fastest, so with (pp 2, dp 2, tp 2)

    rank = (pp * 2 + dp) * 2 + tp          tp neighbours are ranks 0 and 1, pp neighbours 0 and 4

tp is innermost because it talks most, pp outermost because it talks least. A group is what is left of the mesh when
some axes vary and the others stand still. dp is a product of two atoms, replica x shard: with dp 4 and 2 replicas

    dp        0 1 2 3
    replica   0 0 1 1       ranks that keep the same shares
    shard     0 1 0 1       ranks that share: neighbours

The mesh knows ranks and numbers; processes and sockets are runtime/comm's.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

AXES = ("pp", "dp", "tp")
"""Every axis that a plan sets, in the order in which they are printed and laid out."""
ATOMS = ("replica", "shard")
"""Of dp."""


@dataclass(frozen=True)
class Mesh:
    """Axis names and sizes, outermost first. `Mesh((("pp", 2), ("tp", 4)))` has 8 ranks. `replicas` divides dp."""

    axes: tuple[tuple[str, int], ...]
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1 or dict(self.axes).get("dp", 1) % self.replicas:
            raise ValueError(f"{self.replicas} replicas do not divide dp {dict(self.axes).get('dp', 1)}")
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
        """Product of the sizes of the named axes, or atoms of dp."""
        sizes = dict(self.axes)
        sizes |= {"replica": self.replicas, "shard": sizes.get("dp", 1) // self.replicas}
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

    def index(self, rank: int, name: str) -> int:
        """Where a rank is on an axis, or on an atom of dp."""
        place = self.coordinate(rank)
        if name not in ATOMS:
            return place[name]
        return divmod(place.get("dp", 0), self.degree("shard"))[ATOMS.index(name)]

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` on the named axes, or atoms of dp, only, itself included, ascending."""
        unknown = set(names) - {*self.names, *ATOMS}
        if unknown:
            raise ValueError(f"this mesh has no axis {sorted(unknown)}, only {self.names}")
        place = self.coordinate(rank)
        ranges = [(place[name],) if name not in names else range(size) for name, size in self.axes]
        atoms = [atom for atom in ATOMS if atom in names]
        if len(atoms) == 1 and "dp" in self.names and "dp" not in names:
            (atom,) = atoms
            shards = self.degree("shard")
            first, own = place["dp"] // shards * shards, place["dp"] % shards
            inside, across = range(first, first + shards), range(own, self.degree("dp"), shards)
            ranges[self.names.index("dp")] = inside if atom == "shard" else across
        elif atoms and "dp" in self.names:
            ranges[self.names.index("dp")] = range(self.degree("dp"))
        return tuple(self.rank(**dict(zip(self.names, point, strict=True))) for point in itertools.product(*ranges))

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """Every group over the named axes, by its first rank: the same list on every rank."""
        return sorted({self.group(rank, *names) for rank in range(self.size)})

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes)
