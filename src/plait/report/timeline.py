"""A timeline as a chart in characters or as SVG, and a schedule as a grid of slots.

    pp 0 0─1─····█0██··█1██  33.3%      0─    forward of microbatch 0      · idle or waiting
    pp 1 ··0─█0██1─█1██····  33.3%      █0██  its backward                 R gradient sum over dp

One row a stage, time from left to right, the bubble of the stage on the right. Predicted and measured timelines are one
type, so one function draws both. Sends, receives and waits are not drawn: a wait is idle time.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from ..design.records import Span, Timeline
from ..design.schedule import Action, Kind, Schedule
from ..design.schedule.play import play
from . import svg as drawing
from .words import duration, in_units, percent, rank_bubble

NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.REDUCE: "reduce"}
LEGEND = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.REDUCE: "gradient sum over dp"}
FILL = {Kind.FORWARD: "─", Kind.BACKWARD: "█", Kind.REDUCE: "R"}
NUMBER_STYLE = {Kind.FORWARD: "black on cyan", Kind.BACKWARD: "bright_white on blue", Kind.REDUCE: "black on yellow"}
FILL_STYLE = {Kind.FORWARD: "black on cyan", Kind.BACKWARD: "blue", Kind.REDUCE: "black on yellow"}
IDLE = "·"
MARGIN = len(" 100.0%")


def draw(timeline: Timeline, *, width: int, title: str) -> Text:
    """The chart in at most `width` columns, with the bubble of each rank and of all."""
    return _chart(timeline, width, title, timeline.seconds)


def draw_pair(simulated: Timeline, measured: Timeline, width: int) -> RenderableType:
    """Simulated above measured. Two clocks of seconds share one scale; the textbook's clock has its own."""
    lengths = [simulated.seconds, measured.seconds]
    if not in_units(simulated) and not in_units(measured):
        lengths = [max(lengths)] * 2
    return Group(
        _chart(simulated, width, "simulated", lengths[0], legend=False),
        Text(),
        _chart(measured, width, "measured", lengths[1]),
    )


def _chart(timeline: Timeline, width: int, title: str, length: float, *, legend: bool = True) -> Text:
    names = [f"pp {rank} " for rank in range(timeline.ranks)]
    label = max(map(len, names), default=0)
    columns = max(1, width - label - MARGIN)
    if in_units(timeline) and 0 < length <= columns:
        columns -= columns % int(length)  # every unit gets the same number of columns
    chart = Text(no_wrap=True, overflow="crop")
    chart.append(title, style="bold")
    chart.append(f": bubble {percent(timeline.bubble)}, {duration(timeline)}\n")
    for rank, name in enumerate(names):
        chart.append(name.ljust(label))
        chart.append_text(_row(timeline, rank, columns, length))
        chart.append(f"{percent(rank_bubble(timeline, rank)):>{MARGIN}}\n")
    if legend:
        chart.append_text(_legend(timeline))
    chart.rstrip()
    return chart


def _row(timeline: Timeline, rank: int, columns: int, length: float) -> Text:
    """One rank's cells. Computation is painted last, so that it hides a reduction that runs beneath it."""
    cells = [(IDLE, "dim")] * columns
    spans = [span for span in timeline.spans if span.rank == rank and span.action.kind in NAMES]
    for span in sorted(spans, key=lambda s: (s.action.kind.lane == "compute", s.start)):
        first, last = (round(moment * columns / length) if length else 0 for moment in (span.start, span.end))
        cells[first:last] = _block(span, last - first)
    return Text.assemble(*cells)


def _block(span: Span, columns: int) -> list[tuple[str, str]]:
    """A forward is its number and lines, a backward a filled cell, its number and more of them; a number that does not
    fit is left out."""
    kind, label = span.action.kind, str(span.action.microbatch)
    front = int(kind is Kind.BACKWARD)
    if kind is Kind.REDUCE or front + len(label) > columns:
        front, label = 0, ""
    fill = (FILL[kind], FILL_STYLE[kind])
    rest = columns - front - len(label)
    return [*[fill] * front, *[(letter, NUMBER_STYLE[kind]) for letter in label], *[fill] * rest]


