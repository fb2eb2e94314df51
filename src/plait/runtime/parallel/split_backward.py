"""Split backward: the gradient of a linear layer's weight, put off.

    whole   B   dx = dy W         dW += dyᵀ x          one after the other, layer by layer
    split   I   dx = dy W         (x, dy) kept          the stage before waits for dx alone
            W                     dW += dyᵀ x           whenever the schedule has time

What passes through a linear layer is plait's own function, to which autograd knows no weight: I is an ordinary backward
that leaves (x, dy) of each layer behind, and W adds their products to the gradients. Norms, embeddings and whatever else
has parameters get their gradients in I. Where backward is whole, column-parallel layers put theirs off no longer than
until the sum of their input's gradient is under way. Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class Rows(Protocol):
    """What a layer read, of which a part is kept: `own`. `whole` is asked for once a reader."""

    own: Tensor
    readers: int

    def whole(self) -> Tensor: ...


@dataclass
class Product:
    """A gradient that is owed: of the weight [out, in] (or its transpose) and the bias. x may be a part of the `rows`
    that were read. `notes` live as long as x and dy are kept for it."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool
    x: Tensor
    dy: Tensor
    rows: Rows | None
    notes: tuple[object, object]


class _Linear(Function):
    """`anchor` is a number that wants a gradient and gets none: so that the output has one where x has not."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor,
        owe: Callable[[Tensor, Tensor], None],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(kept)
        ctx.weight, ctx.owe, ctx.wanted = weight, owe, x.requires_grad
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        (kept,) = ctx.saved_tensors
        # The node lives as long as its graph: what it owes (`rows` are part of that) must not.
        owe, ctx.owe = ctx.owe, None
        # Without its place in the graph, which would keep what the whole stage read, and its gradient.
        owe(kept.detach(), grads[0])
        return (grads[0] @ ctx.weight if ctx.wanted else None), None, None, None, None, None


class WeightGradients:
    """The linear layers of one stage and what they owe."""

    def __init__(self) -> None:
        self._owed: list[Product] = []
        self._later: dict[int, list[Product]] = {}
        self._anchors: dict[torch.device, Tensor] = {}
        self._open: Callable[[nn.Parameter], Tensor] = _nowhere
        self._ready: Callable[[nn.Parameter], None] = _nobody
        self.note: Callable[[Tensor], object] = _nobody
        """Asked for each tensor that is kept between the two halves, for whoever counts them."""

    def adopt(self, place: Callable[[nn.Parameter], Tensor], ready: Callable[[nn.Parameter], None]) -> None:
        """The place that a gradient is added to, and who is told that it has all that a microbatch brings from here."""
        self._open, self._ready = place, ready

    def put_off(self, module: nn.Module, *, transposed: bool) -> None:
        """Replaces the forward of a linear layer, whose weight is [in, out] when `transposed`."""

        def forward(x: Tensor) -> Tensor:
            weight: nn.Parameter = module.weight  # type: ignore[assignment]
            bias: nn.Parameter | None = module.bias  # type: ignore[assignment]
            return self.linear(x, weight, bias, transposed=transposed)

        module.forward = forward

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool, rows: Rows | None = None
    ) -> Tensor:  # fmt: skip
        """x Wᵀ + b (x W + b when `transposed`), whose weight's and bias's gradients are put off. Where x is made of
        `rows`, their part is kept."""
        used = weight.t() if transposed else weight
        if not torch.is_grad_enabled() or not weight.requires_grad:  # what is frozen is owed nothing
            return F.linear(x, used, bias)
        assert isinstance(weight, nn.Parameter)
        assert bias is None or isinstance(bias, nn.Parameter)

        def owe(x: Tensor, dy: Tensor) -> None:
            self._owed.append(Product(weight, bias, transposed, x, dy, rows, (self.note(x), self.note(dy))))

        kept = x
        if rows is not None:
            kept, rows.readers = rows.own, rows.readers + 1
        y: Tensor = _Linear.apply(
            x, self._anchor(x.device), used.detach(), None if bias is None else bias.detach(), kept, owe
        )
        return y

    def _anchor(self, device: torch.device) -> Tensor:
        # Kept: to move a number to a GPU stops the host until all before is done.
        found = self._anchors.get(device)
        if found is None:
            found = self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return found

    def keep(self, microbatch: int) -> None:
        """What the backward of the input just left is `microbatch`'s."""
        self._later[microbatch] = self._owed
        self._owed = []

    def settle(self, microbatch: int) -> None:
        """Adds what is owed for `microbatch` to the gradients, the layers in the order of backward."""
        self._add(self._later.pop(microbatch))

    def pay(self) -> None:
        """Adds at once what is owed since it was last asked."""
        products, self._owed = self._owed, []
        self._add(products)

    @torch.no_grad()
    def _add(self, products: list[Product]) -> None:
        last = {parameter: product for product in products for parameter in (product.weight, product.bias)}
        for product in products:
            x = product.x if product.rows is None else product.rows.whole()
            x, dy = x.flatten(0, -2), product.dy.flatten(0, -2)
            if product.weight.requires_grad:
                _add_product(self._open(product.weight), *((x, dy) if product.transposed else (dy, x)))
            if product.bias is not None and product.bias.requires_grad:
                self._open(product.bias).add_(dy.sum(0))
            for parameter in (product.weight, product.bias):
                if parameter is not None and parameter.requires_grad and last[parameter] is product:
                    self._ready(parameter)


def _nobody(tensor: Tensor) -> None: ...


def _nowhere(parameter: nn.Parameter) -> Tensor:
    raise RuntimeError("no place for gradients has been given")


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += leftᵀ right, in the type of `into`: no tensor between where the types agree."""
    if into.dtype == left.dtype:
        into.addmm_(left.t(), right)
    else:
        into.add_(left.t() @ right)
