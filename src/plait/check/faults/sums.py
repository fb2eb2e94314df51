"""Sums over ranks that are left out, taken twice, divided, rounded, or taken too early."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...design import sharding
from ...runtime.comm import collectives, differentiable
from ...runtime.comm.collectives import DONE
from ...runtime.parallel import tensor
from ...runtime.parallel.data import Buckets
from ...runtime.training.step import Run
from .fault import instead, planted

DP, TP = {"dp": 2}, {"tp": 2}


def _leave_out(reason: str) -> None:
    @instead(collectives, "all_reduce")
    def wrong(right: Any, x: Tensor, group: Any, *, why: str, **more: Any) -> Any:
        return DONE if why == reason else right(x, group, why=why, **more)

    @instead(collectives, "start_all_reduced")
    def apart(right: Any, x: Tensor, group: Any, *, why: str, **more: Any) -> Any:
        return (x.clone(), DONE) if why == reason else right(x, group, why=why, **more)


# --- gradients over dp


@planted(
    "Gradients are not summed over dp: every replica trains by itself.",
    kind="module", at="the reduced gradient of lm_head.weight", says="the sum over dp is missing", layout=DP,
)  # fmt: skip
def no_sum_dp() -> None:
    _leave_out("gradients")


def _leave_out_of_the_sum(words: str) -> None:
    own: dict[str, Tensor] = {}

    @instead(Buckets, "_start")
    def start(right: Any, self: Buckets) -> None:
        leaves = [view.data_ptr() for view in self._views[len(self._handles)].values()]
        mine = {name: gradient for name, gradient in self.gradients.items() if gradient.data_ptr() in leaves}
        own.update({name: gradient.clone() for name, gradient in mine.items() if words in name})
        right(self)

    @instead(Buckets, "finish")
    def finish(right: Any, self: Buckets, stage: int) -> None:
        right(self, stage)
        for name, gradient in own.items():
            self.gradients[name].copy_(gradient)


@planted(
    "The norms' gradients are left out of the sum over dp, so that their copies drift apart.",
    kind="module", at="the reduced gradient of model.norm.weight", says="the sum over dp is missing", layout=DP,
)  # fmt: skip
def no_sum_dp_norms() -> None:
    _leave_out_of_the_sum("norm")


@planted(
    "The embedding's gradient is left out of the sum over dp.",
    kind="module", at="the reduced gradient of model.embed_tokens.weight", says="the sum over dp is missing", layout=DP,
)  # fmt: skip
def no_sum_dp_embedding() -> None:
    _leave_out_of_the_sum("embed_tokens")


@planted(
    "Gradients are averaged over dp, though the loss is divided by the target tokens of all ranks already.",
    kind="module", at="the reduced gradient of lm_head.weight", says="averaged over dp instead of summed", layout=DP,
)  # fmt: skip
def average_dp() -> None:
    @instead(collectives, "all_reduce")
    def wrong(right: Any, x: Tensor, group: Any, *, why: str, **more: Any) -> Any:
        if why != "gradients":
            return right(x, group, why=why, **more)
        right(x, group, why=why).wait()
        x.div_(group.size)
        return DONE


@planted(
    "Gradients are summed over dp twice.",
    kind="module", at="the reduced gradient of lm_head.weight", says="summed twice over dp", layout=DP,
)  # fmt: skip
def sum_twice_dp() -> None:
    @instead(collectives, "all_reduce")
    def wrong(right: Any, x: Tensor, group: Any, *, why: str, **more: Any) -> Any:
        if why == "gradients":
            right(x, group, why=why).wait()
        return right(x, group, why=why, **more)


@planted(
    "A bucket leaves one gradient too early: what comes last is added after the sum, on its own rank only.",
    kind="module", at="the reduced gradient of model.layers.0.input_layernorm.weight",
    says="left before its last gradient was in", layout=DP | {"microbatches": 2},
)  # fmt: skip
def bucket_leaves_early() -> None:
    @instead(Buckets, "begin")
    def begin(right: Any, self: Buckets) -> None:
        right(self)
        self._missing = [size - 1 for size in self._sizes]

    @instead(Buckets, "_start")
    def start(right: Any, self: Buckets) -> None:
        right(self)
        self._handles[-1].wait()  # a network so fast that the sum is done before the last gradient comes


@planted(
    "Gradients are summed over dp in bf16.",
    kind="module", at="the reduced gradient of lm_head.weight", says="bf16", layout=DP,
)  # fmt: skip
def gradients_in_bf16() -> None:
    @instead(collectives, "all_reduce")
    def wrong(right: Any, x: Tensor, group: Any, *, why: str, **more: Any) -> Any:
        if why != "gradients":
            return right(x, group, why=why, **more)
        short = x.bfloat16()
        right(short, group, why=why).wait()
        x.copy_(short)
        return DONE


# --- activations and their gradients over tp


@planted(
    "The outputs of row-parallel layers are not summed over tp.",
    kind="module", at="the output of model.layers.0.self_attn.o_proj", says="the sum over tp is missing", layout=TP,
)  # fmt: skip
def no_sum_tp_output() -> None:
    @instead(tensor, "_linear")
    def wrong(right: Any, module: Any, row: Any, group: Any, enter: Any, add: Any, *rest: Any) -> Any:
        return right(module, row, group, enter, tensor.as_it_is, *rest)


@planted(
    "The rows of the embedding are not summed over tp: a token of another rank's slice reads zeros.",
    kind="module", at="the output of model.embed_tokens", says="the sum over tp is missing", layout=TP,
)  # fmt: skip
def no_sum_tp_embedding() -> None:
    @instead(tensor, "_embedding")
    def wrong(right: Any, module: Any, summed: Any, start: int) -> Any:
        return right(module, tensor.as_it_is, start)


@planted(
    "Input gradients of column-parallel layers are not summed over tp, so that norms learn differently on each rank.",
    kind="module", at="the output gradient of model.norm", says="the sum over tp is missing", layout=TP,
    stands_for=("P017",),
)  # fmt: skip
def no_sum_tp_input_gradient() -> None:
    _leave_out("column-parallel input gradient")


@planted(
    "The outputs of row-parallel layers are summed over tp twice.",
    kind="module", at="the output of model.embed_tokens", says="summed twice over tp", layout=TP,
)  # fmt: skip
def sum_twice_tp() -> None:
    @instead(differentiable, "sum")
    def wrong(right: Any, x: Tensor, group: Any, *, why: str) -> Any:
        return right(right(x, group, why=why), group, why=why)


@planted(
    "q, k and v each sum their input gradient over tp: the numbers are right and more is sent than needed.",
    kind="communication", at="tp: column-parallel input gradient", says="times the predicted bytes", layout=TP,
)  # fmt: skip
def input_gradients_summed_apart() -> None:
    @instead(tensor.SharedInput, "__call__")
    def wrong(right: Any, self: Any, x: Tensor) -> Tensor:
        self.forget()
        return right(self, x)  # type: ignore[no-any-return]


@planted(
    "Each gradient is summed in a call of its own: the numbers are right and there are many small calls.",
    kind="communication", at="dp: gradients", says="another number of calls", layout=DP, stands_for=("P123",),
)  # fmt: skip
def bucket_per_tensor() -> None:
    @instead(sharding, "buckets")
    def wrong(right: Any, parts: Any, mesh: Any, rank: int, limit: int, item: int) -> Any:
        return right(parts, mesh, rank, 1, item)


@planted(
    "All ranks meet at a barrier in every step, which nobody asked for.",
    kind="communication", at="barrier", says="was not to be", layout=DP,
)  # fmt: skip
def barrier_in_every_step() -> None:
    @instead(Run, "step")
    def wrong(right: Any, self: Run, *rest: Any, **more: Any) -> Any:
        report = right(self, *rest, **more)
        collectives.barrier(self.world)
        return report


# --- the loss


@planted(
    "The loss over a cut vocabulary leaves out its sums over tp: each rank's soft-max sees its own rows only.",
    kind="module", at="the microbatch's loss", says="its sums over tp are missing", layout=TP,
)  # fmt: skip
def no_sum_tp_loss() -> None:
    _leave_out("loss: sums")


@planted(
    "The loss over a cut vocabulary leaves out its maximum over tp: ranks add exponentials of different shifts.",
    kind="module", at="the microbatch's loss", says="its maximum over tp is missing", layout=TP,
)  # fmt: skip
def no_max_tp_loss() -> None:
    _leave_out("loss: maximum")


@planted(
    "The target tokens are not counted over dp: each rank divides its loss by its own.",
    kind="module", at="the microbatch's loss", says="by the targets of its own dp rank", layout=DP,
)  # fmt: skip
def no_sum_target_tokens() -> None:
    _leave_out("target tokens")


@planted(
    "The reported loss and norm are not summed over the ranks: each reports and clips by its own share.",
    kind="report", at="the loss", says="the sum over pp is missing", layout={"pp": 2},
)  # fmt: skip
def no_sum_loss() -> None:
    _leave_out("loss and gradient norm")


FAULTS = (
    no_sum_dp, no_sum_dp_norms, no_sum_dp_embedding, average_dp, sum_twice_dp, bucket_leaves_early, gradients_in_bf16,
    no_sum_tp_output, no_sum_tp_embedding, no_sum_tp_input_gradient, sum_twice_tp, input_gradients_summed_apart,
    bucket_per_tensor, barrier_in_every_step, no_sum_tp_loss, no_max_tp_loss, no_sum_target_tokens, no_sum_loss,
)  # fmt: skip
