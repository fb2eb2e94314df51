"""`plait schedule NAME`: draws a schedule, with its bubble and what its ranks keep; NAME all: compares them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from ..design.errors import PlanError, listed
from ..design.schedule import METHODS, method
from ..report import schedules, timeline
from ..report.schedules import Played
from ..report.words import counted, percent
from .limits import refuse_schedule
from .terminal import Terminal

ALL = "all"


def schedule(
    name: str = typer.Argument(help=f"{listed([*METHODS, ALL])}."),
    pp: int = typer.Option(4, help="Pipeline ranks."),
    microbatches: int = typer.Option(8, help="Microbatches in a step."),
    chunks: int = typer.Option(0, help="Stages on each rank; 0: the least that the schedule takes."),
    svg: Path | None = typer.Option(None, help="Also write the picture to this file."),
    json: bool = typer.Option(False, "--json", help="Print the numbers, one JSON object a line, and draw nothing."),
) -> None:
    """Draw a schedule in the terminal, a backward taken to last twice a forward; all: every one, with a table."""
    names = list(METHODS) if name == ALL else [name]
    refuse_schedule(pp * max(chunks or method(one).chunks[0] for one in names), microbatches)
    compared = (
        schedules.compare(pp, microbatches, chunks) if name == ALL else [schedules.play(name, pp, microbatches, chunks)]
    )
    drawn = {_title(one): one for one in compared if isinstance(one, Played)}
    if svg is not None:
        _write(svg, drawn, f"schedules of pp {pp}, microbatches {microbatches}" if name == ALL else next(iter(drawn)))
    if json:
        typer.echo(schedules.lines(compared, pp, microbatches))
        return
    console = Terminal()
    if name == ALL:
        console.print(schedules.table(compared, width=console.width))
        console.print()
    console.print(
        timeline.draw_all({title: (one.timeline, one.caption) for title, one in drawn.items()}, console.width)
    )
    if name != ALL:
        (one,) = drawn.values()
        live = ", ".join(f"{count:g}" for count in one.live)
        console.print(
            f"bubble {percent(one.timeline.bubble)}, live microbatches by rank [{live}], peak {max(one.live):g}\n"
            f"sends by rank {one.sends}"
        )


def _title(played: Played) -> str:
    table = played.table
    stages = f" x {table.chunks} stages" if table.chunks > 1 else ""
    return f"{table.name}, {counted(table.ranks, 'rank')}{stages}, {counted(table.microbatches, 'microbatch')}"


def _write(file: Path, drawn: Mapping[str, Played], title: str) -> None:
    panels = {f"{name}: {one.caption}": one.timeline for name, one in drawn.items()}
    if len(drawn) == 1:
        panels = {one.caption: one.timeline for one in drawn.values()}
    try:
        file.write_text(timeline.svg_panels(panels, title=title), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{file} cannot be written: {(error.strerror or 'unknown error').lower()}.") from None


def add_to(app: typer.Typer) -> None:
    app.command("schedule")(schedule)
