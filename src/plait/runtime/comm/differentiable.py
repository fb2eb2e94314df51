"""Collectives with gradients: each is one of a pair, the backward of one being the forward of the other.

    copy     forward identity         backward sum          into a layer whose output dim is cut   (Megatron's f)
    sum      forward sum              backward identity     out of a layer whose input dim is cut  (Megatron's g)
    gather   forward gather last dim  backward own slice    out of a layer whose output is wanted whole
    scatter  forward sum to own tokens    backward gather              out of a branch, with sp
    join     forward gather of tokens     backward sum to own tokens   into a branch, with sp
    take     forward own tokens           backward gather              into the first block
    give     forward gather of tokens     backward own tokens          out of the last block
    copies   forward identity         backward sum of some  a weight of which ranks have copies of a part
    slice    forward own slice        backward gather       into a layer whose input dim is cut, of what is whole

Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .collectives import (
    Handle,
    all_gather_slices,
    all_reduced,
    gather_tokens,
    scatter_tokens,
    start_all_reduced,
    start_scatter_tokens,
)
from .world import Group

Meanwhile = Callable[[], None] | None
"""What there is to do while a gradient is summed."""


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, why: str, meanwhile: Meanwhile) -> Tensor:
        ctx.group, ctx.why, ctx.meanwhile = group, why, meanwhile
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        summed, handle = start_all_reduced(grads[0], ctx.group, why=ctx.why)
        _under_way(handle, ctx)
        return summed, None, None, None


def _under_way(handle: Handle, ctx: Any) -> None:
    """Does what there is to do while a call is under way, and waits for it."""
    if ctx.meanwhile is not None:
        ctx.meanwhile()
    since = ctx.group.ledger.now()
    handle.wait()
    ctx.group.ledger.waited(ctx.group.axis, ctx.why, since)


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, why: str) -> Tensor:
        return all_reduced(x, group, why=why)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: Sequence[int], why: str) -> Tensor:
        ctx.start, ctx.width = builtins.sum(sizes[: group.index]), sizes[group.index]
        return all_gather_slices(x, group, sizes, why=why)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].narrow(-1, ctx.start, ctx.width), None, None, None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: Sequence[int], why: str) -> Tensor:
        ctx.group, ctx.sizes, ctx.why = group, sizes, why
        return x.narrow(-1, builtins.sum(sizes[: group.index]), sizes[group.index])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather_slices(grads[0], ctx.group, ctx.sizes, why=ctx.why), None, None, None


class _Copies(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, spans: Sequence[tuple[int, int]], why: str) -> Tensor:
        ctx.group, ctx.dim, ctx.spans, ctx.why = group, dim, spans, why
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        whole = grads[0].clone()
        slices = [whole.narrow(ctx.dim, start, stop - start) for start, stop in ctx.spans]
        summed = all_reduced(torch.cat(slices, ctx.dim), ctx.group, why=ctx.why)
        for mine, found in zip(slices, summed.split([one.shape[ctx.dim] for one in slices], ctx.dim), strict=True):
            mine.copy_(found)
        return whole, None, None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: Sequence[int], why: str, back: str) -> Tensor:
        ctx.group, ctx.sizes, ctx.why = group, sizes, back
        return scatter_tokens(x, group, sizes, why=why)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gather_tokens(grads[0], ctx.group, ctx.sizes, why=ctx.why), None, None, None, None


class _Join(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sizes: Sequence[int], why: str, back: str, meanwhile: Meanwhile
    ) -> Tensor:
        ctx.group, ctx.sizes, ctx.why, ctx.meanwhile = group, sizes, back, meanwhile
        return gather_tokens(x, group, sizes, why=why)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        own, handle = start_scatter_tokens(grads[0], ctx.group, ctx.sizes, why=ctx.why)
        _under_way(handle, ctx)
        return own, None, None, None, None, None


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: Sequence[int], why: str) -> Tensor:
        ctx.group, ctx.sizes, ctx.why = group, sizes, why
        own: Tensor = x.split(list(sizes), 1)[group.index]
        # Of one row it would be a view, which keeps the whole.
        return own.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_tokens(grads[0], ctx.group, ctx.sizes, why=ctx.why), None, None, None


class _Give(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: Sequence[int], why: str) -> Tensor:
        ctx.index, ctx.sizes = group.index, sizes
        return gather_tokens(x, group, sizes, why=why)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].split(list(ctx.sizes), 1)[ctx.index], None, None, None


class _Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.counts = group.index == 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] if ctx.counts else torch.zeros_like(grads[0]), None


def scatter(x: Tensor, group: Group, sizes: Sequence[int], *, why: str, back: str) -> Tensor:
    """Partial sums [b, s, h] become the own tokens of the sum, [b, sizes[i], h]."""
    return _Scatter.apply(x, group, sizes, why, back)  # type: ignore[no-any-return]


def join(x: Tensor, group: Group, sizes: Sequence[int], *, why: str, back: str, meanwhile: Meanwhile = None) -> Tensor:
    """Own tokens become whole rows, of which each rank makes a part of what follows: gradients are summed, and
    `meanwhile` is called while they are."""
    return _Join.apply(x, group, sizes, why, back, meanwhile)  # type: ignore[no-any-return]


def take(x: Tensor, group: Group, sizes: Sequence[int], *, why: str) -> Tensor:
    """Of whole rows, the same on every rank, the own tokens."""
    return _Take.apply(x, group, sizes, why)  # type: ignore[no-any-return]


def give(x: Tensor, group: Group, sizes: Sequence[int], *, why: str) -> Tensor:
    """Own tokens become whole rows, with which every rank does the same."""
    return _Give.apply(x, group, sizes, why)  # type: ignore[no-any-return]


def once(x: Tensor, group: Group) -> Tensor:
    """What every rank does the same with, where gradients will be summed: that of the first counts."""
    return _Once.apply(x, group)  # type: ignore[no-any-return]


def copy(x: Tensor, group: Group, *, why: str, meanwhile: Meanwhile = None) -> Tensor:
    """Whole on every rank, used by each for its slice: the gradients of the slices are summed, and `meanwhile` is called
    while they are."""
    return x if group.transport is None else _Copy.apply(x, group, why, meanwhile)


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


def gather(x: Tensor, group: Group, sizes: Sequence[int], *, why: str) -> Tensor:
    """Slices of the last dim, so long on each rank, become the whole on every rank. What follows must be the same on all
    ranks: each keeps its own slice of the gradient."""
    return x if group.transport is None else _Gather.apply(x, group, sizes, why)


def copies(x: Tensor, group: Group, dim: int, spans: Sequence[tuple[int, int]], *, why: str) -> Tensor:
    """Of a weight of which ranks have copies of some `spans` of a dim: the gradients of the copies are summed."""
    return x if group.transport is None else _Copies.apply(x, group, dim, spans, why)


def slice(x: Tensor, group: Group, sizes: Sequence[int], *, why: str) -> Tensor:
    """Whole on every rank, of which each uses its slice of the last dim, so long on each: the gradients of the slices are
    gathered, so that what comes before does the same work on all ranks."""
    return x if group.transport is None else _Slice.apply(x, group, sizes, why)
