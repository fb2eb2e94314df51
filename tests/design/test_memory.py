"""What a stage keeps between the halves of a backward, and what a rank keeps at its fullest moment, counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from plait.design.cost.memory import WIDE, arriving, deferred, kept, kept_of, memory
from plait.design.per_token import Here
from plait.design.plan import Plan
from plait.design.schedule import BACKWARDS, Action, Kind
from plait.design.sharding import shard
from plait.design.table import table as table_of
from plait.design.unit import Unit
from tests.design.facts import llama

PAPER = json.loads(
    (Path(__file__).parents[1] / "references" / "zero.json").read_text(), parse_float=Decimal, parse_int=Decimal
)
HIDDEN, KEYS, INNER, VOCABULARY = 16, 8, 24, 64


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("compute", "item"), [("fp32", 4), ("bf16", 2)])
def test_what_is_put_off(tp: int, compute: str, item: int) -> None:
    """Per token of a block: what q, k and v read (once), o, gate and up (once), and down; the gradients of what each
    gave. Inputs of o and down and outputs of the others are cut over tp. On the last stage what the head read, and the
    logits' gradient."""
    plan = Plan(pp=2, tp=tp, sp=False, compute=compute, schedule="zb-h1", batch=4, microbatches=2, seq=8)
    facts = llama(blocks=4)
    read = HIDDEN + HIDDEN // tp + HIDDEN + INNER // tp
    gave = (HIDDEN + 2 * KEYS) // tp + HIDDEN + 2 * INNER // tp + HIDDEN
    here = Here(plan, facts, shard(facts, plan), 0)
    assert deferred(here, 0) == 2 * (read + gave) * item
    assert deferred(here.at(1), 1) == (2 * (read + gave) + HIDDEN + VOCABULARY // tp) * item


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
    here = Here(plan, facts, shard(facts, plan), 0)
    table, tokens = table_of(plan, facts), 2 * plan.seq

    def held(done: set[Action]) -> int:
        found = 0
        for action in done:
            if action.kind is Kind.FORWARD:
                ends = {replace(action, kind=kind) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
                scale = WIDE * (action.stage == plan.stages - 1)
                found += (kept(here.at(action.stage), action.stage) * tokens + scale) * (not ends & done)
            elif action.kind is Kind.BACKWARD_INPUT:
                late = Action(Kind.BACKWARD_WEIGHT, action.stage, action.microbatch)
                found += deferred(here.at(action.stage), action.stage) * tokens * (late not in done)
        return found

    for bill, row in zip(memory(plan, facts), table.rows, strict=True):
        most = 0
        for now, action in enumerate(row):
            came = (
                arriving(here.at(action.stage), action.stage) * tokens
                if action.kind in BACKWARDS and table.splits
                else 0
            )
            most = max(most, held(set(row[:now])) + came, held(set(row[: now + 1])))
        assert bill.activations == most > 0


@pytest.mark.parametrize("entry", PAPER["entries"], ids=lambda e: f"{e['params_billion']}B-dp{e['dp']}-{e['table']}")
def test_the_table_of_the_zero_paper(entry: dict[str, Any]) -> None:
    """Gigabytes of weights and gradients of 2 bytes and a state of 12, from what counts a rank's bill, as the paper
    prints them: it rounds some and cuts others."""
    model = int(entry["params_billion"] * 10**9)
    unit = Unit("model", 0, None, ("weight",), (model,), int(entry["dp"]))
    for zero, printed in entry["gb"].items():
        found = kept_of([unit], int(zero))
        bytes_ = 2 * found.weights + 2 * found.gradients + 12 * found.state
        last_digit = Decimal(10) ** printed.as_tuple().exponent
        assert abs(Decimal(bytes_) / 10**9 - printed) < last_digit, zero


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_bill_counts_as_the_paper_does(zero: int) -> None:
    """In plait's types: gradients and masters of 4 bytes; padding, and a counter a tensor, beside it."""
    facts = llama(blocks=4)
    plan = Plan(dp=2, zero=zero, batch=4, seq=8, compute="bf16")
    units = shard(facts, plan).units(0)
    found, (bill, _) = kept_of(units, zero), memory(plan, facts)
    on_their_way = bill.gradients - 4 * found.gradients
    assert bill.weights == 2 * found.weights
    assert (on_their_way > 0) == (zero >= 2)
    assert bill.state + bill.master_weights == 12 * found.state + 4 * len(facts.parameters)
