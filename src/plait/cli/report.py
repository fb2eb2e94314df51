"""`plait report RUN`: draws a run again, from the files that it left."""

from __future__ import annotations

from pathlib import Path

import typer

from ..report import page


def report(
    run: Path = typer.Argument(help="A directory that plait train has written."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="Where the page is written. [default: RUN/report.html]", show_default=False
    ),
) -> None:
    """Draw a run as one page, and its timelines as a trace."""
    for file in page.draw(run, output):
        typer.echo(f"written: {file}")


def add_to(app: typer.Typer) -> None:
    app.command("report")(report)
