"""What must be done before what: the order law, action by action."""

from __future__ import annotations

import pytest

from plait.design.schedule import BACKWARDS, Action, Kind, lower, make, needs, partner
from plait.design.schedule.play import play, unit_seconds
from tests.design.second_opinion import table


def action(word: str) -> Action:
    return table(word).rows[0][0]


@pytest.mark.parametrize(
    ("word", "bare", "full"),
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
def test_needs(word: str, bare: str, full: str) -> None:
    """One law for both forms: what the table leaves out stands for its own needs."""
    schedule = make("gpipe", 3, 2)
    assert [str(a) for a in needs(action(word), schedule)] == bare.split()
    assert [str(a) for a in needs(action(word), lower(schedule))] == full.split()


@pytest.mark.parametrize(
    ("word", "bare", "full"),
    [
        ("2F1", "1F1", "1F1"), ("1I1", "1F1 2I1", "1F1 2I1"), ("0I1", "0F1 1I1", "0F1 0WG1"), ("3I0", "3F0", "3F0"),
        ("2I0", "2F0 3I0", "2F0 2WG0"), ("1W1", "1I1", "1I1"), ("1SG1", "1I1", "1I1"), ("1R1", "1W0 1W1", "1W0 1W1"),
    ],
)  # fmt: skip
def test_needs_of_halves_and_of_stages_on_one_rank(word: str, bare: str, full: str) -> None:
    """zb-v on two ranks: stages 1 and 2 follow each other on rank 1."""
    schedule = make("zb-v", 2, 2)
    assert [str(a) for a in needs(action(word), schedule)] == bare.split()
    assert [str(a) for a in needs(action(word), lower(schedule))] == full.split()


@pytest.mark.parametrize(("name", "p"), [("1f1b", 3), ("interleaved", 3), ("zb-v", 3), ("dualpipe", 4)])
def test_partners_are_mutual(name: str, p: int) -> None:
    schedule = lower(make(name, p, 4), reduce=True)
    for a in schedule.actions:
        other = partner(a, schedule)
        if a.kind.lane == "p2p":
            assert other is not None
            assert partner(other, schedule) == a
            assert abs(other.stage - a.stage) == 1
            assert schedule.rank_of(other.stage) != schedule.rank_of(a.stage)
        else:
            assert other is None


def test_backwards_of_a_microbatch_are_whole_or_parted() -> None:
    """dualpipe-v has both in one table."""
    schedule = make("dualpipe-v", 2, 6)
    kinds = {a.kind for a in schedule.actions}
    assert {*BACKWARDS, Kind.BACKWARD_WEIGHT} <= kinds
    assert schedule.splits
    times = play(schedule, unit_seconds)
    assert len(times) == sum(map(len, schedule.rows))
