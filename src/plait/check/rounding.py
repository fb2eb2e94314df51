"""How far a layout may lie from the reference at each place, wide and as shipped.

Wide, the bound is a number, 1e-9 of the largest magnitude, where right layouts lie near 1e-13.

As shipped, rounding decides how far two right ways to compute the same lie apart, and the bound is measured: the
reference takes its step again a few times, every module's output and the gradient that comes back to it off by what
rounding there may be. A layout may lie ALLOWANCE times as far off as the furthest of these runs; and always by what its
type does not tell apart, and by one rounding of the largest of its quantity: a tensor may be zero only because terms
cancel.

AdamW divides a gradient by its own magnitude: in the first step a weight moves by lr, however small its gradient, and
where that is within its bound of zero rounding decides which way. As shipped those elements of a weight are not compared.
The others are `settled`, and must agree to a few roundings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
FEW = 64
"""A deviation that is the largest of fewer draws than this (runs x elements) may be small by chance: it counts twice."""
ROUNDED = {torch.float32: 2, torch.bfloat16: 1}
"""By how many roundings one module is off: in fp32 the sums inside it round too, in bf16 they are fp32 and only what
leaves it is rounded."""
ROUNDING = torch.finfo(torch.float32).eps
ALWAYS = 32 * ROUNDING
"""Share of the largest magnitude by which a tensor of fp32 may always depart; one of bf16 by one rounding of bf16."""
UPDATED = ("weight", "published weight")


def wide_bounds(record: Mapping[str, Tensor]) -> dict[str, float]:
    return {key: _exact(key, RELATIVE * largest(record[key]) + ABSOLUTE) for key in _places(record)}


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
        """The bound of every place, and by part which elements of its weight are settled."""
        kinds: dict[str, float] = {}
        for key in self._apart:
            quantity = Place.of(0, key).quantity
            kinds[quantity] = max(kinds.get(quantity, 0.0), largest(self._record[key]))
        bounds: dict[str, float] = {}
        settled: dict[str, Tensor] = {}
        for key, apart in self._apart.items():
            place, value = Place.of(0, key), self._record[key]
            if place.quantity in UPDATED:
                apart = apart[settled[place.name]]
            allowance = ALLOWANCE * (2 if value.numel() * DISTURBED < FEW else 1)
            type_allows = max(ALWAYS, torch.finfo(value.dtype).eps) if value.is_floating_point() else 0.0
            within = max(allowance * largest(apart), type_allows * largest(value), ROUNDING * kinds[place.quantity])
            bounds[key] = _exact(key, within + ABSOLUTE)
            if place.quantity == "clipped gradient":
                settled[place.name] = value.abs() > bounds[key]
        return bounds, settled


def largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _places(record: Mapping[str, Tensor]) -> Iterator[str]:
    """The keys that are places of a layout, in order; a record may hold other things."""
    return (key for key in record if Place.of(0, key).quantity in WORDS)


def _exact(key: str, bound: float) -> float:
    return 0.0 if Place.of(0, key).quantity in (*EXACT, *GIVEN) else bound


def disturb(whole: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """From now on every module's output, and the gradient that comes back to it, is off by up to ROUNDED roundings of
    `dtype`, of its own magnitude and of its row's mean (partial sums are as large as their parts; zeros stay)."""
    generator = torch.Generator().manual_seed(seed)
    rounding = ROUNDED[dtype] * torch.finfo(dtype).eps / 2

    def off(x: Tensor) -> Tensor:
        draw = torch.rand(x.shape, generator=generator, dtype=torch.float32).to(x.dtype) * 2 - 1
        size = x.detach().abs()
        return (size + size.mean(-1, keepdim=True)) * draw * rounding

    def hook(module: nn.Module, args: object, output: object) -> object:
        if not isinstance(output, Tensor):  # a router's choice of experts and their weights
            return output
        disturbed = output + off(output)
        if disturbed.requires_grad:
            disturbed.register_hook(lambda gradient: gradient + off(gradient))
        return disturbed

    for module in whole.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(hook)
