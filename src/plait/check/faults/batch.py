"""What a rank reads: another's rows, shifted targets, wrong positions; microbatches in the wrong place; their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...runtime.batch import Batch
from ...runtime.data import batches
from ...runtime.hf import attention, stage_model
from ...runtime.hf.read import find_blocks
from ...runtime.hf.stage_model import StageModel
from ...runtime.parallel import loss
from ...runtime.parallel.data import Buckets
from ...runtime.parallel.pipeline import Pipeline
from ...runtime.parallel.stage import Stage
from ...runtime.training.step import Run
from .fault import instead, planted

TWO = {"microbatches": 2}
STAGES = {"pp": 2, "microbatches": 2}


def _every_microbatch(spoil: Callable[[Batch], Batch]) -> None:
    @instead(Batch, "split")
    def wrong(right: Any, self: Batch, parts: int) -> list[Batch]:
        return [spoil(part) for part in right(self, parts)]


# --- rows, targets, positions


@planted(
    "Every dp rank reads the rows of the first one.",
    kind="batch item", at="the batch's sample_ids", says="rows of dp rank 0", layout={"dp": 2},
    stands_for=("P087", "P143"),
)  # fmt: skip
def samples_of_another_rank() -> None:
    @instead(batches, "own_rows")
    def wrong(right: Any, plan: Any, rank: int) -> slice:
        return right(plan, 0)  # type: ignore[no-any-return]


@planted(
    "Targets are shifted twice, by the data and by the model: each token is asked for the one after the next.",
    kind="batch item", at="the batch's targets", says="the one after the next", layout={"dp": 2},
)  # fmt: skip
def targets_shifted() -> None:
    _every_microbatch(lambda batch: replace(batch, targets=batch.targets.roll(-1, 1)))


@planted(
    "Targets are shifted inside the row after it was cut: its last token is asked for its first.",
    kind="batch item", at="the batch's targets", says="the row's first token", layout={"dp": 2},
)  # fmt: skip
def target_wraps_at_row_end() -> None:
    def spoil(batch: Batch) -> Batch:
        return replace(batch, targets=torch.cat((batch.targets[:, :-1], batch.tokens[:, :1]), 1))

    _every_microbatch(spoil)


@planted(
    "Padding is trained on.",
    kind="batch item", at="the batch's targets", says="targets that are to be ignored", layout={"dp": 2},
)  # fmt: skip
def padding_trained() -> None:
    def spoil(batch: Batch) -> Batch:
        return replace(batch, targets=torch.where(batch.document_ids < 0, batch.tokens, batch.targets))

    _every_microbatch(spoil)


@planted(
    "Positions run on from one document of a row to the next.",
    kind="batch item", at="the batch's positions", says="run on through the row", layout={"dp": 2},
    stands_for=("P038",),
)  # fmt: skip
def positions_not_restarted() -> None:
    def spoil(batch: Batch) -> Batch:
        return replace(batch, positions=torch.arange(batch.tokens.shape[1]).expand(batch.tokens.shape).contiguous())

    _every_microbatch(spoil)


@planted(
    "Attention's mask forgets the documents: those packed into one row see each other.",
    kind="module", at="the output of model.layers.0.self_attn.o_proj", says="looks across documents", layout={"tp": 2},
    stands_for=("P038",),
)  # fmt: skip
def mask_forgets_documents() -> None:
    @instead(attention, "visible")
    def wrong(right: Any, batch: Batch, window: int | None) -> Any:
        return right(replace(batch, document_ids=torch.zeros_like(batch.document_ids)), window)


# --- microbatches


@planted(
    "The last stage takes its microbatches in another order than the first: tokens meet the targets of other tokens.",
    kind="schedule", at="microbatch 0: the batch's sample_ids", says="the rows of microbatch 1", layout=STAGES,
)  # fmt: skip
def microbatches_swapped() -> None:
    @instead(Pipeline, "run")
    def wrong(right: Any, self: Pipeline, microbatches: list[Batch], *rest: Any) -> Tensor:
        return right(self, microbatches[::-1] if any(s.is_last for s in self._stages.values()) else microbatches, *rest)  # type: ignore[no-any-return]


@planted(
    "The last microbatch of a step is never run.",
    kind="schedule", at="microbatch 1: the batch's sample_ids", says="never came to it", layout=TWO,
)  # fmt: skip
def microbatch_dropped() -> None:
    @instead(Pipeline, "__init__")
    def wrong(right: Any, self: Pipeline, *rest: Any, **more: Any) -> None:
        right(self, *rest, **more)
        last = self.schedule.microbatches - 1
        if last and self._trains:
            self._row = tuple(a for a in self._row if a.microbatch != last or a.kind.lane == "dp")
            self._final = dict.fromkeys(self._final, last - 1)


@planted(
    "The first microbatch is used twice and the last one not at all.",
    kind="schedule", at="microbatch 1: the batch's sample_ids", says="the rows of microbatch 0", layout=TWO,
)  # fmt: skip
def microbatch_repeated() -> None:
    @instead(Batch, "split")
    def wrong(right: Any, self: Batch, parts: int) -> list[Batch]:
        found = right(self, parts)
        return [*found[:-1], found[0]]


@planted(
    "A stage goes on with the activation that it received first, whatever came later.",
    kind="schedule", at="microbatch 1: the input of model.layers.2", says="that of microbatch 0", layout=STAGES,
)  # fmt: skip
def activation_of_other_microbatch() -> None:
    first: list[Tensor] = []

    @instead(Pipeline, "_wait_activation")
    def wrong(right: Any, self: Pipeline, stage: int, m: int) -> None:
        right(self, stage, m)
        received = self._received[stage, m]
        if m == 0:
            first[:] = [received.detach().clone()]
        self._received[stage, m] = first[0].clone().requires_grad_(received.requires_grad)


@planted(
    "What a stage receives as gradient is lost: the stages before it learn nothing.",
    kind="module", at="the output gradient of model.layers.1", says="it is zero", layout=STAGES,
)  # fmt: skip
def stage_gradient_lost() -> None:
    @instead(Pipeline, "_wait_gradient")
    def wrong(right: Any, self: Pipeline, stage: int, m: int) -> None:
        right(self, stage, m)
        self._gradients[stage, m].zero_()


@planted(
    "The last block of the first stage is left out.",
    kind="module", at="the output of model.layers.1.input_layernorm", says="never ran", layout={"pp": 2},
    stands_for=("P047",),
)  # fmt: skip
def block_left_out() -> None:
    @instead(StageModel, "__init__")
    def wrong(right: Any, self: StageModel, *rest: Any, **more: Any) -> None:
        right(self, *rest, **more)
        if self._enter is None:
            _, blocks = find_blocks(self.module)
            own = [block for block in blocks if not isinstance(block, stage_model._StandIn)]
            own[-1].forward = lambda hidden_states, *args, **more: hidden_states


# --- the weight of a microbatch


def _weighted(weight: Callable[[Pipeline, int, Tensor], Tensor]) -> None:
    """Each microbatch's loss is multiplied by weight(pipeline, its number, the right weight)."""

    @instead(Pipeline, "_forward")
    def wrong(right: Any, self: Pipeline, stage: int, m: int) -> None:
        before = self._inverse_weight
        if before is not None:
            self._inverse_weight = weight(self, m, before)
        right(self, stage, m)
        self._inverse_weight = before


