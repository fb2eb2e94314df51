"""The trace is what Chrome and Perfetto read: their fields, times that rise, and nothing that overlaps in a lane."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from plait.report import page, trace
from tests.report import runs


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dp": 2, "tp": 2, "pp": 2, "microbatches": 4},
        {"pp": 4, "microbatches": 8},
        {"pp": 2, "microbatches": 4, "schedule": "interleaved"},
        {"pp": 2, "microbatches": 4, "schedule": "zb-h1"},
    ],
    ids=str,
)
def test_a_trace_is_valid(tmp_path: Path, layout: dict[str, Any]) -> None:
    made = runs.made(**layout)
    page.draw(runs.folder(tmp_path, made))
    found = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    named = {(e["pid"], e["args"]["name"]) for e in found["traceEvents"] if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert len(events) == len(made.measured.spans) + len(made.simulated.spans)
    assert {e["ph"] for e in found["traceEvents"]} == {"M", "X"}
    lanes = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in threads
        lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        for one, other in pairwise(lane):
            assert one["ts"] <= other["ts"]
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
    # A process is a rank of rank 0's pipeline; simulated ones stand apart.
    ranks = {made.plan.mesh.rank(pp=stage) for stage in range(made.plan.pp)}
    assert {event["pid"] for event in events} == ranks | {trace.SIMULATED + rank for rank in ranks}
    stage = made.plan.pp - 1
    rank = made.plan.mesh.rank(pp=stage)
    assert (rank, f"rank {rank} (pp {stage}), measured") in named
    assert (trace.SIMULATED + rank, f"rank {rank} (pp {stage}), simulated") in named


def test_times_are_microseconds_of_the_records() -> None:
    made = runs.made(pp=2, microbatches=2)
    events = {(e["pid"], e["name"]): e for e in trace.trace(made)["traceEvents"] if e["ph"] == "X"}
    span = next(span for span in made.measured.spans if str(span.action) == "1B0")
    event = events[1, "1B0"]
    assert event["ts"] == pytest.approx(1e6 * span.start)
    assert event["dur"] == pytest.approx(1e6 * (span.end - span.start))
    assert event["args"] == {"kind": "backward", "stage": 1, "microbatch": 0}
    assert event["cat"] == "compute"
