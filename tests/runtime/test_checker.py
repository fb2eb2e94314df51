"""The checker says no: small faults planted in the ranks, each of which it must see, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.check.compare import from_json, passed
from tests.nursery import Nursery
from tests.runtime.test_layouts import proof

LAYOUT = {"model": "llama-tiny", "dp": 2, "tp": 2, "pp": 2, "batch": 16, "microbatches": 2}


def with_fault(fault: str) -> list[Any]:
    """The comparison with one piece of the runtime replaced, in this process and so in the ranks that it forks."""
    FAULTS[fault]()
    return proof(LAYOUT)


def no_sum_over(why: str, *, average: bool = False) -> None:
    from plait.runtime.comm import collectives, differentiable
    from plait.runtime.parallel import data

    right = collectives.all_reduce

    def wrong(x: torch.Tensor, group: Any, *, why: str, **more: Any) -> Any:
        if why != fault_why:
            return right(x, group, why=why, **more)
        if not average:
            return collectives.DONE
        handle = right(x, group, why=why, **{**more, "wait": True})
        x.div_(group.size)
        return handle

    fault_why = why
    for module in (collectives, differentiable, data):
        module.all_reduce = wrong  # type: ignore[attr-defined]


def targets_shifted() -> None:
    from plait.runtime.training.step import Run

    right = Run.step

    def wrong(self: Run, batch: Any, **more: Any) -> Any:
        from dataclasses import replace

        return right(self, replace(batch, targets=batch.targets.roll(1, 1)), **more)

    Run.step = wrong  # type: ignore[method-assign]


def slice_shifted() -> None:
    from plait.runtime.hf import stage_model

    right = stage_model._slices

    def wrong(sharding: Any, rank: int) -> Any:
        found = right(sharding, rank)
        name = "model.layers.1.mlp.up_proj.weight"
        if name in found and found[name][0].start:
            rows = found[name][0]
            found[name] = (slice(rows.start - 1, rows.stop - 1), *found[name][1:])
        return found

    stage_model._slices = wrong


def decay_on_norms() -> None:
    from dataclasses import replace

    from plait.runtime.training import assemble
    from plait.runtime.training.optimizer import Optimizer

    assemble.Optimizer = lambda plan, parts, *rest: Optimizer(  # type: ignore[assignment,misc]
        plan, tuple(replace(part, decays=True) for part in parts), *rest
    )


def norm_counts_copies() -> None:
    from plait.design.layout import Layout

    Layout.is_first_copy = lambda self, mesh, rank: True  # type: ignore[method-assign]


FAULTS = {
    "no sum over dp": lambda: no_sum_over("gradients"),
    "average over dp": lambda: no_sum_over("gradients", average=True),
    "no sum of row-parallel outputs": lambda: no_sum_over("row-parallel output"),
    "no sum of input gradients": lambda: no_sum_over("column-parallel input gradient"),
    "targets shifted": targets_shifted,
    "slice shifted": slice_shifted,
    "decay on norms": decay_on_norms,
    "norm counts copies": norm_counts_copies,
}
SEEN_IN = {
    "no sum over dp": "gradient",
    "average over dp": "gradient",
    "no sum of row-parallel outputs": "loss",
    "no sum of input gradients": "gradient",
    "targets shifted": "loss",
    "slice shifted": "weight",
    "decay on norms": "weight",
    "norm counts copies": "gradient norm",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(nursery: Nursery, fault: str) -> None:
    rows = from_json(nursery(with_fault, fault))
    assert not passed(rows)
    wrong = [row for row in rows if not row.passes]
    assert SEEN_IN[fault] in {row.quantity for row in wrong}
    if fault == "decay on norms":
        assert {row.quantity for row in wrong} <= {"weight", "loss", "gradient norm"}
        assert any("norm" in row.name for row in wrong)
    if fault == "norm counts copies":
        assert not any(row.quantity == "gradient" for row in wrong)
