"""Proves a table right before anything runs: complete, ordered, and free of deadlock.

The deadlock check is the hardest case there is: no send or receive returns before its partner is there, and each pair
of ranks is one queue (NCCL with one communicator a pair). A table that passes runs on anything gentler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from ..errors import PlanError
from .action import BACKWARDS, Action, Kind, Schedule, law, needs, partner
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
    trains = any(action.kind in BACKWARDS for action in counts)
    for stage in range(schedule.stages):
        for microbatch in schedule.microbatches_of(stage):
            for expected in _parts(stage, microbatch, counts) if trains else [Action(Kind.FORWARD, stage, microbatch)]:
                if expected not in counts:
                    raise PlanError(f"The schedule {schedule.name} never does {expected}.")
            whole = Action(Kind.BACKWARD, stage, microbatch)
            split = Action(Kind.BACKWARD_INPUT, stage, microbatch)
            if whole in counts and split in counts:
                raise PlanError(f"The schedule {schedule.name} does {whole} and {split}: one backward, twice.")
    reduced = {action.stage for action in counts if action.kind is Kind.REDUCE}
    unreduced = sorted(set(range(schedule.stages)) - reduced)
    if reduced and unreduced:
        raise PlanError(f"The schedule {schedule.name} reduces some stages, but not stage {unreduced[0]}.")
    lowered = any(action.kind.lane in ("p2p", "wait") for action in counts)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if schedule.rank_of(action.stage) != rank:
                raise PlanError(f"The schedule {schedule.name} does {action} on rank {rank}, which has another stage.")
            if action.microbatch not in schedule.microbatches_of(action.stage):
                raise PlanError(
                    f"The schedule {schedule.name} does {action}, but has {schedule.microbatches} microbatches."
                )
            # In a lowered table nothing may be left out: a wait that is missing computes with what has not arrived.
            wanted = [*law(action, schedule)] if lowered else [*needs(action, schedule)]
            if other := partner(action, schedule):
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
            other = partner(action, schedule)
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


def _parts(stage: int, microbatch: int, counts: Container[Action]) -> list[Action]:
    """What a stage does with a microbatch in training: F and B, or F, I and W."""
    kinds = [Kind.FORWARD, Kind.BACKWARD]
    if (
        Action(Kind.BACKWARD_INPUT, stage, microbatch) in counts
        or Action(Kind.BACKWARD_WEIGHT, stage, microbatch) in counts
    ):
        kinds = [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
    return [Action(kind, stage, microbatch) for kind in kinds]


Kept = Callable[[int, int], float]


def peak(
    schedule: Schedule, rank: int, *, forward: Kept, deferred: Kept, arriving: Kept = lambda stage, microbatch: 0
) -> float:  # fmt: skip
    """The most that `rank` keeps at one time: a stage keeps `forward(stage, microbatch)` from a microbatch's forward to
    its backward, and `deferred` from the backward of the input to that of the weights. A backward lets go of the one
    while the other grows; it begins with `arriving` more, before it has let go of anything."""
    live = most = 0.0
    for action in schedule.rows[rank]:
        key = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            live += forward(*key)
        elif action.kind in BACKWARDS:
            most = max(most, live + arriving(*key))
            live -= forward(*key)
            live += deferred(*key) if action.kind is Kind.BACKWARD_INPUT else 0
        elif action.kind is Kind.BACKWARD_WEIGHT:
            live -= deferred(*key)
        most = max(most, live)
    return most


def live_microbatches(schedule: Schedule, rank: int) -> int:
    """The most forwards whose activations `rank` keeps at one time, a microbatch once for each of its stages."""
    return int(peak(schedule, rank, forward=lambda *_: 1, deferred=lambda *_: 0))
