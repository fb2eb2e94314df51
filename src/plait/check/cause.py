"""What the first departure looks like: the ranks' own tensors there, tried against everything that usually goes wrong.

Nothing before the place departs, so the difference is the fault itself and not its consequence. The guesses are functions
from the evidence to a sentence, or None where they do not fit; the first that fits is told (guesses/).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..design.mesh import Mesh
from .evidence import Evidence, ranks_in_words
from .guesses import GUESSES, SCHEDULE
from .places import BYTES, EXACT, REPLICAS, Place, Verdict

UPDATE = ("norm", "clip", "clipped gradient", "lr", "first moment", "second moment", "weight", "published weight")
NUMBERS = ("share", "loss", "norm", "clip", "lr", BYTES)
"""Places that are one number, so that a factor says something."""


def explained(verdict: Verdict, evidence: Evidence) -> Verdict:
    """The verdict with the likely cause of its first departure: one sentence, without a capital and a full stop."""
    for guess in GUESSES:
        cause = guess(evidence)
        if cause:
            kind = "schedule" if guess in SCHEDULE else kind_of(evidence.place)
            return replace(verdict, cause=cause, kind=kind)
    return replace(verdict, cause=_unknown(evidence), kind=kind_of(evidence.place))


def kind_of(place: Place) -> str:
    """Where a reader would look; a guess may know better that it is the schedule."""
    if place.quantity in UPDATE:
        return "optimizer"
    kinds = {"batch": "batch item", "tokens": "report", "loss": "report", BYTES: "communication", REPLICAS: "copies"}
    return kinds.get(place.quantity, "module")


def described(verdict: Verdict, mesh: Mesh) -> list[str]:
    """The first departure and its likely cause, as lines."""
    first = verdict.first
    where = f" on {ranks_in_words(first.ranks, mesh)}" if first.ranks else ""
    far = ", not the same"
    if first.deviation == float("inf"):
        far = ", missing or not finite"
    elif first.scale and first.place.quantity not in EXACT:
        far = f", off by {first.relative:.1e} of its largest"
    if first.ratio not in (None, 1) and first.place.quantity in NUMBERS:
        far = f", {first.ratio:.6g} times what it should be"
    return [f"first departure ({verdict.kind}): {first.place}{where}{far}", f"likely: {verdict.cause}"]


def _unknown(e: Evidence) -> str:
    """Nothing fits: where in the tensor it departs, and up to where all agrees."""
    before = e.place_before()
    so_far = "" if before is None else f"; up to there ({before}) all agrees"
    if not e.wrong:
        return f"none of the usual{so_far}"
    rank = max(e.wrong, key=lambda r: float((e.held[r].double() - e.own(e.whole, r).double()).abs().max()))
    off = (e.held[rank].double() - e.own(e.whole, rank).double()).abs() > e.departure.bound
    within = [sorted({int(i) for i in index}) for index in torch.nonzero(off).unbind(1)] if off.any() else []
    box = ", ".join(f"{side[0]}-{side[-1]}" for side in within)
    share = f": on rank {rank} {int(off.sum())} of {off.numel()} elements depart, within [{box}]" if box else ""
    return f"none of the usual{share}{so_far}"
