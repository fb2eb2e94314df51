"""One training step, and the run that takes it.

count target tokens -> carry out the schedule -> norm and clip -> optimizer (which publishes) -> report

In fp16 the loss is scaled, and a step whose numbers are not finite updates nothing: weights, the optimizer's state and
learning rate are those of before, and the data goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ...design.plan import Plan
from ...design.sharding import Sharding
from ..batch import Batch
from ..comm.collectives import all_reduce
from ..comm.world import World
from ..hf.read import Model
from ..hf.stage_model import StageModel
from ..parallel.clock import Clock
from ..parallel.data import Buckets
from ..parallel.gathering import Gathering
from ..parallel.loss import ChunkedLoss
from ..parallel.master import Master
from ..parallel.pipeline import Pipeline
from ..parallel.recompute import Recompute
from ..parallel.stage import Stage
from ..parallel.tied import TiedWeights
from ..parallel.zero import Shares
from ..sequential import SequentialModel, SequentialStage
from .gradients import clip, loss_and_norm, overflow, rows_of, squared_norm, unscaled
from .loss_scale import LossScale, Suspects
from .optimizer import Optimizer, learning_rate

Trained = Model | SequentialModel
Body = StageModel | SequentialStage

Moment = Literal["reduced", "clipped"]
"""Gradients summed over the ranks and not yet clipped; clipped and not yet used."""


Given = Batch | Sequence[Batch]
"""What a step trains on: this rank's rows of a global batch, or its microbatches."""


def _unseen(moment: Moment) -> None: ...


