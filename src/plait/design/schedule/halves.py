"""Every whole backward in two halves, one right after the other: B becomes I W.

Nothing is gained by it; but each half has a time of its own then, from which the schedules that part them are predicted.
"""

from __future__ import annotations

from dataclasses import replace

from .action import Action, Kind, Schedule


def in_halves(schedule: Schedule) -> Schedule:
    def halves(action: Action) -> tuple[Action, ...]:
        if action.kind is not Kind.BACKWARD:
            return (action,)
        return replace(action, kind=Kind.BACKWARD_INPUT), replace(action, kind=Kind.BACKWARD_WEIGHT)

    rows = tuple(tuple(half for action in row for half in halves(action)) for row in schedule.rows)
    return replace(schedule, rows=rows, pairs=())
