"""`plait check MODEL`: the layout against one process on the same global batch. Exit 0 when all agree, else 1."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import typer
from rich.table import Table

from ..design.errors import PlanError, nearest
from ..design.plan import Plan, cuts_rows
from ..report import sharding
from ..report.words import counted
from .flags import Values, named, resolve, takes_plan
from .limits import refuse_check
from .terminal import Terminal

STEPS = 3
DEFAULTS = {"steps": STEPS, "seq": 64}
MEANINGLESS = (
    "data", "tokenizer", "packing", "data_order", "epochs", "eval_every", "eval_share", "eval_data", "sample_every",
)  # fmt: skip
"""Fields that a comparison does not read: it draws its own tokens."""
SHOWN = 8
"""Departing places that are listed; the rest are counted."""


def check(
    given: Values,
    full: bool = typer.Option(False, "--full", help="Check the model as it is, not a small twin of it."),
    plant: str = typer.Option("", help="Put a fault into the ranks, which the check must find; 'list' names them."),
) -> int:
    """Compare every module, gradient, moment, weight and byte of a layout with one process; name what departs first."""
    if plant:
        from ..check.faults import FAULTS

        if plant == "list":
            width = max(map(len, FAULTS))
            lines = [f"{name:{width}}  {fault.meaning}" for name, fault in FAULTS.items()]
            Terminal().print("\n".join(lines), soft_wrap=True)
            return 0
        if plant not in FAULTS:
            way = f"{nearest(plant, FAULTS)} plait check --plant list names them."
            raise PlanError(f"There is no fault '{plant}' to plant.{way}")
        plan, origin = resolve(given, DEFAULTS | FAULTS[plant].layout)
        return _run(plan, origin, full=full, plant=FAULTS[plant].patch, name=plant)
    plan, origin = resolve(given, DEFAULTS)
    named(origin, "check")
    return _run(plan, origin, full=full, plant=None, name="")


def _run(plan: Plan, origin: dict[str, str], *, full: bool, plant: Callable[[], None] | None, name: str) -> int:
    begin = time.perf_counter()
    if origin["batch"] == "default":
        # Four rows a microbatch unless told otherwise: one of each awkward kind.
        plan = plan.model_copy(update={"batch": 4 * plan.dp * plan.microbatches})

    from ..check.batches import awkward_batches
    from ..check.proof import prove
    from ..design.rules import validate
    from ..design.table import settled
    from ..runtime.comm.nursery import refuse_too_many
    from ..runtime.comm.world import Rendezvous
    from ..runtime.hf.read import read
    from ..runtime.hf.twin import twin

    if Rendezvous.from_environment() is not None:
        raise PlanError("plait check starts ranks of its own, so a launcher has nothing to start: run it without one.")
    model = read(plan.model, weights=full, vocabulary=plan.vocabulary)
    validate(plan, model.facts)
    refuse_too_many(plan.world)
    small = twin(model, plan)
    if not full:
        model, plan = small.model, small.plan
        validate(plan, model.facts)
    plan = settled(plan, model.facts)
    way = (
        "leave --full out, which checks a small twin"
        if full and small.shrunk
        else "take fewer ranks or a smaller batch"
    )
    refuse_check(plan, model.facts, STEPS, shipped=True, way=way)
    console = Terminal()
    if full or not small.shrunk:
        kind = "random parameters" if model.weights is None else f"parameters of {model.weights.said}"
        console.print(f"{plan.model} as it is: {model.facts.elements / 1e6:.1f} M {kind}", soft_wrap=True)
    else:
        console.print(
            f"twin of {plan.model}: {', '.join(small.shrunk)} (--full for the model as it is)", soft_wrap=True
        )
    if name:
        console.print(f"planted: {name}", soft_wrap=True)
    draw = partial(awkward_batches, plan, model.facts.vocabulary, STEPS)
    verdicts = prove(plan, model, draw, plant=plant)
    for verdict in verdicts:
        show(console, verdict, plan)
    good = all(verdict.passed for verdict in verdicts)
    layout = f"{model.name} over {sharding.layout(plan, sp=cuts_rows(plan, model.facts))}"
    word = "equals" if good else "DIFFERS from"
    far = f": largest deviation {verdicts[0].largest.relative:.1e} of the reference in fp64" if good else ""
    console.print(f"{layout} {word} one process{far}, {time.perf_counter() - begin:.1f} s", soft_wrap=True)
    return 0 if good else 1


def show(console: Terminal, verdict: object, plan: Plan) -> None:
    """A pass as a table, and after it what departs first and why."""
    from ..check.cause import described
    from ..check.places import Verdict

    assert isinstance(verdict, Verdict)
    console.print(verdict_table(verdict))
    if verdict.passed:
        return
    console.print(f"{counted(len(verdict.departures), 'place')} of step {verdict.steps} depart, in this order:")
    for departure in verdict.departures[:SHOWN]:
        console.print(f"  {departure.place}", soft_wrap=True)
    if len(verdict.departures) > SHOWN:
        console.print(f"  and {len(verdict.departures) - SHOWN} more")
    for line in described(verdict, plan.mesh):
        console.print(line, soft_wrap=True, style="bold")


def verdict_table(verdict: object) -> Table:
    """The quantities of one pass: how many places each has, and how far the worst of them is."""
    from ..check.places import WORDS, Verdict

    assert isinstance(verdict, Verdict)
    how = "wide (fp64)" if verdict.numerics == "wide" else f"as shipped ({verdict.numerics})"
    steps = "1 step" if verdict.steps == 1 else f"{verdict.steps} steps"
    table = Table(title=f"layout against one process, {how}, {steps}", title_justify="left", pad_edge=False, box=None)
    for name, justify in (
        ("quantity", "left"),
        ("places", "right"),
        ("largest", "right"),
        ("of bound", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in verdict.worst:
        mark = f"{row.departing} DEPART" if row.departing else "equal"
        exact = row.used == 0 and row.relative == 0
        largest, used = ("0", "0") if exact else (f"{row.relative:.1e}", f"{row.used:.1%}" if row.used < 10 else "over")
        table.add_row(WORDS[row.quantity], str(row.places), largest, used, mark)
    return table


def add_to(app: typer.Typer) -> None:
    app.command("check")(takes_plan(check, defaults=DEFAULTS | {"batch": "4 x dp x microbatches"}, without=MEANINGLESS))
