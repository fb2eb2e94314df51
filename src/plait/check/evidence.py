"""The first departure and what is known around it: every rank's tensor there, and the reference's at all other places."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from ..design.layout import Box
from ..design.mesh import Mesh, factors
from ..design.plan import Plan
from ..design.sharding import Sharding
from ..runtime.hf.read import Model
from .places import PARTS, Departure, Place, boxes_of, held_of, output_of, slices_of, stretch_of
from .reference import step_file

CLOSE = 1e-6
"""Relative difference within which two tensors count as the same guess, wide; as shipped the bound of the place."""


@dataclass
class Evidence:
    """`held` is what the ranks have at the place, by rank; a rank that has nothing there is missing. `inputs` is what
    the other blocks of a rank got of that microbatch, by the block's name."""

    plan: Plan
    model: Model
    sharding: Sharding
    departure: Departure
    held: dict[int, Tensor]
    folder: Path
    numerics: str
    inputs: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        return self.departure.place

    @property
    def mesh(self) -> Mesh:
        return self.sharding.mesh

    def reference(self, place: Place) -> Tensor | None:
        """The whole tensor of the reference at another place, or None when it has none."""
        file = step_file(self.folder, self.numerics, place.step)
        if not file.exists():
            return None
        with safe_open(file, framework="pt") as whole:
            if place.key not in whole.keys():  # noqa: SIM118 (not a mapping)
                return None
            tensor: Tensor = whole.get_tensor(place.key)
            return tensor

    def beside(self, quantity: str, name: str = "", microbatch: int | None = None) -> Tensor | None:
        """The reference's tensor at another place of the same step."""
        return self.reference(Place(self.place.step, quantity, name, microbatch))

    def before(self, quantity: str) -> Tensor | None:
        """The reference's `quantity` of the same part one step earlier; a weight was the initial one before step 1."""
        if self.place.step == 1 and quantity.endswith("weight"):
            quantity = "initial weight"
        return self.reference(Place(self.place.step - 1, quantity, self.place.name))

    @cached_property
    def whole(self) -> Tensor:
        found = self.reference(self.place)
        assert found is not None
        return found

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """What `rank` holds of the parameter of this place, part by part; empty for other places."""
        if self.place.quantity not in PARTS:
            return ()
        return boxes_of(self.sharding.parameter(self.place.name), self.place.quantity, self.mesh, rank)

    def stretch(self, rank: int) -> tuple[int, int] | None:
        """Which elements of those, flat; None for all."""
        place = self.place
        return stretch_of(self.sharding, place.name, place.quantity, rank) if place.quantity in PARTS else None

    def mine(self, whole: Tensor, name: str, quantity: str, rank: int) -> Tensor | None:
        """What `rank` should have of `quantity` of a parameter; None where that is nothing."""
        held = held_of(self.sharding, name, quantity, rank)
        return slices_of(whole, held, self.sharding.parameter(name)) if held[0] else None

    def own(self, whole: Tensor, rank: int) -> Tensor:
        """The slice of `whole` that `rank` should have."""
        if self.place.quantity in PARTS:
            mine = self.mine(whole, self.place.name, self.place.quantity, rank)
            if mine is not None:
                return mine
        return output_of(self.place.name, self.held[rank].shape, whole, self.sharding, rank)

    def same(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape:
            return False
        if not one.is_floating_point():
            return bool((one == other).all())
        allowed = max(self.departure.bound, CLOSE * self.departure.scale if self.numerics == "wide" else 0.0)
        return not one.numel() or float((one.double() - other.double()).abs().max()) <= allowed

    @cached_property
    def wrong(self) -> list[int]:
        """The departing ranks that have something of the right shape there."""
        return [
            r for r in self.departure.ranks if r in self.held and self.held[r].shape == self.own(self.whole, r).shape
        ]

    def fits(self, guess: Callable[[int], bool]) -> bool:
        """Whether `guess(rank)` holds on every departing rank."""
        return bool(self.wrong) and all(guess(rank) for rank in self.wrong)

    def is_whole(self, whole: Tensor | None) -> bool:
        """Whether what every departing rank has is its slice of `whole`."""
        return whole is not None and self.fits(lambda rank: self.same(self.held[rank], self.own(whole, rank)))

    @property
    def axes(self) -> Iterator[tuple[str, ...]]:
        """Every set of axes over which ranks could have summed, single ones first; replicas of ZeRO before all of dp."""
        names = [name for name, size in self.mesh.axes if size > 1]
        if self.mesh.replicas > 1:
            yield ("replica",)
        for count in range(1, len(names) + 1):
            yield from combinations(names, count)
        tp, groups = self.mesh.degree("tp"), self.sharding.heads[1]
        if tp > groups > 0:
            yield (factors("tp", tp // groups)[1],)

    def place_before(self) -> Place | None:
        """The place of the same step that was compared before this one, and agreed."""
        with safe_open(step_file(self.folder, self.numerics, self.place.step), framework="pt") as whole:
            keys = [key for key, _, _ in json.loads(whole.metadata()["order"])]
        here = keys.index(self.place.key)
        return Place.of(self.place.step, keys[here - 1]) if here else None


def ranks_in_words(ranks: tuple[int, ...] | list[int], mesh: Mesh) -> str:
    """'every rank', 'ranks 2, 3 (pp 1)'."""
    chosen = set(ranks)
    if chosen == set(range(mesh.size)):
        return "every rank" if mesh.size > 1 else "the one rank"
    listed = ("rank " if len(chosen) == 1 else "ranks ") + ", ".join(map(str, sorted(chosen)))
    shared = []
    for axis, size in mesh.axes:
        values = {mesh.coordinate(rank)[axis] for rank in chosen}
        if size > 1 and len(values) == 1:
            shared.append(f"{axis} {values.pop()}")
    return f"{listed} ({', '.join(shared)})" if shared else listed
