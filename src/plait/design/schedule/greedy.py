"""One pass through a pipeline of one stage a rank: whenever a stage is free, it takes what a few simple rules say.

    backward of the input    when its gradient is there; after one, a forward that can be done comes first
    forward                  when the memory allows it, and no gradient is about to come
    backward of the weights  in what would be a gap, or where only it makes room for a forward

After the heuristic of Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3.1: as many forwards as fit before
the first backward, then one of each in turn. What it leaves open (is a gap of this size worth filling, is a gradient
worth waiting for) are the `Knobs`; auto.py tries them. A pass is a simulation: a stage knows what is on its way to it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from .action import Action, Kind

TINY = 1e-9
"""Moments, as shares of a microbatch's time, and sizes, as shares of the limit, that differ by less are the same."""


@dataclass(frozen=True)
class Times:
    """What one microbatch costs on each stage: seconds of its forward and of both halves of its backward, bytes from the
    forward to the backward of the input (`activation`), and from there to that of the weights (`deferred`).
    `communication` is the seconds that anything is on its way from one stage to the next. Any unit will do."""

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    activation: tuple[float, ...]
    deferred: tuple[float, ...]
    communication: float = 0.0

    def seconds(self, action: Action) -> float:
        """How long an action takes: the clock for play()."""
        stage = action.stage
        if action.kind is Kind.FORWARD:
            return self.forward[stage]
        if action.kind is Kind.BACKWARD_INPUT:
            return self.input[stage]
        if action.kind is Kind.BACKWARD_WEIGHT:
            return self.weight[stage]
        return self.input[stage] + self.weight[stage] if action.kind is Kind.BACKWARD else 0.0

    def work(self, stage: int) -> float:
        """Seconds of one microbatch."""
        return self.forward[stage] + self.input[stage] + self.weight[stage]

    @cached_property
    def cycle(self) -> float:
        """Seconds of one microbatch on the slowest stage."""
        return max(self.work(stage) for stage in range(len(self.forward)))

    @property
    def whole(self) -> Times:
        """The same where backward is not split: nothing is put off."""
        backward = tuple(one + other for one, other in zip(self.input, self.weight, strict=True))
        nothing = (0.0,) * len(backward)
        return replace(self, input=backward, weight=nothing, deferred=nothing)


Step = tuple[Kind, int]
"""A kind and a microbatch: an action where the stage is known."""


@dataclass(frozen=True)
class Knobs:
    """`patience`: seconds that a stage may be idle in all, to be there when a gradient comes. `share`: it also waits
    where that takes less than this share of a forward. `fill`: a gap of this share of the weights' backward, or more, is
    filled with it. `eager`: so is any smaller gap, where the stage's patience is at an end."""

    patience: float
    share: float
    fill: float
    eager: bool


@dataclass
class _Stage:
    """Where a stage stands in the pass. What has been done of a kind is a number: microbatches come in order."""

    forwards: int = 0
    inputs: int = 0
    weights: int = 0
    free: float = 0.0
    idle: float = 0.0
    begun: bool = False
    backward_last: bool = False


