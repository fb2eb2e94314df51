"""fp16's loss scale: left in gradients, left in their norm, left out of a microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ...runtime.parallel.pipeline import Pipeline
from ...runtime.training import gradients
from ..reference import CHECKED_SCALE
from .fault import instead, planted

FP16 = {"dp": 2, "compute": "fp16"}


@planted(
    "One bucket's gradients keep the scale of the loss.",
    kind="module", at="the reduced gradient of lm_head.weight", says="the scale of the loss, 1024, is still in it",
    layout=FP16,
)  # fmt: skip
def scale_left_in_a_bucket() -> None:
    @instead(gradients, "unscaled")
    def wrong(right: Any, buffers: Iterable[Tensor], scale: float) -> None:
        right(list(buffers)[1:], scale)


@planted(
    "The norm is that of the scaled gradients: they are clipped 1024 times too far.",
    kind="optimizer", at="the gradient norm", says="it is that of the gradients times the scale of the loss, 1024",
    layout=FP16,
)  # fmt: skip
def norm_of_scaled_gradients() -> None:
    @instead(gradients, "squared_norm")
    def wrong(right: Any, *args: Any) -> Any:
        return right(*args) * CHECKED_SCALE**2


@planted(
    "Only the first microbatch's loss is scaled.",
    kind="module", at="microbatch 1: the output gradient of lm_head", says="0.0009766 times the reference",
    layout=FP16 | {"microbatches": 2},
)  # fmt: skip
def scale_of_one_microbatch() -> None:
    @instead(Pipeline, "_forward")
    def wrong(right: Any, self: Pipeline, stage: int, m: int) -> None:
        right(self, stage, m)
        if m and (stage, m) in self._gradients:
            del self._gradients[stage, m]


FAULTS = (scale_left_in_a_bucket, norm_of_scaled_gradients, scale_of_one_microbatch)
