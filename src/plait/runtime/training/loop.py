"""The training loop: batches in, reports out, one line of metrics a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from ..comm.nursery import BadNumbersError
from . import replicas
from .evaluate import Evaluation
from .step import Given, Report, Run
from .watch import Watch


def train(run: Run, batches: Iterable[Given], seen: Callable[[Report], None]) -> Watch:
    """Takes a step on each batch and shows its report to `seen`, on every rank; returns what there was to see of the time
    and memory of the steps. Copies of a weight that differ before the first step, and numbers that are not finite after
    any, end the run on all ranks at once, since all see the same."""
    replicas.agree(run)
    watch = Watch(run)
    for batch in watch.over(batches):
        report = watch.step(batch)
        seen(report)
        if not report.finite:
            raise BadNumbersError(
                f"step {report.step} has loss {report.loss} and gradient norm {report.grad_norm}: lower lr "
                f"({run.plan.lr}), add warmup ({run.plan.warmup}) or clip ({run.plan.clip})."
            )
    return watch


class Metrics:
    """Writes RUN/metrics.jsonl: one object a step or an evaluation, flushed line by line."""

    def __init__(self, file: Path) -> None:
        self._lines = file.open("w", encoding="utf-8")

    def write(self, report: Report) -> None:
        self._add({
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "tokens": report.tokens,
            "tokens_per_s": report.tokens_per_s,
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
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()
