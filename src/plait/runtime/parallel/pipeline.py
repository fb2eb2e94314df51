"""Carries out one rank's row of a schedule: a table from kind to method, and a loop.

Order is not decided here. Sends and receives are posted where the table has them and waited for where the table says so.
Where messages are matched by tag (not over NCCL) the next AHEAD receives are posted as well: Gloo moves a message once
its receive is there, which then is before it is sent. A sent tensor lives until SENT more are sent, and no longer: what
backward needs of it is its place in the graph. Stages that follow each other on this rank hand over without a message.
With one stage this is gradient accumulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...design.schedule import AHEAD, BACKWARDS, LAST, SENT, Action, Kind, Schedule
from ..batch import Batch
from ..comm import collectives
from ..comm.collectives import Handle
from ..comm.world import Group


class Clock(Protocol):
    """What the pipeline needs of a clock."""

    def start(self) -> None: ...

    def now(self) -> object: ...

    def mark(self, action: Action, since: object) -> None: ...


class WeightGradients(Protocol):
    """What the linear layers of a stage owe (parallel/split_backward.py)."""

    def keep(self, microbatch: int) -> None: ...

    def settle(self, microbatch: int) -> None: ...


class Stage(Protocol):
    """What the pipeline needs of a stage (parallel/stage.py)."""

    @property
    def is_last(self) -> bool: ...

    @property
    def weight_gradients(self) -> WeightGradients | None:
        """Where backward is split."""
        ...

    def forward(self, batch: Batch, received: Tensor | None) -> Tensor: ...

    def logits(self, output: Tensor) -> Tensor: ...

    def loss(self, output: Tensor, batch: Batch, inverse_weight: Tensor) -> Tensor: ...


class GradSink(Protocol):
    """Where finished gradients go."""

    final: bool
    """Whether what backward gives now is the last of the step for its stage: each gradient may leave when it is ready."""

    def done(self, stage: int) -> None:
        """A backward of the stage is over: whatever it has not brought by now it does not bring."""
        ...

    def finish(self, stage: int) -> None:
        """Returns when every gradient of the stage is reduced."""
        ...


Key = tuple[int, int]
"""(stage, microbatch)."""
RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)


class Pipeline:
    """One rank's part in a schedule; `stages` are those of this rank, by number. What stage n gives to the next
    has the `shape(n, b, s)` and is of `dtype`."""

    def __init__(
        self, schedule: Schedule, stages: Mapping[int, Stage], group: Group, *,
        shape: Callable[[int, int, int], Sequence[int]], dtype: torch.dtype, device: torch.device, clock: Clock,
        sink: GradSink,
    ) -> None:  # fmt: skip
        self.schedule = schedule
        self._row = schedule.rows[group.index]
        self._stages, self._group, self.clock, self._sink = stages, group, clock, sink
        self._shape, self._dtype, self._device = shape, dtype, device
        self._receives = [action for action in self._row if action.kind in RECEIVES]
        self._ahead = AHEAD if collectives.by_tag(group) else 0
        self._trains = any(action.kind in BACKWARDS for action in self._row)
        # The last of its kind of every stage: when the gradients that it gives are whole.
        self._final = {(a.stage, False): a.microbatch for a in self._row if a.kind in BACKWARDS}
        self._final |= {(a.stage, True): a.microbatch for a in self._row if a.kind in LAST}
        self._do: dict[Kind, Callable[[int, int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECEIVE_ACTIVATION: self._receive_in_turn,
            Kind.WAIT_ACTIVATION: self._wait_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECEIVE_GRADIENT: self._receive_in_turn,
            Kind.WAIT_GRADIENT: self._wait_gradient,
            Kind.REDUCE: lambda stage, _: self._sink.finish(stage),
        }

    def run(self, microbatches: Sequence[Batch], inverse_weight: Tensor | None, scale: float = 1.0) -> Tensor:
        """One step: the sum of this rank's losses (0 without the last stage), on the device. Backward begins with `scale`
        in the place of 1: it gives the gradients of so many times the loss. Without `inverse_weight` the
        last stage keeps its logits in `logits`, by microbatch, and computes no loss."""
        self._microbatches, self._inverse_weight, self._scale = microbatches, inverse_weight, scale
        self._received: dict[Key, Tensor] = {}  # what a stage reads
        self._given: dict[Key, Tensor] = {}  # what it gave, until it is sent or handed over
        self._graphs: dict[Key, GradientEdge] = {}  # where its backward starts
        self._gradients: dict[Key, Tensor] = {}  # of what it gave
        self._arriving: dict[tuple[str, int, int], Handle] = {}
        self._sent: deque[Handle] = deque()
        self.logits: dict[int, Tensor] = {}
        self._losses: list[Tensor] = []
        self._posted, self._called = 0, 0
        self._post_receives(self._ahead)
        for action in self._row:
            since = self.clock.now()
            self._do[action.kind](action.stage, action.microbatch)
            self.clock.mark(action, since)
        for handle in self._sent:
            handle.wait()
        # Not before: in chunks the loss of a microbatch is known when its backward has run.
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for share in self._losses:
            loss += share
        return loss

    def _forward(self, stage: int, m: int) -> None:
        batch, key, before = self._microbatches[m], (stage, m), self.schedule.before(stage)
        if before is not None and not self.schedule.sends(before, stage):
            # Handed over on this rank: a leaf, so that each stage has a graph of its own.
            self._received[key] = self._given.pop((before, m)).detach().requires_grad_(torch.is_grad_enabled())
        # Without backwards to come, what was received lives no longer than its use.
        received = self._received.get(key) if self._trains else self._received.pop(key, None)
        part = self._stages[stage]
        output = part.forward(batch, received)
        if part.is_last:
            if self._inverse_weight is None:
                self.logits[m] = part.logits(output)
                return
            output = part.loss(output, batch, self._inverse_weight)
            self._losses.append(output.detach())
            if self._trains and self._scale != 1:
                self._gradients[key] = torch.full_like(output, self._scale)
        else:
            self._given[key] = output.detach()
        if self._trains and output.requires_grad:  # nothing in a first stage may train
            self._graphs[key] = get_gradient_edge(output)

    def _backward(self, stage: int, m: int) -> None:
        self._backward_input(stage, m)
        if self._stages[stage].weight_gradients is not None:
            self._backward_weight(stage, m)

    def _backward_input(self, stage: int, m: int) -> None:
        key, part = (stage, m), self._stages[stage]
        self._sink.final = m == self._final[stage, False]
        graph, gradient = self._graphs.pop(key, None), self._gradients.pop(key, None)
        if graph is not None:
            torch.autograd.backward(graph, gradient)
        if part.weight_gradients is not None:
            part.weight_gradients.keep(m)
        before = self.schedule.before(stage)
        if before is not None:
            gradient = self._received.pop(key).grad
            assert gradient is not None
            self._gradients[before, m] = gradient
        if part.weight_gradients is None:
            self._sink.done(stage)

    def _backward_weight(self, stage: int, m: int) -> None:
        owed = self._stages[stage].weight_gradients
        assert owed is not None
        self._sink.final = m == self._final[stage, True]
        owed.settle(m)
        self._sink.done(stage)

    def _send_activation(self, stage: int, m: int) -> None:
        self._post(self._given.pop((stage, m)), stage, self.schedule.after(stage), m, "activation")

    def _send_gradient(self, stage: int, m: int) -> None:
        before = self.schedule.before(stage)
        assert before is not None
        self._post(self._gradients.pop((before, m)), before, before, m, "gradient")

    def _post(self, tensor: Tensor, boundary: int, target: int | None, m: int, why: str) -> None:
        assert target is not None
        # What is waited for only here lives that long: Gloo does not say before that a message was taken.
        while len(self._sent) >= SENT:
            self._sent.popleft().wait()
        to = self.schedule.rank_of(target)
        tag = self._tag(why, boundary, m)
        self._sent.append(collectives.send(tensor, to, self._group, why=why, tag=tag))

    def _receive_in_turn(self, *_: int) -> None:
        self._called += 1
        self._post_receives(self._called + self._ahead)

    def _post_receives(self, many: int) -> None:
        """Posts the first `many` receives of the table, if they are not."""
        for action in self._receives[self._posted : many]:
            arrives = action.kind is Kind.RECEIVE_ACTIVATION
            (self._receive_activation if arrives else self._receive_gradient)(action.stage, action.microbatch)
            self._posted += 1

    def _receive(self, stage: int, boundary: int, source: int | None, m: int, why: str) -> Tensor:
        assert source is not None
        batch = self._microbatches[m]
        space = torch.empty(self._shape(boundary, *batch.tokens.shape), dtype=self._dtype, device=self._device)
        rank, tag = self.schedule.rank_of(source), self._tag(why, boundary, m)
        self._arriving[why, stage, m] = collectives.receive(space, rank, self._group, why=why, tag=tag)
        return space

    def _receive_activation(self, stage: int, m: int) -> None:
        before = self.schedule.before(stage)
        self._received[stage, m] = self._receive(stage, stage - 1, before, m, "activation")

    def _receive_gradient(self, stage: int, m: int) -> None:
        after = self.schedule.after(stage)
        self._gradients[stage, m] = self._receive(stage, stage, after, m, "gradient")

    def _wait_activation(self, stage: int, m: int) -> None:
        self._arriving.pop(("activation", stage, m)).wait()
        self._received[stage, m].requires_grad_(torch.is_grad_enabled())

    def _wait_gradient(self, stage: int, m: int) -> None:
        self._arriving.pop(("gradient", stage, m)).wait()

    def _tag(self, why: str, boundary: int, m: int) -> int:
        """Of what passes between a stage and the next: one for each microbatch and direction."""
        return 2 * (boundary * self.schedule.microbatches + m) + (why == "gradient")
