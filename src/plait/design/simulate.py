"""Plays a lowered schedule on a clock, giving the `Timeline` that a run is measured against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from .records import Span, Timeline
from .schedule import Action, Kind, Schedule
from .schedule.play import Together, play, unit_seconds

Seconds = Callable[[Action], float]


def simulate(
    schedule: Schedule, seconds: Seconds = unit_seconds, *, latency: float = 0, together: Together | None = None
) -> Timeline:  # fmt: skip
    """The timeline when each action takes `seconds(action)`. Posting a send or a receive is given the transfer's time
    on the sending side; a wait lasts until its tensor is there. `latency` and `together` are the player's: for a table of
    computation only, they stand for its transfers and say what its pairs take."""
    times = play(schedule, seconds, latency=latency, together=together)
    spans = [Span(rank, action, *times[action]) for rank, row in enumerate(schedule.rows) for action in row]
    return Timeline(schedule.ranks, tuple(spans))


def mean_seconds(measured: Timeline) -> Seconds:
    """A clock for the simulator from what was measured: the mean time of a stage's forward and backward; no transfer
    time, since a measured wait is what the simulation is to show."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in measured.spans:
        if span.action.kind.lane == "compute":
            times[span.action.kind, span.action.stage].append(span.end - span.start)

    def seconds(action: Action) -> float:
        found = times.get((action.kind, action.stage))
        return sum(found) / len(found) if found else 0.0

    return seconds
