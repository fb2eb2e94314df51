"""Schedules: who computes which microbatch when. One file each, pure; `SCHEDULES` is the list."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import PlanError, listed, nearest
from . import forward, gpipe, naive, one_f_one_b
from .action import Action, Kind, Schedule, needs, partner
from .check import check, live_microbatches
from .lower import lower

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "naive": naive.make,
    "gpipe": gpipe.make,
    "1f1b": one_f_one_b.make,
}
"""Training schedules by name: (pipeline ranks, microbatches) -> the table of computation."""

FORWARD_ONLY = forward.make

__all__ = [
    "FORWARD_ONLY", "SCHEDULES", "Action", "Kind", "Schedule", "check", "live_microbatches", "lower", "make", "needs",
    "partner",
]  # fmt: skip


def make(name: str, ranks: int, microbatches: int) -> Schedule:
    """The schedule `name` for p = `ranks` and m = `microbatches`, computation only."""
    if name not in SCHEDULES:
        raise PlanError(f"There is no schedule '{name}'; use {listed(SCHEDULES)}.{nearest(name, SCHEDULES)}")
    if ranks < 1 or microbatches < 1:
        raise PlanError(f"A schedule needs at least 1 stage and 1 microbatch, not {ranks} and {microbatches}.")
    return SCHEDULES[name](ranks, microbatches)
