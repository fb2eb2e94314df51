"""Plays a lowered schedule on a clock, giving the `Timeline` that a run is measured against."""

from __future__ import annotations

from collections.abc import Callable

from .records import Span, Timeline
from .schedule import Action, Schedule
from .schedule.play import play, unit_seconds

Seconds = Callable[[Action], float]


def simulate(schedule: Schedule, seconds: Seconds = unit_seconds) -> Timeline:
    """The timeline when each action takes `seconds(action)`. Posting a send or a receive is given the transfer's time
    on the sending side; a wait lasts until its tensor is there."""
    times = play(schedule, seconds)
    spans = [Span(rank, action, *times[action]) for rank, row in enumerate(schedule.rows) for action in row]
    return Timeline(schedule.ranks, tuple(spans))
