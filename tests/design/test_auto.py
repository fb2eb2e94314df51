"""auto: the paper's rates and below on its twelve settings, and never slower than another table that fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.design.balance import weights
from plait.design.cost.memory import memory
from plait.design.errors import PlanError
from plait.design.per_token import operations
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.design.schedule import (
    RUNS,
    Action,
    Kind,
    Schedule,
    Times,
    check,
    lower,
    make,
    one_stage_each,
    peak,
    search,
)
from plait.design.schedule.auto import fits, least_seconds, seconds
from plait.design.schedule.auto import search as search_alone
from plait.design.sharding import shard
from plait.design.table import estimate, memory_limit, settled
from plait.design.table import table as table_of
from tests.design.facts import llama

REFERENCE = Path(__file__).parents[1] / "references" / "zero_bubble_2p.json"
PAGE = [
    line.removesuffix(" |")
    for line in (Path(__file__).parents[2] / "docs/methods/auto.md").read_text("utf-8").splitlines()
]
PAPER: list[dict[str, Any]] = json.loads(REFERENCE.read_text(encoding="utf-8"))["settings"]
EVERY = pytest.mark.parametrize("row", PAPER, ids=lambda row: f"{row['model']}-m{row['m']}")


def even(p: int, *, forward: float, input: float, weight: float, deferred: float, communication: float = 0.0) -> Times:
    """Every stage the same; a microbatch's activations are 1."""
    return Times((forward,) * p, (input,) * p, (weight,) * p, (1.0,) * p, (deferred,) * p, communication)


def of(row: dict[str, Any]) -> Times:
    h, a, s = row["hidden"], row["heads"], row["seq"]
    return even(
        row["p"], forward=row["forward"], input=row["input"], weight=row["weight"],
        deferred=32 * h / (34 * h + 5 * a * s), communication=row["communication"],
    )  # fmt: skip


def rate(row: dict[str, Any], table: Schedule) -> float:
    """The bubble rate as the paper prints it."""
    cost = seconds(table, of(row), rolling=True)
    return round(1 - row["m"] * (row["forward"] + row["input"] + row["weight"]) / cost, 4)


# --- the paper's settings


@EVERY
def test_the_clock_is_the_papers(row: dict[str, Any]) -> None:
    """1f1b and zb-h1 have the printed rates, so that the rates of a search can be compared with printed ones."""
    assert rate(row, make("1f1b", row["p"], row["m"])) == row["1f1b"]
    assert rate(row, make("zb-h1", row["p"], row["m"])) == row["zb_h1"]


@EVERY
@pytest.mark.parametrize("times_p", [1, 2])
def test_the_search_alone_reaches_the_published_rates(row: dict[str, Any], times_p: int) -> None:
    p, m, limit = row["p"], row["m"], times_p * row["p"]
    table = search_alone(p, m, of(row), limit, rolling=True)
    check(table)
    assert rate(row, table) <= row[f"zb_{times_p}p"]
    shown = next(line for line in PAGE if line.startswith(f"| {row['model']} | {p} | {m} |")).split(" | ")
    assert shown[2 * times_p + 1 : 2 * times_p + 3] == [f"{row[f'zb_{times_p}p']:.4f}", f"{rate(row, table):.4f}"]
    # The memory is counted here once more, without the search's own count.
    h, a, s = row["hidden"], row["heads"], row["seq"]
    share = 32 * h / (34 * h + 5 * a * s)
    kept = [peak(table, rank, forward=lambda *_: 1, deferred=lambda *_: share) for rank in range(p)]
    assert max(kept) <= limit + 1e-6


@pytest.mark.parametrize("row", [row for row in PAPER if row["p"] == 8], ids=lambda row: f"{row['model']}-m{row['m']}")
def test_a_step_that_ends_together_is_as_short_as_zb_h1s_or_shorter(row: dict[str, Any]) -> None:
    for times_p in (1, 2):
        table = search_alone(row["p"], row["m"], of(row), times_p * row["p"])
        assert seconds(table, of(row)) <= seconds(make("zb-h1", row["p"], row["m"]), of(row)) * (1 + 1e-9)


