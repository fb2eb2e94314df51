"""Schedules side by side on the textbook's clock, for the same p ranks and m microbatches.

F         one microbatch's forward on a p-th of the model; a backward takes 2 F, each half of it 1 F
time      of a step, in F: a stage of v on a rank takes a v-th of it
live      the most that a rank keeps, in what one microbatch leaves on a p-th of the model. A backward in two halves
          lets go of it all after the second: the upper bound that the papers use
x 1f1b    live of the fullest rank as a multiple of 1f1b's
sends     messages that the rank with the most of them sends in a step
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from textwrap import wrap

from rich.text import Text

from ..design.errors import PlanError
from ..design.records import Timeline
from ..design.schedule import METHODS, Kind, Schedule, check, lower, make, peak
from ..design.schedule.play import unit_seconds
from ..design.simulate import simulate
from .words import percent

SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)


@dataclass(frozen=True)
class Played:
    """A schedule, lowered and proven, and its timeline in F."""

    table: Schedule
    timeline: Timeline

    @property
    def live(self) -> list[float]:
        """Of each rank."""
        share = float(_share(self.table))
        return [
            peak(self.table, rank, forward=lambda *_: share, deferred=lambda *_: share)
            for rank in range(self.table.ranks)
        ]

    @property
    def sends(self) -> list[int]:
        """Of each rank."""
        return [sum(action.kind in SENDS for action in row) for row in self.table.rows]

    @property
    def caption(self) -> str:
        return f"bubble {percent(self.timeline.bubble)}, {self.timeline.seconds:g} F"


@dataclass(frozen=True)
class Refused:
    """A schedule that cannot be made for these numbers."""

    name: str
    why: str


def play(name: str, ranks: int, microbatches: int, chunks: int = 0) -> Played:
    """What cannot be made is a `PlanError`. The two of a pair begin and end together, and take as long as one after the
    other: a transfer takes no time here, so there is none to hide."""
    made = make(name, ranks, microbatches, chunks)
    table = lower(made)
    check(table)
    found = simulate(made, together=lambda forward, backward: unit_seconds(forward) + unit_seconds(backward))
    share = _share(table)
    if share != 1:
        spans = (replace(s, start=float(s.start * share), end=float(s.end * share)) for s in found.spans)
        found = Timeline(found.ranks, tuple(spans))
    return Played(table, found)


def _share(table: Schedule) -> Fraction:
    """A stage as a part of what a rank has where each has one."""
    return Fraction(table.ranks * table.chains, table.stages)


def compare(ranks: int, microbatches: int, chunks: int = 0) -> list[Played | Refused]:
    """Every schedule; `chunks` is for those that can have several numbers of stages on a rank. When none can be made,
    a `PlanError`."""
    found: list[Played | Refused] = []
    for name, method in METHODS.items():
        few, many = method.chunks
        try:
            found.append(play(name, ranks, microbatches, chunks if few < many else 0))
        except PlanError as error:
            found.append(Refused(name, str(error)))
    whys = [one.why for one in found if isinstance(one, Refused)]
    if len(whys) == len(found):
        raise PlanError(whys[-1])
    return found


@dataclass(frozen=True)
class Row:
    """The numbers of one schedule, as the head of this file has them; `live` of each rank."""

    schedule: str
    pp: int
    microbatches: int
    chunks: int
    bubble: float
    time: float
    live: list[float]
    of_1f1b: float
    sends: int


def row(played: Played) -> Row:
    table = played.table
    first = play("1f1b", table.ranks, table.microbatches)
    return Row(
        schedule=table.name, pp=table.ranks, microbatches=table.microbatches, chunks=table.chunks,
        bubble=played.timeline.bubble, time=played.timeline.seconds, live=played.live,
        of_1f1b=max(played.live) / max(first.live), sends=max(played.sends),
    )  # fmt: skip


def lines(compared: Sequence[Played | Refused], ranks: int, microbatches: int) -> str:
    """One JSON object a line."""
    objects = [
        asdict(row(one)) if isinstance(one, Played)
        else {"schedule": one.name, "pp": ranks, "microbatches": microbatches, "refused": one.why}
        for one in compared
    ]  # fmt: skip
    return "\n".join(map(json.dumps, objects))


HEAD = ("schedule", "chunks", "bubble", "time", "live", "x 1f1b", "sends")


def cells(found: Row) -> tuple[str, ...]:
    """Under `HEAD`."""
    return (
        found.schedule, str(found.chunks), percent(found.bubble), f"{found.time:g} F", f"{max(found.live):g}",
        f"{found.of_1f1b:.2f}", str(found.sends),
    )  # fmt: skip


def table(compared: Sequence[Played | Refused], *, width: int) -> Text:
    """A line a schedule; one that cannot be made has the reason in the place of its numbers."""
    rows = [HEAD, *(cells(row(one)) for one in compared if isinstance(one, Played))]
    whys = {one.name: one.why for one in compared if isinstance(one, Refused)}
    names = 2 + max(map(len, [*whys, *(line[0] for line in rows)]))
    widths = [2 + max(map(len, column)) for column in zip(*rows, strict=True)][1:]
    found = Text()
    for number, line in enumerate(rows):
        numbers = "".join(cell.rjust(wide) for cell, wide in zip(line[1:], widths, strict=True))
        found.append(line[0].ljust(names) + numbers + "\n", "" if number else "bold")
    for name, why in whys.items():
        words = wrap(why, max(20, width - names), break_long_words=False)
        found.append(name.ljust(names) + ("\n" + " " * names).join(words) + "\n", "dim")
    return found.append(" ".join(MEANING))


MEANING = (
    "F: one microbatch's forward on a p-th of the model; a backward takes 2 F, each half of it 1 F.",
    "live: the most that a rank keeps, in what one microbatch leaves on a p-th of the model.",
    "x 1f1b: of the fullest rank. sends: messages of the rank with the most.",
)
