"""The alphabet of schedules, and the one place where their order is stated.

A schedule is a table: one row of actions per pipeline rank, carried out from left to right. Makers write the
computation only; lower.py adds what must be sent and waited for. `needs` is the order law: everything that checks,
plays, runs or draws a schedule asks it, and nothing else states an order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Kind(Enum):
    """(letter in tables, lane it occupies)."""

    FORWARD = ("F", "compute")
    BACKWARD = ("B", "compute")
    SEND_ACTIVATION = ("SA", "p2p")
    RECEIVE_ACTIVATION = ("RA", "p2p")
    WAIT_ACTIVATION = ("WA", "wait")
    SEND_GRADIENT = ("SG", "p2p")
    RECEIVE_GRADIENT = ("RG", "p2p")
    WAIT_GRADIENT = ("WG", "wait")
    REDUCE = ("R", "dp")

    def __init__(self, letter: str, lane: str) -> None:
        self.letter = letter
        self.lane = lane


@dataclass(frozen=True)
class Action:
    """Prints as '2F0': stage 2, forward, microbatch 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.letter}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """`rows[r]` is what pipeline rank r does, in order. Stage s lives on rank s (one stage a rank so far)."""

    name: str
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.rows)

    def rank_of(self, stage: int) -> int:
        return stage

    @cached_property
    def actions(self) -> frozenset[Action]:
        return frozenset(action for row in self.rows for action in row)


def law(action: Action, stages: int) -> Iterator[Action]:
    """What must be done before `action`, when everything that can be stated is in the table."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.FORWARD and stage > 0:
        yield Action(Kind.WAIT_ACTIVATION, stage, microbatch)
    elif kind is Kind.WAIT_ACTIVATION:
        yield Action(Kind.RECEIVE_ACTIVATION, stage, microbatch)
    elif kind is Kind.RECEIVE_ACTIVATION:
        yield Action(Kind.SEND_ACTIVATION, stage - 1, microbatch)
    elif kind is Kind.SEND_ACTIVATION:
        yield Action(Kind.FORWARD, stage, microbatch)
    elif kind is Kind.BACKWARD:
        yield Action(Kind.FORWARD, stage, microbatch)
        if stage < stages - 1:
            yield Action(Kind.WAIT_GRADIENT, stage, microbatch)
    elif kind is Kind.WAIT_GRADIENT:
        yield Action(Kind.RECEIVE_GRADIENT, stage, microbatch)
    elif kind is Kind.RECEIVE_GRADIENT:
        yield Action(Kind.SEND_GRADIENT, stage + 1, microbatch)
    elif kind is Kind.SEND_GRADIENT:
        yield Action(Kind.BACKWARD, stage, microbatch)


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """What must be done before `action` in this table. Communication that the table leaves out (it is not lowered yet)
    stands for its own needs, so the same law serves both forms. REDUCE needs every backward of its stage."""
    if action.kind is Kind.REDUCE:
        return tuple(a for a in schedule.rows[schedule.rank_of(action.stage)]
                     if a.kind is Kind.BACKWARD and a.stage == action.stage)  # fmt: skip
    found: list[Action] = []
    for need in law(action, schedule.stages):
        if need in schedule.actions or need.kind.lane == "compute":
            found.append(need)
        else:
            found.extend(needs(need, schedule))
    return tuple(found)


def partner(action: Action) -> Action | None:
    """The other end of a send or a receive."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.SEND_ACTIVATION:
        return Action(Kind.RECEIVE_ACTIVATION, stage + 1, microbatch)
    if kind is Kind.RECEIVE_ACTIVATION:
        return Action(Kind.SEND_ACTIVATION, stage - 1, microbatch)
    if kind is Kind.SEND_GRADIENT:
        return Action(Kind.RECEIVE_GRADIENT, stage - 1, microbatch)
    if kind is Kind.RECEIVE_GRADIENT:
        return Action(Kind.SEND_GRADIENT, stage + 1, microbatch)
    return None
