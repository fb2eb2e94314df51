"""The loss scale of fp16: what the loss is multiplied by before backward, so that small gradients are not zero in it.

    step overflows      skipped by all ranks     scale / 2, no less than 1
    window good steps                            scale x 2, no more than 2^24

Whether a step overflows is read off its loss and gradient norm, which every rank has, the same bits, in the step's one
host sync: so all ranks decide alike, and nothing more is sent. What must not wait for the host goes by a number on the
device (gradients.overflow): the update itself. Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...design.plan import Plan
from ...design.sharding import Sharding
from ..comm.collectives import all_gather
from ..comm.world import World

FLOOR, MOST = 1.0, 2.0**24


class LossScale:
    """`value` is the scale of the step to come; `skipped` counts the steps that were, `in_a_row` the last of them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.value = plan.first_loss_scale
        self.skipped, self.in_a_row = 0, 0
        self._good = 0

    def learn(self, *, finite: bool) -> bool:
        """A step has ended with numbers that are `finite`, or not: whether it was skipped."""
        plan = self._plan
        if not plan.skips:
            return False
        self._good = self._good + 1 if finite else 0
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.skipped += not finite
        if plan.scales_dynamically and not finite:
            self.value = max(self.value / 2, FLOOR)
        elif plan.scales_dynamically and self._good == plan.loss_scale_window:
            self.value, self._good = min(self.value * 2, MOST), 0
        return not finite

    @property
    def state(self) -> dict[str, float | int]:
        """What the steps so far have left, as values of JSON."""
        return {"value": self.value, "skipped": self.skipped, "in_a_row": self.in_a_row, "good": self._good}

    def restore(self, state: Mapping[str, float | int]) -> None:
        """Goes on from `state`. The steps that were skipped are no updates, whatever comes; the scale itself is kept
        where this plan changes it too."""
        self.skipped = int(state["skipped"])
        if self._plan.skips:
            self.in_a_row, self._good = int(state["in_a_row"]), int(state["good"])
        if self._plan.scales_dynamically:
            self.value = float(state["value"])

    def spent(self, used: float) -> bool:
        """Whether the step that was just skipped with the scale `used` was one too many."""
        floor = self._plan.scales_dynamically and used <= FLOOR
        return self.in_a_row >= self._plan.max_skips or (floor and self.in_a_row > 0)


class Suspects:
    """Which gradients are not finite, looked at before they are summed over ranks, on the rank that made them."""

    def __init__(self) -> None:
        self._bad: dict[str, Tensor] = {}

    def look(self, name: str, gradient: Tensor) -> None:
        bad = ~gradient.isfinite().all()
        self._bad[name] = bad | self._bad[name] if name in self._bad else bad

    def first(self, sharding: Sharding, world: World) -> str:
        """The one that backward came to first and the ranks that have it, in words; every rank must ask. Empty where all
        are finite."""
        order = [one.name for one in reversed(sharding.parameters)]
        mine = next((place for place, name in enumerate(order) if self._bad.get(name, False)), len(order))
        everyone = all_gather(torch.tensor(mine, device=world.device), world.everyone, why="overflow")
        found = [int(place) for place in everyone]
        first = min(found)
        if first == len(order):
            return ""
        ranks = [rank for rank, place in enumerate(found) if place == first]
        return f"{order[first]} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
