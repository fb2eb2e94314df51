"""A run in one file: RUN/run.json, written at its end, and all that `plait report` needs beside the lines of metrics.

    {"format": 1, "plan": {...}, "facts": {...}, "measured": {"ranks": 2, "spans": {...}}, "step_times": {...}, ...}

Written with the run; whatever is wrong with the files of a folder when it is read is one sentence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..design.errors import PlanError
from ..design.facts import ModelFacts
from ..design.plan import Plan
from ..design.records import MemoryBill, StepTime, Timeline, Traffic
from ..design.schedule import Schedule
from .plain import plain, revive

FORMAT = 1
NAME = "run.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
PAGE = "report.html"
TRACE = "trace.json"
AT_THE_END = (NAME, SAMPLES, PAGE, TRACE)
"""What a run writes when it ends, in this order."""

T = TypeVar("T")


@dataclass(frozen=True)
class RunRecord:
    """What a run was, what was predicted for it, and what it measured. Timelines are of the last step, on the ranks of
    rank 0's pipeline; traffic is of one step, on all ranks."""

    plan: Plan
    facts: ModelFacts
    began: str
    """Date and time, as ISO 8601 has it."""
    seconds: float
    """How long the training took."""
    device: str
    versions: dict[str, str]
    data: str
    """What the text was, in a few words."""
    entropy: float
    """Of the text's single tokens: the loss of a model that knows their frequencies and nothing else."""
    proof: str
    """How far the layout was from one process, in a line; empty where nobody asked."""
    schedule: Schedule
    simulated: Timeline
    measured: Timeline
    traffic_predicted: tuple[Traffic, ...]
    traffic_measured: tuple[Traffic, ...]
    memory_predicted: tuple[MemoryBill, ...]
    memory_measured: tuple[MemoryBill, ...]
    step_times: tuple[StepTime, ...]


@dataclass(frozen=True)
class Metric:
    """One line of metrics.jsonl."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float


@dataclass(frozen=True)
class Evaluated:
    """The other kind of line in metrics.jsonl: the mean loss over the held-out text when `step` steps were taken."""

    step: int
    eval_loss: float
    eval_tokens: int
    eval_seconds: float


@dataclass(frozen=True)
class Sample:
    """One line of samples.jsonl: the text that the model drew after `prompt` when it had taken `step` steps."""

    step: int
    prompt: str
    text: str


def write(record: RunRecord, folder: Path) -> None:
    text = json.dumps({"format": FORMAT, **plain(record)}, separators=(",", ":"))
    (folder / NAME).write_text(text, encoding="utf-8")


def add_samples(samples: list[Sample], folder: Path) -> None:
    """Adds a line for each to samples.jsonl."""
    with (folder / SAMPLES).open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(plain(sample)) + "\n" for sample in samples)


def read(folder: Path) -> tuple[RunRecord, list[Metric], list[Sample]]:
    """The record of a run, its metrics and its samples; what is not one is a `PlanError`."""
    record = _record(folder)
    metrics = [line for line in _metrics(folder) if isinstance(line, Metric)]
    if not metrics:
        raise PlanError(f"{folder / METRICS} holds no step, so there is nothing to draw.")
    file = folder / SAMPLES
    samples = [_revived(Sample, values, source) for values, source in _lines(file)] if file.exists() else []
    return record, metrics, samples


def evaluations(folder: Path) -> list[Evaluated]:
    """The evaluations of a run that `read` takes."""
    return [line for line in _metrics(folder) if isinstance(line, Evaluated)]


def _metrics(folder: Path) -> list[Metric | Evaluated]:
    return [
        _revived(Evaluated, values, source) if isinstance(values, dict) and "eval_loss" in values
        else _revived(Metric, values, source)
        for values, source in _lines(folder / METRICS)
    ]  # fmt: skip


def _record(folder: Path) -> RunRecord:
    if not folder.is_dir():
        raise PlanError(f"There is no directory {folder}: name one that plait train has written (runs/...).")
    file = folder / NAME
    if not file.exists():
        more = "; its run has not ended" if (folder / METRICS).exists() else ""
        raise PlanError(f"{folder} holds no {NAME}{more}: plait train writes it at the end of a run.")
    values = _json(_text(file), file)
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise PlanError(f"{file} is not the record of a run in format {FORMAT}, which this version reads.")
    record = _revived(RunRecord, values, file)
    if not _fits(record):
        raise PlanError(f"{file} is damaged: it does not describe the {record.plan.world} ranks of its plan.")
    return record


def _fits(record: RunRecord) -> bool:
    """Whether every row is of a rank that the plan has, and every rank has its rows."""
    plan = record.plan
    everyone = list(range(plan.world))
    per_rank = (record.memory_predicted, record.memory_measured, record.step_times)
    return all([row.rank for row in rows] == everyone for rows in per_rank) and all(
        timeline.ranks == plan.pp and all(0 <= span.rank < plan.pp for span in timeline.spans)
        for timeline in (record.simulated, record.measured)
    )


def _lines(file: Path) -> list[tuple[Any, str]]:
    """One object a line, and where it stands. A last line that was cut off while it was written is left out."""
    lines = _text(file).splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [(_json(line, f"{file}, line {n}"), f"{file}, line {n}") for n, line in enumerate(lines, 1)]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {(error.strerror or 'unknown error').lower()}.") from None
    except ValueError:
        raise PlanError(f"{file} is not text in UTF-8.") from None


def _json(text: str, source: Path | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{source} is damaged: it is not JSON ({str(error) or 'nested too deep'}).") from None


def _revived(kind: type[T], values: Any, source: Path | str) -> T:
    try:
        found: T = revive(kind, values, "")
        return found
    except PlanError as error:
        raise PlanError(f"{source} is damaged: {error}") from None
