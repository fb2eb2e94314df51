"""naive: one microbatch goes through the stages and back; the layers are simply placed on several devices.

    rank 0  F0 . . B0        bubble 1 - 1/p: one rank computes at a time
    rank 1  . F0 B0 .

With one stage and no pipeline at all this is ordinary training.
"""

from __future__ import annotations

from .action import Action, Kind, Schedule


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    row = [(Action(Kind.FORWARD, stage, 0), Action(Kind.BACKWARD, stage, 0)) for stage in range(ranks)]
    return Schedule("naive", 1, tuple(row))
