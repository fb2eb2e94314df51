"""What a stage keeps between the halves of a backward, and what a rank keeps at its fullest moment, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.design.cost.memory import WIDE, arriving, deferred, kept, memory
from plait.design.plan import Plan
from plait.design.schedule import BACKWARDS, Action, Kind
from plait.design.sharding import shard
from plait.design.table import table as table_of
from tests.design.facts import llama

HIDDEN, KEYS, INNER, VOCABULARY = 16, 8, 24, 64


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("compute", "item"), [("fp32", 4), ("bf16", 2)])
def test_what_is_put_off(tp: int, compute: str, item: int) -> None:
    """Per token of a block: what q, k and v read (once), o, gate and up (once), and down; the gradients of what each
    gave. Inputs of o and down and outputs of the others are cut over tp. On the last stage what the head read, and the
    logits' gradient."""
    plan = Plan(pp=2, tp=tp, compute=compute, schedule="zb-h1", batch=4, microbatches=2, seq=8)
    facts = llama(blocks=4)
    read = HIDDEN + HIDDEN // tp + HIDDEN + INNER // tp
    gave = (HIDDEN + 2 * KEYS) // tp + HIDDEN + 2 * INNER // tp + HIDDEN
    sharding = shard(facts, plan)
    assert deferred(plan, facts, sharding, 0) == 2 * (read + gave) * item
    assert deferred(plan, facts, sharding, 1) == (2 * (read + gave) + HIDDEN + VOCABULARY // tp) * item


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, schedule="zb-h1", microbatches=4, batch=8), Plan(pp=2, schedule="zb-h2", microbatches=8, batch=16),
        Plan(pp=2, schedule="zb-v", microbatches=4, batch=8), Plan(pp=2, schedule="v-half", microbatches=4, batch=8),
        Plan(pp=2, schedule="dualpipe-v", microbatches=8, batch=16),
        Plan(pp=2, schedule="interleaved", microbatches=4, batch=8),
    ],
    ids=lambda plan: plan.schedule,
)  # fmt: skip
def test_the_fullest_moment(plan: Plan) -> None:
    """After each action of a rank: the stages and microbatches that are between F and their backward, and those between I
    and W; while one is in its backward, also the gradient that it came with."""
    facts = llama(blocks=4)
    sharding = shard(facts, plan)
    table, tokens = table_of(plan, facts), 2 * plan.seq

    def held(done: set[Action]) -> int:
        found = 0
        for action in done:
            if action.kind is Kind.FORWARD:
                ends = {replace(action, kind=kind) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
                scale = WIDE * (action.stage == plan.stages - 1)
                found += (kept(plan, facts, sharding, action.stage) * tokens + scale) * (not ends & done)
            elif action.kind is Kind.BACKWARD_INPUT:
                late = Action(Kind.BACKWARD_WEIGHT, action.stage, action.microbatch)
                found += deferred(plan, facts, sharding, action.stage) * tokens * (late not in done)
        return found

    for bill, row in zip(memory(plan, facts), table.rows, strict=True):
        most = 0
        for now, action in enumerate(row):
            came = arriving(plan, facts, action.stage) * tokens if action.kind in BACKWARDS and table.splits else 0
            most = max(most, held(set(row[:now])) + came, held(set(row[: now + 1])))
        assert bill.activations == most > 0
