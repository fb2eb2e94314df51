"""Every schedule, for many ranks and microbatches: complete, ordered, free of deadlock, with the textbooks' bubbles.

`carry_out` below is a second opinion: it knows nothing of the order law, only tensors, queues and blocking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.design.errors import PlanError
from plait.design.schedule import (
    FORWARD_ONLY,
    METHODS,
    Action,
    Kind,
    Schedule,
    check,
    live_microbatches,
    lower,
    make,
    needs,
    partner,
)
from plait.design.simulate import simulate

CASES = [(name, p, m) for name in METHODS for p in (1, 2, 3, 4, 8) for m in range(1, 17) if name != "naive" or m == 1]
EVERY = pytest.mark.parametrize(("name", "p", "m"), CASES)
SMALL = pytest.mark.parametrize(("name", "p", "m"), [("naive", 3, 1), ("gpipe", 3, 3), ("1f1b", 3, 4), ("1f1b", 2, 3)])


class Stuck(Exception):
    """The table cannot go on."""


Queues = Callable[[int, int], object]
QUEUES: dict[str, Queues] = {
    "one queue a pair": lambda one, other: frozenset((one, other)),
    "one queue a rank": lambda one, other: "everything",
}


def carry_out(schedule: Schedule, queues: Queues, *, receives_block: bool) -> None:
    """Runs a lowered table with values in place of tensors. A send blocks until its receive is posted; a transfer
    happens when it is first in the queue of both its ranks; a wait blocks until the tensor is there."""
    ranks, last = len(schedule.rows), len(schedule.rows) - 1
    places = [0] * ranks
    posted: dict[tuple[int, object], list[Action]] = {}
    arrived: set[tuple[int, str, int]] = set()  # (rank, letter, microbatch): the transfer is complete
    usable: set[tuple[int, str, int]] = set()  # the same, waited for
    computed: set[tuple[int, str, int]] = set()

    def peer(action: Action) -> int:
        forward = action.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT)
        return action.stage + 1 if forward else action.stage - 1

    def match(rank: int, action: Action) -> None:
        other = peer(action)
        mine = posted.get((rank, queues(rank, other)), [])
        theirs = posted.get((other, queues(other, rank)), [])
        if mine and theirs and peer(mine[0]) == other and peer(theirs[0]) == rank:
            ends = {mine[0].kind.letter, theirs[0].kind.letter}
            if ends not in ({"SA", "RA"}, {"SG", "RG"}) or mine[0].microbatch != theirs[0].microbatch:
                raise Stuck(f"{mine[0]} meets {theirs[0]}")
            for at, queue in ((rank, mine), (other, theirs)):
                done = queue.pop(0)
                arrived.add((at, done.kind.letter, done.microbatch))

    def step(rank: int, action: Action) -> bool:
        """Whether `rank` can leave this action behind."""
        letter, m = action.kind.letter, action.microbatch
        if letter in ("SA", "SG", "RA", "RG"):
            queue = posted.setdefault((rank, queues(rank, peer(action))), [])
            if action not in queue and (rank, letter, m) not in arrived:
                if letter in ("SA", "SG"):
                    assert (rank, "F" if letter == "SA" else "B", m) in computed, f"{action} sends nothing"
                queue.append(action)
            match(rank, action)
            return (rank, letter, m) in arrived or (letter in ("RA", "RG") and not receives_block)
        if letter in ("WA", "WG"):
            match(rank, Action(Kind.RECEIVE_ACTIVATION if letter == "WA" else Kind.RECEIVE_GRADIENT, rank, m))
            usable.add((rank, letter, m))
            return (rank, "R" + letter[1], m) in arrived
        if letter == "F":
            assert rank == 0 or (rank, "WA", m) in usable, f"{action} has no input"
        if letter == "B":
            assert (rank, "F", m) in computed, f"{action} before its forward"
            assert rank == last or (rank, "WG", m) in usable, f"{action} has no gradient"
        computed.add((rank, letter, m))
        return True

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while places[rank] < len(row):
                queued = sum(map(len, posted.values()))
                if not step(rank, row[places[rank]]):
                    moved |= queued != sum(map(len, posted.values()))
                    break
                places[rank] += 1
                moved = True
    if any(place < len(row) for place, row in zip(places, schedule.rows, strict=True)):
        raise Stuck(str(places))
    assert not any(posted.values())
    assert {c for c in computed if c[1] in "FB"} == {
        (rank, letter, m) for rank in range(ranks) for letter in "FB" for m in range(schedule.microbatches)
    }


def moved(schedule: Schedule, rank: int, old: int, new: int) -> Schedule:
    """The table with one action of one row taken from place `old` to place `new`."""
    row = list(schedule.rows[rank])
    row.insert(new, row.pop(old))
    rows = list(schedule.rows)
    rows[rank] = tuple(row)
    return replace(schedule, rows=tuple(rows))


def without(schedule: Schedule, action: Action) -> Schedule:
    return replace(schedule, rows=tuple(tuple(a for a in row if a != action) for row in schedule.rows))


def table(text: str, microbatches: int = 1) -> Schedule:
    """A schedule from its printed form, one row a line."""
    kinds = {kind.letter: kind for kind in Kind}
    rows = []
    for line in text.strip().splitlines():
        words = [(int(w[0]), w[1:].rstrip("0123456789"), w) for w in line.split()]
        rows.append(tuple(Action(kinds[letter], stage, int(w[1 + len(letter) :])) for stage, letter, w in words))
    return Schedule("written", microbatches, tuple(rows))


# --- every maker, every size


@EVERY
def test_tables_are_right_before_and_after_lowering(name: str, p: int, m: int) -> None:
    schedule = make(name, p, m)
    check(schedule)
    for reduce in (False, True):
        lowered = lower(schedule, reduce=reduce)
        check(lowered)
        computation = tuple(tuple(a for a in row if a.kind in (Kind.FORWARD, Kind.BACKWARD)) for row in lowered.rows)
        assert computation == schedule.rows
        assert all((row[-1].kind is Kind.REDUCE) == reduce for row in lowered.rows)
        assert sum(a.kind is Kind.SEND_ACTIVATION for a in lowered.actions) == (p - 1) * m
        assert sum(a.kind is Kind.SEND_GRADIENT for a in lowered.actions) == (p - 1) * m


@EVERY
def test_tables_run_when_every_send_blocks(name: str, p: int, m: int) -> None:
    lowered = lower(make(name, p, m), reduce=True)
    for queues in QUEUES.values():
        for receives_block in (False, True):
            carry_out(lowered, queues, receives_block=receives_block)


@EVERY
def test_bubbles_are_the_textbooks(name: str, p: int, m: int) -> None:
    """Exact: a forward takes 1, a backward 2, so every span is an integer. Communication that takes no time changes
    nothing."""
    bubble = 1 - Fraction(1, p) if name == "naive" else Fraction(p - 1, m + p - 1)
    for schedule in (make(name, p, m), lower(make(name, p, m))):
        timeline = simulate(schedule)
        busy = [Fraction(timeline.busy(rank)) for rank in range(p)]
        assert busy == [3 * m] * p
        assert 1 - sum(busy) / (p * Fraction(timeline.seconds)) == bubble
        assert timeline.bubble == float(bubble)


@EVERY
def test_live_microbatches(name: str, p: int, m: int) -> None:
    expected = [{"naive": 1, "gpipe": m, "1f1b": min(m, p - stage)}[name] for stage in range(p)]
    for schedule in (make(name, p, m), lower(make(name, p, m))):
        assert [live_microbatches(schedule, stage) for stage in range(p)] == expected


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_forward_only(p: int, m: int) -> None:
    lowered = lower(FORWARD_ONLY(p, m), reduce=True)
    check(lowered)
    assert {a.kind for a in lowered.actions} <= {
        Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION, Kind.WAIT_ACTIVATION,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_fewer_microbatches_than_stages_works(name: str, m: int) -> None:
    lowered = lower(make(name, 4, m), reduce=True)
    check(lowered)
    carry_out(lowered, QUEUES["one queue a pair"], receives_block=True)


def printed(schedule: Schedule, rank: int) -> str:
    return " ".join(map(str, schedule.rows[rank]))


def test_the_rows_of_the_docstrings() -> None:
    assert printed(make("gpipe", 2, 4), 1) == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    assert printed(make("1f1b", 2, 4), 0) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    assert printed(make("1f1b", 2, 4), 1) == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    assert printed(lower(make("naive", 2, 1)), 1) == "1RA0 1WA0 1F0 1B0 1SG0"


def test_one_stage_is_gradient_accumulation() -> None:
    assert printed(lower(make("1f1b", 1, 2), reduce=True), 0) == "0F0 0B0 0F1 0B1 0R1"


# --- what is refused


def test_naive_takes_one_microbatch() -> None:
    with pytest.raises(PlanError, match=r"microbatches is 4.*Set microbatches 1, or use gpipe or 1f1b"):
        make("naive", 2, 4)


def test_unknown_schedules_are_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"no schedule 'gpip'; use naive, gpipe or 1f1b. Did you mean 'gpipe'\?"):
        make("gpip", 2, 4)
    with pytest.raises(PlanError, match="at least 1 stage and 1 microbatch, not 2 and 0"):
        make("gpipe", 2, 0)


@SMALL
def test_an_action_left_out_is_named(name: str, p: int, m: int) -> None:
    """Any one action, computation or communication, from the table with communication and from the one without."""
    for schedule in (make(name, p, m), lower(make(name, p, m))):
        for action in schedule.actions:
            with pytest.raises(PlanError, match=rf"\b{action}\b"):
                check(without(schedule, action))


@SMALL
def test_a_reduction_left_out_is_named(name: str, p: int, m: int) -> None:
    schedule = lower(make(name, p, m), reduce=True)
    for stage in range(p):
        with pytest.raises(PlanError, match=f"not stage {stage}"):
            check(without(schedule, Action(Kind.REDUCE, stage, m - 1)))


@SMALL
def test_an_action_too_many_is_named(name: str, p: int, m: int) -> None:
    for schedule in (make(name, p, m), lower(make(name, p, m))):
        for extra in (schedule.rows[0][0], Action(Kind.FORWARD, 0, m), Action(Kind.FORWARD, 1, 0)):
            rows = ((*schedule.rows[0], extra), *schedule.rows[1:])
            with pytest.raises(PlanError, match=f"does {extra}"):
                check(replace(schedule, rows=rows))


@SMALL
def test_a_dependent_pair_swapped_is_named(name: str, p: int, m: int) -> None:
    """Every action moved to before something that it needs on its own rank."""
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


@settings(max_examples=400)
@given(
    st.sampled_from([("naive", 3, 1), ("gpipe", 2, 3), ("gpipe", 3, 2), ("1f1b", 2, 3), ("1f1b", 3, 3)]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(-3, 3)), min_size=1, max_size=4),
)
def test_what_passes_the_check_runs(case: tuple[str, int, int], changes: list[tuple[int, int, int]]) -> None:
    """Random disorder: whenever check lets a table through, the second opinion carries it out; whenever the second
    opinion is stuck or finds a tensor missing, check has refused it."""
    schedule = lower(make(*case))
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


# --- the order law


def action(word: str) -> Action:
    return table(word).rows[0][0]


@pytest.mark.parametrize(
    ("word", "bare", "lowered"),
    [
        ("0F1", "", ""),
        ("1F1", "0F1", "1WA1"),
        ("2B1", "2F1", "2F1"),
        ("1B1", "1F1 2B1", "1F1 1WG1"),
        ("1WA1", "0F1", "1RA1"),
        ("1RA1", "0F1", "0SA1"),
        ("0SA1", "0F1", "0F1"),
        ("1WG1", "2B1", "1RG1"),
        ("1RG1", "2B1", "2SG1"),
        ("2SG1", "2B1", "2B1"),
        ("1R1", "1B0 1B1", "1B0 1B1"),
    ],
)
def test_needs(word: str, bare: str, lowered: str) -> None:
    """One law for both forms: what the table leaves out stands for its own needs."""
    schedule = make("gpipe", 3, 2)
    assert [str(a) for a in needs(action(word), schedule)] == bare.split()
    assert [str(a) for a in needs(action(word), lower(schedule))] == lowered.split()


def test_partners_are_mutual() -> None:
    for a in lower(make("1f1b", 3, 4), reduce=True).actions:
        other = partner(a)
        assert (other is not None) == (a.kind.lane == "p2p")
        assert other is None or (partner(other) == a and abs(other.stage - a.stage) == 1)
