"""How far a layout may lie from the reference at each place, wide and as shipped.

Wide, the bound is a number, 1e-9 of the largest magnitude, where right layouts lie near 1e-13.

As shipped, rounding decides how far two right ways to compute the same lie apart, and the bound is measured: the
reference takes its step again a few times, every module's output and the gradient that comes back to it off by what
rounding there may be. A layout may lie ALLOWANCE times as far off as the furthest of these runs, and always by what its
type does not tell apart.

Both allow CANCELLED roundings of the largest of its quantity: a tensor may be zero only because terms cancel.

AdamW divides a gradient by its own magnitude: in the first step a weight moves by lr, however small its gradient, and in
proportion below 1e-8. So what rounding leaves of a zero gradient moves weights. They have a `slack`, element by element,
by which they may be off beyond the bound: wide that small movement, as shipped any where the gradient is within its bound
of zero. The other elements must agree to a few roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from .places import EXACT, WORDS, Place

RELATIVE, ABSOLUTE = 1e-9, 1e-14
"""Wide: |d| <= RELATIVE x max |reference| + ABSOLUTE."""
GIVEN = ("initial weight", "lr")
"""What layout and reference both start from: the same bits."""
DISTURBED = 6
"""Runs of the disturbed loop."""
ALLOWANCE = 3.0
"""Times the furthest of them."""
CANCELLED = 4
EPSILON = 1e-8
"""AdamW's."""
FEW = 64
"""A deviation that is the largest of fewer draws than this (runs x elements) may be small by chance: it counts twice."""
ROUNDED = {torch.float32: 2, torch.bfloat16: 1, torch.float16: 1}
"""By how many roundings one module is off: in fp32 the sums inside it round too, in bf16 and fp16 they are fp32 and only
what leaves it is rounded."""
ALWAYS = 32 * torch.finfo(torch.float32).eps
"""Share of the largest magnitude by which a tensor of fp32 may always depart; one of bf16 or fp16 by one rounding of its
own."""
UPDATED = ("weight", "published weight")


def wide_bounds(record: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, float]:
    """The bound of every place of a step; `before` is the slack of the weights that it begins with, in proportion to
    which all that is computed with them may be off. A frozen weight is the same bits."""
    zero = _zero(record, torch.float64)
    relative = RELATIVE + max(map(largest, before.values()), default=0.0)
    return {
        key: _exact(key, relative * largest(record[key]) + ABSOLUTE + zero[Place.of(0, key).quantity], record)
        for key in _places(record)
    }


def wide_slack(record: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The slack of every part's weight after a step, by part: how far lr g / (|g| + EPSILON) moves when g is off by what
    rounding leaves of zero. `before` is that of the step before."""
    slack: dict[str, Tensor] = {}
    zero = _zero(record, torch.float64).get("clipped gradient", 0.0)
    for key in _places(record):
        place = Place.of(0, key)
        if place.quantity == "clipped gradient":
            moved = float(record[Place(0, "lr").key]) * zero * EPSILON / (record[key].abs() + EPSILON).square()
            moved = torch.where(moved > ABSOLUTE, moved, 0.0)
            slack[place.name] = before[place.name] + moved if place.name in before else moved
    return slack


class Rounding:
    """The bounds of one step as shipped: `learn` from each disturbed run's record, then ask for `bounds`."""

    def __init__(self, record: Mapping[str, Tensor]) -> None:
        self._record = record
        self._apart = {key: torch.zeros(record[key].shape, dtype=torch.float64) for key in _places(record)}

    def learn(self, run: Mapping[str, Tensor]) -> None:
        for key, furthest in self._apart.items():
            apart = (run[key].double() - self._record[key].double()).abs()
            torch.maximum(furthest, apart.nan_to_num(nan=torch.inf), out=furthest)

    def bounds(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """The bound of every place, and by part the slack of its weight."""
        zero = _zero(self._record, torch.float32)
        bounds: dict[str, float] = {}
        slack: dict[str, Tensor] = {}
        for key, apart in self._apart.items():
            place, value = Place.of(0, key), self._record[key]
            if place.name in slack and place.quantity in UPDATED:
                apart = apart[slack[place.name] == 0]
            allowance = ALLOWANCE * (2 if value.numel() * DISTURBED < FEW else 1)
            type_allows = max(ALWAYS, torch.finfo(value.dtype).eps) if value.is_floating_point() else 0.0
            within = max(allowance * largest(apart), type_allows * largest(value), zero[place.quantity]) + ABSOLUTE
            bounds[key] = _exact(key, within, self._record)
            if place.quantity == "clipped gradient":
                slack[place.name] = torch.where(value.abs() > within, 0.0, torch.inf)
        return bounds, slack


def _zero(record: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """By quantity: up to where a tensor may be nothing but what rounding leaves of terms that cancel."""
    found: dict[str, float] = {}
    for key in _places(record):
        quantity = Place.of(0, key).quantity
        found[quantity] = max(found.get(quantity, 0.0), CANCELLED * torch.finfo(dtype).eps * largest(record[key]))
    return found


def largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _places(record: Mapping[str, Tensor]) -> Iterator[str]:
    """The keys that are places of a layout, in order; a record may hold other things."""
    return (key for key in record if Place.of(0, key).quantity in WORDS)


def _exact(key: str, bound: float, record: Mapping[str, Tensor]) -> float:
    place = Place.of(0, key)
    frozen = place.quantity == "published weight" and Place(0, "weight", place.name).key not in record
    return 0.0 if frozen or place.quantity in (*EXACT, *GIVEN) else bound


def disturb(whole: nn.Module, dtype: torch.dtype, seed: int, *, sums: torch.dtype) -> Callable[[Tensor], Tensor]:
    """From now on every module's output, and the gradient that comes back to it, is off by up to ROUNDED roundings of
    `dtype`, of its own magnitude and of its row's mean (partial sums are as large as their parts; zeros stay), and of the
    smallest numbers that the type has. What it returns does the same to a microbatch's gradient, with the roundings of
    `sums`, the narrowest type in which gradients are added up, where that is narrower than fp32."""
    generator = torch.Generator().manual_seed(seed)

    def disturbed(x: Tensor, type_: torch.dtype, roundings: int) -> Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        draw = torch.rand(x.shape, generator=generator, dtype=torch.float32) * 2 - 1
        size, limits = wide.detach().abs(), torch.finfo(type_)
        steps = (size + size.mean(-1, keepdim=True)) * (roundings * limits.eps) + limits.smallest_normal * limits.eps
        return (wide + steps / 2 * draw).to(x.dtype)

    def hook(module: nn.Module, args: object, output: object) -> object:
        if not isinstance(output, Tensor):  # a router's choice of experts and their weights
            return output
        off = disturbed(output, dtype, ROUNDED[dtype])
        if off.requires_grad:
            off.register_hook(lambda gradient: disturbed(gradient, dtype, ROUNDED[dtype]))
        return off

    for module in whole.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(hook)
    if torch.finfo(sums).eps <= torch.finfo(torch.float32).eps:
        return lambda gradient: gradient
    return lambda gradient: disturbed(gradient.float(), sums, 1)
