"""The memory of each rank as bars of characters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.design.records import MemoryBill
from plait.report.memory import MOST, PIECES, draw

BILL = MemoryBill(0, weights=100, master_weights=0, gradients=100, state=200, activations=300, working=100)


@pytest.mark.parametrize("width", [20, 80, 133])
def test_pieces_are_as_long_as_their_bytes(width: int) -> None:
    """The largest bill fills its line; each piece is its share of that, to a character."""
    small = replace(BILL, rank=1, activations=0, working=0)
    lines = draw([BILL, small], [BILL, small], width).splitlines()
    first, _, second, _, meaning = lines
    marks = {field: mark for field, _, mark in PIECES}
    room = sum(first.count(mark) for mark in marks.values())
    assert room >= 20
    for line, bill in ((first, BILL), (second, small)):
        for field, mark in marks.items():
            assert abs(line.count(mark) - room * getattr(bill, field) / BILL.peak) <= 1
    assert "optimizer state" in meaning
    assert "master" not in meaning


def test_many_ranks_are_counted() -> None:
    bills = [replace(BILL, rank=rank) for rank in range(MOST + 3)]
    lines = draw(bills, bills, 80).splitlines()
    assert len(lines) == 2 * MOST + 2
    assert lines[-2] == "and 3 more ranks"


def test_a_measured_bar_stands_below_the_predicted_one() -> None:
    more = replace(BILL, activations=1200)
    predicted, measured, _ = draw([BILL], [more], 80).splitlines()
    assert "predicted" in predicted
    assert "measured" in measured
    assert predicted.count("·") < measured.count("·")
