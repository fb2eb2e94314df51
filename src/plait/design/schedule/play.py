"""Plays a schedule on a clock: each rank starts its next action when the rank is free and the action's needs are met.

The one player behind the lowering, the check and the simulation, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import PlanError
from .action import Action, Kind, Schedule, needs

Times = dict[Action, tuple[float, float]]


def unit_seconds(action: Action) -> float:
    """The textbook's clock: a forward takes 1, a backward 2, everything else nothing."""
    return {Kind.FORWARD: 1, Kind.BACKWARD: 2}.get(action.kind, 0)


def play(schedule: Schedule, seconds: Callable[[Action], float]) -> Times:
    """(start, end) of every action; a table that cannot go on is refused with where each rank stands."""
    times: Times = {}
    clocks: list[float] = [0] * schedule.ranks
    places = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while places[rank] < len(row):
                action = row[places[rank]]
                wanted = needs(action, schedule)
                if any(need not in times for need in wanted):
                    break
                start = max([clocks[rank], *(times[need][1] for need in wanted)])
                times[action] = (start, start + seconds(action))
                clocks[rank] = times[action][1]
                places[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {row[place]} waits for "
        + ", ".join(str(need) for need in needs(row[place], schedule) if need not in times)
        for rank, (row, place) in enumerate(zip(schedule.rows, places, strict=True))
        if place < len(row)
    ]
    if stuck:
        raise PlanError(f"The schedule {schedule.name} cannot be carried out: {'; '.join(stuck)}.")
    return times
