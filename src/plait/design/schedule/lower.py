"""Adds communication to a table of computation: sends, receives, waits, and the reduction of gradients.

Every transfer is given one moment on a common clock: when its producer ends, with a backward taken to last twice a
forward. Sender and receiver both get it at that moment, so each rank's row is a projection of one common order. That is
why the result cannot deadlock even when every send blocks and all transfers of a rank share one queue: the earliest
unfinished action of the common order can always go on. check.py proves it again for each table, without this argument.

    before   rank 1  1F0 1B0                      after   rank 1  1RA0 1WA0 1F0 1B0 1SG0

A receive is posted when the tensor is sent, or as soon after as the rank is free; the wait stands right before its use.
"""

from __future__ import annotations

from .action import Action, Kind, Schedule, partner
from .play import play, unit_seconds

_SENDS = {Kind.FORWARD: Kind.SEND_ACTIVATION, Kind.BACKWARD: Kind.SEND_GRADIENT}
_WAITS = {Kind.FORWARD: Kind.WAIT_ACTIVATION, Kind.BACKWARD: Kind.WAIT_GRADIENT}


def lower(schedule: Schedule, *, reduce: bool = False) -> Schedule:
    """The table with its communication. `reduce` adds, after a stage's last backward, the end of its gradients' sum
    over data parallel ranks (buckets leave during that backward; what is left leaves now, and all are waited for)."""
    last = schedule.stages - 1
    times = play(schedule, unit_seconds)
    # (moment, transfers before computation, order of writing) -> action
    rows: list[list[tuple[float, int, int, Action]]] = [[] for _ in schedule.rows]
    ordered = sorted(times.items(), key=lambda item: (item[1][0], schedule.rank_of(item[0].stage)))
    for number, (action, (start, end)) in enumerate(ordered):
        stage, microbatch = action.stage, action.microbatch
        row = rows[schedule.rank_of(stage)]
        receives = stage > 0 if action.kind is Kind.FORWARD else stage < last
        sends = stage < last if action.kind is Kind.FORWARD else stage > 0
        if receives:
            row.append((start, 1, 2 * number, Action(_WAITS[action.kind], stage, microbatch)))
        row.append((start, 1, 2 * number + 1, action))
        if sends:
            send = Action(_SENDS[action.kind], stage, microbatch)
            receive = partner(send)
            assert receive is not None
            row.append((end, 0, number, send))
            rows[schedule.rank_of(receive.stage)].append((end, 0, number, receive))
    lowered = [[entry[-1] for entry in sorted(row, key=lambda entry: entry[:3])] for row in rows]
    has_backward = any(action.kind is Kind.BACKWARD for action in times)
    if reduce and has_backward:
        for stage in range(schedule.stages):
            lowered[schedule.rank_of(stage)].append(Action(Kind.REDUCE, stage, schedule.microbatches - 1))
    return Schedule(schedule.name, schedule.microbatches, tuple(map(tuple, lowered)))
