"""What a run is asked between two steps: its loss on held-out text, and text drawn from the prompts.

Every rank must ask, on the same steps; rank 0 (the one with a view) writes and prints what they find.
"""

from __future__ import annotations

from pathlib import Path

from ..report.record import Sample, add_samples
from ..runtime.data.held_out import EvalBatches, evaluation_part
from ..runtime.data.tokens import Corpus
from ..runtime.training.evaluate import evaluate
from ..runtime.training.loop import Metrics
from ..runtime.training.sample import sample
from ..runtime.training.step import Run
from .view import View, printable


class Look:
    """`after(step)` does what is due then: evaluation before the first step, every plan.eval_every steps and after the
    last; samples of `count` tokens every plan.sample_every steps and after the last."""

    def __init__(
        self, run: Run, corpus: Corpus, prompts: list[str], count: int, folder: Path, metrics: Metrics | None,
        view: View | None,
    ) -> None:  # fmt: skip
        self._run, self._corpus, self._prompts, self._count = run, corpus, prompts, count
        self._metrics, self._view = metrics, view
        self._folder = folder
        part = evaluation_part(corpus, run.plan)
        self._batches = None if part is None else EvalBatches(part, run.plan, run.world.rank)

    def after(self, step: int) -> None:
        plan, last = self._run.plan, step == self._run.steps
        if self._batches is not None and (step % plan.eval_every == 0 or last):
            found = evaluate(self._run, self._batches)
            if self._view is not None and self._metrics is not None:
                self._metrics.write_evaluation(found)
                self._view.evaluation(found)
        if plan.sample_every and step and (step % plan.sample_every == 0 or last):
            texts = self.texts()
            if self._view is not None:
                self._write(step, texts)
                self._view.sample(step, texts)

    def closing(self) -> list[str]:
        """What the trained model writes, which is kept as well; every rank must ask."""
        texts = self.texts()
        plan = self._run.plan
        if self._view is not None and not plan.sample_every:  # else the last step's are kept already
            self._write(self._run.done, texts)
        return texts

    def texts(self) -> list[str]:
        """What the model writes now, each text beginning with its prompt; none when no token is asked for."""
        if not self._count:
            return []
        tokenizer, found = self._corpus.tokenizer, []
        for prompt in self._prompts:
            start = tokenizer.encode(prompt) or [tokenizer.end]
            found.append(tokenizer.decode(start + sample(self._run, start, self._count)))
        return found

    def _write(self, step: int, texts: list[str]) -> None:
        """One line a text, without its prompt."""
        found = zip(self._prompts, texts, strict=False)
        add_samples([Sample(step, prompt, text.removeprefix(prompt)) for prompt, text in found], self._folder)


def shown(texts: list[str]) -> str:
    """Texts for a terminal, one below the other."""
    return "\n\n".join(map(printable, texts))
