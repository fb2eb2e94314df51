"""Batches that are hard on a layout: several documents in a row, padding, rows with very different target counts."""

from __future__ import annotations

import torch

from ..design.plan import Plan
from ..runtime.batch import IGNORE, Batch


def awkward_batches(plan: Plan, vocabulary: int, count: int) -> list[Batch]:
    """`count` global batches of random tokens, the same for every layout: of each four rows one is a single document,
    two are packed from several, and one has few targets and a padded end."""
    generator = torch.Generator().manual_seed(plan.seed)
    return [_batch(plan, vocabulary, generator, number) for number in range(count)]


def _batch(plan: Plan, vocabulary: int, generator: torch.Generator, number: int) -> Batch:
    rows, seq = plan.batch, plan.seq
    tokens = torch.randint(0, vocabulary, (rows, seq + 1), generator=generator)
    cuts = torch.rand(rows, seq, generator=generator) < 4 / seq
    few = torch.rand(rows, seq, generator=generator) < 0.8
    kind = torch.arange(rows) % 4
    starts = cuts & ((kind == 1) | (kind == 2)).unsqueeze(1)
    starts[:, 0] = False
    documents = starts.cumsum(1)
    column = torch.arange(seq).expand(rows, seq)
    begun = torch.where(starts, column, 0).cummax(1).values
    targets = tokens[:, 1:].clone()
    targets[:, :-1][starts[:, 1:]] = IGNORE
    targets[(kind == 3).unsqueeze(1) & few] = IGNORE
    padded = (kind == 3).unsqueeze(1) & (column >= max(1, 3 * seq // 4))
    targets[padded] = IGNORE
    return Batch(
        tokens=tokens[:, :-1].masked_fill(padded, 0).contiguous(),
        targets=targets,
        positions=(column - begun).masked_fill(padded, 0),
        document_ids=documents.masked_fill(padded, -1),
        sample_ids=torch.arange(rows) + number * rows,
    )
