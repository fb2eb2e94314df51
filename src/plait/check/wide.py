"""Computes wide: inside `wide()` every request for fp32 becomes one for fp64.

transformers drops to fp32 inside (norms, rotary tables, routers, soft-max), so fp64 weights alone leave noise of 1e-9 to
1e-7 that hides small faults. With those requests widened on both sides, layout and reference agree to about 1e-14, and a
wrong factor stands out however small its effect on the loss.

    x.float(), x.to(torch.float32), softmax(x, dtype=torch.float)      the request is changed
    torch.ones(n), int / int                                           the default dtype is fp64
    loss.backward(): recomputed blocks, hooks, custom functions        the engine runs inside the mode too
    grouped_mm(x, experts)                                             one product a group: torch has no fp64 kernel

What is fp32 already stays so (a weight or a buffer of a model that was built outside): build, too, inside `wide()`. The
default dtype is the whole process's, so only one thread may compute meanwhile. `torch.finfo(torch.float32)` is a number
and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDER: dict[Any, Any] = {
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.FloatTensor: torch.DoubleTensor,
    torch.cuda.FloatTensor: torch.cuda.DoubleTensor,  # type: ignore[attr-defined]
    "torch.FloatTensor": "torch.DoubleTensor",
    "torch.cuda.FloatTensor": "torch.cuda.DoubleTensor",
}


def _widen(value: Any) -> Any:
    is_name = isinstance(value, torch.dtype | str | type(torch.FloatTensor))
    return _WIDER.get(value, value) if is_name else value


def _never(*args: Any) -> bool:
    return False


def _asking_no_mode(function: Any) -> Callable[..., Any]:
    """`function` of torch as it is written, but it does not ask whether a mode would take its place.

    A mode is switched off while it handles a call, and all of backward is one call. It has to be on when the engine
    starts, or whatever Python runs in there would compute in fp32; but then torch would hand the call to the mode again.
    """
    scope = {**function.__globals__, "has_torch_function": _never, "has_torch_function_unary": _never}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_BACKWARD = {
    function: _asking_no_mode(function)
    for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


def _product_by_group(x: Tensor, weights: Tensor, offs: Tensor | None = None, **other: Any) -> Tensor:
    """x [rows, in], weights [groups, in, out] -> [rows, out]; group g takes rows offs[g - 1] to offs[g], and the rest
    belong to no one."""
    if x.dim() != 2 or weights.dim() != 3 or offs is None or any(value is not None for value in other.values()):
        raise NotImplementedError("a grouped product other than [rows, in] x [groups, in, out] is not widened")
    stops = offs.tolist()
    pieces = [x[start:stop] @ weight for start, stop, weight in zip([0, *stops], stops, weights, strict=False)]
    rest = x.new_zeros(len(x) - stops[-1], weights.shape[2])
    return torch.cat([*pieces, rest])


_GROUPED = tuple(
    getattr(place, name)
    for place, name in ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm"))
    if hasattr(place, name)
)


class wide(TorchFunctionMode):
    """Used like a function: `with wide(): ...`. It may be entered inside itself."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[torch.dtype] = []

    def __enter__(self) -> Self:
        self._found.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._found.pop())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = {key: _widen(value) for key, value in (kwargs or {}).items()}
        if func in _BACKWARD:
            with self:
                return _BACKWARD[func](*args, **named)
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args, **named)
        if func in _GROUPED and args[0].dtype is torch.float64:
            return _product_by_group(*args, **named)
        return func(*map(_widen, args), **named)
