"""Microbatches of any rows and any length in one step, and a smaller last one, against one process in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.check.wide import wide
from plait.design.plan import Plan
from plait.runtime.batch import IGNORE, Batch
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.hf.whole import WholeModel
from plait.runtime.training import loop
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from tests.conftest import Models
from tests.nursery import CallError, Nursery

STEPS = 3
SHAPES = {0: [(2, 7), (3, 16), (1, 33)], 1: [(1, 40), (4, 5), (2, 16)]}
"""(rows, tokens) of each microbatch, by dp rank."""


def microbatches(dp: int, step: int) -> list[Batch]:
    """Random tokens; in every second row two documents, and in the last microbatch few targets."""
    generator = torch.Generator().manual_seed(10 * step + dp)
    found = []
    for number, (rows, length) in enumerate(SHAPES[dp]):
        batch = Batch.of(torch.randint(0, 96, (rows, length + 1), generator=generator))
        begins = length // 2
        documents, positions, targets = (
            tensor.clone() for tensor in (batch.document_ids, batch.positions, batch.targets)
        )
        documents[1::2, begins:] = 1
        positions[1::2, begins:] -= begins
        targets[1::2, begins - 1] = IGNORE
        if number == 2:
            targets[:, 3:] = IGNORE
        found.append(Batch(batch.tokens, targets, positions, documents, batch.sample_ids + 100 * dp + 10 * number))
    return found


def plan_of(model: str, changes: dict[str, Any]) -> Plan:
    return Plan(**{
        "model": model, "batch": 3 * changes.get("dp", 1), "seq": 16, "microbatches": 3, "steps": STEPS, "clip": 0.5,
        "lr_schedule": "constant", **changes,
    })  # fmt: skip


def one_process(model: str, changes: dict[str, Any], file: str) -> list[list[float]]:
    """(loss, norm, tokens) of each step; the weights after the last in `file`."""
    plan, reports = plan_of(model, changes), []
    with wide():
        whole = WholeModel(read(model), plan.seed, torch.float64)
        parameters = dict(whole.module.named_parameters())
        groups = [
            {"params": [p for p in parameters.values() if (p.dim() > 1) is decays], "weight_decay": decay}
            for decays, decay in ((True, plan.weight_decay), (False, 0.0))
        ]
        adamw = torch.optim.AdamW(groups, lr=plan.lr, betas=(plan.beta1, plan.beta2))
        for step in range(STEPS):
            batches = [part for dp in range(plan.dp) for part in microbatches(dp, step)]
            tokens = sum(int(part.weight) for part in batches)
            total = 0.0
            for part in batches:
                logits = whole.forward(part).flatten(0, 1)
                loss = F.cross_entropy(logits, part.targets.flatten(), ignore_index=IGNORE, reduction="sum") / tokens
                loss.backward()
                total += float(loss.detach())
            norm = float(torch.sqrt(sum((p.grad.square().sum() for p in parameters.values()), torch.zeros(()))))  # type: ignore[union-attr]
            for parameter in parameters.values():
                assert parameter.grad is not None
                parameter.grad *= min(1.0, plan.clip / (norm + 1e-6))
            adamw.step()
            adamw.zero_grad()
            reports.append([total, norm, tokens])
    save_file({name: value.detach().contiguous() for name, value in parameters.items()}, file)
    return reports


def laid_out(model: str, changes: dict[str, Any], file: str) -> Any:
    """Of every rank the reports, and how far its weights are from those in `file`, of the largest of each tensor."""
    plan = plan_of(model, changes)

    def main(world: World) -> Any:
        seen = []
        with wide():
            run = build(plan, world, wide=True)
            steps = (microbatches(world.coordinate["dp"], step) for step in range(STEPS))
            loop.train(run, steps, seen.append)
        wanted, worst = load_file(file), 0.0
        for name, weight in run.optimizer.weights.items():
            parameter = run.sharding.parameter(name)
            slices = [
                wanted[name][tuple(slice(*side) for side in box)] for box in parameter.boxes(plan.mesh, world.rank)
            ]
            own: Tensor = torch.cat(slices, parameter.first.dim)
            worst = max(worst, float((weight.detach() - own).abs().max() / own.abs().max()))
        return [[[r.loss, r.grad_norm, r.tokens] for r in seen], worst]

    return launch(main, plan)


LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "tp": 2, "schedule": "1f1b"}, {"pp": 2, "tp": 2, "schedule": "interleaved"},
    {"pp": 2, "tp": 2, "schedule": "zb-h1"}, {"dp": 2, "pp": 2, "schedule": "gpipe", "balance": "3,1"},
    {"dp": 2, "tp": 2, "pp": 2, "schedule": "zb-h1"}, {},
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_microbatches_of_any_shape_equal_one_process(
    nursery: Nursery, tiny: Models, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Lengths 7, 16 and 33 in one step; with dp 2 the other replica has its own."""
    file = str(tmp_path / "weights.safetensors")
    wanted = nursery(one_process, tiny(), layout, file)
    for found, worst in nursery(laid_out, tiny(), layout, file):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)
        assert worst < 1e-11


def refused(model: str, shapes: list[tuple[int, int]]) -> Any:
    plan = plan_of(model, {})

    def main(world: World) -> Any:
        run = build(plan, world)
        return run.step([Batch.of(torch.zeros(rows, length + 1, dtype=torch.int64)) for rows, length in shapes]).loss

    return launch(main, plan)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(1, 4), (1, 4)], "step takes 3 microbatches, not 2"),
        ([(1, 4)] * 4, "step takes 3 microbatches, not 4"),
        ([(1, 4), (0, 4), (1, 4)], "microbatch 1 has 0 x 4 tokens: give it a row or more of 1 to 64 tokens"),
        ([(1, 4), (1, 4), (1, 65)], "microbatch 2 has 1 x 65 tokens"),
        ([(1, 0), (1, 4), (1, 5)], "microbatch 0 has 1 x 0 tokens"),
    ],
    ids=str,
)
def test_microbatches_that_do_not_fit_the_plan(
    nursery: Nursery, tiny: Models, shapes: list[tuple[int, int]], words: str
) -> None:
    with pytest.raises(CallError, match=words):
        nursery(refused, tiny(), shapes)


@pytest.mark.parametrize(("rows", "parts"), [(8, 3), (6, 4), (5, 5), (7, 1)])
def test_a_batch_splits_in_parts_that_differ_by_at_most_one(rows: int, parts: int) -> None:
    batch = Batch.of(torch.arange(rows * 5).view(rows, 5))
    found = batch.split(parts)
    sizes = [part.rows for part in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert torch.equal(torch.cat([part.tokens for part in found]), batch.tokens)
    with pytest.raises(ValueError, match=f"{rows} rows do not split into {rows + 1} parts of at least one"):
        batch.split(rows + 1)
