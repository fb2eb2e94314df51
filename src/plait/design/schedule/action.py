"""The alphabet of schedules, and the one place where their order is stated.

A schedule is a table: one row of actions per pipeline rank, carried out from left to right. Makers write the
computation only; lower.py adds what must be sent and waited for. `needs` is the order law: everything that checks,
plays, runs or draws a schedule asks it, and nothing else states an order.

    F  forward        B  backward, whole        I  backward of the input        W  backward of the weights

A backward is whole, or parted in I, which the stage before waits for, and W, which nobody does. Stages that follow each
other on one rank hand over without sending.
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
    BACKWARD_INPUT = ("I", "compute")
    BACKWARD_WEIGHT = ("W", "compute")
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


BACKWARDS = frozenset((Kind.BACKWARD, Kind.BACKWARD_INPUT))
"""What gives the gradient of a stage's input."""
LAST = frozenset((Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
"""What a stage does last with a microbatch."""


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
    """`rows[r]` is what pipeline rank r does, in order; `placement[s]` is the rank of stage s (none given: rank s).

    `pairs` are a forward and the backward that follows it in a row, meant to run at the same time. `chains` is more than
    1 where the stages are that many copies of the model, one after the other in `placement`, each with its share of the
    microbatches (in order, as even as can be): DualPipe's two directions.
    """

    name: str
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...] = ()
    pairs: tuple[tuple[Action, Action], ...] = ()
    chains: int = 1

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement) or len(self.rows)

    @property
    def chunks(self) -> int:
        """The most stages on one rank."""
        return max(len(self.on(rank)) for rank in range(self.ranks))

    def rank_of(self, stage: int) -> int:
        return self.placement[stage] if self.placement else stage

    def on(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def before(self, stage: int) -> int | None:
        """The stage that this one gets its activations from."""
        return stage - 1 if stage % (self.stages // self.chains) else None

    def after(self, stage: int) -> int | None:
        """The stage that this one gets its gradients from."""
        return stage + 1 if (stage + 1) % (self.stages // self.chains) else None

    def sends(self, stage: int, other: int | None) -> bool:
        """Whether what goes from one stage to the other is sent: not where both are on one rank."""
        return other is not None and self.rank_of(stage) != self.rank_of(other)

    def microbatches_of(self, stage: int) -> range:
        """What a stage computes: all of them, where there is one chain."""
        chain = stage // (self.stages // self.chains)
        return range(chain * self.microbatches // self.chains, (chain + 1) * self.microbatches // self.chains)

    @cached_property
    def actions(self) -> frozenset[Action]:
        return frozenset(action for row in self.rows for action in row)

    @cached_property
    def splits(self) -> bool:
        """Whether backwards are parted."""
        return any(action.kind is Kind.BACKWARD_WEIGHT for action in self.actions)

    def backward(self, stage: int, microbatch: int) -> Action:
        """What gives the gradient of the stage's input: its whole backward, or that of the input."""
        whole = Action(Kind.BACKWARD, stage, microbatch)
        return whole if whole in self.actions else Action(Kind.BACKWARD_INPUT, stage, microbatch)


def law(action: Action, schedule: Schedule) -> Iterator[Action]:
    """What must be done before `action`, when everything that can be stated is in the table."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    before, after = schedule.before(stage), schedule.after(stage)
    if kind is Kind.FORWARD and before is not None:
        sent = schedule.sends(before, stage)
        yield Action(Kind.WAIT_ACTIVATION, stage, microbatch) if sent else Action(Kind.FORWARD, before, microbatch)
    elif kind is Kind.WAIT_ACTIVATION:
        yield Action(Kind.RECEIVE_ACTIVATION, stage, microbatch)
    elif kind is Kind.RECEIVE_ACTIVATION and before is not None:
        yield Action(Kind.SEND_ACTIVATION, before, microbatch)
    elif kind is Kind.SEND_ACTIVATION:
        yield Action(Kind.FORWARD, stage, microbatch)
    elif kind in BACKWARDS:
        yield Action(Kind.FORWARD, stage, microbatch)
        if after is not None:
            sent = schedule.sends(after, stage)
            yield Action(Kind.WAIT_GRADIENT, stage, microbatch) if sent else schedule.backward(after, microbatch)
    elif kind is Kind.BACKWARD_WEIGHT:
        yield Action(Kind.BACKWARD_INPUT, stage, microbatch)
    elif kind is Kind.WAIT_GRADIENT:
        yield Action(Kind.RECEIVE_GRADIENT, stage, microbatch)
    elif kind is Kind.RECEIVE_GRADIENT and after is not None:
        yield Action(Kind.SEND_GRADIENT, after, microbatch)
    elif kind is Kind.SEND_GRADIENT:
        yield schedule.backward(stage, microbatch)


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """What must be done before `action` in this table. Communication that the table leaves out (it is not lowered yet)
    stands for its own needs, so the same law serves both forms. REDUCE needs every backward of its stage."""
    if action.kind is Kind.REDUCE:
        return tuple(a for a in schedule.rows[schedule.rank_of(action.stage)]
                     if a.kind in LAST and a.stage == action.stage)  # fmt: skip
    found: list[Action] = []
    for need in law(action, schedule):
        if need in schedule.actions or need.kind.lane == "compute":
            found.append(need)
        else:
            found.extend(needs(need, schedule))
    return tuple(found)


def partner(action: Action, schedule: Schedule) -> Action | None:
    """The other end of a send or a receive."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    ends = {
        Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, schedule.after(stage)),
        Kind.RECEIVE_ACTIVATION: (Kind.SEND_ACTIVATION, schedule.before(stage)),
        Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, schedule.before(stage)),
        Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, schedule.after(stage)),
    }
    other, place = ends.get(kind, (kind, None))
    return None if place is None else Action(other, place, microbatch)
