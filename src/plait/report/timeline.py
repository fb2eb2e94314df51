"""A timeline as a chart in characters or as SVG.

    pp 0 0─1─····█0██··█1██  33.3%      0─    forward of microbatch 0      · idle or waiting
    pp 1 ··0─█0██1─█1██····  33.3%      █0██  its backward                 R gradient sum over dp

One row a rank, time from left to right, the bubble of the rank on the right. Predicted and measured timelines are one
type, so one function draws both. Sends, receives and waits are not drawn: a wait is idle time. A forward and a backward
that run at the same time share the row, the forward above. How kinds and stages look is in kinds.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..design.records import Span, Timeline
from ..design.schedule import Action, Kind
from . import svg as drawing
from .kinds import LATER, LOOKS, drawn, label, together
from .words import duration, in_units, percent, rank_bubble

IDLE = "·"
MARGIN = len(" 100.0%")


def draw(timeline: Timeline, *, width: int, title: str) -> Text:
    """The chart in at most `width` columns, with the bubble of each rank and of all."""
    return Text("\n").join([
        _chart(timeline, width, title, _caption(timeline), timeline.seconds),
        _legend([timeline], width, _columns(timeline, width, timeline.seconds)[1]),
    ])  # fmt: skip


def draw_pair(simulated: Timeline, measured: Timeline, width: int) -> RenderableType:
    """Simulated above measured. Two clocks of seconds share one scale; the textbook's clock has its own."""
    lengths = [simulated.seconds, measured.seconds]
    if not in_units(simulated) and not in_units(measured):
        lengths = [max(lengths)] * 2
    return Group(
        _chart(simulated, width, "simulated", _caption(simulated), lengths[0]),
        Text(),
        _chart(measured, width, "measured", _caption(measured), lengths[1]),
        _legend([simulated, measured], width, _columns(measured, width, lengths[1])[1]),
    )


def draw_all(timelines: Mapping[str, tuple[Timeline, str]], width: int) -> RenderableType:
    """Several on one common clock by their titles, each with its caption, and one legend."""
    length = max(timeline.seconds for timeline, _ in timelines.values())
    charts: list[Text] = []
    for title, (timeline, caption) in timelines.items():
        charts += [_chart(timeline, width, title, caption, length), Text()]
    played = [timeline for timeline, _ in timelines.values()]
    return Group(*charts[:-1], _legend(played, width, max(_columns(one, width, length)[1] for one in played)))


def _caption(timeline: Timeline) -> str:
    return f"bubble {percent(timeline.bubble)}, {duration(timeline)}"


def _columns(timeline: Timeline, width: int, length: float) -> tuple[int, float]:
    """How many columns a chart has for `length`, and how many that makes a second or a unit."""
    columns = max(1, width - len(f"pp {max(0, timeline.ranks - 1)} ") - MARGIN)
    if 0 < length <= columns and length == int(length):
        columns -= columns % int(length)  # every unit gets the same number of columns
    return columns, columns / length if length else 0.0


def _chart(timeline: Timeline, width: int, title: str, caption: str, length: float) -> Text:
    names = [f"pp {rank} " for rank in range(timeline.ranks)]
    label = max(map(len, names), default=0)
    columns, _ = _columns(timeline, width, length)
    chart = Text(no_wrap=True, overflow="crop")
    chart.append(title, style="bold")
    chart.append(f": {caption}\n")
    for rank, name in enumerate(names):
        chart.append(name.ljust(label))
        chart.append_text(_row(timeline, rank, columns, length))
        chart.append(f"{percent(rank_bubble(timeline, rank)):>{MARGIN}}\n")
    chart.rstrip()
    return chart


