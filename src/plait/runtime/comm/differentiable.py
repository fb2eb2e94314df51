"""Collectives with gradients: each is one of a pair, the backward of one being the forward of the other.

    copy     forward identity         backward sum          into a layer whose output dim is cut   (Megatron's f)
    sum      forward sum              backward identity     out of a layer whose input dim is cut  (Megatron's g)
    gather   forward gather last dim  backward own slice    out of a layer whose output is wanted whole
    slice    forward own slice        backward gather       into a layer whose input dim is cut, of what is whole

Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .collectives import all_gather, all_reduced
from .world import Group


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, why: str) -> Tensor:
        ctx.group, ctx.why = group, why
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_reduced(grads[0], ctx.group, why=ctx.why), None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, why: str) -> Tensor:
        return all_reduced(x, group, why=why)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, why: str) -> Tensor:
        ctx.index, ctx.width = group.index, x.shape[-1]
        return torch.cat(all_gather(x, group, why=why).unbind(0), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(-1, ctx.index * ctx.width, ctx.width), None, None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, why: str) -> Tensor:
        ctx.group, ctx.why = group, why
        width = x.shape[-1] // group.size
        return x.narrow(-1, group.index * width, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(all_gather(grads[0].contiguous(), ctx.group, why=ctx.why).unbind(0), dim=-1), None, None


def copy(x: Tensor, group: Group, *, why: str) -> Tensor:
    """Whole on every rank, used by each for its slice: the gradients of the slices are summed."""
    return x if group.transport is None else _Copy.apply(x, group, why)


def copy_last(x: Tensor, columns: int, group: Group, *, why: str) -> Tensor:
    """The same for the last `columns` of x alone. The sum is taken when the gradient of x itself arrives, so that whoever
    listens to x sees it whole."""
    if group.transport is None or not x.requires_grad:
        return x

    def arrive(gradient: Tensor) -> Tensor:
        rest, last = gradient.split((gradient.shape[-1] - columns, columns), -1)
        return torch.cat((rest, all_reduced(last.contiguous(), group, why=why)), -1)

    x.register_hook(arrive)
    return x


def sum(x: Tensor, group: Group, *, why: str) -> Tensor:
    """A partial sum on every rank becomes the whole sum on all; the result may share nothing with x."""
    return x if group.transport is None else _Sum.apply(x, group, why)


def gather(x: Tensor, group: Group, *, why: str) -> Tensor:
    """Equal slices of the last dim become the whole on every rank. What follows must be the same on all ranks: each
    keeps its own slice of the gradient."""
    return x if group.transport is None else _Gather.apply(x, group, why)


def slice(x: Tensor, group: Group, *, why: str) -> Tensor:
    """Whole on every rank, of which each uses its equal slice of the last dim: the gradients of the slices are gathered,
    so that what comes before does the same work on all ranks."""
    return x if group.transport is None else _Slice.apply(x, group, why)
