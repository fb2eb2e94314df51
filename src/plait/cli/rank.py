"""One rank's life in `plait train`, from joining the world to the last picture."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..check.compare import compare
from ..check.places import Verdict
from ..design.plan import Plan
from ..report.record import METRICS
from ..runtime.checkpoint import folders
from ..runtime.checkpoint.export import TOKENIZER
from ..runtime.checkpoint.writer import Writer
from ..runtime.comm.interruption import Interruption
from ..runtime.comm.world import World
from ..runtime.data.batches import Batches, global_batches
from ..runtime.data.tokenizer import files_of
from ..runtime.data.tokens import Corpus
from ..runtime.hf.read import described
from ..runtime.training import loop
from ..runtime.training.assemble import build
from ..runtime.training.checkpoints import Checkpoints, Ends
from ..runtime.training.launch import corpus as prepare
from ..runtime.training.step import Report, Run
from ..runtime.training.track import TensorBoard
from . import finish
from .look import Look, shown
from .resumed import Earlier
from .view import View, predicted, proof_line


@dataclass(frozen=True)
class Job:
    """What all ranks of `plait train` are asked to do. `proof` is where the reference leaves what it finds in how many
    steps. `earlier` is what the run goes on from, in the same folder if it `goes_on` there. A run that `overwrites` may
    replace another."""

    plan: Plan
    model: Any
    folder: Path
    sample: int
    prompts: list[str]
    track: str
    proof: tuple[Path, int] | None = None
    earlier: Earlier | None = None
    goes_on: bool = False
    overwrites: bool = False
    stop_after: int | None = None
    minutes: float | None = None
    interruption: Interruption | None = None


def rank(meeting: Any, job: Job) -> bool:
    """Trains as one of the ranks; returns whether the proof held."""
    plan, model, folder = job.plan, job.model, job.folder
    # Forked while there is nothing here that it should not have: no socket, no weight.
    writer = Writer() if plan.save_every and plan.save_method == "async" else None
    corpus = prepare(plan, model)
    batches = Batches(corpus, plan, meeting.rank)
    with World(meeting, plan.mesh) as world:
        view = View(plan, model, corpus, batches.steps_total) if world.rank == 0 else None
        if view:
            view.opening()
        verdict = None
        if job.proof is not None:
            verdict = _proven(job, job.proof, world, corpus, view)
            if not verdict.passed:
                return False
        run = build(plan, world, model=model, steps=batches.steps_total)
        checkpoints = Checkpoints(
            run, batches, folder / folders.FOLDER, corpus=corpus.digest, config=described(model.config),
            versions=finish.versions(), writer=writer,
        )  # fmt: skip
        _go_on(job, checkpoints, view)
        begun = run.done if job.goes_on else 0
        if view:
            if not job.goes_on:
                _forget_checkpoints(job, view)
            _keep_tokenizer(job, files_of(corpus.tokenizer, model.tokenizer))
            finish.forget(folder, begun)
        metrics = loop.Metrics(folder / METRICS, begun) if view else None
        board = TensorBoard(folder) if view and job.track == "tensorboard" else None

        def seen(report: Report) -> None:
            if view and metrics:
                metrics.write(report)
                view.step(report)
            if board:
                board.write(report)
            if report.finite or report.skipped:  # else the run ends here
                look.after(report.step)

        look = Look(run, corpus, job.prompts, job.sample, folder, metrics, view)
        if not run.done:
            look.after(0)
        began = time.time()
        ends = Ends(run, interruption=job.interruption, minutes=job.minutes, after=job.stop_after)
        watch = loop.train(run, batches, seen, lambda: _between(run, checkpoints, ends, view))
        _say(run, checkpoints.finished(wait=True), view)
        if writer is not None:
            writer.close()
        if view and ends.why:
            view.stopped(run.done, ends.why, folder)
        if ends.why == Ends.SIGNAL:
            return True
        record = finish.gathered(
            run, watch, corpus, predicted(plan, model.facts), began=began, proof=proof_line(verdict) if verdict else ""
        )
        texts = look.closing()
        if view:
            written = finish.write(record, folder)
            if board:
                board.close(run.done, shown(texts))
            view.closing(record, shown(texts), written)
    return True


def _proven(job: Job, proof: tuple[Path, int], world: World, corpus: Corpus, view: View | None) -> Verdict:
    place, steps = proof
    verdict = compare(job.plan, world, job.model, global_batches(corpus, job.plan, steps), place)
    if view:
        view.proof(verdict)
    return verdict


def _go_on(job: Job, checkpoints: Checkpoints, view: View | None) -> None:
    """Loads what the run goes on from, and takes the names of the checkpoints that it goes back behind."""
    if job.earlier is None:
        return
    folder, wrong = checkpoints.load(job.earlier.checkpoints)
    if view is None:
        return
    view.going_on(folder, [*job.earlier.damaged, *wrong])
    if job.goes_on:
        for newer in folders.steps(folder.parent):
            if (folders.step_of(newer) or 0) > (folders.step_of(folder) or 0):
                view.set_aside(folders.set_aside(newer))
        folders.point(folder)


def _forget_checkpoints(job: Job, view: View) -> None:
    """A new run begins where another left checkpoints: they go with it where it is replaced, and lose their names
    else."""
    for old in folders.steps(job.folder / folders.FOLDER):
        if job.overwrites:
            folders.remove(old)
        else:
            view.set_aside(folders.set_aside(old))


def _keep_tokenizer(job: Job, files: dict[str, bytes]) -> None:
    """The tokenizer stays beside the checkpoints: what has the one needs the other, and the text may be gone then."""
    if not (job.plan.save_every or job.stop_after or job.minutes):
        return
    place = job.folder / folders.FOLDER / TOKENIZER
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        new = place / (name + folders.PARTIAL)
        new.write_bytes(content)
        new.replace(place / name)


def _between(run: Run, checkpoints: Checkpoints, ends: Ends, view: View | None) -> bool:
    """After every step: saves where it is time to, and says whether the run ends here."""
    every, last = run.plan.save_every, run.done == run.steps
    ends_here = ends.asked()
    _say(run, checkpoints.finished(), view)
    if ends_here or (every and (last or run.done % every == 0)):
        _say(run, checkpoints.save(), view)
    return ends_here


def _say(run: Run, whole: list[Path], view: View | None) -> None:
    if view is not None:
        for place in whole:
            view.saved(run.done, place)