# --- any times


TENTHS = st.integers(1, 40).map(lambda tenths: tenths / 10)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, int, Times, float]:
    """(p, m, times, limit): stages that differ, what they put off more or less than what they keep, any limit that one
    microbatch fits."""
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    rows = [tuple(draw(st.lists(TENTHS, min_size=p, max_size=p))) for _ in range(5)]
    times = Times(*rows, communication=draw(st.sampled_from([0.0, 0.1, 0.7, 3.0])))
    least = max(times.activation)
    return p, m, times, draw(st.sampled_from([least, 1.3 * least, p * least, 2 * p * least, 100.0 * least]))


@settings(max_examples=150, deadline=None)
@given(pipelines(), st.booleans())
def test_never_slower_than_another_table_that_fits(case: tuple[int, int, Times, float], rolling: bool) -> None:
    p, m, times, limit = case
    others = one_stage_each(p, m)
    table = search_alone(p, m, times, limit, candidates=others, rolling=rolling)
    assert fits(table, times, limit)
    own = seconds(table, times, rolling=rolling)
    for other in others:
        if fits(other, times, limit):
            assert own <= seconds(other, times, rolling=rolling) * (1 + 1e-9), other.name


@settings(max_examples=150, deadline=None)
@given(pipelines(), st.booleans())
def test_what_the_search_alone_finds_is_legal_and_fits(case: tuple[int, int, Times, float], rolling: bool) -> None:
    p, m, times, limit = case
    table = search_alone(p, m, times, limit, rolling=rolling)
    check(table)
    check(lower(table, reduce=True))
    assert fits(table, times, limit)
    assert table.placement in ((), tuple(range(p)))
    assert table == search_alone(p, m, times, limit, rolling=rolling)


@settings(max_examples=150, deadline=None)
@given(pipelines(), st.booleans())
def test_no_table_is_shorter_than_the_bound(case: tuple[int, int, Times, float], rolling: bool) -> None:
    """The search stops at the bound: were it too high, better tables would be left unseen."""
    p, m, times, limit = case
    found = search_alone(p, m, times, limit, rolling=rolling)
    for table in (found, *one_stage_each(p, m)):
        if fits(table, times, limit):
            least = least_seconds(m, times, limit, rolling=rolling)
            assert least <= seconds(table, times, rolling=rolling) * (1 + 1e-9), table.name


def orders(stage: int, m: int) -> Iterator[tuple[Action, ...]]:
    """Every row of one stage that keeps the order of microbatches in each kind, and F before I before W."""

    def longer(row: tuple[Action, ...], done: tuple[int, int, int]) -> Iterator[tuple[Action, ...]]:
        if done == (m, m, m):
            yield row
        for place, kind in enumerate((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)):
            if done[place] < (done[place - 1] if place else m):
                more = tuple(count + (at == place) for at, count in enumerate(done))
                yield from longer((*row, Action(kind, stage, done[place])), more)

    yield from longer((), (0, 0, 0))


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("rolling", [True, False])
@pytest.mark.parametrize(
    "times",
    [
        Times((1, 1), (1, 1), (1, 1), (1, 1), (0.5, 0.5), 0.0),
        Times((2, 1), (1, 3), (1, 2), (1, 0.7), (0.4, 0.6), 0.3),
        Times((1, 3), (2, 1), (0.6, 1), (1, 1), (0.2, 0.2), 0.1),
    ],
    ids=["even", "slow last", "mixed"],
)
def test_against_every_table_of_two_ranks(times: Times, rolling: bool, limit: float) -> None:
    """All 1,764 tables of three microbatches on two ranks: none below the bound, none shorter than what is found."""
    every = (Schedule("one of all", 3, rows) for rows in product(orders(0, 3), orders(1, 3)))
    costs = []
    for table in every:
        if fits(table, times, limit):
            try:
                costs.append(seconds(table, times, rolling=rolling))
            except PlanError:
                continue  # cannot go on
    assert least_seconds(3, times, limit, rolling=rolling) <= min(costs) * (1 + 1e-9)
    assert seconds(search_alone(2, 3, times, limit, rolling=rolling), times, rolling=rolling) <= min(costs) * (1 + 1e-9)


