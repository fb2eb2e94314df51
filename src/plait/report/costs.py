"""Where a step's time and bytes went, for the page of a run: shares of a step, bytes sent, memory held.

Predicted and measured are rows of one type, so each picture is drawn by one function for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..design.records import DATA_LIMIT, STEP_SHARES, MemoryBill, Traffic, data_share, sent_per_axis
from .markup import Piece, bars, key, left_out, meaning, paragraph, section, some, table
from .pipeline import milli
from .record import RunRecord
from .traffic import by_reason, equal
from .words import counted, percent, size, time

# --- time


def warning(record: RunRecord) -> str:
    """A sentence where waiting for data takes more than `DATA_LIMIT` of the time, or nothing."""
    share = data_share(record.step_times)
    if share <= DATA_LIMIT:
        return ""
    return (
        f"Waiting for data takes {percent(share)} of the time, more than {percent(DATA_LIMIT)}: the ranks stand still "
        "until their batch is there. Prepare batches faster, or ahead of time."
    )


def step_time(record: RunRecord) -> str:
    """The section of a step's time."""
    rows = record.step_times
    total = sum(row.seconds for row in rows) or 1.0
    shares = {name: sum(row.shares[name] for row in rows) / total for name in STEP_SHARES}
    largest = max(shares, key=lambda name: shares[name])
    steps = rows[0].steps if rows else 0
    longest = max((row.seconds for row in rows), default=0.0)
    about = (
        f"A step takes {time(total / max(1, len(rows)))} (mean over the last {counted(steps, 'step')}), most of it "
        f"{largest}: {percent(shares[largest])} over all ranks. "
    )
    about += ", ".join(f"{name} {percent(share)}" for name, share in shares.items() if name != largest) + "."
    drawn = [
        (f"rank {row.rank}", [[(name, value, f"{name}: {time(value)}, {percent(value / (row.seconds or 1))}")
                               for name, value in row.shares.items()]], time(row.seconds))
        for row in (rows[place] for place in some(len(rows)))
    ]  # fmt: skip
    listed = [
        (row.rank, *map(milli, row.shares.values()), milli(row.seconds)) for row in (rows[p] for p in some(len(rows)))
    ]
    cpu = (
        "Ranks on one machine's CPUs share its cores: where there are more ranks than cores, every share includes "
        "waiting for a core."
    )
    return section(
        "time", "Time of a step",
        paragraph(about),
        meaning((name, name, words) for name, words in STEP_SHARES.items()),
        bars(drawn, longest, name="time of a step on each rank"),
        table(("rank", *(f"{name}, ms" for name in STEP_SHARES), "step, ms"), listed, name="Numbers: each rank"),
        left_out(len(rows), "ranks"),
        paragraph(cpu, "note") if record.device.startswith("cpu") and len(rows) > 1 else "",
    )  # fmt: skip


# --- bytes


def traffic(record: RunRecord) -> str:
    """The section of the bytes of a step."""
    predicted, measured = record.traffic_predicted, record.traffic_measured
    ours, theirs = sent_per_axis(predicted), sent_per_axis(measured)
    axes = list(dict.fromkeys([*ours, *theirs]))
    longest = max((float(value) for value in [*ours.values(), *theirs.values()]), default=0.0)
    same = equal(predicted, measured)
    if not axes:
        return section("traffic", "Bytes sent", paragraph("One rank sends nothing."))
    about = (
        "Predicted and measured are equal to the byte, on every rank, for every reason."
        if same
        else "Predicted and measured DIFFER: the table shows where."
    )
    drawn = []
    for axis in axes:
        one, other = float(ours.get(axis, 0)), float(theirs.get(axis, 0))
        pieces = [
            [("predicted", one, f"predicted: {one:,.0f} bytes")],
            [("measured", other, f"measured: {other:,.0f} bytes")],
        ]
        drawn.append((axis, pieces, size(other)))
    left, right = by_reason(predicted), by_reason(measured)
    listed = []
    for axis, why in sorted({**left, **right}, key=lambda reason: axes.index(reason[0])):
        a, b = left.get((axis, why), []), right.get((axis, why), [])
        operation = "/".join(dict.fromkeys(row.operation for row in [*a, *b]))
        listed.append(
            (axis, why, operation, f"{sum(row.calls for row in b):,}", _sent(a), _sent(b), "=" if equal(a, b) else "≠")
        )
    head = ("axis", "reason", "operation", "calls", "predicted, bytes", "measured, bytes", "")
    total = float(sum(theirs.values()))
    return section(
        "traffic", "Bytes sent",
        paragraph(f"One step sends {size(total)} over all ranks. {about}"),
        key((("predicted", "predicted"), ("measured", "measured"))),
        bars(drawn, longest, name="bytes sent in one step on each axis"),
        table(head, listed, name="Numbers: each reason", words=(0, 1, 2)),
        paragraph("Bytes of payloads, with the ring algorithms' shares; world is what all ranks sum together.", "note"),
    )  # fmt: skip


