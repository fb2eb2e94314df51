"""Data parallelism through a master: a sum that lacks a rank, weights that are not given out."""

from __future__ import annotations

from typing import Any

from ...runtime.comm.collectives import Handle
from ...runtime.parallel.master import Master
from .fault import instead, planted

LAYOUT = {"dp": 2, "dp_method": "master"}


@planted(
    "The master adds up nobody's gradients but its own.",
    kind="module", at="the reduced gradient of lm_head.weight", says="lacks microbatch 1", layout=LAYOUT,
)  # fmt: skip
def master_adds_nothing() -> None:
    @instead(Master, "sum")
    def wrong(right: Any, self: Master, x: Any, number: int) -> Handle:
        found: Handle = right(self, x, number)
        own = x.clone()
        after = found.after

        def forget() -> None:
            if after is not None:
                after()
                x.copy_(own)

        found.after = forget
        return found


@planted(
    "The master's new weights are sent, and not taken.",
    kind="optimizer", at="the published weight of model.embed_tokens.weight", says="the update does not reach it",
    layout=LAYOUT,
)  # fmt: skip
def weights_not_taken() -> None:
    @instead(Master, "publish")
    def wrong(right: Any, self: Master) -> None:
        weights = self._weights
        if not self.is_here:
            self._weights = [weight.detach().clone() for weight in weights]
        right(self)
        self._weights = weights


FAULTS = (master_adds_nothing, weights_not_taken)
