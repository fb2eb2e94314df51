"""Frozen weights: what trains, what does not, and how far backward goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...design.facts import ParameterFact
from ...design.frozen import patterns
from ...design.plan import Plan
from ...runtime.hf.stage_model import StageModel
from ...runtime.parallel import frozen
from ...runtime.training import gradients
from ...runtime.training.step import Run
from .fault import instead, planted


@planted(
    "Frozen weights are decayed: the optimizer has them, and decay needs no gradient.",
    kind="optimizer", at="the published weight of model.embed_tokens.weight", says="frozen, and decayed",
    layout={"dp": 2, "freeze": "model.embed_tokens.weight"},
)  # fmt: skip
def frozen_weights_decayed() -> None:
    @instead(Run, "__init__")
    def wrong(right: Any, self: Run, **parts: Any) -> None:
        right(self, **parts)
        step, kept = self.optimizer.step, [weight for weight in self.parameters.values() if not weight.requires_grad]

        def decaying(lr: float, overflow: Tensor | None = None) -> None:
            step(lr, overflow)
            with torch.no_grad():
                for weight in kept:
                    weight.mul_(1 - lr * self.plan.weight_decay)

        self.optimizer.step = decaying  # type: ignore[method-assign]


@planted(
    "Frozen weights get gradients all the same, and the norm counts them.",
    kind="optimizer", at="the gradient norm", says="and what it comes from agrees",
    layout={"pp": 2, "freeze": "lm_head.weight"},
)  # fmt: skip
def frozen_counted_in_the_norm() -> None:
    kept: list[nn.Parameter] = []

    @instead(frozen, "freeze")
    def freeze(right: Any, parameters: Iterable[nn.Parameter]) -> None:
        kept.extend(parameters)

    @instead(gradients, "squared_norm")
    def norm(right: Any, counted: Any, device: Any) -> Any:
        return right([*counted, *(weight.grad for weight in kept if weight.grad is not None)], device)


@planted(
    "A pattern freezes whatever ends as it does: one projection is named, and those of all blocks stay as they are.",
    kind="module", at="the reduced gradient of model.layers.3.mlp.up_proj.weight", says="trained, and taken for frozen",
    layout={"dp": 2, "freeze": "model.layers.1.mlp.up_proj.weight"},
)  # fmt: skip
def trained_taken_for_frozen() -> None:
    @instead(Plan, "trains")
    def wrong(right: Any, self: Plan, fact: ParameterFact) -> bool:
        ends = [pattern.rpartition(".mlp.")[2] for pattern in patterns(self.freeze)]
        return right(self, fact) and not any(fact.name.endswith(end) for end in ends)


@planted(
    "A frozen block runs without a graph: what comes before it learns nothing.",
    kind="module", at="microbatch 0: the output gradient of model.layers.2", says="backward ends before it",
    layout={"dp": 2, "freeze": "model.layers.2.*"},
)  # fmt: skip
def backward_ends_at_frozen_blocks() -> None:
    @instead(StageModel, "materialise")
    def wrong(right: Any, self: StageModel, sharding: Any, *rest: Any) -> None:
        right(self, sharding, *rest)
        trained = {one.first.block for one in sharding.parameters if one.first.trains}
        for number, block in self.blocks.items():
            if number not in trained:
                block.forward = torch.no_grad()(block.forward)


FAULTS = (
    frozen_weights_decayed, frozen_counted_in_the_norm, trained_taken_for_frozen, backward_ends_at_frozen_blocks,
)  # fmt: skip
