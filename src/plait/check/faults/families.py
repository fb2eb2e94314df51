"""What only some families have: biases and sinks of heads, keys that all heads share, inputs that a layer slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ...design.mesh import Mesh
from ...design.part import Parameter
from ...runtime.comm import differentiable
from ...runtime.comm.world import Group
from ...runtime.hf import given, stage_model
from .fault import instead, planted

BLOOM = {"model": "bloom-tiny", "attention": "own"}


@planted(
    "Every tp rank takes the biases of the first heads (ALiBi).",
    kind="module", at="microbatch 0: the output of transformer.h.0.self_attention.dense", says="none of the usual",
    layout={"tp": 2, **BLOOM},
)  # fmt: skip
def biases_of_other_heads() -> None:
    @instead(given, "own_heads")
    def wrong(right: Callable[..., Tensor], value: Tensor, where: str, rows: int, own: given.Heads) -> Tensor:
        return right(value, where, rows, (0, own[1] - own[0], own[2]))


@planted(
    "A class that makes its mask without the positions keeps it.",
    kind="module", at="microbatch 0: the output of transformer.h.0.self_attention.dense",
    says="attention looks across documents", layout={"pp": 2, **BLOOM}, stands_for=("P038",),
)  # fmt: skip
def mask_of_the_class() -> None:
    @instead(stage_model, "give_masks")
    def wrong(right: Any, model: nn.Module, plan: Any) -> None: ...


@planted(
    "The gradient of the keys that all heads share is that of each rank's own heads.",
    kind="module", at="microbatch 0: the output gradient of model.layers.3.self_attn.kv_a_proj_with_mqa",
    says="none of the usual", layout={"tp": 2, "model": "deepseek-v2-tiny"},
)  # fmt: skip
def shared_keys_not_summed() -> None:
    @instead(differentiable, "copy_last")
    def wrong(right: Any, x: Tensor, columns: int, group: Group, *, why: str) -> Tensor:
        return x


@planted(
    "The sinks of one block's heads are those of the heads before, on all ranks but the first.",
    kind="module", at="the initial weight of model.layers.1.self_attn.sinks", says="begins 1 too early",
    layout={"tp": 2, "model": "gpt-oss-tiny"},
)  # fmt: skip
def sinks_shifted() -> None:
    @instead(stage_model, "take")
    def wrong(right: Any, parameter: Parameter, whole: Any, mesh: Mesh, rank: int) -> Any:
        start, stop = parameter.spans(mesh, rank)[0]
        shifted = parameter.name == "model.layers.1.self_attn.sinks" and start > 0
        return whole[start - 1 : stop - 1] if shifted else right(parameter, whole, mesh, rank)


@planted(
    "A layer that slices what it reads gives back the gradient of its own slice, and nothing of the others'.",
    kind="module", at="microbatch 0: the output gradient of model.layers.3.self_attn.v_proj",
    says="the sum over tp is missing",
    layout={"tp": 2, "model": "olmo2-tiny"},
)  # fmt: skip
def gradients_of_slices_not_gathered() -> None:
    @instead(differentiable, "slice")
    def wrong(right: Any, x: Tensor, group: Group, sizes: Sequence[int], *, why: str) -> Tensor:
        return x.narrow(-1, sum(sizes[: group.index]), sizes[group.index])


FAULTS = (
    biases_of_other_heads, mask_of_the_class, shared_keys_not_summed, sinks_shifted, gradients_of_slices_not_gathered,
)  # fmt: skip