@planted(
    "Accumulated gradients are not divided: they are as many times too large as there are microbatches.",
    kind="module", at="microbatch 0: the microbatch's loss", says="accumulation is not scaled",
    layout={"microbatches": 3}, stands_for=("P003",),
)  # fmt: skip
def accumulation_unscaled() -> None:
    _weighted(lambda pipeline, m, right: right * len(pipeline._microbatches))


@planted(
    "Every microbatch counts alike, however many targets it has: a mean of means.",
    kind="module", at="microbatch 0: the microbatch's loss", says="a mean of means", layout=TWO, stands_for=("P001",),
)  # fmt: skip
def mean_of_means() -> None:
    _weighted(lambda pipeline, m, right: 1 / (pipeline._microbatches[m].weight * len(pipeline._microbatches)).double())


@planted(
    "The last microbatch of a step has half its weight.",
    kind="module", at="microbatch 1: the microbatch's loss", says="0.5 times", layout=TWO,
)  # fmt: skip
def last_microbatch_weight() -> None:
    _weighted(lambda pipeline, m, right: right * (0.5 if m == len(pipeline._microbatches) - 1 else 1))


@planted(
    "The gradient so far is divided by the number of microbatches after each of them: a decaying average.",
    kind="module", at="the reduced gradient of lm_head.weight", says="0.25 x microbatch 0, 0.5 x microbatch 1",
    layout=STAGES, stands_for=("P015",),
)  # fmt: skip
def gradient_divided_each_microbatch() -> None:
    sinks: list[Buckets] = []

    @instead(Buckets, "begin")
    def begin(right: Any, self: Buckets) -> None:
        right(self)
        sinks[:] = [self]

    @instead(Pipeline, "_backward")
    def wrong(right: Any, self: Pipeline, stage: int, m: int) -> None:
        right(self, stage, m)
        for buffer in sinks[0].buffers:
            buffer.div_(len(self._microbatches))


