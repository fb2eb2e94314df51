"""Tensor parallelism: layers cut over tp, carried out on plain tensors.

    colwise            x whole -> copy -> x Wᵀ[own rows]            output cut in its last dim
    rowwise            x cut -> x Wᵀ[own columns] -> sum (+ bias)   output whole
    rowwise_split_input   x whole -> own slice -> rowwise
    colwise_gather_output   colwise -> gather                    output whole
    embedding_rowwise  tokens -> rows of the own slice, 0 elsewhere -> sum
    embedding_colwise  tokens -> own columns of their rows -> gather
    mla_kv_a_proj      x whole -> x Wᵀ -> latent | turned -> gradient of what is turned summed
    moe_tp_experts     x whole -> copy -> every expert's own columns and rows -> sum

A module keeps its class and its parameters (the local slices); only its instance's forward is replaced. Which dims are
cut is design/styles.py's; which slice is design/layout.py's. Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...design.styles import Style
from ..comm import differentiable
from ..comm.world import Group

Forward = Callable[[Tensor], Tensor]
Change = Callable[[Tensor], Tensor]


class Multiply(Protocol):
    """x Wᵀ + b, or x W + b when `transposed`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor: ...


def product(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    """What autograd knows."""
    return F.linear(x, weight.t() if transposed else weight, bias)


class SharedInput:
    """`copy` for the modules of one stage. Modules that read the same tensor one after the other (q, k, v) get the same
    copy, so that their input gradients are added first and summed over tp once; `meanwhile` is called while they are."""

    def __init__(self, group: Group, meanwhile: Callable[[], None] | None = None) -> None:
        self._group, self._meanwhile = group, meanwhile
        self._seen: weakref.ref[Tensor] | None = None
        self._version = (0, True)
        self._copy: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        # A copy made where there is no graph (in attention that backward runs again) is none for who has one.
        version = (x._version, torch.is_grad_enabled())
        if self._copy is None or self._seen is None or self._seen() is not x or self._version != version:
            self._copy = differentiable.copy(
                x, self._group, why="column-parallel input gradient", meanwhile=self._meanwhile
            )
            self._seen, self._version = weakref.ref(x), version
        return self._copy

    def forget(self) -> None:
        """Lets go of the last tensor."""
        self._seen = self._copy = None


def split(
    module: nn.Module, row: Style, group: Group, *, enter: Change, add: Change | None, start: int,
    sizes: Sequence[int] | None, transposed: bool, multiply: Multiply,
    copies: Callable[[nn.Parameter], Tensor] | None = None, turned: int = 0,
) -> None:  # fmt: skip
    """Replaces the forward of `module`, whose parameters are (or will be) this rank's slices. `enter` is done to what a
    style copies in (SharedInput), `add` to partial sums (None: they are summed over tp); `start` is the first row of an
    embedding's slice; `sizes` how long each rank's slice is of an output that the style gathers (None: it stays cut), or
    of an input that it slices; `transposed` whether the weight is [in, out]; `multiply` what a linear layer multiplies by
    (split_backward.py's, or `product`); `copies`, where other ranks have copies of parts of a fused weight, sees to it
    that those get the sum of their gradients; `turned` says how many of its last columns each rank's own heads read."""

    def summed(x: Tensor) -> Tensor:
        return differentiable.sum(x, group, why="row-parallel output")

    forward: Callable[..., Tensor]
    if isinstance(module, nn.Embedding):
        forward = _columns(module, group, sizes) if row.leave == "gather" else _embedding(module, summed, start)
    elif row.cuts == "both":
        forward = _experts(module, group, enter, add or summed)
    else:
        forward = _linear(
            module, row, group, enter, add or summed, sizes, transposed, multiply, copies or _weight, turned
        )
    module.forward = forward


def sum_copies(parameter: nn.Parameter, *, group: Group, spans: Sequence[tuple[int, int]], transposed: bool) -> Tensor:
    """A fused weight, or its bias, of which the ranks of a group have copies of some spans of the output dim."""
    dim = parameter.dim() - 1 if transposed else 0
    return differentiable.copies(parameter, group, dim, spans, why="gradient of shared keys and values")


def as_it_is(x: Tensor) -> Tensor:
    return x


def _weight(parameter: nn.Parameter) -> Tensor:
    return parameter


def _linear(
    module: nn.Module, row: Style, group: Group, enter: Change, add: Change, sizes: Sequence[int] | None,
    transposed: bool, multiply: Multiply, copies: Callable[[nn.Parameter], Tensor], turned: int,
) -> Forward:  # fmt: skip
    def forward(x: Tensor) -> Tensor:
        weight = copies(module.weight)  # type: ignore[arg-type]
        bias = None if module.bias is None else copies(module.bias)  # type: ignore[arg-type]
        if row.enter == "copy":
            x = enter(x)
        elif row.enter == "slice" and sizes is not None:
            x = differentiable.slice(x, group, sizes, why="row-parallel input gradient")
        if row.leave == "sum":
            # The bias is whole on every rank: added after the sum, once.
            y = add(multiply(x, weight, None, transposed=transposed))
            return y if bias is None else y + bias
        y = multiply(x, weight, bias, transposed=transposed)
        if row.leave == "gather" and sizes is not None:
            y = differentiable.gather(y, group, sizes, why="column-parallel output")
        elif row.leave == "turned":
            y = differentiable.copy_last(y, turned, group, why="shared keys' gradient")
        return y

    return forward


def _experts(module: nn.Module, group: Group, enter: Change, add: Change) -> Callable[..., Tensor]:
    """A stack of experts, each cut by width: forward(x, chosen experts, their weights). What a rank's slices make of a
    token is a part of the sum, and so is the gradient of the weight that the token was routed with."""
    whole = module.forward

    def weights(t: Tensor) -> Tensor:
        # Summed in fp32 or wider, whatever type the router leaves them in.
        summed = t.to(torch.promote_types(t.dtype, torch.float32))
        return differentiable.copy(summed, group, why="routing weights' gradient").to(t.dtype)

    def forward(x: Tensor, *routing: Tensor) -> Tensor:
        return add(whole(enter(x), *[weights(t) if t.is_floating_point() else t for t in routing]))

    return forward


def _embedding(module: nn.Embedding, summed: Change, start: int) -> Forward:
    # Its class's own: some scale what they look up.
    lookup, padding = module.forward, module.padding_idx

    def forward(tokens: Tensor) -> Tensor:
        local, rows = tokens - start, module.weight.shape[0]
        elsewhere = (local < 0) | (local >= rows)
        # The padding token's row gets no gradient, on the rank that holds it.
        module.padding_idx = padding - start if padding is not None and 0 <= padding - start < rows else None
        found = lookup(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
        return summed(found)

    return forward


def _columns(module: nn.Embedding, group: Group, sizes: Sequence[int] | None) -> Forward:
    lookup = module.forward

    def forward(tokens: Tensor) -> Tensor:
        found = lookup(tokens)
        return found if sizes is None else differentiable.gather(found, group, sizes, why="column-parallel output")

    return forward
