"""The pipeline of a run's last step for its page: simulated above measured on one scale, the bubble hatched, the slowest
stage named.

Small timelines are drawn span by span. Where there are more than `MOST_SPANS`, some stages are drawn, and their rows are
cut into `COLUMNS` columns, each in the colour of what took most of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from ..design.records import Span, Timeline
from ..design.schedule import Kind
from . import svg as drawing
from .curve import round_values
from .markup import key, left_out, paragraph, said, section, some, table
from .record import RunRecord
from .timeline import LEGEND, NAMES
from .words import counted, percent, rank_bubble, time

LEFT, WIDTH, RIGHT, ROW = 58, 880, 62, 26
MOST_SPANS = 1500
MOST_STAGES = 16
COLUMNS = 400
IDLE = "idle"
WAITS = {Kind.WAIT_ACTIVATION: "waits for the activation", Kind.WAIT_GRADIENT: "waits for the gradient"}
HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="7" height="7" style="fill:var(--idle)"/><rect width="2" height="7" style="fill:var(--hatch)"/>'
    "</pattern></defs>"
)


@dataclass(frozen=True)
class StageTime:
    """Mean seconds of a stage's forward and backward of one microbatch."""

    stage: int
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def stage_times(timeline: Timeline) -> list[StageTime]:
    found = []
    for rank in range(timeline.ranks):
        spans = timeline.rows[rank]
        forward, backward = (
            fmean([s.end - s.start for s in spans if s.action.kind is kind] or [0.0])
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        found.append(StageTime(rank, forward, backward))
    return found


def pipeline(record: RunRecord) -> str:
    """The section."""
    measured, simulated = record.measured, record.simulated
    times = stage_times(measured)
    slowest = max(times, key=lambda one: one.seconds)
    plan = record.plan
    many = measured.ranks * plan.microbatches * 2 > MOST_SPANS
    stages = some(measured.ranks, MOST_STAGES) if many else list(range(measured.ranks))
    kinds = [kind for kind in NAMES if kind is not Kind.REDUCE or plan.dp > 1]
    thinned = (
        f"Too many microbatches to draw each: a column is 1/{COLUMNS} of the step, in the colour of what took most of "
        "it. trace.json holds every action."
    )
    about = f"The last step on rank 0's pipeline, {plan.schedule}, {counted(plan.microbatches, 'microbatch')}. "
    rows = [
        (f"pp {one.stage}", milli(one.forward), milli(one.backward), milli(measured.busy(one.stage)),
         percent(rank_bubble(measured, one.stage)), percent(rank_bubble(simulated, one.stage)))
        for one in (times[stage] for stage in some(len(times)))
    ]  # fmt: skip
    head = ("stage", "forward, ms", "backward, ms", "busy in the step, ms", "bubble, measured", "bubble, simulated")
    return section(
        "pipeline", "Pipeline",
        paragraph(about + _takeaway(record, times, slowest)),
        left_out(measured.ranks, "stages", MOST_STAGES) if many else "",
        paragraph(thinned, "note") if many else "",
        key([*((NAMES[kind], LEGEND[kind]) for kind in kinds), ("hatched", "bubble: idle or waiting")]),
        f'<div class="wide" tabindex="0" role="group" aria-label="pipeline">{_svg(record, stages, many, slowest)}</div>',
        table(head, rows, name="Numbers: each stage", words=(0,)),
        left_out(len(times), "stages"),
    )  # fmt: skip


def milli(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def _takeaway(record: RunRecord, times: Sequence[StageTime], slowest: StageTime) -> str:
    measured, simulated = record.measured, record.simulated
    said_ = f"The bubble is {percent(measured.bubble)} of the rank-seconds measured"
    said_ += f", {percent(simulated.bubble)} in the simulation that is given the same forwards and backwards"
    if len(times) == 1:
        return (
            said_
            + "; with one stage it is the sum of gradients after the last backward, and what lies between actions."
        )
    mean = fmean(one.seconds for one in times)
    return (
        f"{said_}. The slowest stage is pp {slowest.stage}: {time(slowest.seconds)} a microbatch, forward and backward, "
        f"{slowest.seconds / mean if mean else 1:.2f} x the mean of the stages."
    )


def _svg(record: RunRecord, stages: list[int], many: bool, slowest: StageTime) -> str:
    length = max(record.simulated.seconds, record.measured.seconds)
    drawn: list[str] = []
    top = 0.0
    for name, timeline in (("simulated", record.simulated), ("measured", record.measured)):
        title = f"{name}: {time(timeline.seconds)}, bubble {percent(timeline.bubble)}"
        drawn.append(drawing.text(LEFT, top + 15, title, "title"))
        drawn += _panel(timeline, stages, top + 24, length, many, slowest.stage if timeline.ranks > 1 else None)
        top += 24 + ROW * len(stages) + 14
    drawn += _axis(length, top)
    box = f"0 0 {LEFT + WIDTH + RIGHT} {drawing.number(top + 22)}"
    label = said(f"pipeline of {counted(record.measured.ranks, 'stage')}, simulated and measured")
    head = f'<svg class="pipeline" viewBox="{box}" role="img" aria-label="{label}">'
    return f"{head}{HATCH}{''.join(drawn)}</svg>"


def _axis(length: float, top: float) -> list[str]:
    drawn = []
    for tick in round_values(0, 1000 * length, 8) if length else [0.0]:
        x = LEFT + WIDTH * tick / (1000 * length) if length else LEFT
        drawn.append(f'<line class="tick" x1="{x:.1f}" y1="{top - 6:.0f}" x2="{x:.1f}" y2="{top:.0f}"/>')
        drawn.append(drawing.text(x, top + 13, f"{tick:.4g}" + (" ms" if not tick else ""), "middle quiet"))
    return drawn


def _panel(
    timeline: Timeline, stages: list[int], top: float, length: float, many: bool, slowest: int | None
) -> list[str]:
    scale = WIDTH / length if length else 0.0
    drawn: list[str] = []
    for place, stage in enumerate(stages):
        y = top + ROW * place
        spans = timeline.rows[stage]
        kind = "end title" if stage == slowest else "end"
        drawn.append(drawing.text(LEFT - 9, y + 15, f"pp {stage}", kind))
        drawn.append(_rect(0, timeline.seconds * scale, y, "hatch"))
        if many:
            drawn += _columns(spans, y, scale, timeline.seconds)
        else:
            drawn += [shape for span in _painted(spans) for shape in _block(span, y, scale)]
        end = f"{percent(rank_bubble(timeline, stage))}{' ◂' if stage == slowest else ''}"
        drawn.append(drawing.text(LEFT + timeline.seconds * scale + 7, y + 15, end, "quiet"))
    return drawn


def _painted(spans: Sequence[Span]) -> list[Span]:
    """What is drawn, in the order of drawing: computation hides a reduction beneath it."""
    shown = [
        span for span in spans if (span.action.kind in NAMES or span.action.kind in WAITS) and span.end > span.start
    ]
    return sorted(shown, key=lambda span: (span.action.kind.lane == "compute", span.start))


def _rect(start: float, end: float, y: float, kind: str, title: str = "") -> str:
    inside = f"<title>{said(title)}</title>" if title else ""
    gap = 0.5 if kind in NAMES.values() and end - start > 3 else 0
    x, width = LEFT + start + gap, max(end - start - 2 * gap, 0.2)
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.0f}" width="{width:.2f}" height="{ROW - 4}">{inside}</rect>'


def _block(span: Span, y: float, scale: float) -> Iterator[str]:
    kind, microbatch = span.action.kind, span.action.microbatch
    start, end = span.start * scale, span.end * scale
    when = f"{milli(span.start)} to {milli(span.end)} ms ({milli(span.end - span.start)} ms)"
    what = WAITS.get(kind) or LEGEND[kind]
    of = "" if kind is Kind.REDUCE else f" of microbatch {microbatch}"
    yield _rect(start, end, y, NAMES.get(kind, "wait"), f"{span.action}: {what}{of}, stage {span.action.stage}, {when}")
    label = "R" if kind is Kind.REDUCE else str(microbatch)
    if kind in NAMES and end - start >= 6 + 7 * len(label):
        ink = "on-dark" if kind is Kind.BACKWARD else "on-light"
        yield drawing.text(LEFT + (start + end) / 2, y + 15, label, f"middle {ink}")


def _columns(spans: Sequence[Span], y: float, scale: float, seconds: float) -> Iterator[str]:
    """The row as runs of columns of one colour, a path a colour."""
    share: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    width = seconds / COLUMNS if seconds else 1.0
    for span in spans:
        if span.action.kind not in NAMES:
            continue
        name = NAMES[span.action.kind]
        for column in range(min(COLUMNS - 1, int(span.start / width)), min(COLUMNS - 1, int(span.end / width)) + 1):
            inside = min(span.end, (column + 1) * width) - max(span.start, column * width)
            share[column][name] = share[column].get(name, 0.0) + inside
    kinds = [max([(width - sum(c.values()), IDLE), *((took, name) for name, took in c.items())])[1] for c in share]
    runs: dict[str, list[str]] = {}
    place = 0
    for kind, columns in groupby(kinds):
        count = len(list(columns))
        if kind != IDLE:
            x, wide = LEFT + place * width * scale, count * width * scale
            runs.setdefault(kind, []).append(f"M{x:.1f} {y:.0f}h{wide:.1f}v{ROW - 4}h-{wide:.1f}z")
        place += count
    for kind, paths in runs.items():
        yield f'<path class="{kind}" d="{"".join(paths)}"/>'