def _sent(rows: Iterable[Traffic]) -> str:
    return f"{round(sum(float(row.sent) for row in rows)):,}"


# --- memory

HELD = {"weights": "weights", "master_weights": "master weights", "gradients": "gradients", "state": "optimizer state",
        "units": "units on their way", "activations": "kept for backward",
        "working": "working set"}  # fmt: skip


def _pieces(bill: MemoryBill, how: str) -> list[Piece]:
    values = {name: getattr(bill, name) or 0 for name in HELD}
    return [(name, value, f"{HELD[name]}, {how}: {value:,} bytes ({size(value)})") for name, value in values.items()]


def same_memory(predicted: Sequence[MemoryBill], measured: Sequence[MemoryBill]) -> bool:
    """Whether weights, gradients and state are equal on every rank; what is kept for backward depends on the batch."""
    return [bill.held for bill in predicted] == [bill.held for bill in measured]


def memory(record: RunRecord) -> str:
    """The section of the memory of each rank."""
    predicted, measured = record.memory_predicted, record.memory_measured
    pairs = list(zip(predicted, measured, strict=False))
    longest = max(bill.peak for bill in [*predicted, *measured])
    fullest = max(measured, key=lambda bill: bill.peak)
    sometimes = ("master_weights", "units", "working")
    names = [name for name in HELD if name not in sometimes or any(getattr(b, name) for b in [*predicted, *measured])]
    about = (
        f"The fullest rank is {fullest.rank}, with {size(fullest.peak)}: {size(sum(fullest.held))} held through the run, "
        f"{size(fullest.activations)} kept for backward at the most, and "
        f"{size(fullest.working or 0)} more at the fullest moment. "
    )
    about += (
        "Weights, gradients and state are as predicted, to the byte, on every rank."
        if same_memory(predicted, measured)
        else "Weights, gradients or state DIFFER from what was predicted: the table shows where."
    )
    shown = [pairs[place] for place in some(len(pairs))]
    drawn = [(f"rank {b.rank}", [_pieces(a, "predicted"), _pieces(b, "measured")], size(b.peak)) for a, b in shown]
    listed = [
        (b.rank, *(cell for name in names for cell in _cells(a, b, name)), size(b.process) if b.process else "-")
        for a, b in shown
    ]
    head = ["rank"]
    for name in names:
        head += [f"{HELD[name]}, predicted", "measured"]
    process = (
        "the most that torch's allocator gave out" if not record.device.startswith("cpu") else "peak resident memory"
    )
    return section(
        "memory", "Memory",
        paragraph(about),
        key((name, HELD[name]) for name in names),
        bars(drawn, longest, name="memory of each rank, predicted above measured"),
        table((*head, "process"), listed, name="Numbers: each rank, in bytes"),
        left_out(len(pairs), "ranks"),
        paragraph("In each pair of bars predicted is above measured. Kept for backward: counted in the first step, and "
                  "predicted for rows of one document; a row that holds several adds their mask. Working set: by how "
                  "much the fullest moment of a step goes beyond it, counted in the second step. Process: "
                  f"{process}, with the interpreter and its libraries, and what kernels use while they run.", "note"),
    )  # fmt: skip


def _cells(predicted: MemoryBill, measured: MemoryBill, name: str) -> tuple[str, str]:
    one, other = (getattr(bill, name) for bill in (predicted, measured))
    return "-" if one is None else f"{one:,}", "-" if other is None else f"{other:,}"
