"""Frozen parameters: used going forward and back, and left as they are.

    frozen   frozen   trained   frozen   head          forward: all; without a graph up to the first that trains
                      |-- backward comes so far --|    through frozen blocks too, whose weights get no gradient

Autograd needs no more than to be told which parameters want no gradient. Backward would end somewhere inside of the first
block that trains anything, wherever its first trained weight stands; here it ends at that block's input, which is asked
for a gradient that nobody reads: so that it is said in a word how far backward comes (design/sharding.py), and a block is
recomputed whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """No gradient is computed for these, or kept."""
    for parameter in parameters:
        parameter.requires_grad_(False)


def begin(block: nn.Module) -> None:
    """From now on backward comes to the input of `block`: its first argument, or hidden_states."""

    def before(
        module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_wanted(args[0]), *args[1:]), named
        return args, {**named, "hidden_states": _wanted(named["hidden_states"])}

    block.register_forward_pre_hook(before, with_kwargs=True)


def _wanted(hidden: Tensor) -> Tensor:
    if hidden.requires_grad or not torch.is_grad_enabled() or not hidden.is_floating_point():
        return hidden
    return hidden.detach().requires_grad_()
