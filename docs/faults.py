"""Writes the tables of planted faults in docs/methods/check.md: what the checker says, and what a loss curve shows.

    python docs/faults.py

runs every fault twice, in a check and in a short training on the standard library's source, which takes some minutes;
tests/runtime/test_checker.py holds what the page says against the checker, and tests/runtime/test_loss_curves.py some of
its losses against new ones.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # what forks must have one thread

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.check.batches import awkward_batches
from plait.check.faults import FAULTS, Fault
from plait.check.places import Verdict
from plait.check.proof import prove
from plait.design.plan import Plan
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import batches, launch

PAGE = Path(__file__).parent / "methods" / "check.md"
MODEL = "llama-tiny"
CHECKED = {"model": MODEL, "seq": 16, "steps": 3}
TRAINED = {"model": MODEL, "data": "stdlib", "tokenizer": "bytes", "seq": 64, "batch": 12, "steps": 30, "lr": 3e-3}
SEEDS = range(7, 12)
LAST = 5
"""The final loss is the mean over so many steps."""


def checked(layout: dict[str, Any], plant: Callable[[], None]) -> Verdict:
    """The verdict of the wide pass over `layout` with a fault in its ranks: four rows a microbatch, three steps."""
    rows = 4 * layout.get("dp", 1) * layout.get("microbatches", 1)
    plan = Plan(**CHECKED | {"batch": rows} | layout)
    model = read(plan.model)
    steps = plan.steps
    return prove(plan, model, lambda: awkward_batches(plan, model.facts.vocabulary, steps), shipped=False, plant=plant)[
        0
    ]


def said(verdict: Verdict) -> tuple[str, str, str]:
    """(kind, place, cause) of the first departure, as the table has them."""
    return verdict.kind, str(verdict.first.place), verdict.cause


def final_loss(changes: dict[str, Any], plant: Callable[[], None] | None = None) -> float:
    """The loss that a short training reports at its end, as a mean over its last steps."""
    plan = Plan(**TRAINED | changes)

    def main(world: World) -> list[float]:
        if plant is not None:
            plant()
        run = build(plan, world)
        return [run.step(batch).loss for batch in batches(plan, world)]

    losses = launch(main, plan)[0]
    return sum(losses[-LAST:]) / LAST


def others(layout: dict[str, Any]) -> dict[str, Any]:
    """What a layout asks for that changes a right run's numbers: right runs that it is compared with need it too."""
    laid_out = (
        "dp", "tp", "pp", "microbatches", "schedule", "chunks", "zero", "replicas", "keep_gathered", "reduce_every",
        "recompute", "loss_chunks", "bucket_mb", "dp_method",
    )  # fmt: skip
    return {key: value for key, value in layout.items() if key not in laid_out}


def findings() -> str:
    """The table of faults: one line each, with what the checker says."""
    lines = ["| fault | what goes wrong | layout | first departure | likely cause |", "| --- | --- | --- | --- | --- |"]
    for fault in FAULTS.values():
        lines.append(finding(fault, *said(checked(fault.layout, fault.patch))))
    return "\n".join(lines)


def finding(fault: Fault, kind: str, place: str, cause: str) -> str:
    """The line of one fault."""
    cells = (f"`{fault.name}`", fault.meaning, laid(fault.layout), f"{kind}: {place}", cause)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def laid(layout: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in layout.items()) or "one rank"


def losses() -> str:
    """The table of final losses, nearest to the right run first, under the spread of right runs."""
    right: dict[str, list[float]] = {}
    rows = []
    for fault in FAULTS.values():
        more = others(fault.layout)
        runs = right.get(laid(more)) or [final_loss(more | {"seed": seed}) for seed in SEEDS]
        right[laid(more)] = runs
        loss = final_loss(fault.layout, fault.patch)
        hidden = "yes" if min(runs) <= loss <= max(runs) else "no"
        rows.append((abs(loss - runs[0]), f"| `{fault.name}` | {loss:.4f} | {loss - runs[0]:+.4f} | {hidden} |"))
    spread = [
        f"right, {len(SEEDS)} seeds{f', {more}' if more != laid({}) else ''}: "
        f"{', '.join(f'{loss:.4f}' for loss in runs)}; from {min(runs):.4f} to {max(runs):.4f}"
        for more, runs in right.items()
    ]
    head = ["| fault | final loss | off the right run | within the spread |", "| --- | --- | --- | --- |"]
    hidden = sum(row.endswith("yes |") for _, row in rows)
    count = f"{hidden} of {len(rows)} faults end within the spread of the right runs."
    return "\n".join([*(f"- {line}" for line in spread), "", count, "", *head, *(row for _, row in sorted(rows))])


def put(page: str, mark: str, table: str) -> str:
    """The page with what stands after a mark replaced."""
    return re.sub(
        rf"<!-- {mark} -->\n.*?<!-- end -->", lambda _: f"<!-- {mark} -->\n\n{table}\n\n<!-- end -->", page,
        flags=re.DOTALL,
    )  # fmt: skip


if __name__ == "__main__":
    for mark, make in (("faults", findings), ("losses", losses)):
        table = make()
        PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), mark, table), encoding="utf-8")