# --- the loss


@planted(
    "Ignored targets count in the weight of the loss.",
    kind="module", at="the microbatch's loss", says="ignored targets are counted", layout={"dp": 2},
)  # fmt: skip
def ignored_targets_weighted() -> None:
    Batch.weight = property(lambda self: torch.tensor(self.targets.numel()))  # type: ignore[assignment, method-assign]


@planted(
    "The loss goes over ignored targets too.",
    kind="module", at="the microbatch's loss", says="ignored targets are trained on", layout={"tp": 2},
)  # fmt: skip
def ignored_targets_trained() -> None:
    setattr(loss, "IGNORE", -1)  # noqa: B010 (not among the names that the module gives out)


@planted(
    "A microbatch's loss is divided by its own targets and multiplied by them again: 0/0 where it has none.",
    kind="module", at="step 2, microbatch", says="has no target", layout={"dp": 2}, stands_for=("P005",),
)  # fmt: skip
def empty_rank_not_a_number() -> None:
    @instead(Stage, "loss")
    def wrong(right: Any, self: Stage, logits: Tensor, batch: Batch, inverse: Tensor) -> Tensor:
        return right(self, logits, batch, inverse) / batch.weight * batch.weight  # type: ignore[no-any-return]


@planted(
    "The loss is computed in bf16.",
    kind="module", at="the microbatch's loss", says="bf16", layout={"dp": 2}, stands_for=("P029",),
)  # fmt: skip
def loss_in_bf16() -> None:
    @instead(loss, "cross_entropy")
    def wrong(right: Any, logits: Tensor, *rest: Any, **more: Any) -> Tensor:
        return right(logits.bfloat16(), *rest, **more).bfloat16()  # type: ignore[no-any-return]


@planted(
    "Every tp rank adds its copy of the loss to the one that is reported.",
    kind="report", at="the loss", says="summed twice over tp", layout={"tp": 2},
)  # fmt: skip
def loss_counts_copies() -> None:
    @instead(Run, "__init__")
    def wrong(right: Any, self: Run, **parts: Any) -> None:
        right(self, **parts)
        self.owns_loss = self.has_loss


@planted(
    "Padding and other ignored targets are reported as trained tokens.",
    kind="report", at="the count of target tokens", says="counts the ignored targets too", layout={"dp": 2},
)  # fmt: skip
def ignored_tokens_counted() -> None:
    @instead(Run, "step")
    def wrong(right: Any, self: Run, batch: Batch, **more: Any) -> Any:
        return replace(right(self, batch, **more), tokens=batch.targets.numel() * self.plan.dp)


FAULTS = (
    samples_of_another_rank, targets_shifted, target_wraps_at_row_end, padding_trained, positions_not_restarted,
    mask_forgets_documents, microbatches_swapped, microbatch_dropped, microbatch_repeated,
    activation_of_other_microbatch, stage_gradient_lost, block_left_out, accumulation_unscaled, mean_of_means,
    last_microbatch_weight, gradient_divided_each_microbatch, ignored_targets_weighted, ignored_targets_trained,
    empty_rank_not_a_number, loss_in_bf16, loss_counts_copies, ignored_tokens_counted,
)  # fmt: skip
