"""v-half: zb-v with half its memory, for half of 1f1b's bubble.

A rank holds at most p + 1 stages of microbatches where p is odd, p + 2 where it is even, until their W: half of 1f1b's
p microbatches of two stages, and one more. Bubble at most (p - 1)(F + I + W) / 2 where F = I = W, of a rank's whole F,
I and W.

    rank 0  0F0 .   .   3F0 3I0 0F1 3W0 .   3F1 3I1 0F2 0I0 3W1 ...     p 2
    rank 1  .   1F0 2F0 .   .   2I0 1F1 2F1 1I0 2W0 2I1 1F2 1W0 ...

Hops of 1 and 2 add up to a lifespan of 6 p on both stages of a rank together. Qi et al., "Pipeline Parallelism with
Controllable Memory", 2024, its building block V-Half (pattern.py).
"""

from __future__ import annotations

from . import pattern
from .action import Schedule


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    # I0 moves to the places modulo 6 that F0, F1 and I1 leave free, which is another one where p is even.
    gaps = (0, 0, 1 if ranks % 2 else 4)
    return pattern.make("v-half", ranks, microbatches, hops=(1, 2, 1, 2), gaps=gaps, most=2 * (ranks // 2 + 1))
