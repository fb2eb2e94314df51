"""A run as one page: a file that needs no network, made of the files in the run's folder alone.

    run.json, metrics.jsonl, samples.jsonl  ->  page(...)  ->  report.html
                                            ->  trace.written(...)  ->  trace.json

Each section states what its picture shows, draws it, and has its numbers folded beneath. The page runs one script, the
button between light and dark; a policy in its head forbids every other, whatever a sample of text may hold.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from ..design.errors import PlanError
from ..design.plan import cuts_rows
from . import costs, trace
from .holders import holders
from .loss import LAST, loss, mean_loss
from .markup import paragraph, said, section, table
from .pipeline import pipeline
from .record import PAGE, TRACE, Evaluated, Metric, RunRecord, Sample, evaluations, read
from .sharding import work
from .style import SCRIPT, sheet
from .traffic import equal
from .words import counted, percent, size, time


def draw(folder: Path, out: Path | None = None) -> list[Path]:
    """Draws the run in `folder` again: its page (at `out`, or in the folder) and its trace; returns what was written."""
    record, metrics, samples = read(folder)
    page_file, trace_file = out or folder / PAGE, folder / TRACE
    drawn = page(record, metrics, samples, evaluations(folder))
    for file, text in ((page_file, drawn), (trace_file, trace.written(record))):
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"{file} cannot be written: {(error.strerror or 'unknown error').lower()}.") from None
    return [page_file, trace_file]


def page(
    record: RunRecord, metrics: Sequence[Metric], samples: Sequence[Sample], held_out: Sequence[Evaluated] = ()
) -> str:
    """The whole file."""
    title = f"{record.plan.model} over {record.plan.mesh}"
    script = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; form-action 'none'"
    body = [
        loss(record, metrics, samples, held_out), holders(record), pipeline(record), costs.step_time(record),
        costs.traffic(record), costs.memory(record), _plan(record),
    ]  # fmt: skip
    return "\n".join([
        '<!doctype html>', '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{said(title)} - plait</title>", f"<style>\n{sheet()}\n</style>", "</head>", "<body>",
        _header(record, metrics), "<main>", *body, "</main>", _footer(record),
        f"<script>{SCRIPT}</script>", "</body>", "</html>", "",
    ])  # fmt: skip


def _header(record: RunRecord, metrics: Sequence[Metric]) -> str:
    plan, last = record.plan, metrics[-LAST:]
    fullest = max(bill.peak for bill in record.memory_measured)
    sent = sum(float(row.sent) for row in record.traffic_measured)
    ours = [row.seconds for row in record.step_times]
    layout = (
        f"{record.facts.family}, {record.facts.elements / 1e6:,.1f} M parameters over {counted(plan.world, 'rank')}: "
        f"{work(plan, sp=cuts_rows(plan, record.facts))}"
    )
    steps = counted(len(last), "step")
    tiles = [
        ("loss", f"{mean_loss(last):.3f}", f"mean of the last {steps}"),
        ("steps", f"{metrics[-1].step:,}", f"in {time(record.seconds)}"),
        ("tokens/s", f"{fmean(m.tokens_per_s for m in last):,.0f}", f"mean of the last {steps}"),
        ("step", time(fmean(ours) if ours else 0.0), f"{metrics[-1].tokens:,} tokens"),
        ("bubble", percent(record.measured.bubble), f"simulated {percent(record.simulated.bubble)}"),
        ("sent a step", size(sent), "as predicted, to the byte"
         if equal(record.traffic_predicted, record.traffic_measured) else "NOT as predicted"),
        ("fullest rank", size(fullest), "at its fullest moment"),
    ]  # fmt: skip
    cells = "".join(
        f'<div><dt>{said(name)}</dt><dd>{said(value)}</dd><dd class="small">{said(note)}</dd></div>'
        for name, value, note in tiles
    )
    warned = costs.warning(record)
    warning = f'<p class="warning" role="alert">{said(warned)}</p>' if warned else ""
    return "\n".join([
        "<header>", '<button id="theme" type="button" hidden>Dark</button>', f"<h1>{said(plan.model)}</h1>",
        paragraph(layout), paragraph(f"Text: {record.data}. {record.proof}".strip(), "muted"),
        f'<dl class="tiles">{cells}</dl>', warning, "</header>",
    ])  # fmt: skip


def _plan(record: RunRecord) -> str:
    values = [(name, value) for name, value in record.plan.model_dump().items()]
    return section("plan", "Plan", table(("key", "value"), values, name="Every value of the plan", words=(0, 1)))


def _footer(record: RunRecord) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"<footer>{said(f'{record.began}. {versions}. {record.device}.')}</footer>"
