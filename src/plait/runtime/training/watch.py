"""What the training loop sees of its steps: where their seconds went on this rank, and how much memory they took.

    | asking for a batch | step: count, move, forwards and backwards, optimizer | metrics, printing | asking ...
    |<----------------------------- one step's time, split ------------------------------>|

Sums over the world carry a few bytes, so their time is waiting: the first, of the target tokens, for the rank whose batch
comes last (data); the one of loss and norm for the slowest rank (bubble). Which share is what: `STEP_SHARES` in
design/records.py. On a CPU a sum over tp takes its rank's time while others compute, too.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from ...design.records import STEP_SHARES, WORLD
from ...design.schedule import Action
from ..batch import Batch
from ..parallel.clock import between
from .kept import Keeper, counted
from .step import Given, Report, Run
from .storages import Storages

MEASURED = 10
"""The last steps, over which the shares are means. The first two, whose memory is counted, do not count where there are
others."""
COUNTED = 2


class Watch:
    """`over(batches)` hands out batches and times what is done with each, until the next is asked for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps: deque[dict[str, float]] = deque(maxlen=MEASURED)
        self._begun = run.done
        self.kept = 0
        """The most bytes that the first step kept for backward at one time."""
        self.most: int | None = None
        """The most bytes that the second step, which finds all that is held, took besides it at one time."""

    def over(self, batches: Iterable[Given]) -> Iterator[Given]:
        source = iter(batches)
        began = time.perf_counter()
        while True:
            asked = time.perf_counter()
            batch = next(source, None)
            if batch is None:
                return
            waited = time.perf_counter() - asked
            yield batch
            if 1 < self._run.done - self._begun <= COUNTED + 1:
                self._steps.clear()
            ended = time.perf_counter()
            self._steps.append(self._shares(waited, ended - began))
            began = ended

    def step(self, batch: Given) -> Report:
        """Takes a step, and counts its memory if it is one of the first two."""
        run = self._run
        if run.done == self._begun:
            parts = (batch,) if isinstance(batch, Batch) else batch
            owed = [stage.weight_gradients for stage in run.stages.values() if stage.weight_gradients is not None]
            keepers: list[Keeper] = [*owed, *run.recomputing.values()]
            keepers += [run.chunked] if run.chunked is not None else []
            with counted((*run.parameters.values(), *(part.tokens for part in parts)), keepers) as kept:
                report = run.step(batch)
            self.kept = kept.peak
        elif run.done == self._begun + 1:
            with Storages(run.holds, run.world.device) as storages:
                report = run.step(batch)
            self.most = storages.peak
        else:
            report = run.step(batch)
        return report

    @property
    def steps(self) -> int:
        return len(self._steps)

    @property
    def means(self) -> list[float]:
        """Seconds of each of `STEP_SHARES`, the mean over the last steps."""
        return [sum(step[name] for step in self._steps) / max(1, len(self._steps)) for name in STEP_SHARES]

    def _shares(self, waited: float, total: float) -> dict[str, float]:
        run, laps = self._run, self._run.laps
        found, spans = dict.fromkeys(STEP_SHARES, 0.0), run.clock.spans()
        for action, begin, end in spans:
            lane = {"compute": "compute", "wait": "bubble"}.get(action.kind.lane, "communication")
            found[lane] += end - begin
        # What lies between actions, and the wait for what was sent to be taken.
        found["communication"] += between(laps["begun"], laps["reduced"]) - sum(found.values())
        found["data"] = waited + between(laps["counted"], laps["here"])
        found["optimizer"] = between(laps["reduced"], laps["updated"])
        for axis, why, begin, end in run.waits:
            seconds = between(begin, end)
            if axis == WORLD and why == "target tokens":
                found["data"] += seconds
            elif axis == WORLD:
                found["optimizer"] -= seconds
                found["bubble"] += seconds
            elif _inside(spans, run.clock.at(begin)):
                found["compute"] -= seconds
                found["communication"] += seconds
        found["other"] = max(0.0, total - sum(found.values()))
        return found


def _inside(spans: Sequence[tuple[Action, float, float]], moment: float) -> bool:
    """Whether a rank computes then; what it waits for in other actions is theirs already."""
    place = bisect_right(spans, moment, key=itemgetter(1)) - 1
    return place >= 0 and moment < spans[place][2] and spans[place][0].kind.lane == "compute"