def _row(timeline: Timeline, rank: int, columns: int, length: float) -> Text:
    """One rank's cells. Computation is painted last, so that it hides a reduction that runs beneath it."""
    end = round(timeline.seconds * columns / length) if length else 0
    cells = [*[(IDLE, "dim")] * end, *[(" ", "")] * (columns - end)]
    spans = [span for span in timeline.rows[rank] if span.action.kind in LOOKS]
    pairs = together(spans)
    for span in sorted(spans, key=lambda s: (s.action.kind.lane == "compute", s.start)):
        first, last = (round(moment * columns / length) if length else 0 for moment in (span.start, span.end))
        if span not in pairs.values():
            cells[first:last] = _block(span, last - first, timeline.chunk(span), pairs.get(span))
    return Text.assemble(*cells)


def _block(span: Span, columns: int, chunk: int, other: Span | None = None) -> list[tuple[str, str]]:
    """A forward is its number and lines, a backward a filled cell, its number and more of them; a number that does not
    fit is left out. Two at the same time are both numbers, each before cells of two halves."""
    look, words = LOOKS[span.action.kind], label(span)
    if other is not None:
        below = LOOKS[other.action.kind]
        half = columns // 2
        fill = ("▄", f"{below.colour} on {look.colour}")
        return [
            *_numbered(words, look.number_style(chunk), fill, 0, half),
            *_numbered(label(other), below.number_style(chunk), fill, 0, columns - half),
        ]
    fill = (look.fill(chunk), look.fill_style(chunk))
    if span.action.kind is Kind.REDUCE:
        return [fill] * columns
    return _numbered(words, look.number_style(chunk), fill, look.front, columns)


def _numbered(words: str, style: str, fill: tuple[str, str], front: int, columns: int) -> list[tuple[str, str]]:
    if front + len(words) > columns:
        return [fill] * columns
    return [*[fill] * front, *[(letter, style) for letter in words], *[fill] * (columns - front - len(words))]


def _legend(timelines: Sequence[Timeline], width: int, scale: float) -> Text:
    """What is on the charts, in as many lines as it takes. `scale` is columns a second: what fills none is not there."""

    def sample(kind: Kind, chunk: int = 0, other: Kind | None = None) -> Text:
        second = other and Span(0, Action(other, 0, 1), 0, 0)
        columns = 1 if kind is Kind.REDUCE else 2 if other is None else 4
        return Text.assemble(*_block(Span(0, Action(kind, 0, 0), 0, 0), columns, chunk, second))

    spans = [
        (span, timeline.chunk(span))
        for timeline in timelines
        for span in timeline.spans
        if round(span.end * scale) > round(span.start * scale)
    ]
    kinds = drawn(span for span, _ in spans)
    entries = [sample(kind).append(f" {LOOKS[kind].words}") for kind in kinds]
    stages = max((len(stages) for timeline in timelines for stages in timeline.stages), default=0)
    if stages > 1:
        second = drawn(span for span, chunk in spans if chunk % 2)
        doubled = Text.assemble(*(sample(kind, 1) for kind in second if kind is not Kind.REDUCE))
        entries.append(doubled.append(f" {LATER}" if stages == 2 else " every second stage of the rank"))
    if any(together(row) for timeline in timelines for row in timeline.rows):
        entries.append(sample(Kind.FORWARD, 0, Kind.BACKWARD).append(" at the same time"))
    entries += [Text(IDLE, "dim").append(" idle", "not dim"), Text("% bubble of the rank")]
    lines = [Text()]
    for entry in entries:
        if lines[-1] and len(lines[-1]) + 2 + len(entry) > width:
            lines.append(Text())
        lines[-1].append_text(Text("  " if lines[-1] else "")).append_text(entry)
    found = Text("\n").join(lines)
    found.no_wrap, found.overflow = True, "crop"
    return found


# SVG

CHART = (72, 640)
"""Left edge and width of the time axis, in pixels."""
ROW = 26


def svg(timeline: Timeline, *, title: str) -> str:
    """The timeline as a self-contained SVG, one row a rank."""
    return svg_panels({_caption(timeline): timeline}, title=title)


