"""Weights and their updates: wrong slices, wrong draws; norm and clip, learning rate, decay, moments, publishing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...design.mesh import Mesh
from ...design.part import Parameter
from ...runtime.hf import stage_model
from ...runtime.hf.stage_model import StageModel
from ...runtime.parallel.data import Buckets
from ...runtime.training import gradients, optimizer
from ...runtime.training.optimizer import Optimizer
from ...runtime.training.step import Run
from .fault import instead, planted

TP = {"tp": 2}
Take = Callable[[Parameter, Tensor, Mesh, int], Tensor]

# --- initial weights


@planted(
    "The slice of one projection begins a row too early on all ranks but the first.",
    kind="module", at="the initial weight of model.layers.1.mlp.up_proj.weight", says="begins 1 too early", layout=TP,
)  # fmt: skip
def slice_shifted() -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    @instead(stage_model, "take")
    def wrong(right: Take, parameter: Parameter, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        start, stop = parameter.spans(mesh, rank)[0]
        shifted = parameter.name == name and start > 0
        return whole[start - 1 : stop - 1] if shifted else right(parameter, whole, mesh, rank)


@planted(
    "One projection's slices are dealt to the tp ranks in reverse.",
    kind="module", at="the initial weight of model.layers.0.mlp.down_proj.weight", says="the slice of rank 1", layout=TP,
)  # fmt: skip
def slices_swapped() -> None:
    name = "model.layers.0.mlp.down_proj.weight"

    @instead(stage_model, "take")
    def wrong(right: Take, parameter: Parameter, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        group = mesh.group(rank, "tp")
        mine = group[-1 - group.index(rank)] if parameter.name == name else rank
        return right(parameter, whole, mesh, mine)


@planted(
    "KV heads are dealt to the tp ranks in turn and query heads in blocks: queries meet other heads' keys and values.",
    kind="module", at="the initial weight of model.layers.0.self_attn.k_proj.weight", says="in the place of",
    layout=TP, stands_for=("P045", "P085"),
)  # fmt: skip
def kv_head_mapped_wrong() -> None:
    @instead(stage_model, "take")
    def wrong(right: Take, parameter: Parameter, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        cuts = parameter.first.compute.cuts
        if not cuts or not parameter.name.endswith(("k_proj.weight", "v_proj.weight")):
            return right(parameter, whole, mesh, rank)
        whole = whole[...]  # read, where the weights are real
        heads = torch.arange(whole.shape[0]).view(-1, cuts[0].quantum)
        return whole[heads[mesh.coordinate(rank)["tp"] :: mesh.degree("tp")].flatten()]


@planted(
    "Each tp rank draws its own slice from the module's seed: all slices are alike.",
    kind="module", at="the initial weight of model.embed_tokens.weight", says="have the same numbers", layout=TP,
    stands_for=("P025",),
)  # fmt: skip
def init_identical_on_shards() -> None:
    @instead(stage_model, "take")
    def wrong(right: Take, parameter: Parameter, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        return whole[tuple(slice(0, length) for length in right(parameter, whole, mesh, rank).shape)]


@planted(
    "The rank is added to the seed: replicas begin with different weights.",
    kind="module", at="the initial weight of model.embed_tokens.weight", says="what seed 8 gives", layout={"dp": 2},
    stands_for=("P025", "P036"),
)  # fmt: skip
def init_seeded_by_rank() -> None:
    @instead(StageModel, "materialise")
    def wrong(right: Any, self: StageModel, sharding: Any, rank: int, seed: int, *rest: Any) -> None:
        right(self, sharding, rank, seed + rank, *rest)


# --- norm and clip


@planted(
    "The gradient norm counts what every tp rank holds a copy of once for each copy.",
    kind="optimizer", at="the gradient norm", says="copies over tp are each counted", layout=TP, stands_for=("P009",),
)  # fmt: skip
def norm_counts_copies() -> None:
    @instead(Run, "__init__")
    def wrong(right: Any, self: Run, **parts: Any) -> None:
        right(self, **parts)
        self._counted = gradients.rows_of(self.sink.gradients.values())


@planted(
    "Each stage clips by the norm of its own gradients.",
    kind="optimizer", at="the clip factor", says="the norm of what it holds", layout={"pp": 2, "clip": 0.1},
    stands_for=("P007",),
)  # fmt: skip
def clip_per_stage() -> None:
    @instead(gradients, "clip")
    def wrong(right: Any, buffers: Any, norm: Any, limit: float) -> None:
        right(buffers, nn.utils.get_total_norm(buffers), limit)


# --- the update


@planted(
    "The learning rate's schedule moves once for every rank in each step.",
    kind="optimizer", at="step 2: the learning rate", says="moves 2 times a step", layout={"dp": 2},
    stands_for=("P040",),
)  # fmt: skip
def lr_per_rank() -> None:
    @instead(optimizer, "learning_rate")
    def wrong(right: Any, plan: Any, step: int, steps: int) -> float:
        return right(plan, step * plan.world, steps)  # type: ignore[no-any-return]


@planted(
    "The learning rate's schedule moves before the update and not after it.",
    kind="optimizer", at="step 1: the learning rate", says="the rate of 1 update later", layout={"dp": 2},
)  # fmt: skip
def lr_one_step_ahead() -> None:
    @instead(optimizer, "learning_rate")
    def wrong(right: Any, plan: Any, step: int, steps: int) -> float:
        return right(plan, step + 1, steps)  # type: ignore[no-any-return]


@planted(
    "Norms are decayed like matrices.",
    kind="optimizer", at="the weight of model.layers.0.input_layernorm.weight", says="decayed, and its kind is not to be",
    layout={"dp": 2},
)  # fmt: skip
def decay_on_norms() -> None:
    @instead(Optimizer, "__init__")
    def wrong(right: Any, self: Optimizer, plan: Any, parts: Any, *rest: Any) -> None:
        right(
            self,
            plan,
            tuple(replace(one, parts=tuple(replace(part, decays=True) for part in one.parts)) for one in parts),
            *rest,
        )


@planted(
    "Nothing is decayed.",
    kind="optimizer", at="the weight of model.embed_tokens.weight", says="not decayed, and its kind is to be",
    layout={"dp": 2},
)  # fmt: skip
def decay_left_out() -> None:
    @instead(Optimizer, "__init__")
    def wrong(right: Any, self: Optimizer, plan: Any, *rest: Any) -> None:
        right(self, plan.model_copy(update={"weight_decay": 0.0}), *rest)


@planted(
    "The optimizer updates a copy of the weights and the model goes on with those from before.",
    kind="optimizer", at="the published weight of model.embed_tokens.weight", says="from before the update",
    layout={"dp": 2},
)  # fmt: skip
def stale_weights() -> None:
    @instead(Optimizer, "__init__")
    def wrong(right: Any, self: Optimizer, plan: Any, parts: Any, parameters: Any, gradients: Any) -> None:
        copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
        right(self, plan, parts, copies, gradients)


@planted(
    "AdamW's first moment is kept in bf16.",
    kind="optimizer", at="the first moment of model.embed_tokens.weight", says="bf16", layout={"dp": 2},
)  # fmt: skip
def moment_in_bf16() -> None:
    @instead(Optimizer, "step")
    def wrong(right: Any, self: Optimizer, *args: Any) -> None:
        right(self, *args)
        for name in self.weights:
            first, _ = self.moments(name)
            first.copy_(first.bfloat16())


@planted(
    "Weights are updated in bf16: there is no wider copy that remembers small updates.",
    kind="optimizer", at="the weight of model.embed_tokens.weight", says="bf16", layout={"dp": 2},
)  # fmt: skip
def no_master_weights() -> None:
    @instead(Optimizer, "step")
    def wrong(right: Any, self: Optimizer, *args: Any) -> None:
        right(self, *args)
        with torch.no_grad():
            for weight in self.weights.values():
                weight.copy_(weight.bfloat16())


@planted(
    "Gradients are not set to zero: those of the step before are still in them.",
    kind="module", at="step 2: the reduced gradient of lm_head.weight", says="the step before is still in it",
    layout={"pp": 2},
)  # fmt: skip
def previous_gradient_kept() -> None:
    @instead(Buckets, "begin")
    def wrong(right: Any, self: Buckets) -> None:
        right(self)
        for views in self._views:
            for parameter, view in views.items():
                parameter.grad = view
        self._untouched.clear()


@planted(
    "One replica's gradients are a few roundings off: nothing brings the copies together again.",
    kind="copies", at="the copies of gradient of lm_head.weight", says="not the same bits", layout={"dp": 2},
    stands_for=("P154",),
)  # fmt: skip
def replica_drifts() -> None:
    @instead(Buckets, "finish")
    def wrong(right: Any, self: Buckets, stage: int) -> None:
        right(self, stage)
        for buffer, group in zip(self.buffers, self._groups, strict=True):
            buffer.mul_(1 + 4 * torch.finfo(buffer.dtype).eps * group.index)


FAULTS = (
    slice_shifted, slices_swapped, kv_head_mapped_wrong, init_identical_on_shards, init_seeded_by_rank,
    norm_counts_copies, clip_per_stage, lr_per_rank, lr_one_step_ahead, decay_on_norms, decay_left_out, stale_weights,
    moment_in_bf16, no_master_weights, previous_gradient_kept, replica_drifts,
)  # fmt: skip
