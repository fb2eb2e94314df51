"""What `plait train --resume` goes on from: found, and held against what is asked for, before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..design.errors import PlanError
from ..design.plan import Plan
from ..design.resume import refuse_changes
from ..design.sharding import shard
from ..runtime.checkpoint import folders
from ..runtime.checkpoint.index import Index
from ..runtime.checkpoint.load import refuse_other_tensors
from ..runtime.hf.read import Model
from ..runtime.hf.written import other_config
from ..runtime.training.checkpoints import tensors_of
from .flags import Values

AUTO = "auto"


@dataclass(frozen=True)
class Earlier:
    """A run that is gone on with: its `checkpoints` that seem whole, the newest first, and what is wrong with others."""

    run: Path
    checkpoints: tuple[tuple[Path, Index], ...]
    damaged: tuple[str, ...]

    @property
    def newest(self) -> Index:
        return self.checkpoints[0][1]

    @property
    def defaults(self) -> Values:
        """The plan's values, from which flags differ."""
        return self.newest.plan.model_dump()

    def fitting(self, plan: Plan, model: Model) -> Earlier:
        """The same with the checkpoints that `plan` can go on from; a `PlanError` where the newest is none."""
        parameters = tensors_of(shard(model.facts, plan).parameters)
        kept: list[tuple[Path, Index]] = []
        for folder, index in self.checkpoints:
            try:
                refuse_changes(index.plan, plan)
                if index.config is not None and (keys := other_config(index.config, model.config)):
                    if keys == ["vocab_size"] and plan.vocabulary != index.plan.vocabulary:
                        raise PlanError(
                            f"vocabulary {plan.vocabulary} makes {model.config.vocab_size} rows, but the run began with "
                            f"{index.config['vocab_size']}: leave it out."
                        )
                    raise PlanError(
                        f"{folder} is of another model than {plan.model}: their configs differ in {', '.join(keys)}."
                    )
                refuse_other_tensors(index, parameters, folder)
            except PlanError:
                if not kept:
                    raise
                continue
            kept.append((folder, index))
        return replace(self, checkpoints=tuple(kept))

    def over(self, plan: Plan) -> bool:
        """Whether no step is left to take."""
        progress, saved = self.newest.progress, self.newest.plan
        same = (saved.epochs, saved.steps) == (plan.epochs, plan.steps)
        return progress.step >= (progress.steps if same or plan.epochs else plan.steps)


def found(resume: str, out: Path | None, *, overwrite: bool) -> Earlier | None:
    """What `--resume` names; None where it names nothing, or auto finds nothing to go on from."""
    if not resume:
        return None
    if overwrite:
        raise PlanError("--resume goes on with a run and --overwrite replaces it: give one of the two.")
    if resume == AUTO and out is None:
        raise PlanError("--resume auto looks for checkpoints in --out: name it, or give the run itself to --resume.")
    run = out if resume == AUTO and out is not None else Path(resume)
    checkpoints, damaged = folders.whole(run)
    if not checkpoints:
        if resume == AUTO and not damaged:
            return None
        raise folders.none_left(run, damaged)
    if folders.step_of(run) is not None and run.parent.name == folders.FOLDER:  # one checkpoint of a run
        run = run.parent.parent
    return Earlier(run, tuple(checkpoints), tuple(map(str, damaged)))
