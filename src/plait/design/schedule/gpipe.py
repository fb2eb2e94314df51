"""gpipe: all forwards, then all backwards.

    rank 0  F0 F1 F2 F3 .  .  B0 B1 B2 B3      bubble (p - 1) / (m + p - 1)
    rank 1  .  F0 F1 F2 F3 B0 B1 B2 B3 .       every microbatch's activations live at once

Huang et al., "GPipe", 2019, section 2.3. Backwards run in the order of the forwards. With one stage this is plain
gradient accumulation, except that it keeps every microbatch alive: use 1f1b for that.
"""

from __future__ import annotations

from .action import Action, Kind, Schedule


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    def row(stage: int) -> tuple[Action, ...]:
        return tuple(Action(kind, stage, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(microbatches))

    return Schedule("gpipe", microbatches, tuple(row(stage) for stage in range(ranks)))
