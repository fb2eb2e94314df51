"""Carries out one rank's row of a schedule: a table from kind to method, and a loop.

Order is not decided here. Sends and receives are posted where the table has them and waited for where the table says so;
a sent tensor lives until its handle is done. With one stage this is gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...design.schedule import Action, Kind, Schedule
from ..batch import Batch
from ..comm import collectives
from ..comm.collectives import Handle
from ..comm.world import Group


class Clock(Protocol):
    """What the pipeline needs of a clock."""

    def start(self) -> None: ...

    def now(self) -> object: ...

    def mark(self, action: Action, since: object) -> None: ...


class Stage(Protocol):
    """What the pipeline needs of a stage (parallel/stage.py)."""

    @property
    def is_last(self) -> bool: ...

    def forward(self, batch: Batch, received: Tensor | None) -> Tensor: ...

    def loss(self, logits: Tensor, batch: Batch, inverse_weight: Tensor) -> Tensor: ...


class GradSink(Protocol):
    """Where finished gradients go."""

    def last_backward(self) -> None:
        """The next backward is the stage's last: each gradient may leave as soon as it is ready."""
        ...

    def finish(self) -> None:
        """Returns when every gradient is reduced."""
        ...


class Pipeline:
    """One rank's part in a schedule. `hidden` is the size of what passes between stages: [b, s, hidden] of `dtype`."""

    def __init__(
        self, schedule: Schedule, stage: Stage, group: Group, *, hidden: int, dtype: torch.dtype, device: torch.device,
        clock: Clock, sink: GradSink,
    ) -> None:  # fmt: skip
        self.schedule = schedule
        self._row = schedule.rows[group.index]
        self._stage, self._group, self.clock, self._sink = stage, group, clock, sink
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._last = next((a.microbatch for a in reversed(self._row) if a.kind is Kind.BACKWARD), None)
        self._do: dict[Kind, Callable[[int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECEIVE_ACTIVATION: self._receive_activation,
            Kind.WAIT_ACTIVATION: self._wait_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECEIVE_GRADIENT: self._receive_gradient,
            Kind.WAIT_GRADIENT: self._wait_gradient,
            Kind.REDUCE: lambda _: self._sink.finish(),
        }

    def run(self, microbatches: Sequence[Batch], inverse_weight: Tensor | None) -> Tensor:
        """One step: the sum of this rank's losses (0 before the last stage), on the device. Without `inverse_weight`
        the last stage keeps its logits in `outputs` and computes no loss."""
        self._microbatches, self._inverse_weight = microbatches, inverse_weight
        self._received: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._arriving: dict[tuple[str, int], Handle] = {}
        self._sent: list[Handle] = []
        self.outputs: dict[int, Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for action in self._row:
            since = self.clock.now()
            self._do[action.kind](action.microbatch)
            self.clock.mark(action, since)
        for handle in self._sent:
            handle.wait()
        self._received.clear()
        return self._loss

    def _forward(self, m: int) -> None:
        batch = self._microbatches[m]
        # Without backwards to come, what was received and sent lives no longer than its use.
        received = self._received.get(m) if self._last is not None else self._received.pop(m, None)
        output = self._stage.forward(batch, received)
        if self._stage.is_last and self._inverse_weight is not None:
            output = self._stage.loss(output, batch, self._inverse_weight)
            self._loss += output.detach()
        self.outputs[m] = output

    def _backward(self, m: int) -> None:
        if m == self._last:
            self._sink.last_backward()
        output = self.outputs.pop(m)
        torch.autograd.backward(output, self._gradients.pop(m, None))
        if m in self._received:
            gradient = self._received.pop(m).grad
            assert gradient is not None
            self._gradients[m] = gradient

    def _send_activation(self, m: int) -> None:
        output = self.outputs[m] if self._last is not None else self.outputs.pop(m)
        self._post(output.detach(), +1, m, "activation")

    def _send_gradient(self, m: int) -> None:
        self._post(self._gradients.pop(m), -1, m, "gradient")

    def _post(self, tensor: Tensor, step: int, m: int, why: str) -> None:
        self._sent = [handle for handle in self._sent if not handle.done()]
        to = self._group.index + step
        self._sent.append(collectives.send(tensor, to, self._group, why=why, tag=_tag(why, m)))

    def _receive(self, step: int, m: int, why: str) -> Tensor:
        batch = self._microbatches[m]
        space = torch.empty((*batch.tokens.shape, self._hidden), dtype=self._dtype, device=self._device)
        source = self._group.index + step
        self._arriving[why, m] = collectives.receive(space, source, self._group, why=why, tag=_tag(why, m))
        return space

    def _receive_activation(self, m: int) -> None:
        self._received[m] = self._receive(-1, m, "activation")

    def _receive_gradient(self, m: int) -> None:
        self._gradients[m] = self._receive(+1, m, "gradient")

    def _wait_activation(self, m: int) -> None:
        self._arriving.pop(("activation", m)).wait()
        self._received[m].requires_grad_(torch.is_grad_enabled())

    def _wait_gradient(self, m: int) -> None:
        self._arriving.pop(("gradient", m)).wait()


def _tag(why: str, m: int) -> int:
    return 2 * m + (why == "gradient")
