"""1f1b: a short warm-up of forwards, then one forward and one backward in turn, then the remaining backwards.

    rank 0  F0 F1 .  B0 F2 B1 F3 B2 .  B3      bubble (p - 1) / (m + p - 1), as gpipe
    rank 1  .  F0 B0 F1 B1 F2 B2 F3 B3 .       at most min(m, p - stage) microbatches live

Narayanan et al., "PipeDream-Flush", 2021 (Megatron-LM, SC21, section 2.2). With one stage this is plain gradient
accumulation.
"""

from __future__ import annotations

from .action import Action, Kind, Schedule


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    def row(stage: int) -> tuple[Action, ...]:
        warm_up = min(ranks - 1 - stage, microbatches)
        forwards = [Action(Kind.FORWARD, stage, m) for m in range(microbatches)]
        backwards = [Action(Kind.BACKWARD, stage, m) for m in range(microbatches)]
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            actions += [forward, backward]
        return (*actions, *backwards[microbatches - warm_up :])

    return Schedule("1f1b", microbatches, tuple(row(stage) for stage in range(ranks)))
