"""`plait check MODEL`: the layout against one process on the same global batch, wide. Exit 0 when all agree, else 1."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import typer
from rich.table import Table

from ..design.errors import PlanError
from ..report.words import counted
from .flags import Values, named, resolve, takes_plan
from .limits import refuse_memory
from .terminal import Terminal

STEPS = 3
DEFAULTS = {"steps": STEPS, "seq": 64}
MEANINGLESS = ("data", "tokenizer", "epochs", "compute")
"""Fields that a comparison does not read: it draws its own tokens and computes in fp64."""
SHOWN = 8
"""Failing rows of one quantity that are listed; the rest are counted."""


def check(given: Values) -> int:
    """Compare loss, every gradient, the gradient norm and every weight after 3 AdamW steps with one process."""
    plan, origin = resolve(given, DEFAULTS)
    named(origin, "check")
    if origin["batch"] == "default":
        # Four rows a microbatch unless told otherwise: one of each awkward kind.
        plan = plan.model_copy(update={"batch": 4 * plan.dp * plan.microbatches})
    begin = time.perf_counter()

    from ..check.batches import awkward_batches
    from ..check.compare import Row, compare, from_json, passed, to_json
    from ..check.reference import reference
    from ..design.plan import validate
    from ..runtime.comm.nursery import launch, refuse_too_many
    from ..runtime.comm.world import Rendezvous, World
    from ..runtime.hf.read import read

    if Rendezvous.from_environment() is not None:
        raise PlanError("plait check starts ranks of its own, so a launcher has nothing to start: run it without one.")
    model = read(plan.model)
    validate(plan, model.facts)
    refuse_too_many(plan.world)
    refuse_memory(plan, model.facts, wide=True)
    with tempfile.TemporaryDirectory(prefix="plait-check-") as folder:
        file = Path(folder) / "reference.safetensors"

        def main(rendezvous: Rendezvous) -> object:
            # Drawn on each rank, not in the parent: what forks must not have computed.
            batches = awkward_batches(plan, model.facts.vocabulary, STEPS)
            with World(rendezvous, plan.mesh) as world:
                return to_json(compare(plan, world, model, batches, file))

        def single() -> None:
            reference(plan, model, awkward_batches(plan, model.facts.vocabulary, STEPS), file)

        rows = from_json(launch(main, plan.world, helpers=(single,))[0])
    console = Terminal()
    console.print(verdict_table(rows))
    worst: Row = max(rows, key=lambda row: row.relative)
    layout = f"{model.name} over {plan.mesh}, {plan.schedule}, {counted(plan.microbatches, 'microbatch')}"
    good = passed(rows)
    word = "equals" if good else "DIFFERS from"
    console.print(
        f"{layout} {word} one process: largest deviation {worst.relative:.1e} of the reference ({worst.quantity} "
        f"{worst.name}), {time.perf_counter() - begin:.1f} s",
        soft_wrap=True,
    )
    return 0 if good else 1


def verdict_table(rows: list) -> Table:  # type: ignore[type-arg]
    """The worst row of each quantity, and the rows that fail."""
    from ..check.compare import summary

    table = Table(title="layout against one process, wide (fp64)", title_justify="left", pad_edge=False, box=None)
    for name, justify in (
        ("quantity", "left"),
        ("compared", "right"),
        ("worst", "left"),
        ("relative", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for quantity, worst in summary(rows).items():
        count = sum(row.quantity == quantity for row in rows)
        failing = [row for row in rows if row.quantity == quantity and not (row.passes and row.deviation >= 0)]
        # What no rank holds first, then the worst first.
        failing.sort(key=lambda row: (row.deviation >= 0, -row.relative))
        for row in failing[:SHOWN] or [worst]:
            mark = "equal" if not failing else "DIFFERS" if row.deviation >= 0 else "HELD BY NO RANK"
            table.add_row(quantity, str(count), row.name, f"{row.relative:.1e}", mark)
        if len(failing) > SHOWN:
            table.add_row(quantity, str(count), f"and {len(failing) - SHOWN} more", "", "DIFFER")
    return table


def add_to(app: typer.Typer) -> None:
    app.command("check")(takes_plan(check, defaults=DEFAULTS | {"batch": "4 x dp x microbatches"}, without=MEANINGLESS))
