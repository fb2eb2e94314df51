"""`plait train MODEL`: trains a laid-out model on text. Local ranks are forked; under torchrun this process is one."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import typer

from ..design.errors import PlanError
from ..design.plan import Plan, validate
from .flags import Values, resolve, takes_plan


def train(
    given: Values,
    out: Path | None = typer.Option(
        None, help="Where the run is written. [default: runs/MODEL-TIME]", show_default=False
    ),
    overwrite: bool = typer.Option(False, help="Replace an earlier run's files in --out."),
    prove: int = typer.Option(0, min=0, help="Before training, compare this many steps with one process, wide."),
    sample: int = typer.Option(32, min=0, help="Tokens of text to draw from the trained model."),
    prompt: str = typer.Option("def ", help="What the text begins with."),
) -> int:
    """Train MODEL, laid over the ranks that the degrees describe."""
    from ..runtime.comm.nursery import launch
    from ..runtime.comm.world import Rendezvous
    from ..runtime.data.batches import global_batches
    from ..runtime.data.tokens import prepare
    from ..runtime.hf.read import read

    plan, _ = resolve(given)
    here = Rendezvous.from_environment()
    if here is not None:
        if plan.ranks not in (0, here.size):
            raise PlanError(f"-n {plan.ranks} is asked for, but the launcher started {here.size} ranks: leave -n out.")
        plan = plan.model_copy(update={"ranks": here.size})
        if prove:
            raise PlanError(
                "--prove starts a process of its own, which a launcher's ranks cannot: run plait check first."
            )
    model = read(plan.model)
    validate(plan, model.facts)
    folder = _folder(out, plan, overwrite, here)
    # In a process of its own: tokenising starts threads, and what is wrong with the text is said before any rank starts.
    launch(lambda _: prepare(plan, model.facts.vocabulary).description, 1)
    folder.mkdir(parents=True, exist_ok=True)

    if here is not None:
        _rank(here, plan, model, folder, None, sample, prompt)
        return 0
    with tempfile.TemporaryDirectory(prefix="plait-prove-") as scratch:
        file = Path(scratch) / "reference.safetensors" if prove else None

        def single() -> None:
            from ..check.reference import reference

            assert file is not None
            corpus = prepare(plan, model.facts.vocabulary)
            reference(plan, model, global_batches(corpus, plan, prove), file)

        helpers = (single,) if prove else ()
        proof = (file, prove) if file is not None else None
        verdicts = launch(
            lambda meeting: _rank(meeting, plan, model, folder, proof, sample, prompt), plan.world, helpers=helpers
        )
    return 0 if all(verdicts) else 1


def _folder(out: Path | None, plan: Plan, overwrite: bool, here: Any) -> Path:
    """Where the run is written, checked before anything starts."""
    folder = out or Path("runs") / f"{Path(plan.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"--out {folder} is a file; name a directory.")
    # Under a launcher rank 0 may already have begun to write when another rank looks.
    if (folder / "metrics.jsonl").exists() and not overwrite and (here is None or here.rank == 0):
        raise PlanError(f"{folder} already holds a run: choose another --out, or replace it with --overwrite.")
    parent = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(parent, os.W_OK):
        raise PlanError(f"--out {folder} cannot be written: no permission in {parent}.")
    return folder


def _rank(
    meeting: Any, plan: Plan, model: Any, folder: Path, proof: tuple[Path, int] | None, sample: int, prompt: str
) -> bool:
    """One rank's life, from joining the world to the last picture; returns whether the proof held."""
    from ..check.compare import compare, passed
    from ..runtime.comm.world import World
    from ..runtime.data.batches import Batches, global_batches
    from ..runtime.data.tokens import prepare
    from ..runtime.training import loop, measure
    from ..runtime.training.assemble import build
    from ..runtime.training.sample import sample as draw
    from .view import View, predicted

    corpus = prepare(plan, model.facts.vocabulary)
    batches = Batches(corpus, plan, meeting.rank)
    with World(meeting, plan.mesh) as world:
        view = View(plan, model.facts, corpus, batches.steps_total) if world.rank == 0 else None
        if view:
            view.opening()
        rows = None
        if proof is not None:
            rows = compare(plan, world, model, global_batches(corpus, plan, proof[1]), proof[0])
            if view:
                view.proof(rows)
            if not passed(rows):
                return False
        run = build(plan, world, model=model, steps=batches.steps_total)
        metrics = loop.Metrics(folder / "metrics.jsonl") if view else None

        def seen(report: Any) -> None:
            if view and metrics:
                metrics.write(report)
                view.step(report)

        loop.train(run, batches, seen)
        expected = predicted(plan, model.facts)
        traffic = measure.traffic(world, expected)  # first: what follows moves bytes of its own
        timeline = measure.timeline(run)
        start = corpus.tokenizer.encode(prompt) or [corpus.tokenizer.end]
        text = corpus.tokenizer.decode(start + draw(run, start, sample)) if sample else ""
        if view:
            view.closing(run.pipeline.schedule, timeline, expected, traffic, rows, text, folder)
    return True


def add_to(app: typer.Typer) -> None:
    app.command("train")(takes_plan(train))
