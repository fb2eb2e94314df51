"""The bytes of a step per axis and reason: predicted beside measured, and whether the two are equal on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from rich import box as boxes
from rich.table import Table

from ..design.records import Traffic

EQUAL, DIFFERENT = "=", "≠"

Reason = tuple[str, str]


def table(predicted: Sequence[Traffic], measured: Sequence[Traffic]) -> Table:
    """One line an axis and reason: calls and bytes put on the wire, summed over all ranks. The mark compares rank by
    rank, operation by operation, calls and payload: equal sums of unequal rows do not pass."""
    found = Table(
        title="bytes sent in one step, over all ranks",
        box=boxes.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        show_footer=True,
    )
    found.add_column("axis", footer="all", no_wrap=True)
    found.add_column("reason")
    found.add_column("operation", no_wrap=True)
    found.add_column("calls", justify="right")
    found.add_column("predicted", footer=_bytes(predicted), justify="right", no_wrap=True)
    found.add_column("measured", footer=_bytes(measured), justify="right", no_wrap=True)
    found.add_column("", footer=_mark(equal(predicted, measured)), no_wrap=True)
    ours, theirs = by_reason(predicted), by_reason(measured)
    axes = list(dict.fromkeys(row.axis for row in [*predicted, *measured]))
    for reason in sorted({**ours, **theirs}, key=lambda reason: axes.index(reason[0])):
        left, right = ours.get(reason, []), theirs.get(reason, [])
        calls = list(dict.fromkeys(f"{sum(row.calls for row in rows):,}" for rows in (left, right)))
        operations = "/".join(dict.fromkeys(row.operation for row in [*left, *right]))
        found.add_row(*reason, operations, " / ".join(calls), _bytes(left), _bytes(right), _mark(equal(left, right)))
    return found


def equal(predicted: Iterable[Traffic], measured: Iterable[Traffic]) -> bool:
    """Whether both say the same of every rank, operation, call and payload."""
    return sorted(map(_key, predicted)) == sorted(map(_key, measured))


def by_reason(rows: Iterable[Traffic]) -> dict[Reason, list[Traffic]]:
    found: dict[Reason, list[Traffic]] = {}
    for row in rows:
        found.setdefault((row.axis, row.why), []).append(row)
    return found


def _key(row: Traffic) -> tuple[int, str, str, str, int, int, int]:
    return row.rank, row.axis, row.why, row.operation, row.ranks, row.calls, row.payload


def _bytes(rows: Sequence[Traffic]) -> str:
    """To the byte; '-' when nothing was said at all."""
    return f"{round(sum((row.sent for row in rows), Fraction(0))):,}" if rows else "-"


def _mark(same: bool) -> str:
    return EQUAL if same else DIFFERENT
