"""zb-h2: zb-h1 with twice the forwards in its warm-up, so that nothing is left of the bubble where F = I = W.

    rank 0  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 ...     bubble (p - 1)(F + I - 2 W)
    rank 1  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 ...     at most 2 (p - s) - 1 microbatches live, and 2 s that wait for their W

Rank s warms up with 2 (p - 1 - s) forwards, and its W comes 2 s microbatches after its I. The formula counts a rank's
own time, from its first action to its last: rank s begins s forwards late and ends as much later, and a step that waits
for all ranks pays p - 1 forwards. Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.2.
"""

from __future__ import annotations

from .action import Schedule
from .zb_h1 import row


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    return Schedule(
        "zb-h2",
        microbatches,
        tuple(row(stage, microbatches, warm_up=2 * (ranks - 1 - stage), late=2 * stage) for stage in range(ranks)),
    )
