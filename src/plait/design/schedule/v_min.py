"""v-min: zb-v with the least memory that keeps all ranks at work between warm-up and drain.

A rank holds the activations of at most (p + 1) / 3 microbatches, rounded down, and one more, until their W: a third of
1f1b's. Bubble at most 2/3 (p - 1)(F + I + W) where F = I = W, and one unit (half a rank's F) more where 3 divides p;
where they are not equal, each turn of the pattern waits for the slowest. Every hop is the shortest there is, 1: a
lifespan of 4 p on both stages of a rank together. Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, its
building block V-Min (pattern.py).
"""

from __future__ import annotations

from . import pattern
from .action import Schedule


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    # Where 3 divides p, I would meet F of the same stage at its place modulo 6.
    gaps = (0, 0 if ranks % 3 else 2, 0)
    most = 2 * ((ranks + 1) // 3 + 1)
    return pattern.make("v-min", ranks, microbatches, hops=(1, 1, 1, 1), gaps=gaps, most=most)
