"""forward: forwards only, for evaluation and for text samples from the training stages."""

from __future__ import annotations

from .action import Action, Kind, Schedule


def make(ranks: int, microbatches: int) -> Schedule:
    rows = tuple(tuple(Action(Kind.FORWARD, s, m) for m in range(microbatches)) for s in range(ranks))
    return Schedule("forward", microbatches, rows)
