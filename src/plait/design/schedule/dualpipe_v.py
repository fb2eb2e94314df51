"""dualpipe-v: two stages a rank, placed as a V; forward and backward of two microbatches at the same time.

    rank 0  F0 F0 F0 F1 I1 W1 F1 (F0 B1)(F1 B0) B1 (F1 B0) B1 I0 W0 I0 W0     p 2, m 4
            warm-up              pairs                     drain

0 and 1 are the rank's two stages; F and B in brackets are a pair: the communication of one hides behind the computation
of the other. In the drain some backwards are parted, and their W fill the waits. Bubble (p - 1)(F&B + B - 3 W), F&B the
time of a pair; a rank holds at most 2 p + 1 stages of microbatches. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024,
section 3.2.1 and table 2: DualPipe (dualpipe.py) cut in half, so that a rank keeps one copy of its stages, with PP = 2
p there.

The order takes 2 p microbatches or more. For fewer it is that for 2 p without those that are not there: what is left of
an order that can be carried out can be carried out.
"""

from __future__ import annotations

from collections.abc import Iterator

from .action import Action, Kind, Schedule
from .place import vee

Move = tuple[tuple[Kind, int], ...]
"""(kind, side) of an action, or of the two of a pair."""
F0, F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
B0, B1 = (Kind.BACKWARD, 0), (Kind.BACKWARD, 1)
I0, I1 = (Kind.BACKWARD_INPUT, 0), (Kind.BACKWARD_INPUT, 1)
W = (Kind.BACKWARD_WEIGHT, 0)
"""The W of the oldest I that has none yet, whichever its side."""


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    rows, pairs = [], []
    for rank in range(ranks):
        row, paired = carried_out(rank, ranks, (rank, 2 * ranks - 1 - rank), (range(microbatches), range(microbatches)))
        rows.append(row)
        pairs += paired
    return Schedule("dualpipe-v", microbatches, tuple(rows), vee(ranks, 2), pairs=tuple(pairs))


def moves(rank: int, ranks: int, microbatches: int) -> Iterator[Move]:
    """What `rank` does, `microbatches` >= 2 `ranks` on each of its two sides."""
    inner = ranks - 1 - rank  # ranks below it in the V
    yield from [(F0,)] * (2 * inner)
    yield from [(F0,), (F1,)] * (rank + 1)
    yield from [(I1,), (W,), (F1,)] * inner
    for turn in range(microbatches - 2 * ranks + rank + 1):
        # The rank at the bottom has nothing to gain from its first pair, and others wait for what it gives.
        yield from [(F0,), (B1,)] if turn == 0 and inner == 0 else [(F0, B1)]
        yield (F1, B0)
    yield from [(B1,), (F1, B0)] * inner
    backwards = [B1, B0] * (rank + 1)
    parted = [I1, I0] * (rank + 1)
    yield from ((move,) for move in backwards[: rank + 1])
    yield from ((move,) for move in parted[rank + 1 :])
    yield from [(W,), (I0,)] * inner
    yield from [(W,)] * (rank + 1)


def carried_out(
    rank: int, ranks: int, stages: tuple[int, int], microbatches: tuple[range, range]
) -> tuple[tuple[Action, ...], list[tuple[Action, Action]]]:
    """The row of `rank` and its pairs, for the stages and the microbatches of its two sides."""
    row: list[Action] = []
    pairs: list[tuple[Action, Action]] = []
    numbers = {(kind, side): 0 for kind in (Kind.FORWARD, Kind.BACKWARD) for side in (0, 1)}
    owed: list[Action | None] = []
    for move in moves(rank, ranks, max(2 * ranks, *map(len, microbatches))):
        actions: list[Action | None] = []
        for kind, side in move:
            if kind is Kind.BACKWARD_WEIGHT:
                actions.append(owed.pop(0))
                continue
            counted = Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD
            number = numbers[counted, side]
            numbers[counted, side] += 1
            there = number < len(microbatches[side])
            action = Action(kind, stages[side], microbatches[side][number]) if there else None
            actions.append(action)
            if kind is Kind.BACKWARD_INPUT:
                owed.append(action and Action(Kind.BACKWARD_WEIGHT, action.stage, action.microbatch))
        done = [action for action in actions if action is not None]
        row += done
        if len(done) == 2:
            pairs.append((done[0], done[1]))
    return tuple(row), pairs
