"""Checkpoints without ranks, for what is done to their files: every rank's part is written in turn by this process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.design.plan import Plan
from plait.design.sharding import shard
from plait.design.slices import kept, quantity_of
from plait.runtime.checkpoint import folders
from plait.runtime.checkpoint.contents import Contents, quantities
from plait.runtime.checkpoint.index import Index, Progress
from plait.runtime.checkpoint.load import Target, load
from plait.runtime.checkpoint.save import bytes_of, commit, index_of, partial, prepare, write_file
from plait.runtime.hf.read import read
from plait.runtime.training.checkpoints import tensors_of

LAYOUT: dict[str, Any] = {"dp": 2, "tp": 2, "zero": 1}


facts = cache(lambda model: read(model).facts)


@dataclass(frozen=True)
class Writer:
    """Writes checkpoints of `layout`, whose numbers follow from `seed` and the step."""

    layout: dict[str, Any]
    model: str = "llama-tiny"
    seed: int = 0

    @property
    def plan(self) -> Plan:
        return Plan(model=self.model, batch=12, seq=16, **self.layout)

    @cached_property
    def contents(self) -> Contents:
        return Contents(shard(facts(self.model), self.plan), "F32", "F32")

    def values(self, step: int) -> dict[tuple[str, str], Tensor]:
        """The whole tensors, by name and quantity."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        return {
            (one.name, quantity): torch.randn(one.shape, generator=generator)
            for one in self.contents.sharding.parameters
            for quantity in quantities(trains=one.first.trains)
        }

    def save(self, run: Path, step: int, keep: int = 0) -> Path:
        contents, values = self.contents, self.values(step)
        sharding, place = contents.sharding, run / folders.FOLDER / folders.name_of(step)
        prepare(place)
        checksums = []
        for rank in range(sharding.mesh.size):
            layout = contents.file(rank)
            if layout is None:
                checksums.append([])
                continue

            def held(name: str, quantity: str, rank: int = rank) -> Tensor:
                """As the rank has it: the slices of the parts side by side, or its stretch of that."""
                parameter = sharding.parameter(name)
                boxes = parameter.boxes(sharding.mesh, rank)
                parts = [values[name, quantity][tuple(slice(*side) for side in box)] for box in boxes]
                local = torch.cat(parts, parameter.first.dim).contiguous().view(-1)
                cut = sharding.stretch(name, quantity_of(parameter), rank)
                return local if cut is None else local[cut[0] : cut[1]].clone()

            checksums.append(write_file(partial(place), layout, bytes_of(held, layout)))
        progress = Progress(step, 100, step, {"value": 1.0, "skipped": 0, "in_a_row": 0, "good": 0}, {"row": step}, "")
        index = Index(progress, self.plan, None, {"plait": "0"}, tuple(tensors_of(sharding.parameters).values()))
        commit(place, index_of(index, contents, checksums).text(), keep)
        return place


def loaded(folder: Path, index: Index, layout: dict[str, Any] | None = None) -> dict[tuple[str, str], Tensor]:
    """What one process (or with a `layout` each rank in turn, the last to write wins) reads of a checkpoint."""
    sharding = shard(facts(index.plan.model), Plan(model=index.plan.model, batch=12, **(layout or {})))
    found: dict[tuple[str, str], Tensor] = {}
    for rank in range(sharding.mesh.size):
        targets: dict[tuple[str, str], Target] = {}
        for one in sharding.parameters:
            slices = tuple(kept(sharding, one.name, "stored", rank))
            size = sum(math.prod(stop - start for start, stop in piece.box) for piece in slices)
            for quantity in quantities(trains=one.first.trains):
                flat = torch.full((size,), float("nan"))
                targets[one.name, quantity] = Target(slices, flat)
        load(folder, index, lambda *which, here=targets: [here[which]])
        for which, target in targets.items():
            whole = found.setdefault(which, torch.full(sharding.parameter(which[0]).shape, float("nan")))
            for piece in target.slices:
                whole[tuple(slice(*side) for side in piece.box)] = target.view(piece.box, piece)
    return found


def same(one: dict[tuple[str, str], Tensor], other: dict[tuple[str, str], Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())
