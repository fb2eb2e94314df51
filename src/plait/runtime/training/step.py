"""One training step, and the run that takes it.

count target tokens -> carry out the schedule -> norm and clip -> optimizer (which publishes) -> report
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ...design.plan import Plan
from ...design.sharding import Sharding
from ..batch import Batch
from ..comm.collectives import all_reduce
from ..comm.world import World
from ..hf.read import Model
from ..hf.stage_model import StageModel
from ..parallel.clock import Clock
from ..parallel.data import Buckets
from ..parallel.pipeline import Pipeline
from ..parallel.stage import Stage
from ..parallel.tensor import SharedInput
from ..parallel.tied import TiedWeights
from .gradients import clip, loss_and_norm, part_of, squared_norm
from .optimizer import Optimizer, learning_rate

Moment = Literal["reduced", "clipped"]
"""Gradients summed over the ranks and not yet clipped; clipped and not yet used."""


def _unseen(moment: Moment) -> None: ...


@dataclass(frozen=True)
class Report:
    """What a step says of itself; `loss` is the mean over the step's target tokens, `tokens` counts those."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Run:
    """A laid-out model in training on this rank. Made by `build`."""

    def __init__(
        self, *, plan: Plan, world: World, model: Model, sharding: Sharding, sink: Buckets, optimizer: Optimizer,
        tied: TiedWeights, clock: Clock, body: StageModel, stage: Stage, pipeline: Pipeline, forward: Pipeline,
        forget: SharedInput, steps: int | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.world, self.model, self.sharding = plan, world, model, sharding
        self.body, self.stage = body, stage
        self.sink, self.optimizer, self.tied = sink, optimizer, tied
        self.steps = steps or plan.steps
        self.done = 0
        self.forward_pipeline = forward
        self.clock, self.pipeline, self._shared = clock, pipeline, forget
        place = world.coordinate
        self._first_of_replica = place["pp"] == place["tp"] == 0
        self._owns_loss = place["pp"] == plan.pp - 1 and place["tp"] == 0
        self._counted = [
            part_of(sink.gradients[held.name], held, number, world.mesh, world.rank)
            for held in sharding.on_stage(place["pp"])
            for number, part in enumerate(held.parts)
            if part.grad.is_first_copy(world.mesh, world.rank)
        ]

    def step(self, batch: Batch, *, at: Callable[[Moment], None] = _unseen) -> Report:
        """Trains on this rank's rows of one global batch (batch / dp rows of seq tokens); the same report everywhere.
        `at` is called at each `Moment`, for whoever wants to look at the gradients then."""
        begin = time.perf_counter()
        plan, world = self.plan, self.world
        rows = plan.batch // plan.dp
        if batch.tokens.shape != (rows, plan.seq):
            raise ValueError(
                f"step takes {rows} rows (batch {plan.batch} / dp {plan.dp}) of {plan.seq} tokens, not "
                f"{tuple(batch.tokens.shape)}"
            )

        world.begin(self.done + 1)
        weight = (batch.weight * self._first_of_replica).to(world.device)
        all_reduce(weight, world.everyone, why="target tokens")
        inverse = 1 / weight.clamp(min=1).double()

        self.clock.start()
        self.sink.begin()
        microbatches = [part.to(world.device) for part in batch.split(plan.microbatches)]
        self.body.step = self.done
        share = self.pipeline.run(microbatches, inverse)
        self._shared.forget()
        self.tied.reduce()
        at("reduced")

        # Everyone's account of the step is sealed before this sum, and compared after it: ranks that did not make the
        # same calls take no step.
        world.seal()
        loss, norm = loss_and_norm(share * self._owns_loss, squared_norm(self._counted, world.device), world)
        world.agree()
        clip(self.sink.buffers, norm, plan.clip)
        at("clipped")

        lr = learning_rate(plan, self.done, self.steps)
        self.optimizer.step(lr)
        self.tied.publish()

        self.done += 1
        with world.waiting("the numbers of the step"):
            numbers = torch.stack((loss, norm, weight.double())).tolist()  # the step's one host sync
        return Report(self.done, numbers[0], numbers[1], lr, int(numbers[2]), time.perf_counter() - begin)
