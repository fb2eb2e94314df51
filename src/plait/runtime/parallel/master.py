"""Data parallelism with one master, as it was done before all-reduce: for learning, and to compare with.

    rank 0                                            every other rank
    deals its batch out            tokens ->          forward of its rows
    computes every rank's loss     <- logits
                                   gradient ->        backward of its rows
    adds gradients up              <- gradients
    updates
    gives the weights out          weights ->         takes them

All goes through rank 0: it sends and receives as much as all others together, it alone has the optimizer's state and does
its work, and while it computes the losses the others wait. What leaves nothing to rank 0 is data.py.
As torch.nn.DataParallel does it, over processes; the parameter server of Li et al., "Scaling Distributed Machine Learning
with the Parameter Server", OSDI 2014, with one server that also works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..batch import Batch
from ..comm.collectives import Handle, receive, send
from ..comm.world import Group

Loss = Callable[[Tensor, Tensor], Tensor]
"""Logits and targets to the sum of the loss over the trained targets."""
BATCH, OUTPUT, GRADIENT, SHARE, WEIGHTS = range(5)
"""Tags, each with a microbatch's, field's or bucket's number."""


def _tag(kind: int, number: int = 0) -> int:
    return 8 * number + kind


class Master:
    """Rank 0 of `group`, or one of those that it has to do with. Each has `rows` rows of `seq` tokens of a batch, in
    `microbatches`; `weights` are what is updated; `loss` is that of some logits."""

    def __init__(
        self, group: Group, *, rows: int, seq: int, microbatches: int, weights: Sequence[Tensor], loss: Loss,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._group, self._loss, self._device = group, loss, device
        self._rows, self._seq, self._microbatches = rows, seq, microbatches
        self._weights = list(weights)
        self._targets: dict[int, list[Tensor]] = {}
        self._turn, self._scale = 0, 1.0

    @property
    def is_here(self) -> bool:
        return self._group.index == 0

    @property
    def _others(self) -> range:
        return range(1, self._group.size)

    def deal(self, batch: Batch, scale: float) -> Batch:
        """This rank's rows of the batch that rank 0 has, of all ranks' rows; nobody else's is looked at. Backward will
        begin with `scale`."""
        self._turn, self._scale = 0, scale
        names = [field.name for field in fields(Batch)]
        if self.is_here:
            parts = {place: batch.slice(place * self._rows, (place + 1) * self._rows) for place in self._others}
            sent = [
                send(getattr(part, name).to(self._device), place, self._group, why="batch", tag=_tag(BATCH, number))
                for place, part in parts.items()
                for number, name in enumerate(names)
            ]
            _wait(sent)
            self._targets = {
                place: [one.targets.to(self._device) for one in part.split(self._microbatches)]
                for place, part in parts.items()
            }
            return batch.slice(0, self._rows)
        shape = {name: (self._rows,) if name == "sample_ids" else (self._rows, self._seq) for name in names}
        found = {name: torch.empty(shape[name], dtype=torch.int64, device=self._device) for name in names}
        _wait([
            receive(found[name], 0, self._group, why="batch", tag=_tag(BATCH, number))
            for number, name in enumerate(names)
        ])  # fmt: skip
        return Batch(**found)

    # --- the loss, as a stage has it

    def logits(self, output: Tensor) -> Tensor:
        return output

    def share(self, output: Tensor, batch: Batch, inverse_weight: Tensor) -> Tensor:
        """A microbatch's share of the step's mean loss: rank 0 computes its own and the others'."""
        if not torch.is_grad_enabled():
            total = self._loss(output, batch.targets)
            return total * inverse_weight.to(total.dtype)
        number, self._turn = self._turn, self._turn + 1
        if not self.is_here:
            return _AtMaster.apply(output, self._group, number)  # type: ignore[no-any-return]
        self._of_others(output, number, inverse_weight)
        total = self._loss(output, batch.targets)
        return total * inverse_weight.to(total.dtype)

    def _of_others(self, like: Tensor, number: int, inverse_weight: Tensor) -> None:
        for place in self._others:
            targets = self._targets[place][number]
            logits = like.new_empty((*targets.shape, like.shape[-1]))
            receive(logits, place, self._group, why="outputs", tag=_tag(OUTPUT, number)).wait()
            logits.requires_grad_()
            total = self._loss(logits, targets)
            share = total * inverse_weight.to(total.dtype)
            # Scaled before it takes the type of the logits: that is what a scale is for.
            (gradient,) = torch.autograd.grad(share, logits, torch.full_like(share, self._scale))
            _wait([
                send(share.detach().reshape(1), place, self._group, why="losses", tag=_tag(SHARE, number)),
                send(gradient, place, self._group, why="output gradients", tag=_tag(GRADIENT, number)),
            ])  # fmt: skip

    # --- gradients and weights

    def sum(self, x: Tensor, number: int) -> Handle:
        """Starts adding everyone's x to rank 0's; the others' stay as they are."""
        if not self.is_here:
            return send(x, 0, self._group, why="gradients", tag=_tag(WEIGHTS, number))
        spaces = [torch.empty_like(x) for _ in self._others]
        arriving = [
            receive(space, place, self._group, why="gradients", tag=_tag(WEIGHTS, number))
            for place, space in zip(self._others, spaces, strict=True)
        ]

        def add() -> None:
            for handle, space in zip(arriving, spaces, strict=True):
                handle.wait()
                x.add_(space)

        return Handle(None, None, after=add)

    @torch.no_grad()
    def publish(self) -> None:
        """Rank 0's weights become everyone's."""
        flat = torch.cat([weight.detach().view(-1) for weight in self._weights])
        if self.is_here:
            _wait([send(flat, place, self._group, why="weights", tag=_tag(WEIGHTS)) for place in self._others])
            return
        receive(flat, 0, self._group, why="weights", tag=_tag(WEIGHTS)).wait()
        for weight, new in zip(self._weights, flat.split([one.numel() for one in self._weights]), strict=True):
            weight.copy_(new.view(weight.shape))


class _AtMaster(Function):
    """Logits go to rank 0, which says what their loss is and what its gradient, times what backward begins with."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, group: Group, number: int) -> Tensor:
        output = output.contiguous()
        sent = send(output, 0, group, why="outputs", tag=_tag(OUTPUT, number))
        share = torch.empty(1, dtype=torch.promote_types(output.dtype, torch.float32), device=output.device)
        ctx.gradient = torch.empty_like(output)
        receive(share, 0, group, why="losses", tag=_tag(SHARE, number)).wait()
        receive(ctx.gradient, 0, group, why="output gradients", tag=_tag(GRADIENT, number)).wait()
        sent.wait()
        return share.squeeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None, None


def _wait(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()
