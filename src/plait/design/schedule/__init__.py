"""Schedules: who computes which microbatch when. One file each, pure; `METHODS` is the list, with what each one takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import PlanError, listed, nearest
from . import (
    auto,
    dualpipe,
    dualpipe_v,
    forward,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from .action import BACKWARDS, LAST, Action, Kind, Schedule, needs, partner
from .check import check, live_microbatches, peak
from .greedy import TINY, Times
from .halves import in_halves
from .loss_on_first import placement_with_loss, with_loss_on_first
from .lower import AHEAD, SENT, lower
from .place import Placement, loop, straight, vee

MOST_CHUNKS = 4
"""More stages on a rank are not tried by `auto`."""
Make = Callable[[int, int, int], Schedule]


@dataclass(frozen=True)
class Method:
    """A way to make a table of computation: make(p ranks, m microbatches, v stages a rank). It takes every p that
    `multiple` divides; `chunks` are the least and the most v that it takes (its default is the least), `microbatches` the
    least and the most m. `no_run` says why no run takes it, and what to take instead: it is there to be looked at.
    `searched`: its table depends on what a microbatch costs on each stage, and make() takes the textbook's costs."""

    make: Make
    place: Placement = straight
    chunks: tuple[int, int] = (1, 1)
    microbatches: tuple[int, int] = (1, 1 << 16)
    multiple: int = 1
    no_run: str = ""
    searched: bool = False

    def refusal(self, name: str, ranks: int, microbatches: int, chunks: int) -> str | None:
        """Why it cannot be made for these, with the nearest that it can be made for."""
        if ranks % self.multiple:
            above = -(-ranks // self.multiple) * self.multiple
            legal_pp = listed([degree for degree in (above - self.multiple, above) if degree])
            return (
                f"The schedule {name} takes a multiple of {self.multiple} ranks, but pp is {ranks}. Set pp {legal_pp}, "
                "or use gpipe or 1f1b."
            )
        few, many = self.microbatches
        if not few <= microbatches <= many:
            near = min(max(microbatches, few), many)
            return (
                f"The schedule {name} takes {_counted('microbatch', few, many, microbatches)}, but microbatches is "
                f"{microbatches}. Set microbatches {near}, or use gpipe or 1f1b."
            )
        few, many = self.chunks
        if not few <= chunks <= many:
            near = min(max(chunks, few), many)
            legal = _counted("stage", few, many, chunks)
            return f"The schedule {name} puts {legal} on a rank, but chunks is {chunks}. Set chunks {near}."
        return None


def _counted(noun: str, few: int, many: int, asked: int) -> str:
    """'1 microbatch', '2 or more stages': how many are taken, said to someone who asked for another number."""
    if few == many == 1:
        return f"1 {noun}"
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    if few == many:
        return f"{few} {plural}"
    return f"{few} or more {plural}" if asked < few else f"{many} or fewer {plural}"


def one_stage_each(ranks: int, microbatches: int) -> tuple[Schedule, ...]:
    """The tables that `auto` is never slower than, where they fit: of every other method with stage s on rank s."""
    return tuple(
        found.make(ranks, microbatches, 1)
        for name, found in METHODS.items()
        if not found.searched and found.place is straight and found.refusal(name, ranks, microbatches, 1) is None
    )


@lru_cache(maxsize=8)
def search(ranks: int, microbatches: int, times: Times, limit: float) -> Schedule:
    """auto's table for p = `ranks` and m = `microbatches`: what one costs on each stage, what a rank may keep."""
    return auto.search(ranks, microbatches, times, limit, candidates=one_stage_each(ranks, microbatches))


def several_stages_each(ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """The methods that put several stages on a rank, and how many: what `auto` is never slower than either."""
    for name, found in METHODS.items():
        if found.no_run or found.place is straight or ranks == 1:
            continue
        for chunks in range(found.chunks[0], min(found.chunks[1], MOST_CHUNKS) + 1):
            if found.refusal(name, ranks, microbatches, chunks) is None:
                yield name, chunks


def shorter(best: Schedule, times: Times, other: Schedule, others: Times, limit: float) -> bool:
    """Whether `other` takes less time than `best`, each with the times of its own stages, and fits the limit."""
    return auto.fits(other, others, limit) and auto.seconds(other, others) < auto.seconds(best, times) * (1 - TINY)


def search_in_units(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """auto's table on the textbook's clock, where the weights' backward keeps as much as a forward, within 1f1b's p."""
    times = _units(ranks, 1)
    best = search(ranks, microbatches, times, ranks)
    for name, each in several_stages_each(ranks, microbatches):
        other, others = make(name, ranks, microbatches, each), _units(ranks, each)
        if shorter(best, times, other, others, ranks):
            best, times = replace(other, name="auto", pairs=()), others
    return best


def _units(ranks: int, chunks: int) -> Times:
    """A microbatch takes 1 of each on a rank, and keeps 1 there."""
    share = (1 / chunks,) * (ranks * chunks)
    return Times(share, share, share, activation=share, deferred=share)


METHODS: dict[str, Method] = {
    "naive": Method(naive.make, microbatches=(1, 1)),
    "gpipe": Method(gpipe.make),
    "1f1b": Method(one_f_one_b.make),
    "interleaved": Method(interleaved.make, loop, chunks=(2, 1 << 8)),
    "zb-h1": Method(zb_h1.make),
    "zb-h2": Method(zb_h2.make),
    "zb-v": Method(zb_v.make, vee, chunks=(2, 2)),
    "v-half": Method(v_half.make, vee, chunks=(2, 2)),
    "v-min": Method(v_min.make, vee, chunks=(2, 2)),
    "dualpipe-v": Method(dualpipe_v.make, vee, chunks=(2, 2)),
    "dualpipe": Method(
        dualpipe.make,
        vee,
        chunks=(2, 2),
        microbatches=(2, 1 << 16),
        multiple=2,
        no_run="keeps two copies of the model, whose gradients no run sums: set schedule dualpipe-v, which has the same "
        "pairs and one copy",
    ),
    "auto": Method(search_in_units, searched=True),
}
"""Training schedules by name, and which (p, m, v) each takes: the one place where that is said."""

RUNS = [name for name, found in METHODS.items() if not found.no_run]
"""Those that a run takes."""

FORWARD_ONLY = forward.make

__all__ = [
    "AHEAD", "BACKWARDS", "FORWARD_ONLY", "LAST", "METHODS", "RUNS", "SENT", "Action", "Kind", "Method", "Schedule",
    "Times", "check", "in_halves", "live_microbatches", "loop", "lower", "make", "method", "needs", "one_stage_each",
    "partner", "peak", "placement_with_loss", "search", "several_stages_each", "shorter", "straight", "suitable", "vee",
    "with_loss_on_first",
]  # fmt: skip


def method(name: str) -> Method:
    if name not in METHODS:
        raise PlanError(f"There is no schedule '{name}'; use {listed(RUNS)}.{nearest(name, METHODS)}")
    return METHODS[name]


def make(name: str, ranks: int, microbatches: int, chunks: int = 0) -> Schedule:
    """The schedule `name` for p = `ranks`, m = `microbatches` and v = `chunks` stages a rank (0: its default),
    computation only."""
    found = suitable(name, ranks, microbatches, chunks)
    return found.make(ranks, microbatches, chunks or found.chunks[0])


def suitable(name: str, ranks: int, microbatches: int, chunks: int = 0) -> Method:
    """The method `name`; a `PlanError` where it makes no table for these."""
    found = method(name)
    if ranks < 1 or microbatches < 1:
        raise PlanError(f"A schedule needs at least 1 stage and 1 microbatch, not {ranks} and {microbatches}.")
    refusal = found.refusal(name, ranks, microbatches, chunks or found.chunks[0])
    if refusal:
        raise PlanError(refusal)
    return found
