"""`plait train MODEL`: trains a laid-out model on text. Local ranks are forked; under torchrun this process is one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from ..design.errors import PlanError
from ..design.plan import Plan
from ..design.rules import validate
from ..design.table import settled
from .flags import Values, named, resolve, takes_plan
from .limits import refuse_check, refuse_memory

METRICS = "metrics.jsonl"


def train(
    given: Values,
    out: Path | None = typer.Option(
        None, help="Where the run is written. [default: runs/MODEL-TIME]", show_default=False
    ),
    overwrite: bool = typer.Option(False, help="Replace an earlier run's files in --out."),
    prove: int = typer.Option(0, min=0, help="Before training, compare this many steps with one process, wide."),
    sample: int = typer.Option(32, min=0, help="Tokens of text to draw from the trained model."),
    prompt: list[str] = typer.Option(["def "], help="What the text begins with; may be given several times."),
    track: str = typer.Option("none", help="Also write the metrics for: tensorboard."),
) -> int:
    """Train MODEL, laid over the ranks that the degrees describe."""
    from ..runtime.comm.nursery import alone, in_place, launch, refuse_too_many
    from ..runtime.comm.world import Rendezvous
    from ..runtime.data.batches import global_batches
    from ..runtime.hf.read import read
    from ..runtime.training.track import refuse

    plan, origin = resolve(given)
    named(origin, "train")
    _refuse_unspeakable(prompt)
    refuse(track)
    here = Rendezvous.from_environment()
    if here is not None:
        plan = _under_launcher(plan, here.size, prove)
        here = here.of(plan)
    model = read(plan.model)
    validate(plan, model.facts)
    plan = settled(plan, model.facts)
    if here is None:
        refuse_too_many(plan.world)
        refuse_memory(plan, model.facts)
        if prove:
            refuse_check(
                plan, model.facts, prove, shipped=False, way="leave --prove out; plait check takes a small twin"
            )
    folder = _folder(out, plan)

    def tokenise() -> None:
        # In a process of its own: tokenising starts threads, and what is wrong with the text is said before any rank
        # starts.
        alone(lambda: _tokenised(plan, model), "The tokenizer")

    if here is not None:
        # Rank 0 alone writes: another rank may look when it has already begun, or stand on another machine.
        with _claimed(folder, overwrite, writes=here.rank == 0):
            tokenise()
            in_place(lambda: _rank(here, plan, model, folder, None, sample, prompt, track), here.rank)
        return 0
    with _claimed(folder, overwrite), tempfile.TemporaryDirectory(prefix="plait-prove-") as scratch:
        tokenise()
        proof = (Path(scratch), prove) if prove else None

        def single() -> None:
            from ..check.reference import reference
            from ..runtime.training.launch import corpus as prepare

            corpus = prepare(plan, model)
            reference(plan, model, global_batches(corpus, plan, prove), Path(scratch))

        helpers = (single,) if prove else ()
        verdicts = launch(
            lambda meeting: _rank(meeting, plan, model, folder, proof, sample, prompt, track), plan.world,
            helpers=helpers, hang_timeout=plan.hang_timeout, comm_check=plan.comm_check,
            local_transport=plan.local_transport,
        )  # fmt: skip
    return 0 if all(verdicts) else 1


def _tokenised(plan: Plan, model: Any) -> str:
    """Has the texts of training and evaluation in the cache."""
    from ..runtime.data.held_out import evaluation_part
    from ..runtime.training.launch import corpus as prepare

    corpus = prepare(plan, model)
    evaluation_part(corpus, plan)
    return corpus.description


def _under_launcher(plan: Plan, size: int, prove: int) -> Plan:
    """The plan of a run whose ranks a launcher started."""
    if plan.ranks not in (0, size):
        raise PlanError(f"-n {plan.ranks} is asked for, but the launcher started {size} ranks: leave -n out.")
    if prove:
        raise PlanError("--prove starts a process of its own, which a launcher's ranks cannot: run plait check first.")
    return plan.model_copy(update={"ranks": size})


def _refuse_unspeakable(prompts: list[str]) -> None:
    """Bytes that are no UTF-8 arrive as half characters, which no tokenizer takes: said now, not after the training."""
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise PlanError(f"--prompt {prompt!r} is not text in UTF-8.") from None


def _folder(out: Path | None, plan: Plan) -> Path:
    name = Path(plan.model).name or Path(plan.model).resolve().name
    return out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextmanager
def _claimed(folder: Path, overwrite: bool, *, writes: bool = True) -> Iterator[None]:
    """Takes `folder` for this run before anything starts, so that of two runs at once one is refused. A run that ends
    before its first step leaves nothing behind, and an earlier run's files stay until the first step replaces them."""
    metrics, made, new = folder / METRICS, list[Path](), False
    try:
        if writes:
            new = _claim(metrics, overwrite, made)
        yield
    finally:
        with suppress(OSError):  # what is not empty stays
            if new and metrics.stat().st_size == 0:
                metrics.unlink()
            for place in reversed(made):
                place.rmdir()


