"""ZeRO: who gets which share of a sum, when it is whole again, and what stands in a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...design.sharding import Sharding
from ...runtime.comm import collectives
from ...runtime.parallel.gathering import Gathering
from ...runtime.parallel.zero import Shares
from .fault import instead, planted

ONE = {"dp": 2, "zero": 1}
TWO = {"dp": 2, "zero": 2, "microbatches": 2}
THREE = {"dp": 2, "zero": 3}


@planted(
    "The shares of a sum are handed out one rank off: each rank updates with what was its neighbour's.",
    kind="module", at="the reduced gradient of lm_head.weight", says="which ranks hold which shares is mixed up",
    layout=ONE,
)  # fmt: skip
def share_of_the_neighbour() -> None:
    @instead(collectives, "reduce_scatter")
    def wrong(right: Any, x: Tensor, share: Tensor, *rest: Any, **more: Any) -> Any:
        return right(x.roll(share.numel()), share, *rest, **more)


@planted(
    "The sum of a microbatch takes the place of the sums before it.",
    kind="module", at="the reduced gradient of lm_head.weight", says="0 x microbatch 0, 1 x microbatch 1", layout=TWO,
)  # fmt: skip
def sums_replaced() -> None:
    @instead(collectives, "reduce_scatter")
    def wrong(right: Any, *rest: Any, add: bool, **more: Any) -> Any:
        return right(*rest, add=False, **more)


@planted(
    "A unit leaves one gradient too early: what comes last is in nobody's share.",
    kind="module", at="the reduced gradient of model.norm.weight",
    says="left before its last gradient was in", layout=ONE | {"microbatches": 2},
)  # fmt: skip
def unit_leaves_early() -> None:
    @instead(Shares, "begin")
    def begin(right: Any, self: Shares) -> None:
        right(self)
        for held in self._held:
            held.missing -= 1

    @instead(Shares, "_start")
    def start(right: Any, self: Shares) -> None:
        right(self)
        self._close()
        # Others may still be reading the unit, and find in it what comes last, until a call that follows has ended.
        collectives.all_reduce(self._space[0].new_zeros(1), self._group, why="gradients")


@planted(
    "Shares that were updated are not gathered: a rank trains on with its own share new and the others' old.",
    kind="optimizer", at="the published weight of model.embed_tokens.weight", says="have not been gathered", layout=ONE,
)  # fmt: skip
def shares_not_gathered() -> None:
    @instead(Shares, "publish")
    def wrong(right: Any, self: Shares) -> None: ...


@planted(
    "Weights that were whole before the update are taken for whole after it.",
    kind="module", at="step 2, microbatch 0: the output of model.embed_tokens", says="none of the usual",
    layout=THREE | {"keep_gathered": "yes"},
)  # fmt: skip
def gathered_before_the_update() -> None:
    @instead(Gathering, "_forget")
    def wrong(right: Any, self: Gathering) -> None:
        here = dict(self._in)
        right(self)
        self._in.update(here)


@planted(
    "Backward does not ask for its unit: it multiplies by what stands in the slot.",
    kind="module", at="microbatch 0: the output gradient of model.layers.1.mlp.up_proj", says="none of the usual",
    layout=THREE,
)  # fmt: skip
def backward_does_not_gather() -> None:
    @instead(nn.Module, "register_forward_hook")
    def wrong(right: Any, self: nn.Module, hook: Any, *rest: Any, **more: Any) -> Any:
        ours = getattr(hook, "__qualname__", "").startswith("Gathering.")
        return None if ours else right(self, hook, *rest, **more)


@planted(
    "The norm counts the first rank's shares only.",
    kind="optimizer", at="the gradient norm", says="times the reference on every rank", layout=ONE,
)  # fmt: skip
def norm_of_one_share() -> None:
    @instead(Sharding, "counted")
    def wrong(right: Any, self: Sharding, name: str, rank: int) -> Sequence[tuple[int, int]]:
        return right(self, name, rank) if not self.mesh.index(rank, "shard") else []


@planted(
    "Replicas keep the sums of their own shards.",
    kind="module", at="the reduced gradient of lm_head.weight", says="the sum over replica is missing",
    layout={"dp": 4, "zero": 1, "replicas": 2},
)  # fmt: skip
def no_sum_over_replicas() -> None:
    @instead(Shares, "_close")
    def wrong(right: Any, self: Shares) -> None:
        rest, self._rest = self._rest, {axes: replace(group, transport=None) for axes, group in self._rest.items()}
        right(self)
        self._rest = rest


FAULTS = (
    share_of_the_neighbour, sums_replaced, unit_leaves_early, shares_not_gathered, gathered_before_the_update,
    backward_does_not_gather, norm_of_one_share, no_sum_over_replicas,
)  # fmt: skip
