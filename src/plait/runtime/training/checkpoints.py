"""A run's checkpoints: what of it is saved, when, and how it goes on from one.

What a rank saves is what it keeps: the optimizer's weights (fp32 beside narrower ones of compute), their moments, and
what is frozen. The rest of a run is a few numbers: steps, updates, the loss scale, and the place in the data. Dropout
and the order of the data are drawn from those, so there is no state of any generator.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...design.errors import PlanError
from ...design.part import Parameter
from ...design.slices import kept
from ..checkpoint import folders
from ..checkpoint.contents import Contents
from ..checkpoint.index import Index, Progress, TensorShape
from ..checkpoint.load import TYPES, Target, load, refuse_other_tensors
from ..checkpoint.save import RefusedError, agreed, save
from ..checkpoint.writer import Background, Writer
from ..comm.collectives import all_reduce
from ..comm.interruption import Interruption
from .step import Run

NAMES = {dtype: name for name, dtype in TYPES.items()}


class Data(Protocol):
    """Where the rows come from: a place in them, to be kept and gone back to."""

    @property
    def state(self) -> dict[str, int]: ...

    def restore(self, state: Mapping[str, int]) -> None: ...


class Checkpoints:
    """The checkpoints of a run in `folder`, which every rank must ask alike. `data` hands out the run's batches,
    `corpus` is the digest of the text that they are of, `config` the model's own, to be kept with the weights. With a
    `writer` saves go on beside the training."""

    def __init__(
        self, run: Run, data: Data, folder: Path, *, corpus: str = "", config: dict[str, Any] | None = None,
        versions: Mapping[str, str] | None = None, writer: Writer | None = None,
    ) -> None:  # fmt: skip
        self._run, self._data, self._folder = run, data, folder
        self._corpus, self._config, self._versions = corpus, config, versions or {}
        optimizer = run.optimizer
        compute = next(iter(run.parameters.values())).dtype
        self._wide, self._compute = torch.promote_types(compute, torch.float32), compute
        self.contents = Contents(
            run.sharding, NAMES[self._wide], NAMES[compute], together=run.master is None
        )  # fmt: skip
        self._background = None if writer is None else Background(run.world, self.contents, writer)
        self._narrow = {name for name, weight in optimizer.weights.items() if run.stored[name].dtype != weight.dtype}

    # --- saving

    def save(self) -> list[Path]:
        """Saves the step that the run has come to, or with a writer begins to: the checkpoints that have become whole
        meanwhile."""
        run, keep = self._run, self._run.plan.keep
        if not run.optimizer.begun:
            run.optimizer.begin(0)
        place = self._folder / folders.name_of(run.done)
        if self._background is not None:
            whole = self.finished(wait=True)
            with run.world.ledger.aside():
                self._background.begin(self.tensor, self.index(), place, keep)
            return whole
        with run.world.ledger.aside():
            save(run.world, self.contents, self.tensor, self.index(), place, keep=keep)
        return [place]

    def finished(self, *, wait: bool = False) -> list[Path]:
        """The checkpoint that has become whole since this was asked; with `wait` the one under way does before. A
        `SaveError` where it could not be written. To be asked after every step, and with `wait` after the last."""
        if self._background is None:
            return []
        with self._run.world.ledger.aside():
            place = self._background.look(wait=wait)
        return [] if place is None else [place]

    def index(self) -> Index:
        """What a checkpoint says of the run as it is now, without the files."""
        run = self._run
        return Index(
            Progress(
                step=run.done, steps=run.steps, updates=run.done - run.loss_scale.skipped,
                loss_scale=dict(run.loss_scale.state), data=self._data.state, corpus=self._corpus,
            ),
            run.plan.model_copy(update={"ranks": 0}), self._config,
            dict(self._versions),
            tuple(tensors_of(run.sharding.parameters).values()),
        )  # fmt: skip

    def tensor(self, name: str, quantity: str) -> Tensor:
        """What this rank keeps of a quantity that is saved, flat."""
        run = self._run
        if quantity == "weight":
            found: Tensor = run.optimizer.weights[name] if name in run.optimizer.weights else run.stored[name]
        else:
            found = run.optimizer.moments(name)[quantity == "exp_avg_sq"]
        return found.detach().view(-1)

    # --- loading

    def load(self, found: Sequence[tuple[Path, Index]]) -> tuple[Path, list[str]]:
        """Goes on from the first of these checkpoints whose every byte is as it was written: which, and what is wrong
        with those before it. Raises a `PlanError` on all ranks where none is."""
        run, wrong = self._run, list[str]()
        for folder, index in found:
            error: str | None = None
            try:
                refuse_other_tensors(index, tensors_of(run.sharding.parameters), folder)
                self._read(folder, index)
            except PlanError as damage:
                error = str(damage)
            try:
                with run.world.ledger.aside():
                    agreed(run.world, error, [])
            except RefusedError as refusal:
                wrong.append(refusal.why)
                continue
            return folder, wrong
        raise PlanError(f"No checkpoint can be loaded: {' '.join(wrong)}")

    def _read(self, folder: Path, index: Index) -> None:
        run, progress = self._run, index.progress
        if self._corpus and progress.corpus and self._corpus != progress.corpus:
            raise PlanError(
                f"{folder} is of a run on another text, or in other tokens: resume with the data and the tokenizer that "
                f"the run began with."
            )
        self._data.restore(progress.data)
        run.optimizer.begin(progress.updates)
        load(folder, index, self.targets)
        run.done = progress.step
        run.loss_scale.restore(progress.loss_scale)

    def targets(self, name: str, quantity: str) -> list[Target]:
        """Where this rank keeps a quantity that is saved."""
        run, rank, found = self._run, self._run.world.rank, list[Target]()
        if quantity == "weight" and name in run.stored:
            slices = tuple(kept(run.sharding, name, "stored", rank))
            found.append(Target(slices, run.stored[name].detach().view(-1)))
        if name in (self._narrow if quantity == "weight" else run.optimizer.weights):
            slices = tuple(kept(run.sharding, name, "state", rank))
            found.append(Target(slices, self.tensor(name, quantity)))
        return found


def tensors_of(parameters: Sequence[Parameter]) -> dict[str, TensorShape]:
    """What a checkpoint has of a model, by name."""
    return {one.name: TensorShape(one.name, one.shape, one.first.trains) for one in parameters}


class Ends:
    """Why a run ends before its last step, asked after every step on all ranks, which agree: a signal, the minutes
    that it was given, or a step after which it was to stop."""

    SIGNAL = "a signal"

    def __init__(
        self, run: Run, *, interruption: Interruption | None = None, minutes: float | None = None, after: int | None =
        None
    ) -> None:  # fmt: skip
        self._run, self._interruption, self._minutes, self._after = run, interruption, minutes, after
        self._began = time.monotonic()
        self.why = ""
        """In words, once it is known."""

    def asked(self) -> bool:
        """Whether the run ends here."""
        number = self._interruption.number if self._interruption is not None else 0
        late = self._minutes is not None and time.monotonic() - self._began > 60 * self._minutes
        if self._interruption is not None or self._minutes is not None:
            told = torch.tensor([number, late], device=self._run.world.device, dtype=torch.int64)
            with self._run.world.ledger.aside():
                all_reduce(told, self._run.world.everyone, why="end of the run", op="max")
            number, late = told.tolist()
        if self._run.done >= self._run.steps:
            return False  # it ends by itself, with all that it leaves
        if number:
            self.why = self.SIGNAL
        elif late:
            self.why = f"--max-minutes {self._minutes:g}"
        elif self._after is not None and self._run.done >= self._after:
            self.why = f"--stop-after {self._after}"
        return bool(self.why)
