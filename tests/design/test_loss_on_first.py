"""The loss on the first rank: a stage of its own in every schedule, its bytes, and what the last rank keeps no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.design.cost.memory import memory
from plait.design.cost.traffic import traffic
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.records import Traffic
from plait.design.rules import validate
from plait.design.schedule import RUNS, Kind, check, lower, make, method, with_loss_on_first
from plait.design.simulate import simulate
from plait.design.table import table
from tests.design.facts import llama

FACTS = llama()


def microbatches(name: str) -> list[int]:
    least, most = method(name).microbatches
    return [m for m in range(1, 14) if least <= m <= most]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", RUNS)
def test_every_schedule_takes_it(name: str, p: int) -> None:
    """Complete, ordered and free of deadlock; the stages with blocks keep the order that they had."""
    for m in microbatches(name):
        made = make(name, p, m)
        changed = with_loss_on_first(made)
        check(changed)
        check(lower(changed, reduce=True))
        loss = made.stages
        rest = tuple(tuple(a for a in row if a.stage != loss) for row in changed.rows)
        assert rest == made.rows
        if made.rank_of(loss - 1) == 0:
            assert changed == made
            continue
        assert changed.rank_of(loss) == 0
        assert [a.kind for a in changed.rows[0] if a.stage == loss] == [Kind.FORWARD, Kind.BACKWARD] * m
        assert changed.splits == made.splits
        # On the textbook's clock nothing comes sooner for it.
        assert simulate(lower(changed)).seconds >= simulate(lower(made)).seconds


def test_a_table_without_the_loss_is_refused() -> None:
    made = with_loss_on_first(make("1f1b", 2, 3))
    rows = (tuple(a for a in made.rows[0] if a.stage != 2 or a.microbatch != 1), made.rows[1])
    with pytest.raises(PlanError, match="never does 2F1"):
        check(replace(made, rows=rows))


def pp(plan: Plan) -> dict[tuple[int, str, str], Traffic]:
    validate(plan, FACTS)
    return {(r.rank, r.why, r.operation): r for r in traffic(plan, FACTS) if r.axis == "pp"}


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_go_back_and_their_gradient_comes(tp: int) -> None:
    """b s V/t e more from the last rank to the first on each tp rank, and as much back, m times."""
    plan = Plan(pp=3, tp=tp, sp=False, microbatches=2, batch=4, seq=16, loss_at="first")
    found = pp(plan)
    hidden, logits = 4 * 16 * FACTS.hidden * 4, 4 * 16 * FACTS.vocabulary // tp * 4
    first, last = 0, 2 * tp
    assert found[last, "activation", "send"].payload == found[first, "activation", "receive"].payload == logits
    assert found[first, "gradient", "send"].payload == found[last, "gradient", "receive"].payload == logits
    assert found[first, "activation", "send"].payload == found[last, "gradient", "send"].payload == hidden
    assert {row.calls for row in found.values()} == {2}
    before = pp(plan.model_copy(update={"loss_at": "last"}))
    assert sum(r.sent for r in found.values()) - sum(r.sent for r in before.values()) == tp * 2 * logits


def test_two_ranks_count_both_boundaries_in_one_row() -> None:
    """With two ranks the last sends logits and gradients to the same neighbour."""
    found = pp(Plan(pp=2, microbatches=2, batch=4, seq=16, loss_at="first", schedule="interleaved"))
    hidden, logits = 4 * 16 * FACTS.hidden * 4, 4 * 16 * FACTS.vocabulary * 4
    assert found[1, "activation", "send"].payload == hidden + logits  # stage 1 to 2 on rank 0, and the logits
    assert found[1, "activation", "send"].calls == 4
    assert found[0, "activation", "send"].payload == 2 * hidden


@pytest.mark.parametrize("schedule", RUNS)
def test_one_rank_has_first_and_last(schedule: str) -> None:
    plan = Plan(schedule=schedule, loss_at="first")
    other = plan.model_copy(update={"loss_at": "last"})
    assert table(plan, FACTS) == table(other, FACTS)
    assert plan.placement == other.placement
    assert traffic(plan, FACTS) == traffic(other, FACTS)
    assert memory(plan, FACTS) == memory(other, FACTS)


def test_the_last_rank_keeps_no_exponentials() -> None:
    plan = Plan(pp=2, microbatches=2, batch=4, seq=16)
    last = memory(plan, FACTS)
    first = memory(plan.model_copy(update={"loss_at": "first"}), FACTS)
    loss = 2 * 16 * (4 * FACTS.vocabulary + 18) + 4
    assert last[1].activations - first[1].activations == loss
    # The first rank has two forwards of its blocks alive when it computes a loss.
    assert first[0].activations - last[0].activations == loss
    assert [bill.held for bill in last] == [bill.held for bill in first]
