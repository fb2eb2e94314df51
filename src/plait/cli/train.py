"""`plait train MODEL`: trains a laid-out model on text. Local ranks are forked; under torchrun this process is one."""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from ..design.errors import PlanError
from ..design.facts import ModelFacts
from ..design.plan import Plan
from ..design.rules import validate
from ..design.table import settled
from .flags import Values, named, resolve, takes_plan
from .limits import refuse_check, refuse_disk, refuse_memory

if TYPE_CHECKING:
    from ..runtime.comm.world import Rendezvous
    from .rank import Job

METRICS = "metrics.jsonl"
LOCK_TRIES, LOCK_WAIT_S = 20, 0.1


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
    resume: str = typer.Option(
        "", help="Go on with this run, or from this checkpoint of it; auto: with the one in --out, if it has any.",
        show_default=False,
    ),
    stop_after: int = typer.Option(0, min=0, help="End the run after this step, saved, to be gone on with."),
    max_minutes: float = typer.Option(0.0, min=0, help="The same after the step in which these have passed."),
) -> int:  # fmt: skip
    """Train MODEL, laid over the ranks that the degrees describe."""
    from ..runtime.comm.interruption import Interruption
    from ..runtime.comm.nursery import alone
    from ..runtime.comm.world import Rendezvous
    from ..runtime.hf.read import read
    from ..runtime.training.track import refuse
    from . import resumed
    from .rank import Job

    earlier = resumed.found(resume, out, overwrite=overwrite)
    plan, origin = resolve(given, earlier.defaults if earlier else None)
    named(origin, "train")
    _refuse_unspeakable(prompt)
    refuse(track)
    here = Rendezvous.from_environment()
    if here is not None:
        plan = _under_launcher(plan, here.size, prove)
        here = here.of(plan)
    model = read(plan.model, vocabulary=plan.vocabulary)
    validate(plan, model.facts)
    plan = settled(plan, model.facts)
    if here is None:
        _refuse_too_much(plan, model.facts, prove)
    if earlier is not None:
        earlier = earlier.fitting(plan, model)
        if earlier.over(plan):
            typer.echo(f"{earlier.run} has taken all of its {earlier.newest.progress.steps} steps.")
            return 0
    folder = earlier.run if earlier and out is None else _folder(out, plan)
    refuse_disk(plan, model.facts, folder)
    goes_on = earlier is not None and folder.resolve() == earlier.run.resolve()
    job = Job(
        plan, model, folder, sample=sample, prompts=prompt, track=track, earlier=earlier, goes_on=goes_on,
        overwrites=overwrite,        stop_after=stop_after or None, minutes=max_minutes or None,
        interruption=Interruption() if plan.save_every else None,
    )  # fmt: skip
    # Rank 0 alone writes: another rank may look when it has already begun, or stand on another machine.
    replaces = overwrite or goes_on or resume == resumed.AUTO
    with _claimed(folder, replaces, writes=here is None or here.rank == 0):
        # In a process of its own: tokenising starts threads, and what is wrong with the text is said before any rank
        # starts.
        alone(lambda: _tokenised(plan, model), "The tokenizer")
        held = _locally(job, prove) if here is None else _as_one_of(job, here)
    if job.interruption is not None and job.interruption.number:
        raise SystemExit(128 + job.interruption.number)
    return 0 if held else 1


def _refuse_too_much(plan: Plan, facts: ModelFacts, prove: int) -> None:
    """What this machine is not asked to do."""
    from ..runtime.comm.nursery import refuse_too_many

    refuse_too_many(plan.world)
    refuse_memory(plan, facts)
    if prove:
        refuse_check(plan, facts, prove, shipped=False, way="leave --prove out; plait check takes a small twin")


def _as_one_of(job: Job, here: Rendezvous) -> bool:
    """Trains as one of a launcher's ranks."""
    from ..runtime.comm.nursery import in_place
    from .rank import rank

    in_place(lambda: rank(here, job), here.rank, job.interruption)
    return True


def _locally(job: Job, prove: int) -> bool:
    """Trains over forked ranks: whether the proof held, if there is one."""
    from ..check.reference import reference
    from ..runtime.comm.nursery import launch
    from ..runtime.data.batches import global_batches
    from ..runtime.training.launch import corpus as prepare
    from .rank import rank

    plan, model = job.plan, job.model
    with tempfile.TemporaryDirectory(prefix="plait-prove-") as scratch:
        job = replace(job, proof=(Path(scratch), prove) if prove else None)

        def single() -> None:
            reference(plan, model, global_batches(prepare(plan, model), plan, prove), Path(scratch))

        verdicts = launch(
            lambda meeting: rank(meeting, job), plan.world, helpers=(single,) if prove else (),
            hang_timeout=plan.hang_timeout, comm_check=plan.comm_check, local_transport=plan.local_transport,
            interruption=job.interruption,
        )  # fmt: skip
    return all(verdicts)


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
    lock: IO[str] | None = None
    try:
        if writes:
            new = _claim(metrics, overwrite, made)
            lock = _locked(metrics)
        yield
    finally:
        if lock is not None:
            lock.close()
        with suppress(OSError):  # what is not empty stays
            if new and metrics.stat().st_size == 0:
                metrics.unlink()
            for place in reversed(made):
                place.rmdir()


def _locked(metrics: Path) -> IO[str]:
    """Holds a run's folder: of two that go on with one run at once, one is refused. The system lets go of it when the
    last process of the run has ended, and a run that was killed may have some that are about to."""
    lines = metrics.open("a")
    for attempt in range(LOCK_TRIES):
        try:
            fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == LOCK_TRIES - 1:
                lines.close()
                raise PlanError(f"Another run is writing to {metrics.parent}: wait for its end, or end it.") from None
            time.sleep(LOCK_WAIT_S)
        except OSError:  # a file system without locks
            break
        else:
            break
    return lines


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


def add_to(app: typer.Typer) -> None:
    app.command("train")(takes_plan(train))
