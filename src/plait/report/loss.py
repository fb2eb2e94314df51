"""The loss of a run for its page, with samples of text beside it, and beneath it what goes with a loss: learning rate,
gradient norm, speed."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from .curve import curve, window_of
from .markup import key, paragraph, said, section, some, table
from .record import Evaluated, Metric, RunRecord, Sample
from .words import counted

LAST = 10
"""Steps at the end of a run that its loss and its speed are means over."""
MOST_SAMPLES = 20


def mean_loss(metrics: Sequence[Metric]) -> float:
    """Over tokens, not over steps: a short last batch counts for what it is. A step of fp16 that was skipped may have
    none."""
    metrics = [metric for metric in metrics if isfinite(metric.loss)]
    tokens = sum(metric.tokens for metric in metrics)
    return sum(metric.loss * metric.tokens for metric in metrics) / max(1, tokens)


def loss(record: RunRecord, metrics: Sequence[Metric], samples: Sequence[Sample], held_out: Sequence[Evaluated]) -> str:
    """The section of the curves."""
    points = [(metric.step, metric.loss) for metric in metrics]
    end = mean_loss(metrics[-LAST:])
    below = record.entropy - end
    about = (
        f"From {metrics[0].loss:.3f} to {end:.3f} in {counted(len(metrics), 'step')}. Guessing tokens by their frequency "
        f"alone costs {record.entropy:.3f} (unigram entropy): the loss is {abs(below):.3f} nats "
        f"{'below' if below >= 0 else 'above'} it."
    )
    if held_out:
        first, last = held_out[0], held_out[-1]
        about += (
            f" On held-out text: {first.eval_loss:.3f} after step {first.step}, {last.eval_loss:.3f} after {last.step}."
        )
    reference = (record.entropy, "unigram entropy")
    window = window_of(len(points))
    lines = [("line raw", "each step"), ("line smooth", f"mean over {window:,} steps around")]
    if window == 1:
        lines = [("line smooth", "each step")]
    small = "".join(
        f"<div><h3>{said(name)}</h3>{curve(values, name=name, height=90, smooth=smooth, ticks=3)}</div>"
        for name, values, smooth in (
            ("learning rate", [(m.step, m.lr) for m in metrics], False),
            ("gradient norm", [(m.step, m.grad_norm) for m in metrics], True),
            ("tokens/s", [(m.step, m.tokens_per_s) for m in metrics], True),
            ("held-out loss", [(found.step, found.eval_loss) for found in held_out], False),
        )
        if len(values) > 1 or name != "held-out loss"
    )
    scales = (
        '<fieldset class="scales" aria-label="scale of the loss">'
        '<label><input type="radio" name="scale" checked> linear</label>'
        '<label><input type="radio" name="scale" id="log"> logarithmic</label></fieldset>'
    )
    drawn = (curve(points, name="loss", height=300, log=log, reference=reference) for log in (False, True))
    charts = "".join(
        f'<div class="scale-{scale}">{chart}</div>' for scale, chart in zip(("linear", "log"), drawn, strict=True)
    )
    main = f'<div class="curves">{scales}{charts}{key(lines)}</div>'
    rows = [
        (m.step, f"{m.loss:.4f}", f"{m.grad_norm:.4f}", f"{m.lr:.3e}", f"{m.tokens:,}", f"{m.tokens_per_s:,.0f}")
        for m in (metrics[place] for place in some(len(metrics), 50))
    ]
    head = ("step", "loss", "gradient norm", "learning rate", "tokens", "tokens/s")
    name = "Numbers: each step" if len(metrics) <= 50 else f"Numbers: 50 of {len(metrics):,} steps"
    return section(
        "loss", "Loss",
        paragraph(about),
        f'<div class="beside"><div>{main}</div>{_samples(samples)}</div>',
        f'<div class="trio">{small}</div>',
        table(head, rows, name=name),
    )  # fmt: skip


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return '<div><h3>Samples</h3><p class="note">No text was drawn (--sample 0).</p></div>'
    shown = [samples[place] for place in some(len(samples), MOST_SAMPLES)]
    figures = "".join(
        f"<figure><figcaption>after step {sample.step:,}</figcaption>"
        f"<pre><b>{said(sample.prompt)}</b>{said(sample.text)}</pre></figure>"
        for sample in reversed(shown)
    )
    box = f'<div class="samples" tabindex="0" role="group" aria-label="samples">{figures}</div>'
    return f"<div><h3>Samples</h3>{box}</div>"