def _claim(metrics: Path, overwrite: bool, made: list[Path]) -> bool:
    """Makes the file of metrics, and in `made` the directories above it; whether it was not there before."""
    folder = metrics.parent
    try:
        for place in reversed((folder, *folder.parents)):
            try:
                place.mkdir()
                made.append(place)
            except FileExistsError:
                if not place.is_dir():  # else it was there, or another run has just made it
                    raise
        if overwrite and metrics.exists():
            metrics.open("a").close()
            return False
        metrics.open("x").close()
        return True
    except FileExistsError as error:
        if error.filename == str(metrics):
            sentence = f"{folder} already holds a run: choose another --out, or replace it with --overwrite."
        else:
            sentence = f"--out {folder} cannot be made: {error.filename} is not a directory. Name another."
        raise PlanError(sentence) from None
    except OSError as error:
        raise PlanError(f"--out {folder} cannot be written: {(error.strerror or str(error)).lower()}.") from None


def _rank(
    meeting: Any, plan: Plan, model: Any, folder: Path, proof: tuple[Path, int] | None, sample: int, prompt: list[str],
    track: str,
) -> bool:  # fmt: skip
    """One rank's life, from joining the world to the last picture; returns whether the proof held."""
    from ..check.compare import compare
    from ..runtime.comm.world import World
    from ..runtime.data.batches import Batches, global_batches
    from ..runtime.training import loop
    from ..runtime.training.assemble import build
    from ..runtime.training.launch import corpus as prepare
    from ..runtime.training.track import TensorBoard
    from . import finish
    from .look import Look, shown
    from .view import View, predicted, proof_line

    corpus = prepare(plan, model)
    batches = Batches(corpus, plan, meeting.rank)
    with World(meeting, plan.mesh) as world:
        view = View(plan, model, corpus, batches.steps_total) if world.rank == 0 else None
        if view:
            view.opening()
        verdict = None
        if proof is not None:
            verdict = compare(plan, world, model, global_batches(corpus, plan, proof[1]), proof[0])
            if view:
                view.proof(verdict)
            if not verdict.passed:
                return False
        run = build(plan, world, model=model, steps=batches.steps_total)
        if view:
            finish.forget(folder)
        metrics = loop.Metrics(folder / METRICS) if view else None
        board = TensorBoard(folder) if view and track == "tensorboard" else None

        def seen(report: Any) -> None:
            if view and metrics:
                metrics.write(report)
                view.step(report)
            if board:
                board.write(report)
            if report.finite or report.skipped:  # else the run ends here
                look.after(report.step)

        look = Look(run, corpus, prompt, sample, folder, metrics, view)
        look.after(0)
        began = time.time()
        watch = loop.train(run, batches, seen)
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


def add_to(app: typer.Typer) -> None:
    app.command("train")(takes_plan(train))
