"""What one rank of the layout has at each place: its slices, recorded while the run takes its steps.

The run is not told: the recorder listens to its modules, and its stages' two methods are wrapped to learn which
microbatch is at hand. Which one that is follows from the schedule (the n-th forward of the stage in the row), not from
what the runtime says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..design.schedule import Kind
from ..runtime.batch import Batch
from ..runtime.hf.read import find_blocks
from ..runtime.training.step import Moment, Report, Run
from .record import Recorder, watched
from .reference import record_batch


class Observer:
    """Records one run, step by step, in `seen`; `modules` are the names of those that it listens to."""

    def __init__(self, run: Run, *, inside: bool) -> None:
        self._run = run
        self._recorder = Recorder()
        self._at_hand: int | None = None
        row = run.pipeline.schedule.rows[run.world.coordinate["pp"]]
        first = run.world.coordinate["dp"] * run.plan.microbatches
        self._forwards = {
            stage: [first + a.microbatch for a in row if a.kind is Kind.FORWARD and a.stage == stage]
            for stage in run.stages
        }
        self._turns: dict[int, list[int]] = {}
        self.modules: set[str] = set()
        for number, body in run.bodies.items():
            list_name, _ = find_blocks(body.module)
            owned = {p.first.block for p in run.sharding.on_stage(number) if p.first.block is not None}
            blocks = {f"{list_name}.{block}" for block in owned}
            modules = watched(body.module, blocks, inside=inside)
            self.modules |= set(modules)
            self._recorder.attach(modules, blocks)
        for number in run.stages:
            self._wrap(number)
        # A forward that backward runs again has the graph, and so the gradients, of what is inside.
        self._microbatch_of: dict[int, int] = {}
        for recomputing in run.recomputing.values():
            recomputing.watch = self._again
        # Losses in chunks are known when their backward has run, and so is what the head gave.
        self._shares: dict[int, Tensor] = {}
        self._chunks: dict[tuple[str, int], list[Tensor]] = {}
        if run.chunked is not None:
            run.chunked.watch = self._chunk

    @property
    def seen(self) -> dict[str, Tensor]:
        return self._recorder.seen

    def _wrap(self, number: int) -> None:
        stage, recorder = self._run.stages[number], self._recorder
        forward, loss = stage.forward, stage.loss

        def observed_forward(batch: Batch, received: Tensor | None) -> Tensor:
            turns = self._turns.get(number)
            recorder.microbatch = turns.pop(0) if turns else None
            if recorder.microbatch is not None:
                record_batch(recorder, batch, recorder.microbatch)
                self._microbatch_of[id(batch)] = recorder.microbatch
            output = forward(batch, received)
            self._at_hand = recorder.microbatch
            recorder.microbatch = None
            return output

        def observed_loss(output: Tensor, batch: Batch, inverse_weight: Tensor) -> Tensor:
            share = loss(output, batch, inverse_weight)
            if self._at_hand is not None:
                self._shares[self._at_hand] = share.detach()
            return share

        stage.forward, stage.loss = observed_forward, observed_loss  # type: ignore[method-assign]

    @contextmanager
    def _again(self, batch: Batch) -> Iterator[None]:
        self._recorder.microbatch = self._microbatch_of.get(id(batch))
        yield
        self._recorder.microbatch = None

    def _chunk(self, batch: Batch, quantity: str, part: Tensor) -> None:
        microbatch = self._microbatch_of.get(id(batch))
        if microbatch is None:
            return
        parts = self._chunks.setdefault((quantity, microbatch), [])
        parts.append(part.detach().clone())
        if sum(map(len, parts)) == batch.tokens.numel():
            whole = torch.cat(parts).unflatten(0, batch.tokens.shape)
            self._recorder.add(quantity, whole, self._run.model.facts.head, microbatch)

    def initial(self) -> None:
        """The weights before the first step."""
        self._recorder.seen = {}
        run = self._run
        frozen = {name: held for name, held in run.stored.items() if not run.sharding.parameter(name).first.trains}
        for name, weight in {**run.optimizer.weights, **frozen}.items():
            self._recorder.add("initial weight", weight, name)

    def step(self, batch: Batch) -> None:
        """Takes a step on this rank's rows and records it."""
        self._recorder.seen = {}
        self._microbatch_of.clear()
        self._turns = {number: list(turns) for number, turns in self._forwards.items()}
        self._at_hand = None
        self._shares.clear()
        self._chunks.clear()
        report = self._run.step(batch, at=self._at)
        for microbatch, share in self._shares.items():
            self._recorder.add("share", share, microbatch=microbatch)
        self._report(report)

    def _at(self, moment: Moment) -> None:
        quantity = "gradient" if moment == "reduced" else "clipped gradient"
        for name, gradient in self._run.sink.gradients.items():
            if name in self._run.optimizer.weights:  # a tied weight's is whole at its owner
                self._recorder.add(quantity, gradient, name)

    def _report(self, report: Report) -> None:
        run, recorder = self._run, self._recorder
        recorder.add("tokens", torch.tensor(report.tokens))
        for quantity, value in (("loss", report.loss), ("norm", report.grad_norm), ("lr", run.optimizer.rate)):
            recorder.add(quantity, torch.tensor(value, dtype=torch.float64))
        recorder.add("clip", torch.tensor(self._clip(report.grad_norm), dtype=torch.float64))
        for name, weight in run.optimizer.weights.items():
            first, second = run.optimizer.moments(name)
            recorder.add("first moment", first, name)
            recorder.add("second moment", second, name)
            recorder.add("weight", weight, name)

        for name, held in run.stored.items():
            recorder.add("published weight", held, name)

    def _clip(self, norm: float) -> float:
        """The factor by which this rank scaled its gradients, read off its largest element; 1 when all are zero, and what
        the norm makes it where all that the rank holds is frozen."""
        if not self._run.optimizer.weights:
            return min(1.0, self._run.plan.clip / (norm + 1e-6)) if self._run.plan.clip else 1.0
        largest, factor = 0.0, 1.0
        for key, before in self.seen.items():
            if key.startswith("gradient|") and before.numel():
                place = before.abs().argmax()
                value = float(before.flatten()[place])
                if abs(value) > largest:
                    after = self.seen[f"clipped {key}"].flatten()[place]
                    largest, factor = abs(value), float(after) / value
        return factor
