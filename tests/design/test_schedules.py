"""Every schedule, for many ranks, microbatches and stages a rank: complete, ordered, free of deadlock, with the bubbles
and the memory of the textbooks. What tables must not be is in test_broken_tables.py, what papers print in
test_published_schedules.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import pytest

from plait.design.errors import PlanError, listed
from plait.design.schedule import (
    FORWARD_ONLY,
    METHODS,
    RUNS,
    Action,
    Kind,
    Schedule,
    check,
    live_microbatches,
    lower,
    make,
    peak,
)
from plait.design.schedule.play import unit_seconds
from plait.design.simulate import simulate
from tests.design.second_opinion import QUEUES, carry_out, printed

SIZES = [
    (name, p, v)
    for name, method in METHODS.items()
    for p in (1, 2, 3, 4, 8)
    for v in ((2, 3, 4) if name == "interleaved" else method.chunks[:1])
    if p % method.multiple == 0
]
EVERY = pytest.mark.parametrize(("name", "p", "v"), SIZES)
COUNTS = range(1, 17)


@cache
def tables(name: str, p: int, v: int) -> list[Schedule]:
    """For every legal m from 1 to 16."""
    return [make(name, p, m, v) for m in COUNTS if METHODS[name].refusal(name, p, m, v) is None]


@cache
def lowered(name: str, p: int, v: int) -> list[Schedule]:
    return [lower(schedule, reduce=True) for schedule in tables(name, p, v)]


def computation(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(a for a in row if a.kind.lane == "compute") for row in schedule.rows)


# --- every maker, every size


@EVERY
def test_tables_are_right_before_and_after_lowering(name: str, p: int, v: int) -> None:
    assert tables(name, p, v)
    for schedule, full in zip(tables(name, p, v), lowered(name, p, v), strict=True):
        assert schedule.ranks == p
        if name != "auto":  # which takes whatever placement is shortest
            assert schedule.chunks == v or name == "dualpipe"
            assert schedule.placement == METHODS[name].place(p, v) or not schedule.placement
        check(schedule)
        check(full)
        assert computation(full) == schedule.rows
        # The reductions come last, the last stage first.
        for rank, row in enumerate(full.rows):
            ends = [a.stage for a in row if a.kind is Kind.REDUCE]
            assert ends == sorted(schedule.on(rank), reverse=True)
            assert [a.kind for a in row[-len(ends) :]] == [Kind.REDUCE] * len(ends)
        crossings = sum(
            len(schedule.microbatches_of(stage)) for stage in range(schedule.stages)
            if (after := schedule.after(stage)) is not None and schedule.rank_of(stage) != schedule.rank_of(after)
        )  # fmt: skip
        assert sum(a.kind is Kind.SEND_ACTIVATION for a in full.actions) == crossings
        assert sum(a.kind is Kind.SEND_GRADIENT for a in full.actions) == crossings


@EVERY
def test_tables_run_when_every_send_blocks(name: str, p: int, v: int) -> None:
    for full in lowered(name, p, v):
        for queues in QUEUES.values():
            for receives_block in (False, True):
                carry_out(full, queues, receives_block=receives_block)


@EVERY
def test_pairs_are_a_forward_and_the_backward_after_it(name: str, p: int, v: int) -> None:
    """In the lowered table too, so that both can begin at once."""
    for schedule, full in zip(tables(name, p, v), lowered(name, p, v), strict=True):
        for rows in (schedule.rows, full.rows):
            assert set(schedule.pairs) <= {couple for row in rows for couple in itertools.pairwise(row)}
        for forward, backward in schedule.pairs:
            assert forward.kind is Kind.FORWARD
            assert backward.kind is Kind.BACKWARD
            assert forward.microbatch != backward.microbatch or schedule.placement[forward.stage] != forward.stage
        assert len({action for pair in schedule.pairs for action in pair}) == 2 * len(schedule.pairs)
        check(schedule)


def one_by_one(forward: Action, backward: Action) -> float:
    """A pair takes what its two take one after the other."""
    return unit_seconds(forward) + unit_seconds(backward)


FEW = (1, 2, 3, 7, 8, 16)


@EVERY
def test_communication_that_takes_no_time_changes_nothing(name: str, p: int, v: int) -> None:
    for schedule, full in zip(tables(name, p, v), lowered(name, p, v), strict=True):
        if schedule.microbatches in FEW:
            one, other = (simulate(played, together=one_by_one) for played in (schedule, full))
            assert one.seconds == other.seconds
            assert [one.busy(rank) for rank in range(p)] == [other.busy(rank) for rank in range(p)]


# --- bubbles, in units: a forward of a stage takes 1, and so do I and W


EXACT: dict[str, Callable[[int, int, int], int]] = {
    "naive": lambda p, m, v: 3 * (p - 1),
    "gpipe": lambda p, m, v: 3 * (p - 1),
    "1f1b": lambda p, m, v: 3 * (p - 1),
    "interleaved": lambda p, m, v: 3 * (p - 1),
    "zb-h1": lambda p, m, v: p - 1,
    "zb-h2": lambda p, m, v: p - 1,
    "zb-v": lambda p, m, v: p - 1,
    "dualpipe-v": lambda p, m, v: 2 * (p - 1),
    "dualpipe": lambda p, m, v: 2 * (p // 2 - 1),
}
"""What each rank loses where `steady` says so. With v stages on a rank a unit is 1/v as long as with one. zb-h2 and zb-v
lose nothing but that the last rank begins p - 1 units after the first."""
AT_MOST: dict[str, Callable[[int, int, int], int]] = {
    "v-half": lambda p, m, v: 3 * (p - 1),
    "v-min": lambda p, m, v: 4 * (p - 1) + (p % 3 == 0),
    "auto": lambda p, m, v: p - 1,  # zb-h1 and zb-v are among its candidates
}


def steady(name: str, p: int, m: int) -> bool:
    if name in ("naive", "gpipe", "1f1b"):
        return True
    if name == "interleaved":
        return m % p == 0
    if name == "dualpipe":
        return m >= 2 * p and m % 2 == 0
    return m >= 2 * p or (name == "zb-h1" and m >= p)


@EVERY
def test_bubbles_are_the_textbooks(name: str, p: int, v: int) -> None:
    for schedule in tables(name, p, v):
        m = schedule.microbatches
        timeline = simulate(schedule, together=one_by_one)
        each = [timeline.seconds - timeline.busy(rank) for rank in range(p)]
        if m % schedule.chains == 0:
            assert timeline.busy(0) == 3 * m * schedule.chunks // schedule.chains
        if not steady(name, p, m):
            continue
        if name in EXACT:
            assert each == [EXACT[name](p, m, v)] * p
        else:
            assert max(each) <= AT_MOST[name](p, m, v)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_few_microbatches_lose_no_more_than_1f1b(p: int) -> None:
    """In units of a whole rank's forward. Schedules with less memory than p microbatches are left out: they wait."""
    for m in COUNTS:
        plain = Fraction(simulate(make("1f1b", p, m)).seconds)
        for name in ("interleaved", "zb-h1", "zb-h2", "zb-v"):
            schedule = make(name, p, m)
            assert Fraction(simulate(schedule).seconds) / schedule.chunks <= plain, (name, m)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_share_of_the_bubble(p: int) -> None:
    for m in COUNTS:
        assert simulate(make("1f1b", p, m)).bubble == float(Fraction(p - 1, m + p - 1))
        if m % p == 0:
            for v in (2, 3, 4):
                assert simulate(make("interleaved", p, m, v)).bubble == float(Fraction(p - 1, v * m + p - 1))


