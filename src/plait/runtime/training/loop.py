"""The training loop: batches in, reports out, one line of metrics a step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from ..comm.nursery import BadNumbersError
from . import replicas
from .evaluate import Evaluation
from .step import Given, Report, Run
from .watch import Watch


def _never() -> bool:
    return False


def train(
    run: Run, batches: Iterable[Given], seen: Callable[[Report], None], ends: Callable[[], bool] = _never
) -> Watch:  # fmt: skip
    """Takes a step on each batch and shows its report to `seen`, on every rank; returns what there was to see of the time
    and memory of the steps. `ends` is asked after each step whether the run is to end there. Copies of a weight that
    differ before the first step, numbers that are not finite after any, and in fp16 too many steps in a row that were
    skipped for them, end the run on all ranks at once: all see the same."""
    replicas.agree(run)
    watch = Watch(run)
    for batch in watch.over(batches):
        report = watch.step(batch)
        seen(report)
        if not report.finite and not (report.skipped and not run.loss_scale.spent(report.scale or 1.0)):
            raise BadNumbersError(_what_went_bad(run, report))
        if ends():
            break
    return watch


def _what_went_bad(run: Run, report: Report) -> str:
    first, plan = run.first_not_finite(), run.plan
    named = f"; the first gradient that is not finite is that of {first}" if first else ""
    way = f"lower lr ({plan.lr}), add warmup ({plan.warmup}) or clip ({plan.clip})"
    if not report.skipped:
        return f"step {report.step} has loss {report.loss} and gradient norm {report.grad_norm}{named}: {way}."
    count = run.loss_scale.in_a_row
    skips = f"{count} steps in a row overflowed" if count > 1 else "it overflowed"
    return (
        f"step {report.step} is skipped in fp16, as {skips} (max_skips {plan.max_skips}), the last at a loss scale of "
        f"{report.scale:g}{named}: {way}, or set compute bf16."
    )


def cut_off(file: Path, step: int) -> None:
    """Ends a file of JSON lines after the last that tells of `step` or of one before: those of later steps are written
    again when these are run again. What is no such line ends it, too."""
    with file.open("r+b") as lines:
        end = 0
        for line in lines:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            end += len(line)
        lines.truncate(end)


class Metrics:
    """Writes RUN/metrics.jsonl: one object a step or an evaluation, flushed line by line; after those of a run that has
    taken `done` steps and goes on."""

    def __init__(self, file: Path, done: int = 0) -> None:
        if file.is_file():
            cut_off(file, done if done else -1)
        self._lines = file.open("a", encoding="utf-8")

    def write(self, report: Report) -> None:
        scaled = {} if report.scale is None else {"scale": report.scale, "skipped": report.skipped}
        self._add({
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "tokens": report.tokens,
            "tokens_per_s": report.tokens_per_s,
            **scaled,
        })  # fmt: skip

    def write_evaluation(self, found: Evaluation) -> None:
        """A line of its own, with other names: after a step's, and before the first step's (step 0)."""
        self._add({
            "step": found.step,
            "eval_loss": found.loss,
            "eval_tokens": found.tokens,
            "eval_seconds": found.seconds,
        })  # fmt: skip

    def _add(self, values: dict[str, float]) -> None:
        """What is not finite has no number in JSON."""
        held = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._lines.write(json.dumps(held) + "\n")
        self._lines.flush()
