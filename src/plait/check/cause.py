"""What the first departure looks like: the ranks' own tensors there, tried against everything that usually goes wrong.

Nothing before the place departs, so the difference is the fault itself and not its consequence. Each guess is a function
from the evidence to a sentence, or None where it does not fit; the first that fits is told. A guess is tested on numbers:
that a sum is missing is said when the ranks' tensors, summed over that axis, are the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..design.facts import ModelFacts
from ..design.layout import Box
from ..design.mesh import Mesh
from ..design.plan import Plan
from ..design.sharding import Sharding
from .places import BYTES, PARTS, REPLICAS, Departure, Place, Verdict, beside, boxes_of, output_of
from .reference import step_file

CLOSE = 1e-6
"""Relative difference within which two tensors count as the same guess, wide; as shipped the bound of the place."""


@dataclass
class Evidence:
    """The first departure, and what every rank has there (`held`, by rank)."""

    plan: Plan
    facts: ModelFacts
    sharding: Sharding
    departure: Departure
    held: dict[int, Tensor]
    folder: Path
    numerics: str

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

    @cached_property
    def whole(self) -> Tensor:
        found = self.reference(self.place)
        assert found is not None
        return found

    def box(self, rank: int) -> Box | None:
        if self.place.quantity not in PARTS:
            return None
        boxes = boxes_of(self.sharding.parameter(self.place.name), self.place.quantity, self.mesh, rank)
        return boxes[0] if len(boxes) == 1 else None

    def own(self, whole: Tensor, rank: int) -> Tensor:
        """The slice of `whole` that `rank` should have."""
        if self.place.quantity in PARTS:
            parameter = self.sharding.parameter(self.place.name)
            boxes = boxes_of(parameter, self.place.quantity, self.mesh, rank)
            return beside([whole[tuple(slice(*side) for side in box)] for box in boxes], parameter) if boxes else whole
        return output_of(self.place.name, self.held[rank].shape, whole, self.sharding, rank)

    def same(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape:
            return False
        if not one.is_floating_point():
            return torch.equal(one, other)
        allowed = max(self.departure.bound, CLOSE * self.departure.scale if self.numerics == "wide" else 0.0)
        return not one.numel() or float((one.double() - other.double()).abs().max()) <= allowed

    @property
    def wrong(self) -> list[int]:
        """The departing ranks that have something of the right shape there."""
        return [
            r for r in self.departure.ranks if r in self.held and self.held[r].shape == self.own(self.whole, r).shape
        ]

    def all_wrong(self, guess: Callable[[int], bool]) -> bool:
        return bool(self.wrong) and all(guess(rank) for rank in self.wrong)

    @property
    def axes(self) -> Iterator[tuple[str, ...]]:
        """Every set of axes over which ranks could have summed, single ones first."""
        names = [name for name, size in self.mesh.axes if size > 1]
        for count in range(1, len(names) + 1):
            yield from combinations(names, count)


def explained(verdict: Verdict, evidence: Evidence) -> Verdict:
    return replace(verdict, cause=likely(evidence))


def likely(evidence: Evidence) -> str:
    """One sentence, without a capital and a full stop."""
    from .guesses import GUESSES

    for guess in GUESSES:
        sentence = guess(evidence)
        if sentence:
            return sentence
    return "unknown: it is no missing, repeated or averaged sum, no shifted slice and no other microbatch's"


def ranks_in_words(ranks: tuple[int, ...] | list[int], mesh: Mesh) -> str:
    """'every rank', 'ranks 2, 3 (pp 1)'."""
    everyone = set(range(mesh.size))
    chosen = set(ranks)
    if chosen == everyone:
        return "every rank" if mesh.size > 1 else "the one rank"
    listed = ("rank " if len(chosen) == 1 else "ranks ") + ", ".join(map(str, sorted(chosen)))
    shared = []
    for axis, size in mesh.axes:
        values = {mesh.coordinate(rank)[axis] for rank in chosen}
        if size > 1 and len(values) == 1:
            shared.append(f"{axis} {values.pop()}")
    return f"{listed} ({', '.join(shared)})" if shared else listed


def kind_of(place: Place) -> str:
    """Where a reader would look: in a module, an item of the batch, the optimizer, or what is sent."""
    if place.quantity in ("batch", "tokens"):
        return "batch item"
    if place.quantity in ("norm", "clip", "clipped gradient", "lr", "first moment", "second moment", "weight"):
        return "optimizer"
    if place.quantity == "published weight":
        return "optimizer"
    if place.quantity == BYTES:
        return "communication"
    if place.quantity == REPLICAS:
        return "copies"
    return "module"


def described(verdict: Verdict, mesh: Mesh) -> list[str]:
    """The first departure and its likely cause, as lines."""
    first = verdict.first
    times = "" if first.ratio is None else f"{first.ratio:.4g} times the reference, "
    far = "missing or not finite" if first.deviation == float("inf") else f"off by {first.relative:.1e} of its largest"
    if first.place.quantity in (BYTES, REPLICAS, "batch", "tokens"):
        far, times = "not the same", times if first.place.quantity == BYTES else ""
    where = f"on {ranks_in_words(first.ranks, mesh)}: " if first.ranks else ""
    return [f"first departure ({kind_of(first.place)}): {first.place}; {where}{times}{far}", f"likely: {verdict.cause}"]


def order_of(folder: Path, numerics: str, step: int) -> list[str]:
    """The keys of a step in the reference's order."""
    with safe_open(step_file(folder, numerics, step), framework="pt") as whole:
        return [key for key, _, _ in json.loads(whole.metadata()["order"])]