def test_a_pair_counts_once() -> None:
    """A pair in the time of its backward: the rank is busy for less, and the step is shorter."""
    schedule = make("dualpipe-v", 2, 8)
    after = simulate(schedule, together=one_by_one)
    beside = simulate(schedule, together=lambda one, other: max(unit_seconds(one), unit_seconds(other)))
    pairs = [sum(schedule.rank_of(forward.stage) == rank for forward, _ in schedule.pairs) for rank in range(2)]
    assert [after.busy(rank) - beside.busy(rank) for rank in range(2)] == pairs
    assert beside.seconds < after.seconds


# --- memory, in stages of microbatches


LIVE: dict[str, Callable[[int, int, int, int], int]] = {
    "naive": lambda p, m, v, r: 1,
    "gpipe": lambda p, m, v, r: m,
    "1f1b": lambda p, m, v, r: min(m, p - r),
    "zb-h1": lambda p, m, v, r: min(m, p - r),
    "zb-h2": lambda p, m, v, r: min(m, 2 * (p - r) - 1),
}


@EVERY
def test_live_microbatches(name: str, p: int, v: int) -> None:
    for schedule, full in zip(tables(name, p, v), lowered(name, p, v), strict=True):
        m = schedule.microbatches
        live = [live_microbatches(schedule, rank) for rank in range(p)]
        assert live == [live_microbatches(full, rank) for rank in range(p)]
        if name in LIVE:
            assert live == [LIVE[name](p, m, v, rank) for rank in range(p)]
        if name == "interleaved" and m % p == 0:
            assert live == [min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p)]


