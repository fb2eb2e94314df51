"""Proves a table right before anything runs: complete, ordered, and free of deadlock.

The deadlock check is the hardest case there is: no send or receive returns before its partner is there, and each pair
of ranks is one queue (NCCL with one communicator a pair). A table that passes runs on anything gentler.
"""

from __future__ import annotations

from collections import Counter

from ..errors import PlanError
from .action import Action, Kind, Schedule, law, needs, partner
from .play import play


def check(schedule: Schedule) -> None:
    """Raises a `PlanError` that names the first action at fault."""
    _complete(schedule)
    play(schedule, lambda action: 1)
    _rendezvous(schedule)


def _complete(schedule: Schedule) -> None:
    """Each stage computes each microbatch once, on its rank; each send has its receive, each need is in the table."""
    counts = Counter(action for row in schedule.rows for action in row)
    repeated = [str(action) for action, count in counts.items() if count > 1]
    if repeated:
        raise PlanError(f"The schedule {schedule.name} does {repeated[0]} more than once.")
    kinds = {action.kind for action in counts} & {Kind.FORWARD, Kind.BACKWARD}
    for kind in kinds or {Kind.FORWARD}:
        for stage in range(schedule.stages):
            for microbatch in range(schedule.microbatches):
                if Action(kind, stage, microbatch) not in counts:
                    raise PlanError(f"The schedule {schedule.name} never does {Action(kind, stage, microbatch)}.")
    reduced = {action.stage for action in counts if action.kind is Kind.REDUCE}
    unreduced = sorted(set(range(schedule.stages)) - reduced)
    if reduced and unreduced:
        raise PlanError(f"The schedule {schedule.name} reduces some stages, but not stage {unreduced[0]}.")
    lowered = any(action.kind.lane in ("p2p", "wait") for action in counts)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if schedule.rank_of(action.stage) != rank:
                raise PlanError(f"The schedule {schedule.name} does {action} on rank {rank}, which has another stage.")
            if action.microbatch not in range(schedule.microbatches):
                raise PlanError(
                    f"The schedule {schedule.name} does {action}, but has {schedule.microbatches} microbatches."
                )
            # In a lowered table nothing may be left out: a wait that is missing computes with what has not arrived.
            wanted = [*law(action, schedule.stages)] if lowered else [*needs(action, schedule)]
            if other := partner(action):
                wanted.append(other)
            absent = [need for need in wanted if need not in counts]
            if absent:
                raise PlanError(f"The schedule {schedule.name} does {action} without {absent[0]}.")


def _rendezvous(schedule: Schedule) -> None:
    """Carries out the table with blocking sends and receives, one queue a pair: only the two fronts can meet."""
    places = [0] * schedule.ranks
    done: set[Action] = set()

    def front(rank: int) -> Action | None:
        row = schedule.rows[rank]
        return row[places[rank]] if places[rank] < len(row) else None

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            action = front(rank)
            if action is None:
                continue
            other = partner(action)
            if other is not None:
                peer = schedule.rank_of(other.stage)
                if front(peer) != other:
                    continue
                done.add(other)
                places[peer] += 1
            elif any(need not in done for need in needs(action, schedule)):
                continue
            done.add(action)
            places[rank] += 1
            moved = True
    fronts = [f"rank {rank} at {front(rank)}" for rank in range(schedule.ranks) if front(rank) is not None]
    if fronts:
        raise PlanError(f"The schedule {schedule.name} deadlocks when sends block: {', '.join(fronts)}.")


def live_microbatches(schedule: Schedule, rank: int) -> int:
    """The most microbatches whose activations `rank` keeps at one time."""
    live = peak = 0
    for action in schedule.rows[rank]:
        live += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
        peak = max(peak, live)
    return peak
