"""interleaved: 1f1b over v stages a rank, so that the pipeline fills and drains in steps of 1/v of a rank's work.

    rank 0   0F0 0F1 2F0 2F1 0F2 ...     bubble (p - 1) / (v m + p - 1), in units of 1/v of a forward and backward
    rank 1   1F0 1F1 3F0 3F1 1F2 ...     v times the messages of 1f1b; more microbatches live

Microbatches go in groups of p: a group passes one stage of the rank after the other. m need not be a multiple of p: the
groups are then somewhat larger, the first ones most, and never smaller unless m itself is. Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2.
"""

from __future__ import annotations

from ..layout import balanced
from .action import Action, Kind, Schedule
from .place import loop


def make(ranks: int, microbatches: int, chunks: int) -> Schedule:
    count = max(1, microbatches // ranks)
    groups = [range(*balanced(microbatches, count, group)) for group in range(count)]

    def in_groups(kind: Kind, stages: list[int]) -> list[Action]:
        return [Action(kind, stage, microbatch) for group in groups for stage in stages for microbatch in group]

    def row(rank: int) -> tuple[Action, ...]:
        stages = list(range(rank, ranks * chunks, ranks))
        forwards, backwards = in_groups(Kind.FORWARD, stages), in_groups(Kind.BACKWARD, stages[::-1])
        # Until the first backward can come back: down the later stages of all ranks, and up again.
        warm_up = min(2 * (ranks - 1 - rank) + (chunks - 1) * len(groups[0]), len(forwards))
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            actions += [forward, backward]
        return (*actions, *backwards[len(forwards) - warm_up :])

    rows = tuple(row(rank) for rank in range(ranks))
    return Schedule("interleaved", microbatches, rows, loop(ranks, chunks))
