"""Guesses about pipelines: backwards in two halves, what their products are made of; several stages on a rank.

The gradient of a linear layer's weight is a sum of products, dyᵀ x of each microbatch; the reference keeps both factors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.hf.read import build_on_meta
from ...runtime.hf.stage_model import transposed
from ..evidence import CLOSE, Evidence

MOST_PRODUCTS = 64


def factors_mixed(e: Evidence) -> str | None:
    """The input of one microbatch was multiplied by the gradient of another."""
    m = e.plan.microbatches
    if e.place.quantity != "gradient" or not e.wrong or e.plan.dp * m * m > MOST_PRODUCTS:
        return None
    pairs = [(k, j) for k in range(e.plan.dp * m) for j in range(k // m * m, (k // m + 1) * m)]
    for module, turned in _modules(e).items():
        products = {pair: _product(e, module, turned, *pair) for pair in pairs}
        terms = {pair: product for pair, product in products.items() if product is not None and bool(product.any())}
        mixed = _mixed(e, terms) if terms else None
        if mixed:
            rank, off = mixed
            said = " and ".join(f"the input of microbatch {j} by the gradient of microbatch {k}" for k, j in off)
            return f"{module} multiplies {said} (rank {rank}): what the two halves of a backward keep is mixed up"
    return None


def _mixed(e: Evidence, terms: dict[tuple[int, int], Tensor]) -> tuple[int, list[tuple[int, int]]] | None:
    """A rank, and the products of two microbatches that are in its gradient."""
    for rank in e.wrong:
        matrix = torch.stack([e.own(whole, rank).double().flatten() for whole in terms.values()], 1)
        apart = (e.held[rank].double() - e.own(e.whole, rank).double()).flatten()
        counts = torch.linalg.lstsq(matrix, apart.unsqueeze(1)).solution.squeeze(1)
        if not e.same(matrix @ counts, apart):
            return None
        off = [(k, j) for (k, j), count in zip(terms, counts.tolist(), strict=True) if k != j and abs(count) > CLOSE]
        if off:
            return rank, off
    return None


def one_use(e: Evidence) -> str | None:
    """Of a weight that two modules use, the gradient that one of them gives."""
    if e.place.quantity != "gradient" or not e.wrong:
        return None
    uses = [module for _, module in e.sharding.parameter(e.place.name).first.uses]
    if len(uses) < 2:
        return None
    for module, turned in _modules(e).items():
        products = [_product(e, module, turned, k, k) for k in range(e.plan.dp * e.plan.microbatches)]
        given = sum((product for product in products if product is not None), torch.zeros_like(e.whole))
        others = " and ".join(use for use in uses if use != module)
        if e.is_whole(given):
            return (
                f"it is what {module} alone gives, and {others} uses this weight too: the sum over its uses is missing"
            )
        if e.is_whole(e.whole - given):
            return (
                f"it is what {others} alone gives, and {module} uses this weight too: the sum over its uses is missing"
            )
    return None


def _modules(e: Evidence) -> dict[str, bool]:
    """The linear layers that use the parameter of this place as their weight, and whether it is [in, out] there."""
    model = build_on_meta(e.model.config)
    uses = [module for _, module in e.sharding.parameter(e.place.name).first.uses if e.place.name.endswith(".weight")]
    found = {module: transposed(model.get_submodule(module)) for module in uses}
    return {module: turned for module, turned in found.items() if turned is not None}


def _product(e: Evidence, module: str, turned: bool, gradient: int, factor: int) -> Tensor | None:
    """What a module adds to the gradient of its weight: dyᵀ x of two microbatches."""
    dy, x = e.beside("output gradient", module, gradient), e.beside("factor", module, factor)
    if dy is None or x is None:
        return None
    product = dy.flatten(0, -2).t() @ x.flatten(0, -2)
    return product.t() if turned else product


def stages_in_another_order(e: Evidence) -> str | None:
    """A block of a rank got what another should have got."""
    if e.place.quantity != "input":
        return None
    for rank in e.wrong:
        for block, got in e.inputs.get(rank, {}).items():
            if block != e.place.name and e.same(got, e.whole):
                return f"{block} got it on rank {rank}: its stage ran in the place of another"
    return None
