"""Guesses about tokens that ranks have between the branches of blocks, and rows that are joined of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...design.layout import balanced
from ..evidence import Evidence


def tokens_of_another_rank(e: Evidence) -> str | None:
    """With sp: a rank has the slice that another place of tp should have."""
    if not e.sharding.sp or e.place.microbatch is None or e.whole.dim() != 3:
        return None
    tp = e.mesh.degree("tp")
    spans = [balanced(e.whole.shape[1], tp, place) for place in range(tp)]

    def is_anothers(rank: int) -> bool:
        own = e.mesh.index(rank, "tp")
        others = (span for place, span in enumerate(spans) if place != own)
        return any(e.same(e.held[rank], e.whole[:, slice(*span)]) for span in others)

    return "these are the tokens of another tp rank" if e.fits(is_anothers) else None


def tokens_in_other_places(e: Evidence) -> str | None:
    """The right vectors, one a token, and not where they belong."""
    if e.place.microbatch is None or e.place.quantity != "output" or e.whole.dim() != 3:
        return None

    def is_mixed(rank: int) -> bool:
        held, own = _sums(e.held[rank]), _sums(e.own(e.whole, rank))
        return float((held - own).abs().max()) <= e.departure.bound

    return "the right tokens stand in other places of the rows" if e.fits(is_mixed) else None


def _sums(x: Tensor) -> Tensor:
    """A number a token, in ascending order: the mean, so that it is as large as what it is of."""
    return torch.sort(x.double().flatten(0, -2).mean(-1)).values
