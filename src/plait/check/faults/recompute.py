"""What backward computes again is not what forward computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...runtime.batch import Batch
from ...runtime.hf.stage_model import StageModel
from .fault import instead, planted

AGAIN = {"recompute": "full", "microbatches": 2}
LATER = AGAIN | {"pp": 2, "schedule": "gpipe"}


@planted(
    "A block that is computed again draws its dropout anew.",
    kind="module", at="microbatch 0: the output of transformer.h.0.attn.c_proj", says="none of the usual",
    layout={"model": "gpt2-tiny", **AGAIN}, stands_for=("P027",),
)  # fmt: skip
def dropout_drawn_anew() -> None:
    @instead(StageModel, "again")
    @contextmanager
    def wrong(right: Any, self: StageModel, batch: Batch, mark: Any) -> Iterator[None]:
        with right(self, batch, mark):
            assert self._dropping is not None
            self._dropping._step += 1
            yield


@planted(
    "A block that is computed again sees the documents of the microbatch that came last.",
    kind="module", at="microbatch 0: the output of model.layers.0.self_attn.o_proj",
    says="attention looks across documents", layout=LATER,
)  # fmt: skip
def documents_of_the_last_microbatch() -> None:
    @instead(StageModel, "again")
    def wrong(right: Any, self: StageModel, batch: Batch, mark: Any) -> Any:
        return right(self, self.at_hand, mark)


FAULTS = (dropout_drawn_anew, documents_of_the_last_microbatch)
