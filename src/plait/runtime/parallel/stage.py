"""One stage of the pipeline: a body that turns tokens (and a received hidden state) into a hidden state or logits, and,
on the last stage, the loss. It knows nothing of schedules, ranks or where its body came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ..batch import Batch

Body = Callable[[Batch, Tensor | None], Tensor]


class Loss(Protocol):
    """What the last stage makes of what its body gives (parallel/loss.py)."""

    def logits(self, output: Tensor) -> Tensor: ...

    def share(self, output: Tensor, batch: Batch, inverse_weight: Tensor) -> Tensor: ...


class WeightGradients(Protocol):
    """What linear layers owe where backward is split; the stage keeps it, the pipeline asks for it."""

    note: Callable[[Tensor], object]

    def keep(self, microbatch: int) -> None: ...

    def settle(self, microbatch: int) -> None: ...


class Stage:
    """`forward(batch, received)`; on the last stage also `loss`, and `logits` for whoever wants those."""

    def __init__(self, body: Body, loss: Loss | None, weight_gradients: WeightGradients | None = None) -> None:
        self._body = body
        self._loss = loss
        self.weight_gradients = weight_gradients

    @property
    def is_last(self) -> bool:
        return self._loss is not None

    def forward(self, batch: Batch, received: Tensor | None) -> Tensor:
        return self._body(batch, received)

    def logits(self, output: Tensor) -> Tensor:
        """Of what `forward` gave."""
        assert self._loss is not None
        return self._loss.logits(output)

    def loss(self, output: Tensor, batch: Batch, inverse_weight: Tensor) -> Tensor:
        """This microbatch's share of the step's mean loss; it may be known no sooner than its backward has run."""
        assert self._loss is not None
        return self._loss.share(output, batch, inverse_weight)
