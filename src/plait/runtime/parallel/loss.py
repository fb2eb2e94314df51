"""Cross entropy over a vocabulary that is cut over tp: logits are never gathered.

    x [n, V/t] own logits        m = max over the vocabulary      first reduction over tp, n numbers
                                 z = sum exp(x - m), own target   second reduction, 2 n numbers
    loss = sum of (log z + m - target's logit) over trained targets, times 1 / (target tokens of the whole step)

Log-softmax and loss are fp32 whatever the logits are (fp64 stays fp64). With the weight inside, every later reduction of
the loss and of every gradient, on every axis, is a plain sum. Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..batch import IGNORE, Batch
from ..comm.collectives import all_reduce
from ..comm.world import Group


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, group: Group) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        local = targets - start
        elsewhere = (local < 0) | (local >= wide.shape[-1])
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        highest = wide.amax(-1)
        all_reduce(highest, group, why="loss: maximum", op="max")
        targeted = (wide.gather(-1, local).squeeze(-1) - highest).masked_fill(elsewhere, 0)
        exponentials = (wide - highest.unsqueeze(-1)).exp_()
        sums = torch.stack((exponentials.sum(-1), targeted))
        all_reduce(sums, group, why="loss: sums")
        trained = targets != IGNORE
        ctx.save_for_backward(exponentials, sums[0], local, elsewhere, trained)
        ctx.dtype, ctx.spent = logits.dtype, False
        return ((sums[0].log() - sums[1]) * trained).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, total, local, elsewhere, trained = ctx.saved_tensors
        assert not ctx.spent, "a loss goes backward once: its gradient is made where its exponentials were"
        ctx.spent = True
        weight = (trained * grads[0]).to(total.dtype)
        gradient = exponentials.mul_((weight / total).unsqueeze(-1))
        gradient.scatter_add_(-1, local, (-weight).masked_fill(elsewhere, 0).unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None, None


def only(batch: Batch, received: Tensor | None) -> Tensor:
    """The body of a stage that has nothing but the loss: the logits as they came."""
    assert received is not None
    return received


def cross_entropy(logits: Tensor, targets: Tensor, group: Group, *, start: int) -> Tensor:
    """Sum of the cross entropy of the trained targets: logits [..., V/t] hold vocabulary rows from `start`, targets [...]
    count in the whole vocabulary and may be IGNORE. The same scalar on every rank of the group."""
    return _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), start, group)  # type: ignore[no-any-return]
