"""Adds communication to a table of computation: sends, receives, waits, and the reduction of gradients.

Every transfer is given one moment on a common clock: when its producer ends, with a backward taken to last twice a
forward. Sender and receiver both get it at that moment, so each rank's row is a projection of one common order. That is
why the result cannot deadlock even when every send blocks and all transfers of a rank share one queue: the earliest
unfinished action of the common order can always go on. check.py proves it again for each table, without this argument.

    before   rank 1  1F0 1B0                      after   rank 1  1RA0 1WA0 1F0 1B0 1SG0

A receive is posted when the tensor is sent, or as soon after as the rank is free; the wait stands right before its use.
"""

from __future__ import annotations

from dataclasses import replace

from .action import BACKWARDS, LAST, Action, Kind, Schedule, partner
from .play import play, unit_seconds

AHEAD = 2
"""Receives that a rank has posted before its row comes to them, where messages are matched by tag."""
SENT = 2 * AHEAD
"""Messages of a rank that may be on their way: before one more is sent the first of them must have been taken. The others
have posted theirs ahead, so that none waits for it who is not late, and a table that is free of deadlock when every send
blocks is free of it when some do."""


def lower(schedule: Schedule, *, reduce: bool = False) -> Schedule:
    """The table with its communication. `reduce` adds, after a stage's last backward, the end of its gradients' sum
    over data parallel ranks (buckets leave during that backward; what is left leaves now, and all are waited for)."""
    times = play(schedule, unit_seconds, together=lambda f, b: unit_seconds(f) + unit_seconds(b))
    # (moment, transfers before waits before computation, order of writing) -> action
    rows: list[list[tuple[float, int, int, Action]]] = [[] for _ in schedule.rows]
    places = {action: place for row in schedule.rows for place, action in enumerate(row)}
    ordered = sorted(times.items(), key=lambda item: (item[1][0], schedule.rank_of(item[0].stage), places[item[0]]))
    for number, (action, (start, end)) in enumerate(ordered):
        stage, microbatch = action.stage, action.microbatch
        row = rows[schedule.rank_of(stage)]
        source, wait, send, target = _wires(action, schedule)
        if schedule.sends(stage, source):
            row.append((start, 1, number, Action(wait, stage, microbatch)))
        row.append((start, 2, number, action))
        if target is not None and schedule.sends(stage, target):
            sent = Action(send, stage, microbatch)
            received = partner(sent, schedule)
            assert received is not None
            row.append((end, 0, number, sent))
            rows[schedule.rank_of(target)].append((end, 0, number, received))
    lowered = [[entry[-1] for entry in sorted(row, key=lambda entry: entry[:3])] for row in rows]
    if reduce:
        for actions, computed in zip(lowered, schedule.rows, strict=True):
            # The last stage first: in this order their buckets leave (sharding.py).
            stages = sorted({action.stage for action in computed if action.kind in LAST}, reverse=True)
            actions += [Action(Kind.REDUCE, stage, schedule.microbatches_of(stage)[-1]) for stage in stages]
    return replace(schedule, rows=tuple(map(tuple, lowered)))


def _wires(action: Action, schedule: Schedule) -> tuple[int | None, Kind, Kind, int | None]:
    """Where what an action takes comes from and the wait for it, the send of what it gives and where that goes."""
    before, after = schedule.before(action.stage), schedule.after(action.stage)
    if action.kind is Kind.FORWARD:
        return before, Kind.WAIT_ACTIVATION, Kind.SEND_ACTIVATION, after
    if action.kind in BACKWARDS:
        return after, Kind.WAIT_GRADIENT, Kind.SEND_GRADIENT, before
    return None, Kind.WAIT_GRADIENT, Kind.SEND_GRADIENT, None
