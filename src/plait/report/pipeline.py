"""The pipeline of a run's last step for its page: simulated above measured on one scale, the bubble hatched, the slowest
stage named, and the slowest rank where ranks have several stages.

Small timelines are drawn span by span. Where there are more than `MOST_SPANS`, some ranks are drawn, and their rows are
cut into `COLUMNS` columns, each in the colour of what took most of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from ..design.records import Span, Timeline
from ..design.schedule import Kind
from . import svg as drawing
from .curve import round_values
from .kinds import LATER, LOOKS, drawn, label
from .markup import key, left_out, paragraph, said, section, some, table
from .record import RunRecord
from .timeline import placed
from .words import counted, percent, rank_bubble, runs, time

LEFT, WIDTH, RIGHT, ROW = 58, 880, 62, 26
MOST_SPANS = 1500
MOST_ROWS = 16
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
    """Mean seconds of what a stage computes for one microbatch, a kind each."""

    stage: int
    rank: int
    means: dict[Kind, float]

    @property
    def seconds(self) -> float:
        return sum(self.means.values())


def stage_times(timeline: Timeline) -> list[StageTime]:
    """In the order of the stages."""
    taken: dict[tuple[int, int], dict[Kind, list[float]]] = {}
    for span in timeline.spans:
        if span.action.kind.lane == "compute":
            kinds = taken.setdefault((span.action.stage, span.rank), {})
            kinds.setdefault(span.action.kind, []).append(span.end - span.start)
    return [
        StageTime(stage, rank, {kind: fmean(seconds) for kind, seconds in kinds.items()})
        for (stage, rank), kinds in sorted(taken.items())
    ]


def rank_times(times: Iterable[StageTime]) -> dict[int, float]:
    """Rank -> seconds of a microbatch on all of its stages."""
    found: dict[int, float] = {}
    for one in times:
        found[one.rank] = found.get(one.rank, 0.0) + one.seconds
    return found


def pipeline(record: RunRecord) -> str:
    """The section."""
    measured = record.measured
    times = stage_times(measured)
    slowest = _largest(rank_times(times))
    plan = record.plan
    many = sum(span.action.kind in LOOKS for span in measured.spans) > MOST_SPANS
    ranks = some(measured.ranks, MOST_ROWS) if many else list(range(measured.ranks))
    kinds = [kind for kind in drawn(measured.spans) if kind is not Kind.REDUCE or plan.dp > 1]
    entries = [(LOOKS[kind].name, LOOKS[kind].words) for kind in kinds]
    if max(map(len, measured.stages)) > 1 and not many:
        entries.append(("shade", f"shaded: {LATER}"))
    thinned = (
        f"Too many microbatches to draw each: a column is 1/{COLUMNS} of the step, in the colour of what took most of "
        "it. trace.json holds every action."
    )
    about = f"The last step on rank 0's pipeline, {plan.schedule}, {counted(plan.microbatches, 'microbatch')}. "
    return section(
        "pipeline", "Pipeline",
        paragraph(about + _takeaway(record, times)),
        left_out(measured.ranks, "pipeline ranks", MOST_ROWS) if many else "",
        paragraph(thinned, "note") if many else "",
        key([*entries, ("hatched", "bubble: idle or waiting")]),
        f'<div class="wide" tabindex="0" role="group" aria-label="pipeline">{_svg(record, ranks, many, slowest)}</div>',
        _rank_table(record),
        _stage_table(times),
    )  # fmt: skip


def _rank_table(record: RunRecord) -> str:
    measured, simulated = record.measured, record.simulated
    rows = [
        (f"pp {rank}", runs(measured.stages[rank]), milli(measured.busy(rank)),
         percent(rank_bubble(measured, rank)), percent(rank_bubble(simulated, rank)))
        for rank in some(measured.ranks)
    ]  # fmt: skip
    head = ("rank", "stages", "busy in the step, ms", "bubble, measured", "bubble, simulated")
    return table(head, rows, name="Numbers: each rank of the pipeline", words=(0, 1)) + left_out(
        measured.ranks, "pipeline ranks"
    )


def _stage_table(times: Sequence[StageTime]) -> str:
    kinds = [kind for kind in LOOKS if any(kind in one.means for one in times)]
    rows = [
        (one.stage, f"pp {one.rank}", *(milli(one.means.get(kind, 0.0)) for kind in kinds), milli(one.seconds))
        for one in (times[place] for place in some(len(times)))
    ]
    head = ("stage", "on", *(f"{LOOKS[kind].words}, ms" for kind in kinds), "a microbatch, ms")
    return table(head, rows, name="Numbers: each stage", words=(1,)) + left_out(len(times), "stages")


def milli(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def _largest(times: dict[int, float]) -> int:
    return max(times, key=lambda one: times[one])


def _takeaway(record: RunRecord, times: Sequence[StageTime]) -> str:
    measured, simulated = record.measured, record.simulated
    said_ = f"The bubble is {percent(measured.bubble)} of the rank-seconds measured"
    said_ += f", {percent(simulated.bubble)} in the simulation that is given the same forwards and backwards"
    if measured.ranks == 1:
        return (
            said_ + "; with one rank it is the sum of gradients after the last backward, and what lies between actions."
        )
    of_stage, of_rank = {one.stage: one.seconds for one in times}, rank_times(times)
    stage, rank = _largest(of_stage), _largest(of_rank)
    mean = fmean(of_stage.values())
    said_ += (
        f". The slowest stage is {stage}, on pp {times[stage].rank}: {time(of_stage[stage])} a microbatch, forward and "
        f"backward, {of_stage[stage] / mean if mean else 1:.2f} x the mean of the stages."
    )
    if len(of_stage) > len(of_rank):
        mean = fmean(of_rank.values())
        said_ += (
            f" The slowest rank is pp {rank}: {time(of_rank[rank])} on its stages {runs(measured.stages[rank])} "
            f"together, {of_rank[rank] / mean if mean else 1:.2f} x the mean of the ranks."
        )
    return said_


def _svg(record: RunRecord, ranks: list[int], many: bool, slowest: int) -> str:
    length = max(record.simulated.seconds, record.measured.seconds)
    shapes: list[str] = []
    top = 0.0
    for name, timeline in (("simulated", record.simulated), ("measured", record.measured)):
        title = f"{name}: {time(timeline.seconds)}, bubble {percent(timeline.bubble)}"
        shapes.append(drawing.text(LEFT, top + 15, title, "title"))
        shapes += _panel(timeline, ranks, top + 24, length, many, slowest if timeline.ranks > 1 else None)
        top += 24 + ROW * len(ranks) + 14
    shapes += _axis(length, top)
    box = f"0 0 {LEFT + WIDTH + RIGHT} {drawing.number(top + 22)}"
    label = said(f"pipeline of {counted(record.measured.ranks, 'rank')}, simulated and measured")
    head = f'<svg class="pipeline" viewBox="{box}" role="img" aria-label="{label}">'
    return f"{head}{HATCH}{''.join(shapes)}</svg>"


def _axis(length: float, top: float) -> list[str]:
    shapes = []
    for tick in round_values(0, 1000 * length, 8) if length else [0.0]:
        x = LEFT + WIDTH * tick / (1000 * length) if length else LEFT
        shapes.append(f'<line class="tick" x1="{x:.1f}" y1="{top - 6:.0f}" x2="{x:.1f}" y2="{top:.0f}"/>')
        shapes.append(drawing.text(x, top + 13, f"{tick:.4g}" + (" ms" if not tick else ""), "middle quiet"))
    return shapes


def _panel(
    timeline: Timeline, ranks: list[int], top: float, length: float, many: bool, slowest: int | None
) -> list[str]:
    scale = WIDTH / length if length else 0.0
    shapes: list[str] = []
    for row, rank in enumerate(ranks):
        y = top + ROW * row
        spans = timeline.rows[rank]
        kind = "end title" if rank == slowest else "end"
        shapes.append(drawing.text(LEFT - 9, y + 15, f"pp {rank}", kind))
        shapes.append(_rect(0, timeline.seconds * scale, (y, ROW - 4), "hatch"))
        if many:
            shapes += _columns(spans, y, scale, timeline.seconds)
        else:
            for span, part, shade in placed(timeline, _painted(spans)):
                shapes += _block(span, (y + part[0] * (ROW - 4), part[1] * (ROW - 4)), shade, scale)
        end = f"{percent(rank_bubble(timeline, rank))}{' ◂' if rank == slowest else ''}"
        shapes.append(drawing.text(LEFT + timeline.seconds * scale + 7, y + 15, end, "quiet"))
    return shapes


def _painted(spans: Sequence[Span]) -> list[Span]:
    """What is drawn, in the order of drawing: computation hides a reduction beneath it."""
    shown = [
        span for span in spans if (span.action.kind in LOOKS or span.action.kind in WAITS) and span.end > span.start
    ]
    return sorted(shown, key=lambda span: (span.action.kind.lane == "compute", span.start))


def _rect(start: float, end: float, place: tuple[float, float], kind: str, title: str = "") -> str:
    """`place` is its top and its height."""
    inside = f"<title>{said(title)}</title>" if title else ""
    gap = 0.5 if kind not in ("hatch", "wait") and end - start > 3 else 0
    x, width = LEFT + start + gap, max(end - start - 2 * gap, 0.2)
    y, height = map(drawing.number, place)
    return f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}">{inside}</rect>'


def _block(span: Span, place: tuple[float, float], shade: float, scale: float) -> Iterator[str]:
    action, look = span.action, LOOKS.get(span.action.kind)
    start, end = span.start * scale, span.end * scale
    when = f"{milli(span.start)} to {milli(span.end)} ms ({milli(span.end - span.start)} ms)"
    what = look.words if look else WAITS[action.kind]
    of = "" if action.kind is Kind.REDUCE else f" of microbatch {action.microbatch}"
    title = f"{action}: {what}{of}, stage {action.stage} on pp {span.rank}, {when}"
    yield _rect(start, end, place, look.name if look else "wait", title)
    if look is None:
        return
    top, height = place
    if shade:
        yield _rect(start, end, (top + height * (1 - shade), height * shade), "shade")
    words = label(span)
    if end - start >= 6 + 7 * len(words):
        yield drawing.text(LEFT + (start + end) / 2, top + height / 2 + 4, words, f"middle {look.ink}")


def _columns(spans: Sequence[Span], y: float, scale: float, seconds: float) -> Iterator[str]:
    """The row as runs of columns of one colour, a path a colour."""
    share: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    width = seconds / COLUMNS if seconds else 1.0
    for span in spans:
        if span.action.kind not in LOOKS:
            continue
        name = LOOKS[span.action.kind].name
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
