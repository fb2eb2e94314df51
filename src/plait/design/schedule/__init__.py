"""Schedules: who computes which microbatch when. One file each, pure; `METHODS` is the list, with what each one takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import PlanError, listed, nearest
from . import forward, gpipe, interleaved, naive, one_f_one_b, zb_h1
from .action import BACKWARDS, LAST, Action, Kind, Schedule, needs, partner
from .check import check, live_microbatches, peak
from .halves import in_halves
from .lower import lower
from .place import Placement, loop, straight, vee

Make = Callable[[int, int, int], Schedule]


@dataclass(frozen=True)
class Method:
    """A way to make a table of computation: make(p ranks, m microbatches, v stages a rank). It takes any p; `chunks` are
    the least and the most v that it takes (its default is the least), `microbatches` the least and the most m."""

    make: Make
    place: Placement = straight
    chunks: tuple[int, int] = (1, 1)
    microbatches: tuple[int, int] = (1, 1 << 16)

    def refusal(self, name: str, ranks: int, microbatches: int, chunks: int) -> str | None:
        """Why it cannot be made for these, with the nearest that it can be made for."""
        few, many = self.microbatches
        if not few <= microbatches <= many:
            legal = f"{few}" if few == many else f"{few} or more" if microbatches < few else f"{many} or fewer"
            near = min(max(microbatches, few), many)
            return (
                f"The schedule {name} takes {legal} microbatches, but microbatches is {microbatches}. Set microbatches "
                f"{near}, or use gpipe or 1f1b."
            )
        few, many = self.chunks
        if not few <= chunks <= many:
            legal = f"{few}" if few == many else f"{few} or more" if chunks < few else f"{many} or fewer"
            near = min(max(chunks, few), many)
            return f"The schedule {name} puts {legal} stages on a rank, but chunks is {chunks}. Set chunks {near}."
        return None


METHODS: dict[str, Method] = {
    "naive": Method(naive.make, microbatches=(1, 1)),
    "gpipe": Method(gpipe.make),
    "1f1b": Method(one_f_one_b.make),
    "interleaved": Method(interleaved.make, loop, chunks=(2, 1 << 8)),
    "zb-h1": Method(zb_h1.make),
}
"""Training schedules by name, and which (p, m, v) each takes: the one place where that is said."""

FORWARD_ONLY = forward.make

__all__ = [
    "BACKWARDS", "FORWARD_ONLY", "LAST", "METHODS", "Action", "Kind", "Method", "Schedule", "check", "in_halves",
    "live_microbatches", "loop", "lower", "make", "method", "needs", "partner", "peak", "straight", "vee",
]  # fmt: skip


def method(name: str) -> Method:
    if name not in METHODS:
        raise PlanError(f"There is no schedule '{name}'; use {listed(METHODS)}.{nearest(name, METHODS)}")
    return METHODS[name]


def make(name: str, ranks: int, microbatches: int, chunks: int = 0) -> Schedule:
    """The schedule `name` for p = `ranks`, m = `microbatches` and v = `chunks` stages a rank (0: its default),
    computation only."""
    found = method(name)
    if ranks < 1 or microbatches < 1:
        raise PlanError(f"A schedule needs at least 1 stage and 1 microbatch, not {ranks} and {microbatches}.")
    chunks = chunks or found.chunks[0]
    refusal = found.refusal(name, ranks, microbatches, chunks)
    if refusal:
        raise PlanError(refusal)
    return found.make(ranks, microbatches, chunks)
