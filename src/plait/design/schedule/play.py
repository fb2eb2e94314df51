"""Plays a schedule on a clock: each rank starts its next action when the rank is free and the action's needs are met.

The one player behind the lowering, the check and the simulation, so that they cannot disagree. A rank computes one action
at a time; a message takes its time in the lane of its rank, without keeping the rank from its next action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from ..errors import PlanError
from .action import Action, Kind, Schedule, needs

Times = dict[Action, tuple[float, float]]
Seconds = Callable[[Action], float]
Together = Callable[[Action, Action], float]


def unit_seconds(action: Action) -> float:
    """The textbook's clock: a forward takes 1, a backward 2 (each half of it 1), everything else nothing."""
    return {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}.get(action.kind, 0)


def play(
    schedule: Schedule, seconds: Seconds, *, latency: float = 0, together: Together | None = None
) -> Times:  # fmt: skip
    """(start, end) of every action; a table that cannot go on is refused with where each rank stands.

    `latency` is what passes between the end of an action and the start of one that needs it on another rank. `together`
    gives the time of a pair, which then starts and ends as one; without it the two follow each other.
    """
    times: Times = {}
    clocks: list[float] = [0] * schedule.ranks
    lanes: dict[tuple[int, str], float] = defaultdict(float)
    places = [0] * schedule.ranks
    wanted = {action: needs(action, schedule) for row in schedule.rows for action in row}
    paired = dict(schedule.pairs) if together is not None else {}

    def ready(action: Action, besides: Action | None = None) -> float | None:
        found: float = 0
        rank = schedule.rank_of(action.stage)
        for need in wanted[action]:
            if need == besides:
                continue
            if need not in times:
                return None
            late = latency if schedule.rank_of(need.stage) != rank else 0
            found = max(found, times[need][1] + late)
        return found

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while places[rank] < len(row):
                action = row[places[rank]]
                other = paired.get(action)
                fronts = [action] if other is None else [action, other]
                from_ = [ready(front, action) for front in fronts]
                if any(moment is None for moment in from_):
                    break
                start = max([clocks[rank], *(moment for moment in from_ if moment is not None)])
                if action.kind.lane == "p2p":
                    start = max(start, lanes[rank, "p2p"])
                    times[action] = (start, start + seconds(action))
                    lanes[rank, "p2p"] = times[action][1]
                elif other is not None and together is not None:
                    clocks[rank] = start + together(action, other)
                    times[action] = times[other] = (start, clocks[rank])
                else:
                    clocks[rank] = start + seconds(action)
                    times[action] = (start, clocks[rank])
                places[rank] += len(fronts)
                moved = True
    stuck = [
        f"rank {rank} at {row[place]} waits for "
        + ", ".join(str(need) for need in wanted[row[place]] if need not in times)
        for rank, (row, place) in enumerate(zip(schedule.rows, places, strict=True))
        if place < len(row)
    ]
    if stuck:
        raise PlanError(f"The schedule {schedule.name} cannot be carried out: {'; '.join(stuck)}.")
    return times
