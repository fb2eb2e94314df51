"""forward: forwards only, for evaluation and for text samples from the training stages.

A rank with several stages takes p microbatches through one of them, then the same p through the next.
"""

from __future__ import annotations

from .action import Action, Kind, Schedule


def make(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """The stages of `placement` (the rank of each)."""
    ranks = max(placement) + 1
    here = [[stage for stage, place in enumerate(placement) if place == rank] for rank in range(ranks)]
    rows = (
        tuple(
            Action(Kind.FORWARD, stage, microbatch)
            for first in range(0, microbatches, ranks)
            for stage in stages
            for microbatch in range(first, min(first + ranks, microbatches))
        )
        for stages in here
    )
    return Schedule("forward", microbatches, tuple(rows), placement)
