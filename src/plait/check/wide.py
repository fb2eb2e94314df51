"""Computes wide: inside `wide()` every request for fp32 becomes one for fp64.

transformers drops to fp32 inside (norms, rotary tables, soft-max), so fp64 weights alone leave noise near 1e-9 that hides
small faults. With those requests widened on both sides, layout and reference agree to about 1e-12, and a wrong factor
stands out however small its effect on the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NAMES = {"torch.FloatTensor": "torch.DoubleTensor", "torch.cuda.FloatTensor": "torch.cuda.DoubleTensor"}


def _widen(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return _NAMES.get(value, value) if isinstance(value, str) else value


class wide(TorchFunctionMode):
    """Used like a function: `with wide(): ...`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(_widen, args), **{key: _widen(value) for key, value in (kwargs or {}).items()})
