"""What is predicted or measured: the same types for both, so that they can be subtracted and drawn side by side.

| design says                    | runtime records             | type     |
| simulate(schedule, seconds)    | the executor's clock        | Timeline |
| cost.traffic(...)              | the ledger of collectives   | Traffic  |
| sharding.holdings(...)         | shapes of local tensors     | Holding  |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

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

    @property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds that `rank` computed."""
        return sum((s.end - s.start for s in self.spans if s.rank == rank and s.action.kind.lane == "compute"), 0)

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
    "send": lambda n: Fraction(1),
    "receive": lambda n: Fraction(0),
}


WORLD = "world"
"""The axis of what all ranks sum together."""


@dataclass(frozen=True)
class Traffic:
    """What one rank moved for one reason. `payload` is in bytes over all calls: for all_reduce the tensor's size, for
    all_gather the gathered size, for send the message's."""

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
