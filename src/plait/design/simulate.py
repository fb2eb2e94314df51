"""Plays a lowered schedule on a clock, giving the `Timeline` that a run is measured against."""

from __future__ import annotations

from collections.abc import Callable

from .records import Span, Timeline
from .schedule import Action, Kind, Schedule
from .schedule.play import play

Seconds = Callable[[Action], float]


def unit_seconds(action: Action) -> float:
    """The textbook's clock: a forward takes 1, a backward 2, everything else nothing."""
    return {Kind.FORWARD: 1, Kind.BACKWARD: 2}.get(action.kind, 0)


def simulate(schedule: Schedule, seconds: Seconds = unit_seconds) -> Timeline:
    """The timeline when each action takes `seconds(action)`. Posting a send or a receive is given the transfer's time
    on the sending side; a wait lasts until its tensor is there."""
    times = play(schedule, seconds)
    spans = [Span(rank, action, *times[action]) for rank, row in enumerate(schedule.rows) for action in row]
    return Timeline(schedule.ranks, tuple(spans))
