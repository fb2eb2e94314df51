"""zb-h1: 1f1b with backward split in two; what the stage before waits for comes first, the rest fills the bubble.

    rank 0  F0 F1 .  .  I0 .  W0 F2 I1 W1 ...     bubble (p - 1)(F + I - W), a third of 1f1b's where F = I = W
    rank 1  .  F0 I0 F1 W0 I1 F2 W1 I2 ...        memory as 1f1b: W follows I late by the rank's place

Rank s warms up with p - 1 - s forwards, as 1f1b does; its W comes s microbatches after its I. Qi et al., "Zero Bubble
Pipeline Parallelism", 2023, section 2.1.
"""

from __future__ import annotations

from .action import Action, Kind, Schedule


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    return Schedule(
        "zb-h1",
        microbatches,
        tuple(row(stage, microbatches, warm_up=ranks - 1 - stage, late=stage) for stage in range(ranks)),
    )


def row(stage: int, microbatches: int, *, warm_up: int, late: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then a forward and an I in turn, each followed by the W of the I that was `late` before it."""
    warm_up = min(warm_up, microbatches)
    actions = [Action(Kind.FORWARD, stage, m) for m in range(warm_up)]
    for m in range(microbatches):
        if m + warm_up < microbatches:
            actions.append(Action(Kind.FORWARD, stage, m + warm_up))
        actions.append(Action(Kind.BACKWARD_INPUT, stage, m))
        if m >= late:
            actions.append(Action(Kind.BACKWARD_WEIGHT, stage, m - late))
    actions += [Action(Kind.BACKWARD_WEIGHT, stage, m) for m in range(max(0, microbatches - late), microbatches)]
    return tuple(actions)
