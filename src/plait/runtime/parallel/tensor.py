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
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...design.styles import Style
from ..comm import differentiable
from ..comm.world import Group

Forward = Callable[[Tensor], Tensor]


class Multiply(Protocol):
    """x Wᵀ + b, or x W + b when `transposed`."""

    def __call__(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, *, transposed: bool) -> Tensor: ...


def product(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, *, transposed: bool) -> Tensor:
    """What autograd knows."""
    return F.linear(x, weight.t() if transposed else weight, bias)


class SharedInput:
    """`copy` for the modules of one stage. Modules that read the same tensor one after the other (q, k, v) get the same
    copy, so that their input gradients are added first and summed over tp once."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._seen: weakref.ref[Tensor] | None = None
        self._version = (0, True)
        self._copy: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        # A copy made where there is no graph (in attention that backward runs again) is none for who has one.
        version = (x._version, torch.is_grad_enabled())
        if self._copy is None or self._seen is None or self._seen() is not x or self._version != version:
            self._copy = differentiable.copy(x, self._group, why="column-parallel input gradient")
            self._seen, self._version = weakref.ref(x), version
        return self._copy

    def forget(self) -> None:
        """Lets go of the last tensor."""
        self._seen = self._copy = None


def split(
    module: nn.Module, row: Style, group: Group, shared: SharedInput, *, start: int, gather: bool, transposed: bool,
    multiply: Multiply, turned: int = 0,
) -> None:  # fmt: skip
    """Replaces the forward of `module`, whose parameters are (or will be) this rank's slices. `start` is the first row of
    an embedding's slice; `gather` whether a style that gathers its output does so here; `transposed` whether the weight
    is [in, out]; `multiply` what a linear layer multiplies by (split_backward.py's, or `product`); `turned` how many of
    its last columns each rank's own heads read."""
    forward: Callable[..., Tensor]
    if isinstance(module, nn.Embedding):
        forward = _columns(module, group) if row.leave == "gather" else _embedding(module, group, start)
    elif row.cuts == "both":
        forward = _experts(module, group, shared)
    else:
        forward = _linear(module, row, group, shared, gather, transposed, multiply, turned)
    module.forward = forward


def _linear(
    module: nn.Module, row: Style, group: Group, shared: SharedInput, gather: bool, transposed: bool, multiply: Multiply,
    turned: int,
) -> Forward:  # fmt: skip
    def forward(x: Tensor) -> Tensor:
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        bias: nn.Parameter | None = module.bias  # type: ignore[assignment]
        if row.enter == "copy":
            x = shared(x)
        elif row.enter == "slice":
            x = differentiable.slice(x, group, why="row-parallel input gradient")
        if row.leave == "sum":
            # The bias is whole on every rank: added after the sum, once.
            y = differentiable.sum(multiply(x, weight, None, transposed=transposed), group, why="row-parallel output")
            return y if bias is None else y + bias
        y = multiply(x, weight, bias, transposed=transposed)
        if row.leave == "gather" and gather:
            y = differentiable.gather(y, group, why="column-parallel output")
        elif row.leave == "turned":
            y = differentiable.copy_last(y, turned, group, why="shared keys' gradient")
        return y

    return forward


def _experts(module: nn.Module, group: Group, shared: SharedInput) -> Callable[..., Tensor]:
    """A stack of experts, each cut by width: forward(x, chosen experts, their weights). What a rank's slices make of a
    token is a part of the sum, and so is the gradient of the weight that the token was routed with."""
    whole = module.forward

    def weights(t: Tensor) -> Tensor:
        # Summed in fp32 or wider, whatever type the router leaves them in.
        summed = t.to(torch.promote_types(t.dtype, torch.float32))
        return differentiable.copy(summed, group, why="routing weights' gradient").to(t.dtype)

    def forward(x: Tensor, *routing: Tensor) -> Tensor:
        copies = [weights(t) if t.is_floating_point() else t for t in routing]
        return differentiable.sum(whole(shared(x), *copies), group, why="row-parallel output")

    return forward


def _embedding(module: nn.Embedding, group: Group, start: int) -> Forward:
    # Its class's own: some scale what they look up.
    lookup, padding = module.forward, module.padding_idx

    def forward(tokens: Tensor) -> Tensor:
        local, rows = tokens - start, module.weight.shape[0]
        elsewhere = (local < 0) | (local >= rows)
        # The padding token's row gets no gradient, on the rank that holds it.
        module.padding_idx = padding - start if padding is not None and 0 <= padding - start < rows else None
        found = lookup(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
        return differentiable.sum(found, group, why="row-parallel output")

    return forward


def _columns(module: nn.Embedding, group: Group) -> Forward:
    lookup = module.forward

    def forward(tokens: Tensor) -> Tensor:
        return differentiable.gather(lookup(tokens), group, why="column-parallel output")

    return forward
