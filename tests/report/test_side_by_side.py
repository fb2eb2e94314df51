"""The comparison of schedules says what the formulas say, and why one cannot be made."""

from __future__ import annotations

import json

import pytest

from plait.design.schedule import METHODS, make
from plait.report import schedules
from plait.report.kinds import together
from plait.report.schedules import Played, Refused


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 8)])
def test_numbers_are_the_formulas(p: int, m: int) -> None:
    found = {one.table.name: schedules.row(one) for one in schedules.compare(p, m) if isinstance(one, Played)}
    even = (p - 1) / (m + p - 1)
    for name in ("gpipe", "1f1b"):
        row = found[name]
        assert row.bubble == pytest.approx(even)
        assert (row.time, row.sends) == (3 * (m + p - 1), m if p == 2 else 2 * m)
    assert found["1f1b"].live == [min(m, p - rank) for rank in range(p)]
    assert found["gpipe"].live == [m] * p
    assert found["gpipe"].of_1f1b == m / min(m, p)
    two = found["interleaved"]
    assert two.chunks == 2
    assert two.bubble == pytest.approx((p - 1) / (2 * m + p - 1))
    assert two.time == pytest.approx(3 * (2 * m + p - 1) / 2)
    # The first rank sends at every end of its stages but the model's own: v m forward, (v - 1) m back.
    assert two.sends == (3 * m if p == 2 else 4 * m)
    half = found["zb-h1"]
    assert half.time == pytest.approx(3 * m + p - 1)
    assert half.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    assert half.of_1f1b == 1


@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_formulas_of_the_pages(p: int) -> None:
    """Time beyond 3 m, and the most that a rank keeps, where F = I = W and m is large: docs/methods."""
    m, half = 3 * p, (p - 1) / 2
    exact = {
        "zb-h1": (p - 1, p), "zb-h2": (p - 1, 2 * p - 1), "zb-v": (half, p), "dualpipe-v": (p - 1, p + 0.5),
        "dualpipe": (p - 2, p + 1),
    }  # fmt: skip
    for name, (bubble, live) in exact.items():
        played = schedules.play(name, p, m)
        assert played.timeline.seconds == pytest.approx(3 * m + bubble), name
        assert max(played.live) == live, name
    most = {"v-half": (3 * half, (p + 2) // 2), "v-min": (2 * (p - 1) + 0.5 * (p % 3 == 0), (p + 1) // 3 + 1)}
    for name, (bubble, live) in most.items():
        played = schedules.play(name, p, m)
        assert 3 * m < played.timeline.seconds <= 3 * m + bubble, name
        assert max(played.live) <= live, name


def test_a_pair_is_drawn_as_one_and_counts_once() -> None:
    played = schedules.play("dualpipe", 4, 8)
    pairs = [together(row) for row in played.timeline.rows]
    assert sum(map(len, pairs)) == len(played.table.pairs) > 0
    assert all(0 <= played.timeline.busy(rank) <= played.timeline.seconds for rank in range(4))


def test_every_schedule_has_a_line_and_what_cannot_be_made_says_why() -> None:
    compared = schedules.compare(4, 8)
    shown = schedules.table(compared, width=80).plain
    names = [one.name if isinstance(one, Refused) else one.table.name for one in compared]
    assert names == list(METHODS)
    for name in names:
        assert sum(line.split()[:1] == [name] for line in shown.splitlines()) == 1
    assert max(map(len, shown.partition("F: ")[0].splitlines())) <= 80
    words = " ".join(shown.split())
    assert "naive The schedule naive takes 1 microbatch, but microbatches is 8. Set microbatches 1" in words
    assert "1f1b 1 27.3% 33 F 4 1.00 16" in words
    objects = [json.loads(line) for line in schedules.lines(compared, 4, 8).splitlines()]
    assert [one["schedule"] for one in objects] == names
    assert objects[0]["refused"].startswith("The schedule naive takes 1")
    assert objects[2]["live"] == [4, 3, 2, 1]


def test_chunks_are_for_those_that_can_choose() -> None:
    found = {one.table.name: one.table.chunks for one in schedules.compare(4, 8, 4) if isinstance(one, Played)}
    assert found["interleaved"] == 4
    assert found["1f1b"] == 1


def test_times_are_in_one_unit() -> None:
    """A rank computes 3 F a microbatch however many stages it has."""
    for name in ("1f1b", "interleaved", "zb-h1"):
        played = schedules.play(name, 4, 8)
        assert played.timeline.busy(0) == pytest.approx(24), name
        assert played.timeline.chunk(played.timeline.rows[0][0]) == 0
    assert make("interleaved", 4, 8).chunks == 2