def _legend(timeline: Timeline) -> Text:
    legend = Text()
    drawn = {span.action.kind for span in timeline.spans if span.end > span.start}
    for kind in (kind for kind in NAMES if kind in drawn):
        sample = Span(0, Action(kind, 0, 0), 0, 0)
        legend.append_text(Text.assemble(*_block(sample, 1 if kind is Kind.REDUCE else 2)))
        legend.append(f" {LEGEND[kind]}  ")
    legend.append(IDLE, style="dim")
    legend.append(" idle  % bubble of the stage")
    return legend


def table(schedule: Schedule, *, width: int = 80) -> Text:
    """The grid of slots, each computation taking one: 'F0' is the forward of microbatch 0. Long grids go on in a second
    band of rows."""
    times = play(schedule, lambda action: int(action.kind.lane == "compute"))
    slots = {
        (rank, int(times[action][0])): f"{action.kind.letter}{action.microbatch}"
        for rank, row in enumerate(schedule.rows)
        for action in row
        if action.kind.lane == "compute"
    }
    count = 1 + max((slot for _, slot in slots), default=-1)
    names = [f"pp {rank} " for rank in range(schedule.ranks)]
    label = max(map(len, names), default=0)
    cell = 1 + max(map(len, slots.values()), default=1)
    band = max(1, (width - label) // cell)
    lines: list[str] = []
    for first in range(0, count, band):
        shown = range(first, min(first + band, count))
        lines.append("slot".ljust(label) + "".join(str(slot).ljust(cell) for slot in shown).rstrip())
        for rank, name in enumerate(names):
            lines.append(name.ljust(label) + "".join(slots.get((rank, slot), IDLE).ljust(cell) for slot in shown))
        lines.append("")
    return Text("\n".join(line.rstrip() for line in lines[:-1]), no_wrap=True, overflow="crop")


# SVG

CHART = (72, 640)
"""Left edge and width of the time axis, in pixels."""
ROW = 26


def svg(timeline: Timeline, *, title: str) -> str:
    """The timeline as a self-contained SVG, one row a rank."""
    return svg_panels({f"bubble {percent(timeline.bubble)}, {duration(timeline)}": timeline}, title=title)


def svg_panels(timelines: Mapping[str, Timeline], *, title: str) -> str:
    """Several timelines below each other on one common clock, each under its caption."""
    length = max((timeline.seconds for timeline in timelines.values()), default=0)
    elements: list[str] = []
    top = 40.0
    for caption, timeline in timelines.items():
        elements.append(drawing.text(CHART[0], top + 12, caption))
        elements += _panel(timeline, top + 20, length)
        top += 20 + ROW * timeline.ranks + 12
    kinds = {span.action.kind for timeline in timelines.values() for span in timeline.spans}
    elements += _key([kind for kind in NAMES if kind in kinds], top)
    left, width = CHART
    return drawing.document(left + width + 70, top + 30, title, elements)


def _panel(timeline: Timeline, top: float, length: float) -> list[str]:
    left, width = CHART
    end = left + width * timeline.seconds / length if length else left
    rows: list[str] = []
    for rank in range(timeline.ranks):
        y = top + ROW * rank
        rows.append(drawing.text(left - 10, y + 16, f"pp {rank}", "end"))
        rows.append(drawing.rect(left, y, end - left, ROW - 4, "idle"))
        rows.append(drawing.text(end + 8, y + 16, percent(rank_bubble(timeline, rank))))
    blocks: list[str] = []
    for span in (span for span in timeline.spans if span.action.kind in NAMES and span.end > span.start):
        x, stop = (left + width * moment / length for moment in (span.start, span.end))
        y = top + ROW * span.rank
        blocks.append(drawing.rect(x + 0.5, y, stop - x - 1, ROW - 4, NAMES[span.action.kind]))
        label = "R" if span.action.kind is Kind.REDUCE else str(span.action.microbatch)
        if stop - x >= 4 + 7 * len(label):
            ink = "on-dark" if span.action.kind is Kind.BACKWARD else "on-light"
            blocks.append(drawing.text((x + stop) / 2, y + 15, label, f"middle {ink}"))
    return [*rows, *drawing.group("spans", blocks)]


def _key(kinds: list[Kind], top: float) -> list[str]:
    x = float(CHART[0])
    elements: list[str] = []
    for name, words in [*((NAMES[kind], LEGEND[kind]) for kind in kinds), ("idle", "idle; % bubble of the stage")]:
        elements += [drawing.rect(x, top, 14, 14, name), drawing.text(x + 20, top + 11, words)]
        x += 46 + 6.5 * len(words)
    return elements
