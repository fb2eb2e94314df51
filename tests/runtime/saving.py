"""What tests of checkpoints share: runs on rows that depend on the step alone, and what is left of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from plait.design.layout import box_shape
from plait.design.plan import Plan
from plait.runtime.batch import Batch
from plait.runtime.checkpoint import folders
from plait.runtime.checkpoint.contents import key
from plait.runtime.checkpoint.index import SavedFile
from plait.runtime.comm.world import World
from plait.runtime.data.batches import own_rows
from plait.runtime.training.assemble import build
from plait.runtime.training.checkpoints import Checkpoints
from plait.runtime.training.launch import launch
from plait.runtime.training.replicas import digest


def global_rows(plan: Plan, step: int) -> Batch:
    """The rows of a step, over all ranks."""
    generator = torch.Generator().manual_seed(step)
    return Batch.of(torch.randint(0, 96, (plan.batch, plan.seq + 1), generator=generator))


class Rows:
    """This rank's rows of step after step, random ones; what it has handed out."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self._world, self.step = plan, world, 0

    @property
    def state(self) -> dict[str, int]:
        return {"step": self.step}

    def restore(self, state: Mapping[str, int]) -> None:
        self.step = state["step"]

    def next(self) -> Batch:
        whole = global_rows(self._plan, self.step)
        self.step += 1
        mine = own_rows(self._plan, self._world.rank)
        return whole.slice(mine.start, mine.stop)


def part_of_run(
    model: str, layout: dict[str, Any], folder: str, begin: int, stop: int, wide: bool = False, again: str = ""
) -> dict[str, Any]:  # fmt: skip
    """Trains from step `begin`, whose checkpoint is in `folder`, to step `stop`, and saves there: losses, and digests of
    all that each rank keeps. What was loaded is at once saved to `again`, too, where it is named."""
    plan = Plan(**{"model": model, "batch": 12, "seq": 16, "steps": 40, "lr": 0.01, "warmup": 3, **layout})
    Path(folder).parent.mkdir(parents=True, exist_ok=True)

    def main(world: World) -> Any:
        run = build(plan, world, wide=wide)
        rows = Rows(plan, world)
        checkpoints = Checkpoints(run, rows, Path(folder))
        if begin:
            place = Path(folder) / folders.name_of(begin)
            checkpoints.load([(place, folders.opened(place))])
            if again:
                Checkpoints(run, rows, Path(again)).save()
        losses = []
        while run.done < stop:
            report = run.step(rows.next())
            losses.append([report.loss, report.grad_norm, report.lr])
        checkpoints.save()
        keeps = {f"{name}.weight": digest(weight) for name, weight in run.stored.items()}
        for name in run.optimizer.weights:
            for quantity in ("weight", "exp_avg", "exp_avg_sq"):
                keeps[f"{name}.own.{quantity}"] = digest(checkpoints.tensor(name, quantity))
        return {"losses": losses, "keeps": keeps, "scale": run.loss_scale.state}

    ranks = launch(main, plan)
    assert all(one["losses"] == ranks[0]["losses"] for one in ranks)
    return {"losses": ranks[0]["losses"], "keeps": [one["keeps"] for one in ranks], "scale": ranks[0]["scale"]}


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every quantity of every tensor in a checkpoint, put together from its slices by safetensors itself."""
    index = folders.opened(folder)
    shapes = {tensor.name: tensor.shape for tensor in index.tensors}
    found: dict[str, torch.Tensor] = {}
    for file in index.files:
        tensors = load_file(folder / file.name)
        for one, tensor in zip(file.slices, (tensors[name] for name in keys(file)), strict=True):
            assert tuple(tensor.shape) == box_shape(one.box)
            name = f"{one.name}.{one.quantity}"
            into = found.setdefault(name, torch.full(shapes[one.name], float("nan"), dtype=tensor.dtype))
            into[tuple(slice(*side) for side in one.box)] = tensor
    return found


def keys(file: SavedFile) -> list[str]:
    """The names of a file's tensors, in order."""
    return [key(one.name, one.quantity, one.box) for one in file.slices]
