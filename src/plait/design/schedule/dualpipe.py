"""dualpipe: two copies of the model, one down the ranks and one up; forward and backward of two microbatches at a time.

    rank 0      F0 F0 ... (F0 B1)(F1 B0) ...   0: the copy that begins on rank 0, with the first half of the microbatches
    rank p - 1  F1 F1 ... (F1 B0)(F0 B1) ...   1: the copy that begins on the last rank, with the other half

Each half of the ranks has the order of dualpipe-v over p / 2 ranks (dualpipe_v.py), the second half with the sides
exchanged. Bubble (p / 2 - 1)(F&B + B - 3 W), F&B the time of a pair; at most p + 1 microbatches live on a rank;
weights, gradients and state twice. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 and table 2. For
the simulator only: a run would sum the gradients of the two copies before each update.
"""

from __future__ import annotations

from dataclasses import replace

from . import dualpipe_v
from .action import Schedule
from .place import vee


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    empty = Schedule("dualpipe", microbatches, ((),) * ranks, vee(ranks, 2), chains=2)
    rows, pairs = [], []
    for rank in range(ranks):
        stages = (rank, 2 * ranks - 1 - rank)
        if rank >= ranks // 2:
            stages = (stages[1], stages[0])
        first, second = map(empty.microbatches_of, stages)
        row, paired = dualpipe_v.carried_out(min(rank, ranks - 1 - rank), ranks // 2, stages, (first, second))
        rows.append(row)
        pairs += paired
    return replace(empty, rows=tuple(rows), pairs=tuple(pairs))