def test_every_other_table_of_one_stage_a_rank_is_a_candidate() -> None:
    names = {table.name for table in one_stage_each(4, 1)}
    assert {"naive", "gpipe", "1f1b", "zb-h1"} <= names
    assert "auto" not in names
    assert all(table.stages == 4 for table in one_stage_each(4, 8))
    assert "naive" not in {table.name for table in one_stage_each(4, 8)}


def test_a_slow_last_stage_is_never_idle_once_it_has_begun() -> None:
    """Stages that differ: a head as heavy as two blocks on the last of four."""
    times = Times((2, 2, 2, 4), (2, 2, 2, 4), (2, 2, 2, 4), (1, 1, 1, 1), (0.5, 0.5, 0.5, 0.5), 0.1)
    table = search(4, 16, times, 4)
    assert seconds(table, times) == pytest.approx(3 * (2 + 0.1) + 16 * 12)
    assert seconds(make("1f1b", 4, 16), times) > seconds(table, times) + 6


def test_memory_buys_time() -> None:
    times = even(4, forward=1, input=1, weight=1, deferred=1)
    costs = [seconds(search(4, 12, times, limit), times) for limit in (1, 2, 3, 4, 8)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[1] > costs[2] > costs[3]
    spans = [seconds(search_alone(4, 12, times, limit, rolling=True), times, rolling=True) for limit in (4, 7, 8)]
    assert spans[0] > spans[1] == spans[2] == 36, "2 p - 1 microbatches: no bubble at all"


def test_a_backward_that_would_put_off_more_than_fits_is_whole() -> None:
    times = even(3, forward=1, input=1, weight=1, deferred=2)
    table = search_alone(3, 4, times, 1)
    check(table)
    assert not table.splits
    assert {action.kind for action in table.actions} == {Kind.FORWARD, Kind.BACKWARD}
    assert search_alone(3, 4, times, 2).splits or fits(search_alone(3, 4, times, 2), times, 2)


def test_an_impossible_limit_names_the_least_that_works() -> None:
    times = Times((1, 1), (1, 1), (1, 1), activation=(1, 2.5), deferred=(1, 1))
    with pytest.raises(PlanError, match=r"limit of 2 is less than the 2\.5 .* on stage 1 of 2: set a limit of 2\.5"):
        search(2, 4, times, 2)
    table = search(2, 4, times, 2.5)
    assert peak(table, 1, forward=lambda *_: 2.5, deferred=lambda *_: 1) <= 2.5


# --- a plan's


MODEL = llama(blocks=16, heads=16, head_dim=8, kv_heads=8, intermediate=344, vocabulary=2048)


def planned(**fields: Any) -> Plan:
    plan = Plan(**{"schedule": "auto", "batch": 128, "seq": 64, **fields})
    validate(plan, MODEL)
    return plan


def test_the_operations_of_the_stages_are_those_that_balance_makes_even() -> None:
    plan = planned(pp=4, microbatches=8, balance="cost")
    parts = [operations(plan, MODEL, shard(MODEL, plan), stage) for stage in range(4)]
    assert sum(map(sum, parts)) == sum(weights(MODEL, "cost", plan.seq))
    assert all(backward - forward == forward - weight > 0 for forward, backward, weight in parts)


@pytest.mark.parametrize("limit", [0.4, 1.0, 2.0])
def test_a_plans_table_is_searched_for_within_its_limit(limit: float) -> None:
    plan = planned(pp=8, microbatches=16, schedule_limit=limit)
    times, plain = estimate(plan, MODEL), make("1f1b", 8, 16)
    most = limit * max(
        peak(plain, rank, forward=lambda stage, _: times.activation[stage], deferred=lambda *_: 0) for rank in range(8)
    )
    found = table_of(plan, MODEL)
    check(lower(found, reduce=True))
    assert fits(found, times, most)
    assert found == table_of(plan, MODEL)
    for other in one_stage_each(8, 16):
        if fits(other, times, most):
            assert seconds(found, times) <= seconds(other, times) * (1 + 1e-9)
    # The bill counts the same, and the gradient on its way into a stage: 8 rows x 64 tokens x 128 hidden, fp32.
    assert max(bill.activations for bill in memory(plan, MODEL)) <= most + 8 * 64 * 128 * 4 + 4 * 16


def test_a_plans_limit_that_cannot_be_names_the_least_that_can() -> None:
    plan = planned(pp=4, microbatches=8, schedule_limit=0.05)
    with pytest.raises(
        PlanError, match=r"schedule_limit 0\.05 of the .* MB .* set schedule_limit 0\.\d+ or more"
    ) as error:
        table_of(plan, MODEL)
    least = float(str(error.value).split("set schedule_limit ")[1].split(" ")[0])
    check(table_of(planned(pp=4, microbatches=8, schedule_limit=least), MODEL))
    with pytest.raises(PlanError, match="less than"):
        table_of(planned(pp=4, microbatches=8, schedule_limit=least - 0.002), MODEL)


def test_a_limit_without_a_search_is_refused() -> None:
    with pytest.raises(PlanError, match=r"schedule_limit 2 .* set schedule auto, or schedule_limit 1"):
        planned(pp=4, microbatches=8, schedule="1f1b", schedule_limit=2.0)


def units(p: int, v: int) -> Times:
    share = (1 / v,) * (p * v)
    return Times(share, share, share, activation=share, deferred=share)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 7), (4, 4), (4, 8), (8, 4)])
