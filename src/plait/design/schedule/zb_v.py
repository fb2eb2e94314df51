"""zb-v: two stages a rank, placed as a V, and the split backward: no bubble where F = I = W, with the memory of 1f1b.

    rank 0  0F0 0F1 .   3F0 3I0 0F2 3W0 3F1 3I1 0I0 ...     stages 0 and 3 of p 2, half a rank's work each
    rank 1  .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 ...     a rank begins a unit after the one before: all that is lost

A microbatch comes back to rank 0 for its loss, so that backward begins soon on every rank. A rank holds 2 p stages of
microbatches, until their W: what 1f1b's first rank holds, now on all of them. Where F, I and W are not equally long,
some bubble comes back. Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (extended version), as the pattern V-ZB of
"Pipeline Parallelism with Controllable Memory", 2024 (pattern.py).
"""

from __future__ import annotations

from . import pattern
from .action import Schedule


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    return pattern.make("zb-v", ranks, microbatches, hops=(3, 3, 3, 3), gaps=(0, 0, 0), most=2 * ranks)
