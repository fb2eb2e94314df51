"""Ranks on named axes.

A mesh is an ordered product of axes; the last axis varies fastest, so with (pp 2, dp 2, tp 2)

    rank = (pp * 2 + dp) * 2 + tp          tp neighbours are ranks 0 and 1, pp neighbours 0 and 4

tp is innermost because it talks most, pp outermost because it talks least. A group is what is left of the mesh when
some axes vary and the others stand still.

An axis is a product of factors, which are named after it: `dp/2` counts the pairs of neighbours on dp, `dp%2` which of a
pair a rank is. With dp 4

    dp        0 1 2 3
    dp/2      0 0 1 1       `replica` is another name of dp/n, `shard` of dp%n, with dp = replicas x n
    dp%2      0 1 0 1

The mesh knows ranks and numbers; processes and sockets are runtime/comm's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

AXES = ("pp", "dp", "tp")
"""Every axis that a plan sets, in the order in which they are printed and laid out."""
ATOMS = ("replica", "shard")
"""Factors of dp: ranks that keep the same shares, and ranks that share."""


def factors(axis: str, inner: int) -> tuple[str, str]:
    """The names of an axis's outer factor and of its inner one, of size `inner`."""
    return f"{axis}/{inner}", f"{axis}%{inner}"


def rest_of(axis: str, taken: Iterable[str]) -> str | None:
    """What is left of an axis beside the factors that are taken: itself, its other factor, or nothing."""
    whole, sign, size = axis, "", ""
    for name in taken:
        found, mark, number = _parted(name)
        if found != axis:
            continue
        if not mark or (sign and mark != sign):
            return None
        sign, size = mark, number
        whole = f"{axis}{'%' if sign == '/' else '/'}{size}"
    return whole


def _parted(name: str) -> tuple[str, str, str]:
    """ "tp%2" -> tp, %, 2."""
    for sign in "/%":
        axis, found, size = name.partition(sign)
        if found:
            return axis, sign, size
    return name, "", ""


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

    def _factor(self, name: str) -> tuple[str, int, int]:
        """The axis of a name, how far apart neighbours are on it, and how many there are."""
        if name in ATOMS:
            name = f"dp{'/%'[ATOMS.index(name)]}{dict(self.axes).get('dp', 1) // self.replicas}"
        axis, sign, size = _parted(name)
        whole = dict(self.axes).get(axis, 1 if axis == "dp" else 0)
        if not whole or (sign and whole % int(size)):
            raise ValueError(f"this mesh has no axis {name}, only {self.names}")
        if not sign:
            return axis, 1, whole
        return (axis, int(size), whole // int(size)) if sign == "/" else (axis, 1, int(size))

    def degree(self, *names: str) -> int:
        """Product of the sizes of the named axes, or factors of them."""
        return math.prod(self._factor(name)[2] for name in names)

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
        """Where a rank is on an axis, or on a factor of one."""
        axis, step, size = self._factor(name)
        return self.coordinate(rank).get(axis, 0) // step % size

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` on the named axes, or factors of axes, only, itself included, ascending."""
        place = self.coordinate(rank)
        points = {axis: {where} for axis, where in place.items()}
        for name in names:
            axis, step, size = self._factor(name)
            if axis in points:
                points[axis] = {
                    where + (other - where // step % size) * step for where in points[axis] for other in range(size)
                }
        ranges = [sorted(points[name]) for name in self.names]
        return tuple(self.rank(**dict(zip(self.names, point, strict=True))) for point in itertools.product(*ranges))

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """Every group over the named axes, by its first rank: the same list on every rank."""
        return sorted({self.group(rank, *names) for rank in range(self.size)})

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes)
