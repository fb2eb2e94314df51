"""Weights that several stages use (the embedding and a head tied to it): one owner keeps the state and updates.

    embedding's stage (owner)   gradient of lookup, summed over dp  <- gradient of logits, summed over dp   head's stage
                                norm, clip, update                  -> the new weight

In this order the sum has one order in every layout: within a stage, over dp, then over the stages. Norm, clip and state
count the owner alone. Both ends on one rank share one storage, and nothing is exchanged; nor is
it where the weight is frozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...design.part import Parameter
from ..comm.collectives import receive, send
from ..comm.world import Group

FIRST_TAG = 1 << 20
"""Beyond the tags of a pipeline's microbatches."""


class TiedWeights:
    """The exchange of one rank; `group` is its pipeline. `parameters` are all of the model's, so that every rank counts
    them alike; `gradients` and `weights` are this rank's, by the parameter's name."""

    def __init__(
        self, parameters: Sequence[Parameter], group: Group, gradients: Mapping[str, Tensor],
        weights: Mapping[str, nn.Parameter],
    ) -> None:  # fmt: skip
        self._group, self._gradients, self._weights = group, gradients, weights
        self._exchanges: list[tuple[str, int, int, int]] = []
        for number, parameter in enumerate(parameters):
            if not parameter.first.trains:
                continue
            # Owner and users share it alike, so that a share that is empty here is empty there.
            if parameter.name in gradients and not gradients[parameter.name].numel():
                continue
            owner = parameter.first.owner
            users = dict.fromkeys(place for place in parameter.first.places if place != owner)
            for place, user in enumerate(users):
                self._exchanges.append((parameter.name, owner, user, FIRST_TAG + number * group.size + place))

    def reduce(self) -> None:
        """Adds the users' gradients to the owner's; to be called when each is summed over its own ranks."""
        for name, owner, user, tag in self._exchanges:
            here = self._group.index
            if here == user:
                send(self._gradients[name], owner, self._group, why="tied gradient", tag=tag).wait()
            elif here == owner:
                gradient = self._gradients[name]
                arrived = torch.empty_like(gradient)
                receive(arrived, user, self._group, why="tied gradient", tag=tag).wait()
                gradient += arrived

    @torch.no_grad()
    def publish(self) -> None:
        """Gives the owner's new weight to the users."""
        for name, owner, user, tag in self._exchanges:
            here = self._group.index
            if here == owner:
                send(self._weights[name].detach(), user, self._group, why="tied weight", tag=tag).wait()
            elif here == user:
                receive(self._weights[name].detach(), owner, self._group, why="tied weight", tag=tag).wait()