def test_no_schedule_is_shorter_on_the_textbooks_clock(p: int, m: int) -> None:
    """Within 1f1b's p microbatches: not one that a run takes, with one stage a rank or several."""
    table = make("auto", p, m)
    assert table.name == "auto"
    check(table)
    assert fits(table, units(p, table.chunks), p)
    others = [(name, 0) for name in RUNS if name not in ("auto", "naive")] + [("interleaved", 3), ("interleaved", 4)]
    for name, v in others:
        other = make(name, p, m, v)
        times = units(p, other.chunks)
        if fits(other, times, p):
            assert seconds(table, units(p, table.chunks)) <= seconds(other, times) * (1 + 1e-9), name


def test_one_rank_needs_no_search() -> None:
    assert make("auto", 1, 3).rows == make("1f1b", 1, 3).rows


@pytest.mark.parametrize(("limit", "blocks"), [(0.6, 16), (1.0, 16), (1.0, 4), (2.0, 16)])
def test_a_plan_is_settled_on_the_shortest_that_fits(limit: float, blocks: int) -> None:
    """With the estimates for a model: whatever schedule a run could take instead, it is no shorter, or does not fit."""
    facts = llama(blocks=blocks)
    plan = planned(pp=4, microbatches=8, schedule="auto", schedule_limit=limit)
    chosen = settled(plan, facts)
    assert settled(chosen, facts) == chosen
    assert settled(plan, facts) == chosen
    most = memory_limit(plan, estimate(plan, facts))
    found, times = table_of(chosen, facts), estimate(chosen, facts)
    check(found)
    assert found.placement == chosen.placement or found.stages == 4
    assert fits(found, times, most)
    for name in RUNS:
        other = plan.model_copy(update={"schedule": name, "schedule_limit": 1.0})
        if name in ("auto", "naive") or other.stages > blocks:
            continue
        made, costs = table_of(other, facts), estimate(other, facts)
        if fits(made, costs, most):
            assert seconds(found, times) <= seconds(made, costs) * (1 + 1e-9), name
