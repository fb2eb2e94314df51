"""What is predicted or measured: the same types for both, so that they can be subtracted and drawn side by side.

| design says                    | runtime records             | type     |
| simulate(schedule, seconds)    | the executor's clock        | Timeline |
| cost.traffic(...)              | the ledger of collectives   | Traffic  |
| sharding.holdings(...)         | shapes of local tensors     | Holding  |
| cost.memory(...)               | storages, counted           | MemoryBill |
| -                              | the clock, the ledger       | StepTime |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from .layout import Box
from .schedule.action import Action


@dataclass(frozen=True)
class Span:
    """One action on one rank of the pipeline, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step over `ranks` pipeline ranks."""

    ranks: int
    spans: tuple[Span, ...]

    @cached_property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def rows(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank."""
        found: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            found[span.rank].append(span)
        return tuple(map(tuple, found))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending."""
        return tuple(tuple(sorted({span.action.stage for span in row})) for row in self.rows)

    def chunk(self, span: Span) -> int:
        """The place of a span's stage among those of its rank."""
        return self.stages[span.rank].index(span.action.stage)

    def busy(self, rank: int) -> float:
        """Seconds that `rank` computed; what it computed at the same time counts once."""
        busy: float = 0
        reached: float | None = None
        for start, end in sorted((s.start, s.end) for s in self.rows[rank] if s.action.kind.lane == "compute"):
            since = start if reached is None else max(start, reached)
            busy += max(end - since, 0)
            reached = end if reached is None else max(end, reached)
        return busy

    @property
    def bubble(self) -> float:
        """The share of rank-seconds in which nothing was computed, 0 to 1 (exact when the spans are integers)."""
        if not self.seconds:
            return 0.0
        total = self.ranks * Fraction(self.seconds)
        return float(1 - sum(Fraction(self.busy(rank)) for rank in range(self.ranks)) / total)


SENT_SHARE = {
    # Share of the payload that each rank puts on the wire with the ring algorithms (n ranks); Thakur, Rabenseifner and
    # Gropp, "Optimization of collective communication operations in MPICH", 2005.
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "send": lambda n: Fraction(1),
    "receive": lambda n: Fraction(0),
}


WORLD = "world"
"""The axis of what all ranks sum together."""


@dataclass(frozen=True)
class Traffic:
    """What one rank moved for one reason. `payload` is in bytes over all calls: for all_reduce the tensor's size, for
    all_gather the gathered size, for
    reduce_scatter the size of what is scattered, for send the message's."""

    rank: int
    axis: str
    why: str
    operation: str
    ranks: int
    calls: int
    payload: int

    @property
    def sent(self) -> Fraction:
        """Bytes this rank puts on the wire."""
        return SENT_SHARE[self.operation](self.ranks) * self.payload


def sent_per_axis(rows: Iterable[Traffic]) -> dict[str, Fraction]:
    """Bytes on the wire over all ranks, per axis."""
    total: dict[str, Fraction] = {}
    for row in rows:
        total[row.axis] = total.get(row.axis, Fraction(0)) + row.sent
    return total


@dataclass(frozen=True)
class Holding:
    """One slice of one part, on one rank."""

    rank: int
    part: str
    block: int | None
    box: Box
    bytes: int
    copies: int


@dataclass(frozen=True)
class MemoryBill:
    """Bytes on one rank: what it holds through the whole run, and what it keeps for backward at the fullest moment of a
    step. `master_weights` are the optimizer's own, where compute is narrower than they; `units` what ZeRO moves units
    through: whole weights, pieces of gradients on their way to their sum. `working` is by how much the fullest moment
    goes beyond all that: what actions work with, and messages; None where it is not known. `process` is a reading of the
    allocator (GPU) or of the system (CPU: peak resident memory, with the interpreter and its libraries); a prediction
    has none."""

    rank: int
    weights: int
    master_weights: int
    gradients: int
    state: int
    activations: int
    units: int = 0
    working: int | None = None
    process: int | None = None

    @property
    def held(self) -> tuple[int, int, int, int, int]:
        """What predicted and measured agree on to the byte."""
        return self.weights, self.master_weights, self.gradients, self.state, self.units

    @property
    def total(self) -> int:
        return sum(self.held) + self.activations

    @property
    def peak(self) -> int:
        """The most at one time."""
        return self.total + (self.working or 0)


STEP_SHARES = {
    "data": "waiting for the batch, here and on the rank that gets it last; moving it to the device",
    "compute": "forwards and backwards, without the sums over tp inside them",
    "communication": "sums over tp, what backward could not hide of the sums over dp, sends until they are taken",
    "bubble": "waiting for neighbouring stages, and at the end of the step for the slowest rank",
    "optimizer": "gradient norm, clip, update of the weights",
    "other": "what is left: zeroing gradients, printing, writing metrics",
}
"""The shares of a step's time, in the order in which they are drawn, and what each one is."""


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step went on one rank, from the end of the step before to its own: means over `steps`."""

    rank: int
    steps: int
    data: float
    compute: float
    communication: float
    bubble: float
    optimizer: float
    other: float

    @property
    def seconds(self) -> float:
        return sum(self.shares.values())

    @property
    def shares(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in STEP_SHARES}


DATA_LIMIT = 0.10
"""A larger share of waiting for data is worth a warning."""


def data_share(rows: Iterable[StepTime]) -> float:
    """The share of all ranks' time that waiting for data took, 0 to 1."""
    rows = list(rows)
    total = sum(row.seconds for row in rows)
    return sum(row.data for row in rows) / total if total else 0.0