@dataclass(frozen=True)
class Report:
    """What a step says of itself; `loss` is the mean over the step's target tokens, `tokens` counts those. `scale` is
    what the loss was multiplied by, where it was, and `skipped` says that the step overflowed in fp16: no update."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    scale: float | None = None
    skipped: bool = False

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Forgetful(Protocol):
    """What holds on to the last tensors that it saw."""

    def forget(self) -> None: ...


class Run:
    """A laid-out model in training on this rank. Made by `build`."""

    def __init__(
        self, *, plan: Plan, world: World, model: Trained, sharding: Sharding, sink: Buckets | Shares,
        optimizer: Optimizer, tied: TiedWeights, clock: Clock, bodies: Mapping[int, Body],
        parameters: Mapping[str, nn.Parameter], stages: Mapping[int, Stage], pipeline: Pipeline, forward: Pipeline,
        evaluation: Pipeline, forget: Sequence[Forgetful], gathering: Gathering | None = None,
        recomputing: Mapping[int, Recompute] | None = None, chunked: ChunkedLoss | None = None,
        master: Master | None = None, steps: int | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.world, self.model, self.sharding = plan, world, model, sharding
        self.bodies, self.stages = bodies, stages
        """By the number of the stage, those of this rank."""
        self.parameters = parameters
        """What this rank computes with, by the names of the whole model."""
        self.sink, self.optimizer, self.tied, self.gathering = sink, optimizer, tied, gathering
        self.recomputing = recomputing or {}
        """By the number of the stage, where backward computes anything again."""
        self.chunked = chunked
        """The loss, where it is here and goes over its logits in chunks."""
        self.master = master
        """Where dp ranks do their work through the first of them."""
        self.steps = steps or plan.steps
        self.done = 0
        """Steps; those that were skipped in fp16 are no updates, and the learning rate does not count them."""
        self.loss_scale = LossScale(plan)
        self._suspects: Suspects | None = None
        self.forward_pipeline, self.evaluation_pipeline = forward, evaluation
        self.laps: dict[str, Any] = {}
        """When the parts of the last step ended: tokens counted, batch here, pipeline begun, gradients
        reduced, weights updated."""
        self.waits: tuple[tuple[str, str, Any, Any], ...] = ()
        """The last step's sums that were waited for: axis, why, begin, end."""
        world.ledger.clock = clock.now
        self.clock, self.pipeline, self._forget = clock, pipeline, forget
        place = world.coordinate
        self._first_of_replica = place["pp"] == place["tp"] == 0
        self.has_loss = place["pp"] == sharding.placement[-1]
        """Whether the last stage, which has the loss, is on this rank."""
        self.owns_loss = self.has_loss and place["tp"] == 0
        """Whether its loss counts: once a replica."""
        self._whole_frozen = [
            held.name
            for held in sharding.at(place["pp"])
            if not held.first.trains and sharding.stretch(held.name, "stored", world.rank) is None
        ]
        self._counted = rows_of(
            sink.gradients[held.name].view(-1)[start:stop]
            for held in sharding.at(place["pp"])
            for start, stop in sharding.counted(held.name, world.rank)
        )

    def _microbatches(self, batch: Given) -> Sequence[Batch]:
        plan = self.plan
        if isinstance(batch, Batch):
            rows = plan.batch // plan.dp
            if self.master is not None and self.master.is_here:
                rows = plan.batch
            if batch.tokens.shape != (rows, plan.seq):
                raise ValueError(
                    f"step takes {rows} rows (batch {plan.batch} / dp {plan.dp}) of {plan.seq} tokens, not "
                    f"{tuple(batch.tokens.shape)}"
                )
            dealt = batch if self.master is None else self.master.deal(batch, self.loss_scale.value)
            return dealt.split(plan.microbatches)
        if self.master is not None:
            raise ValueError("with dp_method master step takes one batch: that of all ranks on the first")
        if len(batch) != plan.microbatches:
            raise ValueError(f"step takes {plan.microbatches} microbatches, not {len(batch)}")
        most = self.model.facts.positions
        for number, part in enumerate(batch):
            rows, length = part.tokens.shape
            if not rows or not 0 < length <= most:
                raise ValueError(
                    f"microbatch {number} has {rows} x {length} tokens: give it a row or more of 1 to {most} tokens"
                )
        return batch

    @property
    def stored(self) -> Mapping[str, Tensor]:
        """What this rank keeps of the weights that it computes with, by the names of the whole model: all of each, or
        with ZeRO-3 its stretch."""
        if isinstance(self.sink, Buckets) or self.gathering is None:
            return self.parameters
        return {**self.sink.weights, **self.sink.frozen}

    @property
    def holds(self) -> dict[str, list[Tensor]]:
        """Tensors that this rank holds from step to step, by the fields of a `MemoryBill`."""
        found: dict[str, list[Tensor]] = {
            "weights": [self.parameters[name] for name in self._whole_frozen],
            "master_weights": [],
            "gradients": [],
            "state": [],
            "units": [],
        }
        for owner in (self.sink, self.optimizer, self.gathering):
            for name, tensors in owner.holds.items() if owner is not None else ():
                found[name] += tensors
        return found

    def forget(self) -> None:
        """Lets go of what the last pass left for the next module."""
        for one in self._forget:
            one.forget()

    def step(self, batch: Given, *, at: Callable[[Moment], None] = _unseen) -> Report:
        """Trains on this rank's rows of one global batch (batch / dp rows of seq tokens); the same report everywhere.

        In place of one batch it takes the microbatches themselves, plan.microbatches of them, each of any rows and any
        length: ranks that differ only in pp or tp must bring the same, dp ranks may bring others. What such a step moves
        and keeps follows from their sizes, and not from the plan's.

        With dp_method master the first rank brings the rows of all, and those of the others are not looked at.

        `at` is called at each `Moment`, for whoever wants to look at the gradients then."""
        begin = time.perf_counter()
        plan, world, laps = self.plan, self.world, self.laps
        world.begin(self.done + 1)
        parts = self._microbatches(batch)
        if self.gathering is not None:
            self.gathering.begin()
        weight = (torch.stack([part.weight for part in parts]).sum() * self._first_of_replica).to(world.device)
        all_reduce(weight, world.everyone, why="target tokens")
        inverse = 1 / weight.clamp(min=1).double()

        laps["counted"] = self.clock.now()
        microbatches = [part.to(world.device) for part in parts]
        laps["here"] = self.clock.now()
        self.sink.begin()
        laps["begun"] = self.clock.now()
        self.clock.start()
        for body in self.bodies.values():
            body.step = self.done
        scale = self.loss_scale.value
        self._watch_gradients()
        share = self.pipeline.run(microbatches, inverse, scale)
        self.forget()
        self.tied.reduce()
        if self.gathering is not None:
            self.gathering.end()
        unscaled(self.sink.buffers, scale)
        laps["reduced"] = self.clock.now()
        at("reduced")

        # Everyone's account of the step is sealed before this sum, and compared after it: ranks that did not make the
        # same calls take no step.
        world.seal()
        loss, norm = loss_and_norm(share * self.owns_loss, squared_norm(self._counted, world.device), world)
        world.agree()
        clip(self.sink.buffers, norm, plan.clip)
        at("clipped")

        lr = learning_rate(plan, self.done - self.loss_scale.skipped, self.steps)
        self.optimizer.step(lr, overflow(loss, norm) if plan.skips else None)
        self.tied.publish()
        self.sink.publish()
        if self.master is not None:
            self.master.publish()
        laps["updated"], self.waits = self.clock.now(), tuple(world.ledger.waits)

        self.done += 1
        with world.waiting("the numbers of the step"):
            numbers = torch.stack((loss, norm, weight.double())).tolist()  # the step's one host sync
        report = Report(self.done, numbers[0], numbers[1], lr, int(numbers[2]), time.perf_counter() - begin)
        skipped = self.loss_scale.learn(finite=report.finite)
        return replace(report, scale=scale if plan.skips or scale != 1 else None, skipped=skipped)

    def _watch_gradients(self) -> None:
        """After a step that was skipped, looks for where the next one overflows, before sums take it to other ranks."""
        self._suspects = Suspects() if self.loss_scale.in_a_row else None
        self.sink.leaves = None if self._suspects is None else self._suspects.look

    def first_not_finite(self) -> str:
        """The gradient of the last step that is not finite and nearest to the loss, and its ranks, in words: those that
        made it, or where nobody had reason to look, those that have its sum. Empty where all are. All ranks must ask."""
        suspects = self._suspects
        if suspects is None:
            suspects = Suspects()
            for name, gradient in self.sink.gradients.items():
                suspects.look(name, gradient)
        return suspects.first(self.sharding, self.world)
