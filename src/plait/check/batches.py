"""Batches that are hard on a layout, of one kind a step.

    mixed             of each four rows one is a whole document, two are packed from several, one has few targets and a
                      padded end
    plain             every row one unpadded document, trained on throughout: no mask is made
    padded            every row one document that ends somewhere, padding after it
    uneven            the rows have very different numbers of targets, the fewest 1 and the most all
    empty rank        uneven, and no target at all for one dp rank (where dp is 1: in one microbatch)
    empty microbatch  uneven, and no target at all in one microbatch of one dp rank
    nothing           no target in the whole step: loss and gradients are zero, and the optimizer still takes its step

What has a wrong weight shows where rows are uneven, what is averaged instead of summed where a rank is empty, what looks
across documents where rows are packed, and what is wrong with the mask alone only where some batch has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Generator, Tensor

from ..design.layout import balanced
from ..design.plan import Plan
from ..runtime.batch import IGNORE, Batch

ORDINARY = ("mixed", "empty rank", "plain")
"""The kinds of a check's steps, in turn: the hard ones within three steps."""


def awkward_batches(plan: Plan, vocabulary: int, count: int, kinds: Sequence[str] = ORDINARY) -> list[Batch]:
    """`count` global batches of random tokens, of the `kinds` in turn. Tokens do not depend on the layout; which rows of
    an "empty rank" have targets does."""
    generator = torch.Generator().manual_seed(plan.seed)
    return [
        KINDS[kinds[number % len(kinds)]](plan, _plain(plan, vocabulary, generator, number), generator)
        for number in range(count)
    ]


def _plain(plan: Plan, vocabulary: int, generator: Generator, number: int) -> Batch:
    batch = Batch.of(torch.randint(0, vocabulary, (plan.batch, plan.seq + 1), generator=generator))
    return replace(batch, sample_ids=batch.sample_ids + number * plan.batch)


def _mixed(plan: Plan, batch: Batch, generator: Generator) -> Batch:
    rows, seq = batch.tokens.shape
    cuts = torch.rand(rows, seq, generator=generator) < 4 / seq
    few = torch.rand(rows, seq, generator=generator) < 0.8
    kind = (torch.arange(rows) % 4).unsqueeze(1)
    starts = cuts & ((kind == 1) | (kind == 2))
    starts[:, 0] = False
    column = batch.positions
    begun = torch.where(starts, column, 0).cummax(1).values
    targets = batch.targets.masked_fill((kind == 3) & few, IGNORE)
    targets[:, :-1][starts[:, 1:]] = IGNORE
    packed = replace(batch, targets=targets, positions=column - begun, document_ids=starts.cumsum(1))
    return _pad(packed, (kind == 3) & (column >= max(1, 3 * seq // 4)))


def _padded(plan: Plan, batch: Batch, generator: Generator) -> Batch:
    lengths = torch.randint(1, plan.seq + 1, (plan.batch, 1), generator=generator)
    return _pad(batch, batch.positions >= lengths)


def _uneven(plan: Plan, batch: Batch, generator: Generator) -> Batch:
    counts = (plan.seq ** torch.rand(plan.batch, 1, generator=generator)).long().clamp(1, plan.seq)
    counts[0], counts[-1] = 1, plan.seq
    turn = torch.rand(plan.batch, plan.seq, generator=generator).argsort(1).argsort(1)
    return replace(batch, targets=batch.targets.masked_fill(turn >= counts, IGNORE))


def _empty_rank(plan: Plan, batch: Batch, generator: Generator) -> Batch:
    uneven = _uneven(plan, batch, generator)
    return _without(uneven, _ranks(plan) if plan.dp > 1 else _microbatches(plan), generator)


def _empty_microbatch(plan: Plan, batch: Batch, generator: Generator) -> Batch:
    return _without(_uneven(plan, batch, generator), _microbatches(plan), generator)


def _nothing(plan: Plan, batch: Batch, generator: Generator) -> Batch:
    return replace(batch, targets=torch.full_like(batch.targets, IGNORE))


def _ranks(plan: Plan) -> list[slice]:
    """The rows of every dp rank."""
    return [slice(*balanced(plan.batch, plan.dp, rank)) for rank in range(plan.dp)]


def _microbatches(plan: Plan) -> list[slice]:
    """The rows of every microbatch."""
    ends = [0, *accumulate(plan.microbatch_rows * plan.dp)]
    return [slice(*span) for span in pairwise(ends)]


def _without(batch: Batch, parts: list[slice], generator: Generator) -> Batch:
    """`batch` without targets in one of its `parts`; as it is where there is only one."""
    if len(parts) == 1:
        return batch
    targets = batch.targets.clone()
    targets[parts[int(torch.randint(0, len(parts), (), generator=generator))]] = IGNORE
    return replace(batch, targets=targets)


def _pad(batch: Batch, where: Tensor) -> Batch:
    return replace(
        batch,
        tokens=batch.tokens.masked_fill(where, 0),
        targets=batch.targets.masked_fill(where, IGNORE),
        positions=batch.positions.masked_fill(where, 0),
        document_ids=batch.document_ids.masked_fill(where, -1),
    )


KINDS: dict[str, Callable[[Plan, Batch, Generator], Batch]] = {
    "mixed": _mixed,
    "plain": lambda plan, batch, generator: batch,
    "padded": _padded,
    "uneven": _uneven,
    "empty rank": _empty_rank,
    "empty microbatch": _empty_microbatch,
    "nothing": _nothing,
}
"""Each turns a plain batch into one of its kind."""
