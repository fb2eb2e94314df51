"""What a run shows on a terminal: the layout, a live bar, and at the end where time and bytes went."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..check.places import WORDS, Verdict
from ..design.cost.traffic import traffic
from ..design.plan import Plan, cuts_rows
from ..design.records import sent_per_axis
from ..design.sharding import shard
from ..report import memory as memory_report
from ..report import sharding as sharding_report
from ..report import timeline as timeline_report
from ..report import traffic as traffic_report
from ..report.costs import warning
from ..report.record import RunRecord
from ..report.words import counted, size
from ..runtime.data.held_out import evaluation_part, seen_in_training
from ..runtime.data.tokens import Corpus
from ..runtime.hf.read import Model
from ..runtime.training.evaluate import Evaluation
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
        self._evaluations: list[Evaluation] = []
        self._bar: Progress | None = None

    def opening(self) -> None:
        plan, facts, weights = self._plan, self._model.facts, self._model.weights
        kind = "random parameters" if weights is None else f"parameters of {weights.said}"
        trained = sum(fact.elements for fact in facts.parameters if plan.trains(fact))
        if trained < facts.elements:
            kind += f", {trained / 1e6:.1f} M of them trained"
        self._console.print(
            f"{plan.model} ({facts.family}, {facts.elements / 1e6:.1f} M {kind}, {facts.blocks} blocks) over "
            f"{counted(plan.world, 'rank')}: {sharding_report.work(plan, sp=cuts_rows(plan, facts))}",
            soft_wrap=True,
        )
        self._console.print(f"text: {self._corpus.description}", soft_wrap=True)
        self._say_what_is_held_out()
        self._console.print(sharding_report.table(shard(facts, plan), plan))
        if said := sharding_report.deal(plan, facts):
            self._console.print(said, soft_wrap=True)

    def _say_what_is_held_out(self) -> None:
        part = evaluation_part(self._corpus, self._plan)
        if part is None:
            return
        said = f"held out: {counted(len(part.lengths), 'document')}, {part.tokens:,} tokens"
        if self._plan.eval_data:
            said += f", {self._plan.eval_data}"
            if seen := seen_in_training(self._corpus, part):
                said += f"; {seen} of them are in the training text, too"
        self._console.print(Text(said), soft_wrap=True)

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
        if report.skipped:
            facts += f"  SKIPPED: overflow at loss scale {report.scale:g}"
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

    def evaluation(self, found: Evaluation) -> None:
        self._evaluations.append(found)
        facts = f"held-out loss {found.loss:.3f}  {found.tokens:,} tokens  {found.seconds:.2f} s"
        self._say(f"step {found.step}/{self._steps}  {facts}")

    def sample(self, step: int, texts: list[str]) -> None:
        for text in texts:
            self._say(f"step {step}/{self._steps}  sample: {printable(text)!r}")

    def going_on(self, folder: Path, wrong: list[str]) -> None:
        """Before training: from which checkpoint the run goes on, and which newer ones it cannot read."""
        for sentence in wrong:
            self._say(f"left out: {sentence}")
        self._say(f"going on from {folder}")

    def set_aside(self, place: Path) -> None:
        self._say(f"set aside: {place}, which this run goes back behind")

    def saved(self, step: int, place: Path) -> None:
        self._say(f"step {step}/{self._steps}  saved: {place}")

    def stopped(self, step: int, why: str, run: Path) -> None:
        """The run ends before its last step."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._say(f"ended after step {step} by {why}; it goes on with: plait train --resume {run}")

    def _say(self, line: str) -> None:
        """A line of plain text, above the bar where there is one."""
        console = self._console if self._bar is None else self._bar.console
        console.print(Text(line), soft_wrap=True)

    def closing(self, record: RunRecord, text: str, written: Iterable[Path]) -> None:
        console, last = self._console, [report for report in self._seen[-10:] if isfinite(report.loss)]
        # The mean over the last tokens, not over the last steps: a short last batch counts for what it is.
        loss = sum(report.loss * report.tokens for report in last) / max(1, sum(report.tokens for report in last))
        below = self._corpus.entropy - loss
        console.print(
            f"\nloss {loss:.3f} (mean of the last {len(last)} of {len(self._seen)} steps); guessing tokens by their "
            f"frequency alone costs {self._corpus.entropy:.3f} (unigram entropy): the loss is {abs(below):.3f} nats "
            f"{'below' if below >= 0 else 'ABOVE'} that",
            soft_wrap=True,
        )
        if self._evaluations:
            first, found = self._evaluations[0], self._evaluations[-1]
            began = f" ({first.loss:.3f} before the first)" if len(self._evaluations) > 1 else ""
            over = f"the mean over {found.tokens:,} target tokens"
            console.print(f"held-out loss {found.loss:.3f} after step {found.step}{began}: {over}", soft_wrap=True)
        console.print("\npipeline, last step (simulated from its own forward and backward times)", style="bold")
        console.print(timeline_report.draw_pair(record.simulated, record.measured, console.width))
        console.print()
        console.print(traffic_report.table(record.traffic_predicted, record.traffic_measured))
        axes = ", ".join(f"{axis} {size(float(sent))}" for axis, sent in sent_per_axis(record.traffic_measured).items())
        console.print(f"per axis, all ranks: {axes or 'nothing'}", soft_wrap=True)
        console.print("\nmemory at the fullest moment of a step (the process itself is not counted)", style="bold")
        console.print(
            Text(memory_report.draw(record.memory_predicted, record.memory_measured, console.width)), soft_wrap=True
        )
        if record.proof:
            console.print(record.proof, soft_wrap=True)
        if said := warning(record):
            console.print(said, soft_wrap=True)
        if text:
            console.print("\nsample", style="bold")
            console.print(Text(text), soft_wrap=True)
        console.print(f"\nwritten: {', '.join(map(str, written))}", soft_wrap=True)


def printable(text: str) -> str:
    """Without the bytes that a model draws and a terminal obeys."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


PROVEN = ("loss", "norm", "gradient", "weight")
"""The quantities that the line of a proof gives; the others are in the table of `plait check`."""


def proof_line(verdict: Verdict) -> str:
    """How far the layout was from one process, in one line."""
    word = "equal" if verdict.passed else "NOT equal"
    found = ", ".join(f"{WORDS[quantity]} {verdict.relative(quantity):.1e}" for quantity in PROVEN)
    steps = counted(verdict.steps, "step")
    return f"proof: {word} to one process in the same {steps} (fp64, largest relative deviation): {found}"