class Pass:
    """Carries itself out when made. `rows`: of the table, in which no stage keeps more than `limit`, which must allow
    each of them one microbatch; `starts` and `ends`: of each stage's work."""

    def __init__(self, microbatches: int, times: Times, limit: float, knobs: Knobs) -> None:
        count = len(times.forward)
        self.microbatches, self.times, self.knobs = microbatches, times, knobs
        self.limit = limit * (1 + TINY)
        self.tiny = times.cycle * TINY
        self.stages = [_Stage() for _ in range(count)]
        # When what a stage needs for the forward and the backward of each microbatch is there, as far as that is known.
        self.activations = [[0.0 if stage == 0 else inf] * microbatches for stage in range(count)]
        self.gradients = [[inf] * microbatches for _ in range(count)]
        self.rows: list[list[Step]] = [[] for _ in range(count)]
        self.starts = [0.0] * count
        # (moment, order of asking, stage) to be asked what it does.
        self.queue: list[tuple[float, int, int]] = [(0.0, 0, 0)]
        self.asked = 0
        while self.queue:
            now, _, stage = heapq.heappop(self.queue)
            here = self.stages[stage]
            if now < here.free - self.tiny or here.weights == microbatches:
                continue
            kind, until = self._choose(stage, now)
            if kind is not None:
                self._do(stage, kind, now)
            elif until < inf:
                self._ask(until, stage)

    @property
    def ends(self) -> list[float]:
        return [stage.free for stage in self.stages]

    def _ask(self, moment: float, stage: int) -> None:
        self.asked += 1
        heapq.heappush(self.queue, (moment, self.asked, stage))

    def _choose(self, stage: int, now: float) -> tuple[Kind | None, float]:
        """What the stage does now; where it waits instead, until when."""
        here, knobs, times = self.stages[stage], self.knobs, self.times
        soon = now + self.tiny
        activation, deferred = times.activation[stage], times.deferred[stage]
        kept = (here.forwards - here.inputs) * activation + (here.inputs - here.weights) * deferred
        owes = here.weights < here.inputs
        gradient = self.gradients[stage][here.inputs] if here.inputs < here.forwards else inf
        forward = self.activations[stage][here.forwards] if here.forwards < self.microbatches else inf
        # A backward must find room for what it puts off, after any forward.
        room = kept + max(activation, deferred) <= self.limit
        if here.backward_last and forward <= soon and room:
            return Kind.FORWARD, now
        if gradient <= soon:
            fits = kept - activation + deferred <= self.limit
            return Kind.BACKWARD_INPUT if fits else Kind.BACKWARD_WEIGHT, now
        weight = times.weight[stage]
        idle = here.idle + (now - here.free if here.begun else 0.0)
        # A stage that is faster than the slowest is idle anyway, a little with each microbatch.
        patience = knobs.patience + here.inputs * (times.cycle - times.work(stage)) + self.tiny
        if forward <= soon and room:
            gap = gradient - now
            worth = gap <= knobs.share * times.forward[stage] or idle + gap <= patience
            if gap >= times.forward[stage] - self.tiny or not worth:
                return Kind.FORWARD, now
            return (Kind.BACKWARD_WEIGHT if owes and gap >= knobs.fill * weight else None), gradient
        until = min(gradient, forward if room else inf)
        gap = until - now
        blocked = forward <= soon or until == inf
        late = knobs.eager and idle + gap > patience
        # Every stage before waits for the last gradient, and nothing else can fill its gap then.
        fill = knobs.fill if here.inputs + 1 < self.microbatches else max(1.0, knobs.fill)
        if owes and (blocked or late or gap >= fill * weight - self.tiny):
            return Kind.BACKWARD_WEIGHT, now
        return None, until

    def _do(self, stage: int, kind: Kind, now: float) -> None:
        here, times = self.stages[stage], self.times
        if here.begun:
            here.idle += now - here.free
        else:
            here.begun, self.starts[stage] = True, now
        if kind is Kind.FORWARD:
            number, end = here.forwards, now + times.forward[stage]
            here.forwards += 1
            here.backward_last = False
            self._hand_over(self.activations, stage + 1, number, end)
            if stage + 1 == len(self.stages):
                self.gradients[stage][number] = end
        elif kind is Kind.BACKWARD_INPUT:
            number, end = here.inputs, now + times.input[stage]
            here.inputs += 1
            here.backward_last = True
            self._hand_over(self.gradients, stage - 1, number, end)
        else:
            number, end = here.weights, now + times.weight[stage]
            here.weights += 1
        here.free = end
        self.rows[stage].append((kind, number))
        self._ask(end, stage)

    def _hand_over(self, there: list[list[float]], stage: int, number: int, end: float) -> None:
        if 0 <= stage < len(self.stages):
            arrives = end + self.times.communication
            there[stage][number] = arrives
            self._ask(max(arrives, self.stages[stage].free), stage)
