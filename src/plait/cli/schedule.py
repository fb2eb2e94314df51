"""`plait schedule NAME`: draws a schedule, with its bubble and its peak of live microbatches."""

from __future__ import annotations

from pathlib import Path

import typer

from ..design.errors import PlanError, listed
from ..design.schedule import METHODS, check, live_microbatches, lower, make, method
from ..design.simulate import simulate
from ..report import timeline
from .limits import refuse_schedule
from .terminal import Terminal


def schedule(
    name: str = typer.Argument(help=f"{listed(METHODS)}."),
    pp: int = typer.Option(4, help="Pipeline ranks."),
    chunks: int = typer.Option(0, help="Stages on each rank; 0: the least that the schedule takes."),
    microbatches: int = typer.Option(8, help="Microbatches in a step."),
    svg: Path | None = typer.Option(None, help="Also write the picture to this file."),
) -> None:
    """Draw a schedule in the terminal, a backward taken to last twice a forward."""
    refuse_schedule(pp * (chunks or method(name).chunks[0]), microbatches)
    table = lower(make(name, pp, microbatches, chunks))
    check(table)
    played = simulate(table)
    title = f"{name}, {pp} stages, {microbatches} microbatches"
    if svg is not None:
        try:
            svg.write_text(timeline.svg(played, title=title), encoding="utf-8")
        except OSError as error:
            raise PlanError(f"{svg} cannot be written: {(error.strerror or 'unknown error').lower()}.") from None
    console = Terminal()
    console.print(timeline.draw(played, width=console.width, title=title))
    live = [live_microbatches(table, rank) for rank in range(table.ranks)]
    console.print(f"bubble {played.bubble:.1%}, live microbatches by rank {live}, peak {max(live)}")


def add_to(app: typer.Typer) -> None:
    app.command("schedule")(schedule)
