"""Guesses about what a rank reads, and about what it does not have at all."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.batch import IGNORE
from ..evidence import Evidence
from ..places import PARTS


def never_came(e: Evidence) -> str | None:
    absent = [rank for rank in e.departure.ranks if rank not in e.held]
    if not absent or e.place.quantity != "batch":
        return None
    return f"rank {absent[0]} never came to it: a microbatch is dropped"


def nothing_there(e: Evidence) -> str | None:
    """Missing, of another shape or type, or not a number."""
    if e.departure.deviation != float("inf"):
        return None
    if not e.departure.ranks:
        return "no rank has it"
    for rank in e.departure.ranks:
        held = e.held.get(rank)
        if held is None and e.place.quantity == "gradient":
            return f"rank {rank} has none: it is trained, and taken for frozen"
        if held is None and e.place.quantity.endswith("gradient"):
            return f"none came to rank {rank}: backward ends before it"
        if held is None:
            return f"rank {rank} never ran it, though it ran what comes before"
        own = e.own(e.whole, rank)
        if held.shape != own.shape:
            return f"rank {rank} has {list(held.shape)} where the layout gives it {list(own.shape)}"
        if e.place.quantity in PARTS and held.dtype != own.dtype:
            return f"rank {rank} keeps {held.dtype} where one process keeps {own.dtype}"
    targets = e.beside("batch", "targets", e.place.microbatch)
    if targets is not None and bool((targets == IGNORE).all()):
        return "not a number: the microbatch has no target, and something is divided by their count"
    return "it holds numbers that are not finite"


def _rows_of(e: Evidence, *, same_rank: bool) -> int | None:
    """The microbatch whose rows the departing ranks have: one of their own dp rank, or of another."""
    mine, m = e.place.microbatch, e.plan.microbatches
    if e.place.quantity != "batch" or mine is None:
        return None
    for other in range(e.plan.dp * m):
        asked = other != mine and (other // m == mine // m) == same_rank
        if asked and e.is_whole(e.beside("batch", e.place.name, other)):
            return other
    return None


def rows_of_another_rank(e: Evidence) -> str | None:
    other = _rows_of(e, same_rank=False)
    if other is None:
        return None
    return f"these are rows of dp rank {other // e.plan.microbatches}: the rank reads another rank's samples"


def rows_of_another_microbatch(e: Evidence) -> str | None:
    other = _rows_of(e, same_rank=True)
    return None if other is None else f"these are the rows of microbatch {other}: two are swapped, or one is used twice"


def field_is_wrong(e: Evidence) -> str | None:
    """The right rows, and something in them is wrong."""
    if e.place.quantity != "batch":
        return None
    for sentence, tensor in _spoilt(e).items():
        if e.is_whole(tensor):
            return sentence
    ignored = e.whole == IGNORE
    if e.place.name == "targets" and e.fits(lambda r: torch.equal(e.held[r][~ignored], e.whole[~ignored])):
        return "targets that are to be ignored (padding, the next document's first token) are trained on"
    return f"the rows are the right ones and their {e.place.name} are not"


def _spoilt(e: Evidence) -> dict[str, Tensor]:
    """What a field of the batch looks like when it is spoilt in a known way, by the sentence that says so."""
    tokens = e.beside("batch", "tokens", e.place.microbatch)
    if tokens is None:
        return {}
    if e.place.name == "positions":
        running = torch.arange(tokens.shape[1]).expand(tokens.shape)
        return {"positions run on through the row: they do not restart in each document": running}
    if e.place.name == "targets":
        wrapped = torch.cat((e.whole[:, :-1], tokens[:, :1]), 1)
        return {
            "each token is asked for the one after the next: targets are shifted twice": e.whole.roll(-1, 1),
            "the last target is the row's first token: targets are shifted after the row was cut": wrapped,
        }
    return {}
