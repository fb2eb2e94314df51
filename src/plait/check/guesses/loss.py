"""Guesses about a microbatch's loss: its weight, and what the soft-max goes over, from the reference's own logits."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor

from ...runtime.batch import IGNORE
from ..evidence import Evidence


def weight_of(e: Evidence) -> str | None:
    """The loss is right but for its weight, 1 / (target tokens of the step)."""
    mine, ratio, total = e.place.microbatch, e.departure.ratio, e.beside("tokens")
    if e.place.quantity != "share" or mine is None or ratio is None or total is None:
        return None
    m = e.plan.microbatches
    counts = [_targets(e, microbatch) for microbatch in range(e.plan.dp * m)]
    first = mine // m * m
    own, of_rank = counts[mine], sum(counts[first : first + m])
    tokens = e.plan.batch * e.plan.seq
    weights = {
        f"{m} times too large, as there are {m} microbatches: accumulation is not scaled": m,
        f"weighted as the mean over its own {own} targets, all microbatches alike: a mean of means": (
            float(total) / max(own, 1) / len(counts)
        ),
        f"divided by the targets of its own dp rank, {of_rank}, and not by the step's {int(total)}": (
            float(total) / max(of_rank, 1)
        ),
        f"divided by all {tokens} tokens and not by the {int(total)} targets: ignored targets are counted": (
            float(total) / tokens
        ),
    }
    for sentence, weight in weights.items():
        if weight != 1 and math.isclose(ratio, weight, rel_tol=1e-6):
            return sentence
    return None


def _targets(e: Evidence, microbatch: int) -> int:
    targets = e.beside("batch", "targets", microbatch)
    return 0 if targets is None else int((targets != IGNORE).sum())


def loss_of(e: Evidence) -> str | None:
    """The loss computed in known wrong ways from the right logits."""
    mine, total = e.place.microbatch, e.beside("tokens")
    logits = e.beside("output", e.model.facts.head, mine)
    targets = e.beside("batch", "targets", mine)
    if e.place.quantity != "share" or total is None or logits is None or targets is None or not e.wrong:
        return None
    x, y = logits.flatten(0, 1).double(), targets.flatten()
    head = e.sharding.parameter(e.model.facts.head_weight.name)
    slices = {rank: slice(*head.spans(e.mesh, rank)[0]) for rank in e.wrong}
    everything = slice(0, x.shape[-1])
    guesses = {
        "what the model does with its logits after the head is left out": dict.fromkeys(
            slices, _over_own_rows(x, y, everything)
        ),
        "its sums over tp are missing: each rank's soft-max goes over its own vocabulary rows": {
            rank: _over_own_rows(x, y, own) for rank, own in slices.items()
        },
        "its maximum over tp is missing: the ranks' exponentials are shifted differently": dict.fromkeys(
            slices, _without_maximum(x, y, sorted({(own.start, own.stop) for own in slices.values()}))
        ),
        "ignored targets are trained on": dict.fromkeys(slices, _over_ignored(x, y)),
    }
    sizes = e.plan.tokens_at_once(len(x))
    for count, stop in enumerate(accumulate(sizes[:-1]), 1):
        lost = f"chunks are left out: it is that of the first {stop} of {len(x)} tokens, {count} of {len(sizes)} chunks"
        guesses[lost] = dict.fromkeys(slices, _over_own_rows(x[:stop], y[:stop], everything))
    for sentence, losses in guesses.items():
        if e.fits(lambda r, losses=losses: e.same(e.held[r], losses[r] / total)):  # type: ignore[misc]
            return sentence
    return None


def _over_own_rows(x: Tensor, y: Tensor, own: slice) -> Tensor:
    shifted = x - x.amax(-1, keepdim=True)
    mine = (y >= own.start) & (y < own.stop)
    target = shifted.gather(-1, y.where(mine, 0).unsqueeze(-1)).squeeze(-1).where(mine, 0)
    return ((shifted[:, own].logsumexp(-1) - target) * (y != IGNORE)).sum()


def _without_maximum(x: Tensor, y: Tensor, slices: list[tuple[int, int]]) -> Tensor:
    pieces = [x[:, start:stop] - x[:, start:stop].amax(-1, keepdim=True) for start, stop in slices]
    target = torch.cat(pieces, -1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = torch.stack([piece.exp().sum(-1) for piece in pieces]).sum(0)
    return ((total.log() - target) * (y != IGNORE)).sum()


def _over_ignored(x: Tensor, y: Tensor) -> Tensor:
    """An ignored target has no row: its share is log z alone, of logits shifted by their maximum."""
    shifted = x - x.amax(-1, keepdim=True)
    target = shifted.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(y != IGNORE, 0)
    return (shifted.logsumexp(-1) - target).sum()
