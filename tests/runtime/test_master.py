"""Data parallelism through one master equals one process, and moves what is predicted; rank 0 alone has state."""

from __future__ import annotations

from typing import Any

import pytest

from plait.design.cost.memory import memory
from plait.design.cost.traffic import traffic
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import batches, launch
from plait.runtime.training.step import Run
from tests.nursery import Nursery
from tests.runtime.test_layouts import assert_equal


@pytest.mark.parametrize(
    "changes",
    [
        {"dp": 2, "batch": 8, "microbatches": 3},
        {"dp": 3, "batch": 9, "compute": "bf16", "local_transport": "torch"},
        {"dp": 2, "batch": 8, "microbatches": 2, "model": "gpt2-tiny", "recompute": "full", "bucket_mb": 0.01},
        {"dp": 2, "batch": 4, "freeze": "*embed_tokens*"},
        {"dp": 2, "batch": 4, "compute": "fp16", "microbatches": 2},
    ],
    ids=str,
)
def test_it_equals_one_process(nursery: Nursery, changes: dict[str, Any]) -> None:
    """The check compares bytes, too: each message of every rank as predicted."""
    assert_equal(nursery, shipped=True, **{"model": "llama-tiny", "dp_method": "master", **changes})


def trained(changes: dict[str, Any]) -> Any:
    plan = Plan(**{"model": "llama-tiny", "tokenizer": "bytes", "dp": 2, "batch": 4, "seq": 32, "steps": 3, **changes})

    def main(world: World) -> Any:
        run: Run = build(plan, world)
        losses = [run.step(batch).loss for batch in batches(plan, world)]
        return losses, len(run.optimizer.weights), sum(x.nbytes for x in run.holds["state"])

    return launch(main, plan)


def scaled(changes: dict[str, Any]) -> Any:
    plan = Plan(model="llama-tiny", tokenizer="bytes", dp=2, batch=4, seq=32, steps=3, compute="fp16", **changes)

    def main(world: World) -> Any:
        run: Run = build(plan, world)
        losses = [run.step(batch).loss for batch in batches(plan, world)]
        return losses, run.loss_scale.skipped

    return launch(main, plan)


def test_a_loss_scale_that_fp16_cannot_hold(nursery: Nursery) -> None:
    """The first is 2^16: the gradient of the logits is scaled before it is fp16, on rank 0 for all."""
    (losses, skipped), _ = nursery(scaled, {"dp_method": "master"})
    (expected, none), _ = nursery(scaled, {})
    assert skipped == none == 0
    assert losses == pytest.approx(expected, rel=1e-3)


def test_it_reads_the_same_data_and_learns_the_same(nursery: Nursery) -> None:
    """Rank 0 reads all rows and deals them out; the loss is that of equals, who read their own."""
    masters, equals = nursery(trained, {"dp_method": "master"}), nursery(trained, {})
    assert masters[0][0] == pytest.approx(equals[0][0], rel=1e-6)
    assert masters[0][0] == masters[1][0]
    assert masters[0][1] == equals[0][1]
    assert masters[1][1:] == [0, 0]
    plan = Plan(dp=2, batch=4, seq=32, dp_method="master")
    bills = memory(plan, read("llama-tiny").facts)
    assert bills[0].state == memory(plan.model_copy(update={"dp_method": "ddp"}), read("llama-tiny").facts)[0].state
    assert bills[1].state == 0


def test_rank_0_moves_what_all_others_move() -> None:
    facts = read("llama-tiny").facts
    rows = traffic(Plan(dp=4, batch=8, dp_method="master"), facts)
    moved = [sum(row.payload for row in rows if row.rank == rank and row.axis == "dp") for rank in range(4)]
    assert moved[0] == sum(moved[1:])
    assert moved[1] == moved[2] == moved[3]


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({"dp": 1}, "dp is 1: set dp 2 or more"),
        ({"dp": 2, "tp": 2}, "tp is 2: set tp 1, or dp_method ddp"),
        ({"dp": 2, "zero": 1}, "zero is 1: set zero 0"),
        ({"dp": 2, "split_backward": True}, "split_backward is True: set split_backward false"),
    ],
)
def test_what_it_does_not_take(changes: dict[str, Any], way: str) -> None:
    with pytest.raises(PlanError, match=way):
        validate(Plan(dp_method="master", **changes), read("llama-tiny").facts)
