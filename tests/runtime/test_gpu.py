"""What only a GPU shows; skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.design.plan import Plan
from plait.runtime.comm.world import World
from plait.runtime.training import measure
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from tests.nursery import Nursery
from tests.runtime.test_numbers import random_batch, rows_of


def on_gpus(layout: dict[str, int]) -> Any:
    plan = Plan(**{"model": "llama-tiny", "batch": 8, "seq": 16, "steps": 3, "microbatches": 2, **layout})

    def main(world: World) -> Any:
        run = build(plan, world, wide=True)
        losses = [run.step(rows_of(random_batch(plan, 512), world)).loss for _ in range(3)]
        return [str(world.device), losses, measure.timeline(run).bubble]

    return launch(main, plan)


def gpus(_: str) -> int:
    return torch.cuda.device_count()


@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2, "pp": 2}], ids=str)
def test_nccl_layouts(nursery: Nursery, layout: dict[str, int]) -> None:
    """Each layout on NCCL gives the losses of one GPU, and its clock's events give a timeline."""
    world = Plan(**layout).world
    if nursery(gpus, "") < world:
        pytest.skip(f"needs {world} GPUs")
    one = nursery(on_gpus, {})[0]
    for rank, (device, losses, bubble) in enumerate(nursery(on_gpus, layout)):
        assert device == f"cuda:{rank}"
        assert losses == pytest.approx(one[1], rel=1e-7)
        assert 0 <= bubble < 1
