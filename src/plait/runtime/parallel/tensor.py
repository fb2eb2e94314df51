"""Tensor parallelism: layers cut over tp, carried out on plain tensors.

    colwise            x whole -> copy -> x Wᵀ[own rows]            output cut in its last dim
    rowwise            x cut -> x Wᵀ[own columns] -> sum (+ bias)   output whole
    embedding_rowwise  tokens -> rows of the own slice, 0 elsewhere -> sum

A module keeps its class and its parameters (the local slices); only its instance's forward is replaced. Which dims are
cut is design/styles.py's; which slice is design/layout.py's. Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from ...design.styles import Style
from ..comm import differentiable
from ..comm.world import Group

Forward = Callable[[Tensor], Tensor]


class SharedInput:
    """`copy` for the modules of one stage. Modules that read the same tensor one after the other (q, k, v) get the same
    copy, so that their input gradients are added first and summed over tp once."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._seen: weakref.ref[Tensor] | None = None
        self._version = 0
        self._copy: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._copy is None or self._seen is None or self._seen() is not x or self._version != x._version:
            self._copy = differentiable.copy(x, self._group, why="column-parallel input gradient")
            self._seen, self._version = weakref.ref(x), x._version
        return self._copy

    def forget(self) -> None:
        """Lets go of the last tensor."""
        self._seen = self._copy = None


def split(module: nn.Module, row: Style, group: Group, shared: SharedInput, *, start: int, gather: bool) -> None:
    """Replaces the forward of `module`, whose parameters are already this rank's slices. `start` is the first row of an
    embedding's slice; `gather` whether a style that gathers its output does so here."""
    if isinstance(module, nn.Embedding):
        forward = _embedding(module, group, start)
    else:
        forward = _linear(module, row, group, shared, gather)
    module.forward = forward


def _linear(module: nn.Module, row: Style, group: Group, shared: SharedInput, gather: bool) -> Forward:
    def forward(x: Tensor) -> Tensor:
        weight: Tensor = module.weight  # type: ignore[assignment]
        bias: Tensor | None = module.bias  # type: ignore[assignment]
        if row.enter == "copy":
            x = shared(x)
        if row.leave == "sum":
            # The bias is whole on every rank: added after the sum, once.
            y = differentiable.sum(F.linear(x, weight), group, why="row-parallel output")
            return y if bias is None else y + bias
        y = F.linear(x, weight, bias)
        if row.leave == "gather" and gather:
            y = differentiable.gather(y, group, why="column-parallel output")
        return y

    return forward


def _embedding(module: nn.Embedding, group: Group, start: int) -> Forward:
    padding = None if module.padding_idx is None else module.padding_idx - start

    def forward(tokens: Tensor) -> Tensor:
        local = tokens - start
        elsewhere = (local < 0) | (local >= module.weight.shape[0])
        # The padding token's row gets no gradient, on the rank that holds it.
        own = padding if padding is not None and 0 <= padding < module.weight.shape[0] else None
        rows = F.embedding(local.masked_fill(elsewhere, 0), module.weight, padding_idx=own)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        return differentiable.sum(rows, group, why="row-parallel output")

    return forward
