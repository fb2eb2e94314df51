"""Own tokens and whole rows, and keys and values that several ranks have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.comm import collectives, differentiable
from ...runtime.comm.collectives import DONE
from .fault import instead, planted

SP = {"tp": 2, "sp": True}


def _leave_out_over(factor: str) -> None:
    @instead(collectives, "all_reduce")
    def wrong(right: Any, x: Tensor, group: Any, *, why: str, **more: Any) -> Any:
        return DONE if why == "gradients" and factor in group.axis else right(x, group, why=why, **more)


@planted(
    "Norms between the branches keep the gradient of their own tokens: it is not summed over tp.",
    kind="module", at="the reduced gradient of model.layers.3.post_attention_layernorm.weight",
    says="the sum over tp is missing", layout=SP, stands_for=("P017",),
)  # fmt: skip
def no_sum_sp_norms() -> None:
    _leave_out_over("tp")


@planted(
    "Of a sum that is scattered each rank gets the tokens of its neighbour.",
    kind="module", at="the output of model.layers.0.self_attn.o_proj", says="the tokens of another tp rank", layout=SP,
)  # fmt: skip
def sp_neighbours_tokens() -> None:
    @instead(collectives, "scatter_tokens")
    def wrong(right: Any, x: Tensor, group: Any, sizes: Any, *, why: str) -> Tensor:
        return right(x.roll(-sizes[0], 1), group, sizes, why=why)  # type: ignore[no-any-return]


@planted(
    "Rows are joined rank by rank and not row by row: tokens of one row end up in another.",
    kind="module", at="the output of model.layers.0.self_attn.q_proj", says="tokens stand in other places", layout=SP,
)  # fmt: skip
def sp_rows_mixed() -> None:
    @instead(collectives, "gather_tokens")
    def wrong(right: Any, x: Tensor, group: Any, sizes: Any, *, why: str) -> Tensor:
        found: Tensor = right(x, group, sizes, why=why)
        return torch.cat(found.split(list(sizes), 1), 0).reshape(found.shape)


@planted(
    "The gradient through a router counts once on every rank, and is summed.",
    kind="module", at="the output gradient of model.layers.3.post_attention_layernorm",
    says="none of the usual", layout={**SP, "model": "mixtral-tiny"},
)  # fmt: skip
def sp_router_on_every_rank() -> None:
    @instead(differentiable, "once")
    def wrong(right: Any, x: Tensor, group: Any) -> Tensor:
        return x


@planted(
    "Keys and values that two ranks have keep the gradient of each rank's own queries.",
    kind="module", at="the reduced gradient of model.layers.3.self_attn.v_proj.weight",
    says="the sum over tp%2 is missing", layout={"tp": 8},
)  # fmt: skip
def no_sum_shared_keys() -> None:
    _leave_out_over("tp%2")


@planted(
    "The same of keys and values in one tensor with the queries.",
    kind="module", at="the reduced gradient of model.layers.3.self_attn.qkv_proj.weight",
    says="none of the usual", layout={"tp": 8, "model": "phi3-tiny"},
)  # fmt: skip
def no_sum_shared_keys_fused() -> None:
    @instead(differentiable, "copies")
    def wrong(right: Any, x: Tensor, *rest: Any, **more: Any) -> Tensor:
        return x


FAULTS = (
    no_sum_sp_norms, sp_neighbours_tokens, sp_rows_mixed, sp_router_on_every_rank, no_sum_shared_keys,
    no_sum_shared_keys_fused,
)  # fmt: skip
