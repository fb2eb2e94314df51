"""The loss goes over its logits in chunks, and loses something between two of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...runtime.batch import Batch
from ...runtime.hf.after_head import AfterHead
from ...runtime.parallel.data import Buckets
from ...runtime.parallel.loss import ChunkedLoss
from .fault import instead, planted

THREE = {"loss_chunks": 3, "microbatches": 2}
"""Of 64 tokens: 22, 21 and 21."""


@planted(
    "Tokens do not divide by the chunks, and what is shorter than the first chunk is left out.",
    kind="module", at="microbatch 0: the microbatch's loss",
    says="that of the first 22 of 64 tokens, 1 of 3 chunks", layout=THREE,
)  # fmt: skip
def ragged_chunks_left_out() -> None:
    @instead(ChunkedLoss, "_of_chunk")
    def wrong(right: Any, self: ChunkedLoss, rows: Tensor, *rest: Any) -> Tensor:
        loss: Tensor = right(self, rows, *rest)
        batch, made = rest[2], rest[4]
        if made is None or len(rows) == self._at_once(batch.tokens.numel())[0]:
            return loss
        made.zero_()
        return loss * 0


@planted(
    "The head's weight takes the gradient of the last chunk, and not of the others.",
    kind="module", at="the reduced gradient of lm_head.weight", says="none of the usual", layout=THREE,
)  # fmt: skip
def head_of_one_chunk() -> None:
    @instead(ChunkedLoss, "over")
    def over(right: Any, self: ChunkedLoss, hidden: Tensor, batch: Batch, *rest: Any) -> Tensor:
        left = list(self._at_once(batch.tokens.numel()))
        learn = type(self)._learn

        def last(gradient: Tensor, rows: Tensor) -> None:
            left.pop()
            if not left:
                learn(self, gradient, rows)

        self._learn = last  # type: ignore[method-assign]
        return right(self, hidden, batch, *rest)  # type: ignore[no-any-return]


@planted(
    "The head's gradient leaves when the first chunk has added to it.",
    kind="module", at="the reduced gradient of lm_head.weight", says="none of the usual",
    layout=THREE | {"dp": 2, "bucket_mb": 0.01},
)  # fmt: skip
def head_leaves_after_one_chunk() -> None:
    @instead(ChunkedLoss, "_learn")
    def learn(right: Any, self: ChunkedLoss, gradient: Tensor, rows: Tensor) -> None:
        right(self, gradient, rows)
        self._ready(self._parameters[0])

    @instead(Buckets, "_start")
    def start(right: Any, self: Buckets) -> None:
        right(self)
        self._handles[-1].wait()


@planted(
    "What the model does with its logits is left out where they are made in chunks.",
    kind="module", at="microbatch 0: the microbatch's loss", says="after the head is left out",
    layout=THREE | {"model": "gemma2-tiny"},
)  # fmt: skip
def no_soft_cap_in_chunks() -> None:
    @instead(AfterHead, "__call__")
    def wrong(right: Any, self: AfterHead, logits: Tensor) -> Tensor:
        return logits


FAULTS = (ragged_chunks_left_out, head_of_one_chunk, head_leaves_after_one_chunk, no_soft_cap_in_chunks)
