"""Backwards in two halves, and several stages on a rank: what is put off, what is kept for it, what is handed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...runtime.hf.stage_model import StageModel
from ...runtime.parallel.data import Buckets
from ...runtime.parallel.pipeline import Pipeline, Stage
from ...runtime.parallel.split_backward import Product, WeightGradients
from .fault import instead, planted

SPLIT = {"pp": 2, "schedule": "zb-h1", "microbatches": 3}
VEE = {"pp": 2, "schedule": "zb-v", "microbatches": 2}

# --- the backward of the weights


@planted(
    "The backward of the weights is left out for the first microbatch.",
    kind="module", at="the reduced gradient of lm_head.weight", says="0 x microbatch 0, 1 x microbatch 1", layout=SPLIT,
)  # fmt: skip
def weights_backward_dropped() -> None:
    @instead(Pipeline, "_backward_weight")
    def wrong(right: Any, self: Pipeline, stage: int, m: int) -> None:
        if m:
            right(self, stage, m)


@planted(
    "The backward of the weights is done twice for the first microbatch.",
    kind="module", at="the reduced gradient of lm_head.weight", says="2 x microbatch 0, 1 x microbatch 1", layout=SPLIT,
)  # fmt: skip
def weights_backward_twice() -> None:
    @instead(WeightGradients, "settle")
    def wrong(right: Any, self: WeightGradients, microbatch: int) -> None:
        again = self._later[microbatch]
        right(self, microbatch)
        if not microbatch:
            self._later[microbatch] = again
            right(self, microbatch)


def _keep_instead(spoil: Any) -> None:
    """What is kept of the second microbatch is spoil(its products, those of the first)."""
    first: dict[WeightGradients, list[Product]] = {}

    @instead(WeightGradients, "keep")
    def wrong(right: Any, self: WeightGradients, microbatch: int) -> None:
        if not microbatch:
            first[self] = list(self._owed)
        elif microbatch == 1:
            self._owed = spoil(self._owed, first[self])
        right(self, microbatch)


@planted(
    "The second backward of the weights takes what was kept for the first.",
    kind="module", at="the reduced gradient of lm_head.weight", says="2 x microbatch 0, 0 x microbatch 1", layout=SPLIT,
)  # fmt: skip
def weights_backward_of_another() -> None:
    _keep_instead(lambda own, first: first)


@planted(
    "The backward of the weights multiplies one microbatch's gradients by the inputs of another.",
    kind="schedule", at="the reduced gradient of lm_head.weight",
    says="the input of microbatch 0 by the gradient of microbatch 1", layout=SPLIT,
)  # fmt: skip
def inputs_of_another_microbatch() -> None:
    _keep_instead(lambda own, first: [replace(mine, x=other.x) for mine, other in zip(own, first, strict=True)])


@planted(
    "The gradient of a bias is left out of the backward of the weights: biases learn nothing.",
    kind="module", at="the reduced gradient of transformer.h.3.mlp.c_proj.bias", says="it is zero",
    layout={"model": "gpt2-tiny", **SPLIT},
)  # fmt: skip
def bias_gradient_left_out() -> None:
    @instead(WeightGradients, "settle")
    def wrong(right: Any, self: WeightGradients, microbatch: int) -> None:
        self._later[microbatch] = [replace(product, bias=None) for product in self._later[microbatch]]
        right(self, microbatch)


@planted(
    "A bucket leaves after the last backward of the inputs: the last backward of the weights comes after the sum.",
    kind="module", at="the reduced gradient of lm_head.weight", says="left before its last gradient was in",
    layout={**SPLIT, "dp": 2},
)  # fmt: skip
def bucket_leaves_before_the_weights() -> None:
    sinks: list[Buckets] = []

    @instead(Buckets, "begin")
    def begin(right: Any, self: Buckets) -> None:
        right(self)
        sinks[:] = [self]

    @instead(Pipeline, "_backward_weight")
    def wrong(right: Any, self: Pipeline, stage: int, m: int) -> None:
        if m == self._final[stage, True]:
            while len(sinks[0]._handles) < len(sinks[0].buffers):
                sinks[0]._start()
                sinks[0]._handles[-1].wait()
        right(self, stage, m)


@planted(
    "Gradients are received into one buffer: the next comes before the backward of the weights has used the last.",
    kind="schedule", at="the reduced gradient of model.layers.2.mlp.down_proj.weight",
    says="the input of microbatch 0 by the gradient of microbatch 1", layout={**SPLIT, "pp": 3},
)  # fmt: skip
def received_buffer_reused() -> None:
    buffers: dict[int, Tensor] = {}

    @instead(Pipeline, "_wait_gradient")
    def wrong(right: Any, self: Pipeline, stage: int, m: int) -> None:
        right(self, stage, m)
        if stage in buffers and m:
            buffers[stage].copy_(self._gradients[stage, m])
        buffers[stage] = self._gradients[stage, m]


# --- several stages on a rank


@planted(
    "Two stages of a rank run in each other's place.",
    kind="schedule", at="microbatch 0: the input of model.layers.1", says="model.layers.2 got it", layout=VEE,
)  # fmt: skip
def stages_swapped() -> None:
    @instead(Pipeline, "__init__")
    def wrong(right: Any, self: Pipeline, schedule: Any, stages: Mapping[int, Stage], *rest: Any, **more: Any) -> None:
        swapped = {1: stages[2], 2: stages[1]} if {1, 2} <= set(stages) else {}
        right(self, schedule, {**stages, **swapped}, *rest, **more)


@planted(
    "A stage hands the next one on its rank what it handed over first, whatever came later.",
    kind="schedule", at="microbatch 1: the input of model.layers.2", says="that of microbatch 0", layout=VEE,
)  # fmt: skip
def handed_over_once() -> None:
    first: dict[int, Tensor] = {}

    @instead(Pipeline, "_forward")
    def wrong(right: Any, self: Pipeline, stage: int, m: int) -> None:
        right(self, stage, m)
        if (stage, m) in self._given and stage == 1:
            first[stage] = self._given[stage, m] if m == 0 else first[stage]
            self._given[stage, m] = first[stage]


@planted(
    "Both ends of the model are on one rank, and the head has a copy of the embedding's weight that it is tied to.",
    kind="module", at="the reduced gradient of model.embed_tokens.weight", says="it is what lm_head alone gives",
    layout={"model": "qwen3-tiny", **VEE},
)  # fmt: skip
def tied_weight_copied() -> None:
    @instead(StageModel, "materialise")
    def wrong(right: Any, self: StageModel, sharding: Any, rank: int, seed: int, device: Any, *rest: Any) -> None:
        _, *more = rest
        right(self, sharding, rank, seed, device, {}, *more)


FAULTS = (
    weights_backward_dropped, weights_backward_twice, weights_backward_of_another, inputs_of_another_microbatch,
    bias_gradient_left_out, bucket_leaves_before_the_weights, received_buffer_reused, stages_swapped, handed_over_once,
    tied_weight_copied,
)  # fmt: skip
