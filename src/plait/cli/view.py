"""What a run shows on a terminal: the layout, a live bar, and at the end where time and bytes went."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..check.places import WORDS, Verdict
from ..design.cost.traffic import traffic
from ..design.plan import Plan
from ..design.records import Timeline, Traffic, sent_per_axis
from ..design.schedule import Action, Kind, Schedule
from ..design.sharding import shard
from ..design.simulate import simulate
from ..report import sharding as sharding_report
from ..report import timeline as timeline_report
from ..report import traffic as traffic_report
from ..report.words import counted, size
from ..runtime.data.tokens import Corpus
from ..runtime.hf.read import Model
from ..runtime.training.step import Report
from .check import show
from .terminal import Terminal

predicted = traffic


class View:
    """Rank 0's view of a run: rich on a terminal, plain lines elsewhere."""

    def __init__(self, plan: Plan, model: Model, corpus: Corpus, steps: int) -> None:
        self._plan, self._model, self._corpus, self._steps = plan, model, corpus, steps
        self._console = Terminal()
        self._seen: list[Report] = []
        self._bar: Progress | None = None

    def opening(self) -> None:
        plan, facts, weights = self._plan, self._model.facts, self._model.weights
        kind = "random parameters" if weights is None else f"parameters of {weights.said}"
        self._console.print(
            f"{plan.model} ({facts.family}, {facts.elements / 1e6:.1f} M {kind}, {facts.blocks} blocks) over "
            f"{counted(plan.world, 'rank')}: {plan.mesh}, {plan.schedule}, {counted(plan.microbatches, 'microbatch')} of "
            f"{plan.microbatch_rows} x {plan.seq} tokens",
            soft_wrap=True,
        )
        self._console.print(f"text: {self._corpus.description}", soft_wrap=True)
        self._console.print(sharding_report.table(shard(facts, plan), plan))

    def proof(self, verdict: Verdict) -> None:
        """Before training: in a word when the layout is right (the closing says how far), else with what departs."""
        if verdict.passed:
            self._console.print("proof: equal to one process", soft_wrap=True)
        else:
            show(self._console, verdict, self._plan)
            self._console.print(proof_line(verdict), soft_wrap=True)

    def step(self, report: Report) -> None:
        self._seen.append(report)
        facts = f"loss {report.loss:.3f}  {report.tokens_per_s:,.0f} tokens/s  {report.seconds:.2f} s/step"
        if not self._console.is_terminal:
            self._console.print(f"step {report.step}/{self._steps}  {facts}  lr {report.lr:.2e}", soft_wrap=True)
            return
        if self._bar is None:
            # No refresh thread: the bar moves when a step ends.
            self._bar = Progress(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(), console=self._console, auto_refresh=False,
            )  # fmt: skip
            self._bar.start()
            self._bar.add_task("training", total=self._steps, facts="")
        self._bar.update(self._bar.task_ids[0], completed=report.step, facts=facts, refresh=True)
        if report.step == self._steps:
            self._bar.stop()

    def closing(
        self, schedule: Schedule, measured: Timeline, expected: list[Traffic], moved: list[Traffic],
        verdict: Verdict | None, text: str, folder: Path,
    ) -> None:  # fmt: skip
        console, last = self._console, self._seen[-10:]
        # The mean over the last tokens, not over the last steps: a short last batch counts for what it is.
        loss = sum(report.loss * report.tokens for report in last) / max(1, sum(report.tokens for report in last))
        below = self._corpus.entropy - loss
        console.print(
            f"\nloss {loss:.3f} (mean of the last {len(last)} of {last[-1].step} steps); guessing tokens by their "
            f"frequency alone costs {self._corpus.entropy:.3f} (unigram entropy): the loss is {abs(below):.3f} nats "
            f"{'below' if below >= 0 else 'ABOVE'} that",
            soft_wrap=True,
        )
        console.print("\npipeline, last step (simulated from its own forward and backward times)", style="bold")
        simulated = simulate(schedule, mean_seconds(measured))
        console.print(timeline_report.draw_pair(simulated, measured, console.width))
        console.print()
        console.print(traffic_report.table(expected, moved))
        axes = ", ".join(f"{axis} {size(float(sent))}" for axis, sent in sent_per_axis(moved).items())
        console.print(f"per axis, all ranks: {axes or 'nothing'}", soft_wrap=True)
        if verdict is not None:
            console.print(proof_line(verdict), soft_wrap=True)
        if text:
            console.print("\nsample", style="bold")
            console.print(Text(text), soft_wrap=True)
        console.print(f"\nwritten: {folder / 'metrics.jsonl'}", soft_wrap=True)


PROVEN = ("loss", "norm", "gradient", "weight")
"""The quantities that the line of a proof gives; the others are in the table of `plait check`."""


def proof_line(verdict: Verdict) -> str:
    """How far the layout was from one process, in one line."""
    word = "equal" if verdict.passed else "NOT equal"
    found = ", ".join(f"{WORDS[quantity]} {verdict.relative(quantity):.1e}" for quantity in PROVEN)
    steps = counted(verdict.steps, "step")
    return f"proof: {word} to one process in the same {steps} (fp64, largest relative deviation): {found}"


def mean_seconds(measured: Timeline) -> Any:
    """A clock for the simulator from what was measured: the mean time of a stage's forward and backward; no transfer
    time, since a measured wait is what the simulation is to show."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in measured.spans:
        if span.action.kind.lane == "compute":
            times[span.action.kind, span.action.stage].append(span.end - span.start)

    def seconds(action: Action) -> float:
        found = times.get((action.kind, action.stage))
        return sum(found) / len(found) if found else 0.0

    return seconds
