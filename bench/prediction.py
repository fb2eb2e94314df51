"""What the simulator says of other schedules, from the times of one run of gpipe whose backwards are in halves.

    measured   stage 0: 4 blocks            F0 I0 W0       block  = stage 0 / 4
               stage 1: 4 blocks, head      F1 I1 W1       head   = stage 1 - stage 0
    predicted  a stage of k blocks          k x block, the head on the last; a whole backward is I + W

The step of a schedule is its simulated pipeline and what a step has besides, as gpipe's own step has it. Messages are
taken to cost nothing: what passes between these stages is a quarter of a megabyte.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from plait.design.layout import balanced
from plait.design.schedule import Action, Kind, lower, make, method
from plait.design.simulate import simulate

from .contestants.field import HALVES, PREDICTED
from .rounds import Record
from .work import Work

RANKS = 2
CLOSE = 0.10


def bubble(schedule: str, record: Record, work: Work) -> float:
    """The share of the rank-seconds that a run of `schedule` must idle, by the times of its own computation."""
    times = medians(record)

    def seconds(action: Action) -> float:
        return times.get(f"{action.kind.letter}{action.stage}", 0.0) if action.kind.lane == "compute" else 0.0

    return simulate(lower(make(schedule, record.contestant.ranks, work.microbatches)), seconds).bubble


def medians(record: Record) -> dict[str, float]:
    return {key: median(turn[key] for turn in record.times) for key in record.times[0]}


def predictions(records: dict[str, Record], work: Work) -> list[dict[str, Any]]:
    """A row for each schedule that is in the course: its step as predicted and as measured, medians over the rounds."""
    source = records.get(HALVES)
    if source is None or source.trouble or not source.times:
        return []
    times, found = medians(source), []
    for name, schedule in PREDICTED.items():
        measured = records.get(name)
        if measured is None or measured.trouble or not measured.step_seconds:
            continue
        seconds, step = predicted(schedule, times, work), median(measured.step_seconds)
        found.append({
            "name": name, "schedule": schedule, "predicted": seconds, "measured": step, "ratio": seconds / step,
            "verdict": "met" if abs(seconds / step - 1) <= CLOSE else "not met",
        })  # fmt: skip
    return found


def predicted(schedule: str, times: dict[str, float], work: Work) -> float:
    """Seconds of a step. `times` has the mean seconds of each kind of action by stage ('F0'), and 'rest'."""
    stages = RANKS * method(schedule).chunks[0]
    share = work.layers // RANKS

    def seconds(action: Action) -> float:
        if action.kind is Kind.BACKWARD:
            return of("I", action.stage) + of("W", action.stage)
        return of(action.kind.letter, action.stage) if action.kind.lane == "compute" else 0.0

    def of(letter: str, stage: int) -> float:
        first, last = times[f"{letter}0"], times[f"{letter}{RANKS - 1}"]
        start, stop = balanced(work.layers, stages, stage)
        return (stop - start) * first / share + (last - first) * (stage == stages - 1)

    return simulate(lower(make(schedule, RANKS, work.microbatches)), seconds).seconds + times["rest"]
