"""`plait config show`: the resolved plan, and where each value came from."""

from __future__ import annotations

import typer
from rich.table import Table

from ..design.plan import Plan
from .flags import Values, resolve, takes_plan
from .terminal import Terminal


def show(given: Values) -> None:
    """Print the resolved plan with the origin of each value."""
    plan, origin = resolve(given)
    table = Table(box=None, pad_edge=False)
    for name in ("key", "value", "origin"):
        table.add_column(name, overflow="fold")
    for key in Plan.model_fields:
        table.add_row(key, str(getattr(plan, key)), origin[key])
    Terminal().print(table)


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at configurations.", no_args_is_help=True)
    group.command("show")(takes_plan(show))
    app.add_typer(group, name="config")