MOST: dict[str, Callable[[int], int]] = {
    "zb-v": lambda p: 2 * p,
    "v-half": lambda p: 2 * (p // 2 + 1),
    "v-min": lambda p: 2 * ((p + 1) // 3 + 1),
    "dualpipe-v": lambda p: 2 * p + 1,
    "dualpipe": lambda p: p + 1,
}


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("p", range(1, 17))
def test_what_is_kept_until_the_weights_gradients(name: str, p: int) -> None:
    """A stage keeps 1 from F to I, and between nothing and as much again until W: never more than the bound, which the
    rank that keeps most reaches."""
    if p % METHODS[name].multiple:
        return
    for m in (2, p, 2 * p, 3 * p + 1):
        schedule = make(name, p, max(m, METHODS[name].microbatches[0]))
        for deferred in (0, 0.5, 1):
            kept = [peak(schedule, r, forward=lambda *_: 1, deferred=lambda *_: deferred) for r in range(p)]  # noqa: B023
            assert max(kept) <= MOST[name](p)
    assert max(kept) == MOST[name](p)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("deferred", [0.0, 0.25, 0.5])
def test_what_zb_h1_and_zb_h2_keep(p: int, deferred: float) -> None:
    for name, most in (
        ("zb-h1", lambda r: p - r + r * deferred),
        ("zb-h2", lambda r: 2 * (p - r) - 1 + 2 * r * deferred),
    ):
        schedule = make(name, p, 4 * p)
        for rank in range(p):
            kept = peak(schedule, rank, forward=lambda *_: 1, deferred=lambda *_: deferred)
            assert kept <= most(rank)
            assert kept == most(rank) or rank


# --- examples


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_forward_only(p: int, m: int) -> None:
    for placement in {method.place(p, v) for method in METHODS.values() for v in method.chunks if v < 8}:
        full = lower(FORWARD_ONLY(placement, m), reduce=True)
        check(full)
        assert {a.kind for a in full.actions} <= {
            Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION, Kind.WAIT_ACTIVATION,
        }  # fmt: skip


def test_the_rows_of_the_docstrings() -> None:
    assert printed(make("gpipe", 2, 4), 1) == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    assert printed(make("1f1b", 2, 4), 0) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    assert printed(make("1f1b", 2, 4), 1) == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    assert printed(make("interleaved", 2, 2), 0) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert printed(make("zb-h2", 2, 5), 0).startswith("0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0F4 0I2")
    assert printed(make("zb-h2", 2, 5), 1).startswith("1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3")
    assert printed(make("zb-v", 2, 4), 0).startswith("0F0 0F1 3F0 3I0 0F2 3W0 3F1 3I1 0I0")
    assert printed(make("zb-v", 2, 4), 1).startswith("1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0")
    assert printed(make("v-half", 2, 4), 0).startswith("0F0 3F0 3I0 0F1 3W0 3F1 3I1 0F2 0I0 3W1")
    assert printed(make("v-half", 2, 4), 1).startswith("1F0 2F0 2I0 1F1 2F1 1I0 2W0 2I1 1F2 1W0")
    assert printed(make("dualpipe-v", 2, 4), 0) == (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3"
    )
    assert printed(lower(make("naive", 2, 1)), 1) == "1RA0 1WA0 1F0 1B0 1SG0"


def test_one_stage_is_gradient_accumulation() -> None:
    assert printed(lower(make("1f1b", 1, 2), reduce=True), 0) == "0F0 0B0 0F1 0B1 0R1"


def test_stages_on_one_rank_hand_over_without_sending() -> None:
    full = lower(make("zb-v", 1, 1), reduce=True)
    assert printed(full, 0) == "0F0 1F0 1I0 0I0 1W0 0W0 1R0 0R0"


def test_tables_are_made_in_a_moment() -> None:
    """plan.validate() makes one. The best of three, for a busy machine."""
    for name in METHODS:
        times = []
        for _ in range(3):
            since = time.process_time()
            make(name, 8, 1 if name == "naive" else 128)
            times.append(time.process_time() - since)
        # A search is not made to see whether a plan is right.
        assert min(times) < (6 if METHODS[name].searched else 0.8), (name, times)


# --- what is refused


def test_naive_takes_one_microbatch() -> None:
    with pytest.raises(PlanError, match=r"microbatches is 4.*Set microbatches 1, or use gpipe or 1f1b"):
        make("naive", 2, 4)


def test_dualpipe_takes_an_even_number_of_ranks() -> None:
    with pytest.raises(PlanError, match=r"multiple of 2 ranks, but pp is 3\. Set pp 2 or 4, or use gpipe or 1f1b\."):
        make("dualpipe", 3, 8)
    with pytest.raises(PlanError, match=r"but pp is 1\. Set pp 2,"):
        make("dualpipe", 1, 8)
    with pytest.raises(PlanError, match=r"takes 2 or more microbatches, but microbatches is 1\. Set microbatches 2,"):
        make("dualpipe", 4, 1)


@pytest.mark.parametrize("name", [name for name, found in METHODS.items() if not found.searched])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_stages_a_rank(name: str, v: int) -> None:
    few, many = METHODS[name].chunks
    m = METHODS[name].microbatches[0]
    if few <= v <= many:
        assert make(name, 2, m, v).stages == 2 * v
    else:
        with pytest.raises(
            PlanError, match=rf"The schedule {name} puts {few}.* but chunks is {v}\. Set chunks {few}\."
        ):
            make(name, 2, m, v)


def test_unknown_schedules_are_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=rf"no schedule 'gpip'; use {listed(RUNS)}\. Did you mean 'gpipe'\?"):
        make("gpip", 2, 4)
    with pytest.raises(PlanError, match="at least 1 stage and 1 microbatch, not 2 and 0"):
        make("gpipe", 2, 0)
