"""What is wrong with a table is found and named; what passes the check runs, by a second opinion."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.design.errors import PlanError
from plait.design.schedule import METHODS, Action, Kind, Schedule, check, lower, make, needs
from tests.design.second_opinion import QUEUES, Stuck, carry_out, moved, table, without

CASES = [("naive", 3, 1), ("gpipe", 3, 3), ("1f1b", 3, 4), ("1f1b", 2, 3), ("interleaved", 2, 3), ("zb-h1", 3, 3),
         ("zb-h2", 2, 4), ("zb-v", 2, 3), ("v-min", 3, 2), ("dualpipe-v", 2, 4), ("dualpipe", 2, 4)]  # fmt: skip
SMALL = pytest.mark.parametrize(("name", "p", "m"), CASES)
SPLIT = pytest.mark.parametrize(("name", "p", "m"), [case for case in CASES if make(*case).splits])


@SMALL
def test_an_action_left_out_is_named(name: str, p: int, m: int) -> None:
    """Any one action, computation or communication, from the table with communication and from the one without. A table
    without an I says the same as one without a whole backward: then that, or its W, is named."""
    for schedule in (make(name, p, m), lower(make(name, p, m))):
        for action in schedule.actions:
            with pytest.raises(PlanError, match=rf"\b{action}\b"):
                check(without(schedule, action))


@SMALL
def test_a_reduction_left_out_is_named(name: str, p: int, m: int) -> None:
    schedule = lower(make(name, p, m), reduce=True)
    for action in schedule.actions:
        if action.kind is Kind.REDUCE:
            with pytest.raises(PlanError, match=f"not stage {action.stage}"):
                check(without(schedule, action))


@SMALL
def test_an_action_too_many_is_named(name: str, p: int, m: int) -> None:
    for schedule in (make(name, p, m), lower(make(name, p, m))):
        for extra in (schedule.rows[0][0], Action(Kind.FORWARD, 0, m), Action(Kind.FORWARD, 1, 0)):
            rows = ((*schedule.rows[0], extra), *schedule.rows[1:])
            with pytest.raises(PlanError, match=f"does {extra}"):
                check(replace(schedule, rows=rows))


@SMALL
def test_a_dependent_pair_swapped_is_named(name: str, p: int, m: int) -> None:
    """Every action moved to before something that it needs on its own rank: the W before its I among them."""
    swaps = 0
    for schedule in (make(name, p, m), lower(make(name, p, m), reduce=True)):
        for rank, row in enumerate(schedule.rows):
            for place, action in enumerate(row):
                for need in needs(action, schedule):
                    if need in row:
                        swaps += 1
                        with pytest.raises(PlanError, match=rf"rank {rank} at {action} waits for .*\b{need}\b"):
                            check(moved(schedule, rank, place, row.index(need)))
    assert swaps >= 2 * p


# --- backwards in two


def halves(schedule: Schedule) -> list[Action]:
    return sorted((a for a in schedule.actions if a.kind is Kind.BACKWARD_WEIGHT), key=str)


def with_action(schedule: Schedule, action: Action, *, after: Action) -> Schedule:
    rows = [list(row) for row in schedule.rows]
    row = rows[schedule.rank_of(after.stage)]
    row.insert(row.index(after) + 1, action)
    return replace(schedule, rows=tuple(map(tuple, rows)))


@SPLIT
def test_a_w_before_its_i_is_named(name: str, p: int, m: int) -> None:
    for schedule in (make(name, p, m), lower(make(name, p, m), reduce=True)):
        for late in halves(schedule):
            rank, first = schedule.rank_of(late.stage), replace(late, kind=Kind.BACKWARD_INPUT)
            row = schedule.rows[rank]
            with pytest.raises(PlanError, match=rf"rank {rank} at {late} waits for {first}"):
                check(moved(schedule, rank, row.index(late), row.index(first)))


@SPLIT
def test_a_w_dropped_or_done_twice_is_named(name: str, p: int, m: int) -> None:
    for schedule in (make(name, p, m), lower(make(name, p, m), reduce=True)):
        for late in halves(schedule):
            with pytest.raises(PlanError, match=f"never does {late}"):
                check(without(schedule, late))
            with pytest.raises(PlanError, match=f"does {late} more than once"):
                check(with_action(schedule, late, after=late))


@SPLIT
def test_a_backward_both_whole_and_parted_is_named(name: str, p: int, m: int) -> None:
    for schedule in (make(name, p, m), lower(make(name, p, m), reduce=True)):
        for late in halves(schedule):
            whole, first = replace(late, kind=Kind.BACKWARD), replace(late, kind=Kind.BACKWARD_INPUT)
            with pytest.raises(PlanError, match=f"does {whole} and {first}: one backward, twice"):
                check(with_action(schedule, whole, after=late))


def test_a_w_for_a_whole_backward_is_named() -> None:
    schedule = make("1f1b", 2, 2)
    with pytest.raises(PlanError, match="0I1"):
        check(with_action(schedule, Action(Kind.BACKWARD_WEIGHT, 0, 1), after=Action(Kind.BACKWARD, 0, 1)))


def test_the_second_opinion_finds_the_same() -> None:
    """Each fault above, in a table with its communication."""
    schedule = lower(make("zb-v", 2, 3), reduce=True)
    late = halves(schedule)[0]
    rank, first = schedule.rank_of(late.stage), replace(late, kind=Kind.BACKWARD_INPUT)
    row = schedule.rows[rank]
    broken = [
        moved(schedule, rank, row.index(late), row.index(first)),
        without(schedule, late),
        with_action(schedule, late, after=late),
        with_action(schedule, replace(late, kind=Kind.BACKWARD), after=late),
        replace(schedule, placement=(0, 1, 0, 1)),
    ]
    for wrong in broken:
        with pytest.raises((Stuck, AssertionError)):
            carry_out(wrong, QUEUES["one queue a pair"], receives_block=True)
        with pytest.raises(PlanError):
            check(wrong)


# --- deadlock


HEAD_ON = """
0F0 0SA0 0F1 0SA1 0RG0 0WG0 0B0 0RG1 0WG1 0B1
1RA0 1WA0 1F0 1B0 1SG0 1RA1 1WA1 1F1 1B1 1SG1
"""


def test_two_sends_that_meet_head_on_deadlock() -> None:
    """Ordered, and fine with sends that return at once; but each rank sends first, and neither is heard."""
    schedule = table(HEAD_ON, 2)
    with pytest.raises(PlanError, match="deadlocks when sends block: rank 0 at 0SA1, rank 1 at 1SG0"):
        check(schedule)
    for queues in QUEUES.values():
        with pytest.raises(Stuck):
            carry_out(schedule, queues, receives_block=True)
    check(moved(schedule, 1, 4, 5))


def test_a_send_moved_later_deadlocks() -> None:
    """In each lowered 1f1b table, a send that goes behind the next receive from the same peer."""
    for p, m in ((2, 2), (2, 4), (3, 4)):
        schedule = lower(make("1f1b", p, m))
        row = schedule.rows[0]
        place = row.index(Action(Kind.SEND_ACTIVATION, 0, 1))
        behind = row.index(Action(Kind.RECEIVE_GRADIENT, 0, 0))
        with pytest.raises(PlanError, match="rank 0 at 0RG0"):
            check(moved(schedule, 0, place, behind))


# --- whatever passes the check runs


@cache
def whole(name: str, p: int, m: int) -> Schedule:
    return lower(make(name, p, m), reduce=True)


DISORDERED = [
    (name, p, m) for name in METHODS for p in (2, 3) for m in (1, 2, 3)
    if METHODS[name].refusal(name, p, m, METHODS[name].chunks[0]) is None
]  # fmt: skip


@settings(max_examples=600)
@given(
    st.sampled_from(DISORDERED),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(-3, 3)), min_size=1, max_size=4),
)
@example(("naive", 2, 1), [(1, 5, -3)])  # a stage reduced before it has begun
def test_what_passes_the_check_runs(case: tuple[str, int, int], changes: list[tuple[int, int, int]]) -> None:
    """Random disorder: whenever check lets a table through, the second opinion carries it out; whenever the second
    opinion is stuck or finds a tensor missing, check has refused it."""
    schedule = whole(*case)
    for rank, old, by in changes:
        rank %= schedule.ranks
        old %= len(schedule.rows[rank])
        schedule = moved(schedule, rank, old, min(max(old + by, 0), len(schedule.rows[rank]) - 1))
    try:
        check(schedule)
        passed = True
    except PlanError:
        passed = False
    if passed:
        for queues in QUEUES.values():
            for receives_block in (False, True):
                carry_out(schedule, queues, receives_block=receives_block)
    else:
        with pytest.raises((Stuck, AssertionError)):
            carry_out(schedule, QUEUES["one queue a pair"], receives_block=True)
