"""The loss on the first rank: one more stage, without blocks, to which the logits of the last one are sent.

    rank 0  0F0 0F1 2F0 2B0 0B0 2F1 2B1 0B1      2F takes the logits and gives the loss, 2B gives their gradient;
    rank 1  1F0             1B0 1F1     1B1      each goes over the boundary of stages 1 and 2, b s V e bytes

For comparison with the loss where the logits are. It changes nothing where the last stage is on the first rank anyway.
What it costs: docs/methods/loss-at.md.
"""

from __future__ import annotations

from dataclasses import replace

from .action import Action, Kind, Schedule
from .play import play, unit_seconds


def with_loss_on_first(schedule: Schedule) -> Schedule:
    """A table of computation with the loss's stage after all others, on rank 0. Its forward and backward stand where the
    rank would come to them if they took no time: when the last stage with blocks has given the logits."""
    placement = tuple(schedule.rank_of(stage) for stage in range(schedule.stages))
    if placement_with_loss(placement) == placement:
        return schedule
    times = play(schedule, unit_seconds)
    loss = schedule.stages
    # (moment, the loss before what begins then, action)
    row = [(times[action][0], 1, action) for action in schedule.rows[0]]
    for microbatch in range(schedule.microbatches):
        given = times[Action(Kind.FORWARD, loss - 1, microbatch)][1]
        row += [(given, 0, Action(kind, loss, microbatch)) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    first = tuple(action for *_, action in sorted(row, key=lambda entry: entry[:2]))
    return replace(schedule, rows=(first, *schedule.rows[1:]), placement=placement_with_loss(placement))


def placement_with_loss(placement: tuple[int, ...]) -> tuple[int, ...]:
    """The rank of every stage, and last of the loss where it is a stage of its own."""
    return (*placement, 0) if placement[-1] else placement
