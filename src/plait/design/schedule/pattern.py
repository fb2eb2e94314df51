"""Tables that repeat a pattern: one microbatch's way down and up the ranks and back, begun anew every 6 units.

    rank 0  F0 .  .  .  .  .  .  F1 I1 .  .  .  .  .  .  I0      p 4, every hop 1: the pattern of v-min
    rank 1  .  F0 .  .  .  .  F1 .  .  I1 .  .  .  .  I0
    rank 2  .  .  F0 .  .  F1 .  .  .  .  I1 .  .  I0
    rank 3  .  .  .  F0 F1 .  .  .  .  .  .  I1 I0               (0 and 1: the rank's two stages)

With two stages on a rank, placed as a V, a microbatch is 6 units of work there: F, I and W of each. Begun every 6
units, patterns fit into each other where no two of a rank's F0, F1, I1 and I0 have the same place modulo 6; two places
are left for the W. A stage keeps a microbatch from F to W, its lifespan, so that lifespan / 6 of them live at a time:
the longer the hops, the more memory and the less bubble. The two stages of a rank add up to the same on every rank if
the hops of F0 and I0 add up to those of F1 and I1. Qi et al., "Pipeline Parallelism with Controllable Memory", 2024,
where the pattern is a building block.

The pattern gives the order of F and I. The table is then closed up by playing it in units: an F or I begins when it
can, and W fills what is left, the oldest first, so that the ends of the step fill too. A forward waits while its rank
holds all that it may.
"""

from __future__ import annotations

from collections import deque

from .action import Action, Kind, Schedule, needs
from .place import vee

PERIOD = 6

Hops = tuple[int, int, int, int]
"""Units from one rank to the next, from start to start: F0 (down), F1 (up), I1 (down), I0 (up)."""
Gaps = tuple[int, int, int]
"""Units lost at each turn: from F0 to F1, from F1 to I1, from I1 to I0."""


def make(name: str, ranks: int, microbatches: int, *, hops: Hops, gaps: Gaps, most: int) -> Schedule:
    """`most`: what a rank may hold, a microbatch once for each of its stages, from F to W."""
    orders = tuple(_order(rank, ranks, microbatches, hops, gaps) for rank in range(ranks))
    placement = vee(ranks, 2)
    return Schedule(name, microbatches, _closed(Schedule(name, microbatches, orders, placement), most), placement)


def _order(rank: int, ranks: int, microbatches: int, hops: Hops, gaps: Gaps) -> tuple[Action, ...]:
    """F and I of one rank in the pattern's order."""
    first, second = rank, 2 * ranks - 1 - rank
    down, up = rank, ranks - 1 - rank
    ways = ((Kind.FORWARD, first, down), (Kind.FORWARD, second, up),
            (Kind.BACKWARD_INPUT, second, down), (Kind.BACKWARD_INPUT, first, up))  # fmt: skip
    found: list[tuple[int, Action]] = []
    start = 0  # of each way, on the rank where it begins
    for (kind, stage, behind), hop, gap in zip(ways, hops, (*gaps, 0), strict=True):
        at = start + hop * behind
        found += [(at + PERIOD * microbatch, Action(kind, stage, microbatch)) for microbatch in range(microbatches)]
        start += hop * (ranks - 1) + 1 + gap
    return tuple(action for _, action in sorted(found, key=lambda entry: entry[0]))


def _closed(draft: Schedule, most: int) -> tuple[tuple[Action, ...], ...]:
    """The rows of `draft` with their W, when every action takes one unit and begins as soon as it can."""
    rows: list[list[Action]] = [[] for _ in draft.rows]
    orders = [deque(row) for row in draft.rows]
    owed: list[deque[Action]] = [deque() for _ in draft.rows]
    held = [0] * draft.ranks
    ends: dict[Action, int] = {}
    wanted = {action: needs(action, draft) for row in draft.rows for action in row}
    now = 0
    while any(orders) or any(owed):
        before = len(ends)
        for rank, order in enumerate(orders):
            waits = bool(order) and any(ends.get(need, now + 1) > now for need in wanted[order[0]])
            full = bool(order) and order[0].kind is Kind.FORWARD and held[rank] == most
            if order and not waits and not full:
                action = order.popleft()
            elif owed[rank]:
                action = owed[rank].popleft()
            else:
                continue
            rows[rank].append(action)
            ends[action] = now + 1
            held[rank] += {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0)
            if action.kind is Kind.BACKWARD_INPUT:
                owed[rank].append(Action(Kind.BACKWARD_WEIGHT, action.stage, action.microbatch))
        assert len(ends) > before, f"{draft.name} holds too little: {most}"
        now += 1
    return tuple(map(tuple, rows))
