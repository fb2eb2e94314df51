"""A run's timelines in the trace format of Chrome, which chrome://tracing and ui.perfetto.dev open.

    process   rank 0 (pp 0), measured        rank 0 (pp 0), simulated
    thread    compute | p2p | wait | dp: the lanes of the actions
    event     ph "X", ts and dur in microseconds from the start of the step

pid of a measured rank is the rank; a simulated one has `SIMULATED` added. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from typing import Any

from ..design.mesh import Mesh
from ..design.records import Span, Timeline
from ..design.schedule import Kind
from .record import RunRecord

SIMULATED = 1_000_000
LANES = tuple(dict.fromkeys(kind.lane for kind in Kind))
WORDS = {kind: kind.name.lower().replace("_", " ") for kind in Kind}
COLOURS = {
    Kind.FORWARD: "thread_state_runnable",
    Kind.BACKWARD: "thread_state_running",
    Kind.BACKWARD_INPUT: "thread_state_uninterruptible",
    Kind.BACKWARD_WEIGHT: "good",
    Kind.REDUCE: "thread_state_iowait",
}


def trace(record: RunRecord) -> dict[str, Any]:
    """The object that the file holds."""
    mesh = record.plan.mesh
    events = _events(record.measured, mesh, "measured", 0) + _events(record.simulated, mesh, "simulated", SIMULATED)
    about = {"model": record.plan.model, "layout": str(mesh), "schedule": record.plan.schedule}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": about | {"plait": record.versions.get("plait", "")},
    }


def written(record: RunRecord) -> str:
    return json.dumps(trace(record), separators=(",", ":"))


def _events(timeline: Timeline, mesh: Mesh, how: str, first: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for place, spans in enumerate(timeline.rows):
        rank = mesh.rank(pp=place)
        pid = first + rank
        process = f"rank {rank} (pp {place}), {how}"
        for name, about in (("process_name", {"name": process}), ("process_sort_index", {"sort_index": pid})):
            events.append({"ph": "M", "pid": pid, "tid": 0, "name": name, "args": about})
        for tid, lane in enumerate(LANES):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        events += [_event(span, pid) for span in sorted(spans, key=lambda span: (span.start, span.end))]
    return events


def _event(span: Span, pid: int) -> dict[str, Any]:
    kind, lane = span.action.kind, span.action.kind.lane
    # Ends are rounded like starts, so that spans that touch do not overlap.
    start, end = round(1e6 * span.start, 3), round(1e6 * span.end, 3)
    event = {
        "ph": "X", "pid": pid, "tid": LANES.index(lane), "cat": lane, "name": str(span.action), "ts": start,
        "dur": round(end - start, 3),
        "args": {"kind": WORDS[kind], "stage": span.action.stage, "microbatch": span.action.microbatch},
    }  # fmt: skip
    if kind in COLOURS:
        event["cname"] = COLOURS[kind]
    return event
