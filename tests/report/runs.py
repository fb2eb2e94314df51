"""Runs that never ran: records made of what the design wing predicts, for pages to be drawn of."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.design.cost.memory import memory
from plait.design.cost.traffic import traffic
from plait.design.plan import Plan
from plait.design.records import MemoryBill, StepTime, Timeline
from plait.design.schedule import Action, Kind, lower
from plait.design.simulate import simulate
from plait.design.table import table
from plait.report import record
from plait.report.record import RunRecord, Sample
from tests.design.facts import llama


def seconds(action: Action) -> float:
    """A clock on which the last of a few stages is slower and a send takes its time."""
    work = {Kind.FORWARD: 0.010, Kind.BACKWARD: 0.020, Kind.BACKWARD_INPUT: 0.011, Kind.BACKWARD_WEIGHT: 0.009,
            Kind.SEND_ACTIVATION: 0.001, Kind.REDUCE: 0.004}  # fmt: skip
    return work.get(action.kind, 0.0) * (1.5 if action.stage == 1 else 1.0)


def slower(timeline: Timeline) -> Timeline:
    """As measured: everything a tenth later and longer."""
    spans = tuple(replace(span, start=1.1 * span.start, end=1.1 * span.end) for span in timeline.spans)
    return Timeline(timeline.ranks, spans)


def times(rank: int, **changes: float) -> StepTime:
    values = {"data": 0.002, "compute": 0.1, "communication": 0.03, "bubble": 0.04, "optimizer": 0.005, "other": 0.001}
    return StepTime(rank, 10, **(values | changes))


def made(*, blocks: int = 4, **fields: Any) -> RunRecord:
    plan = Plan(**{"model": "llama-tiny", "batch": 16, "seq": 32, **fields})
    facts = llama(blocks=blocks)
    schedule = lower(table(plan, facts), reduce=True)
    simulated = simulate(schedule, seconds)
    rows = tuple(traffic(plan, facts))
    bills = tuple(memory(plan, facts))
    return RunRecord(
        plan=plan, facts=facts, began="2026-01-02 03:04:05", seconds=12.5, device="cpu (x86_64, 2 cores)",
        versions={"plait": "0.1.0", "torch": "2.8"}, data="3 documents, 1,000 bytes, 900 tokens (bytes)", entropy=3.1,
        proof="", schedule=schedule, simulated=simulated, measured=slower(simulated), traffic_predicted=rows,
        traffic_measured=rows, memory_predicted=bills, memory_measured=tuple(map(read_off, bills)),
        step_times=tuple(times(rank) for rank in range(plan.world)),
    )  # fmt: skip


def read_off(bill: MemoryBill) -> MemoryBill:
    return replace(bill, process=300_000_000)


def metrics(steps: int) -> list[dict[str, float]]:
    """Losses that fall and wobble."""
    return [
        {"step": step, "loss": 2.5 + 4 * math.exp(-step / (1 + steps / 5)) + 0.1 * math.sin(7.0 * step), "grad_norm": 0.7,
         "lr": 1e-3 * (1 - step / (steps + 1)), "tokens": 512, "tokens_per_s": 4000.0 + step % 7}
        for step in range(1, steps + 1)
    ]  # fmt: skip


def folder(where: Path, made_: RunRecord, *, steps: int = 30, samples: Sequence[Sample] = ()) -> Path:
    """The files that such a run would have left, but the pictures."""
    where.mkdir(parents=True, exist_ok=True)
    record.write(made_, where)
    record.add_samples(list(samples), where)
    (where / record.METRICS).write_text("".join(json.dumps(line) + "\n" for line in metrics(steps)))
    return where