def svg_panels(timelines: Mapping[str, Timeline], *, title: str) -> str:
    """Several timelines below each other on one common clock, each under its caption."""
    length = max((timeline.seconds for timeline in timelines.values()), default=0)
    elements: list[str] = []
    top = 40.0
    for caption, timeline in timelines.items():
        elements.append(drawing.text(CHART[0], top + 12, caption))
        elements += _panel(timeline, top + 20, length)
        top += 20 + ROW * timeline.ranks + 12
    kinds = drawn(span for timeline in timelines.values() for span in timeline.spans)
    later = any(len(stages) > 1 for timeline in timelines.values() for stages in timeline.stages)
    key, height = _key(kinds, later, top)
    left, width = CHART
    return drawing.document(left + width + 70, top + height, title, [*elements, *key])


def _panel(timeline: Timeline, top: float, length: float) -> list[str]:
    left, width = CHART
    end = left + width * timeline.seconds / length if length else left
    rows: list[str] = []
    blocks: list[str] = []
    for rank in range(timeline.ranks):
        y = top + ROW * rank
        rows.append(drawing.text(left - 10, y + 16, f"pp {rank}", "end"))
        rows.append(drawing.rect(left, y, end - left, ROW - 4, "idle"))
        rows.append(drawing.text(end + 8, y + 16, percent(rank_bubble(timeline, rank))))
        spans = [span for span in timeline.rows[rank] if span.action.kind in LOOKS and span.end > span.start]
        for span, part, shade in placed(timeline, spans):
            x, stop = (left + width * moment / length for moment in (span.start, span.end))
            blocks += _drawn(span, x, stop, (y + part[0] * (ROW - 4), part[1] * (ROW - 4)), shade)
    return [*rows, *drawing.group("spans", blocks)]


def placed(timeline: Timeline, spans: Sequence[Span]) -> Iterator[tuple[Span, tuple[float, float], float]]:
    """Where in its row each of a rank's spans is drawn, as shares of the row's height: the span, (where it begins, its
    height), and how much of it is shaded, from below: nothing on the first stage of the rank, all of it on the last."""
    pairs = together(spans)
    second = set(pairs.values())
    for span in spans:
        most = len(timeline.stages[span.rank]) - 1
        shade = timeline.chunk(span) / most if most and span.action.kind is not Kind.REDUCE else 0.0
        yield span, (0, 0.5) if span in pairs else (0.5, 0.5) if span in second else (0, 1), shade


def _drawn(span: Span, x: float, stop: float, place: tuple[float, float], shade: float) -> Iterator[str]:
    """One span: its rectangle, the shade on it, and its number where it fits. `place` is its top and its height."""
    look, words = LOOKS[span.action.kind], label(span)
    y, height = place
    yield drawing.rect(x + 0.5, y, stop - x - 1, height, look.name)
    if shade:
        yield drawing.rect(x + 0.5, y + height * (1 - shade), stop - x - 1, height * shade, "shade")
    if stop - x >= 4 + 7 * len(words):
        yield drawing.text((x + stop) / 2, y + height / 2 + 4, words, f"middle {look.ink}")


def _key(kinds: list[Kind], later: bool, top: float) -> tuple[list[str], float]:
    """The legend, in as many lines as it needs, and its height."""
    left, width = CHART
    entries = [(LOOKS[kind].name, LOOKS[kind].words) for kind in kinds]
    if later:
        entries.append(("shade", f"shaded: {LATER}"))
    x, y = float(left), top
    elements: list[str] = []
    for name, words in [*entries, ("idle", "idle; % bubble of the rank")]:
        long = 46 + 6.5 * len(words)
        if x > left and x + long > left + width + 70:
            x, y = float(left), y + 22
        elements += [drawing.rect(x, y, 14, 14, name), drawing.text(x + 20, y + 11, words)]
        x += long
    return elements, y - top + 30
