"""Runs the layout wide on the reference's batches and holds every slice of every rank against the reference.

Each rank compares what it holds (copies too) with its box of the whole tensor, so nothing is gathered; the largest
deviation of each tensor is one maximum over the world. A tensor passes when max |d| <= 1e-9 max |reference| + 1e-14.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..design.layout import Layout
from ..design.plan import Plan
from ..runtime.batch import Batch
from ..runtime.comm.collectives import all_reduce
from ..runtime.comm.world import World
from ..runtime.hf.read import Model
from ..runtime.training.assemble import build
from .wide import wide

RELATIVE, ABSOLUTE = 1e-9, 1e-14


@dataclass(frozen=True)
class Row:
    """One compared quantity: the largest deviation over all ranks, and the largest magnitude of the reference."""

    quantity: str
    name: str
    deviation: float
    scale: float

    @property
    def relative(self) -> float:
        return self.deviation / self.scale if self.scale else self.deviation

    @property
    def passes(self) -> bool:
        return self.deviation <= RELATIVE * self.scale + ABSOLUTE


def compare(plan: Plan, world: World, model: Model, batches: list[Batch], file: Path) -> list[Row]:
    """The rows of the comparison, the same on every rank; waits for `file` to appear. All ranks must call."""
    with wide():
        run = build(plan, world, model=model, wide=True)
        size = plan.batch // plan.dp
        first = world.coordinate["dp"] * size
        reports = []
        gradients: dict[str, Tensor] = {}
        for step, batch in enumerate(batches):
            # The gradients of the first step, as reduced and before the clip scales them.
            keep = (
                (lambda: gradients.update({n: g.clone() for n, g in run.sink.gradients.items()})) if step == 0 else None
            )
            reports.append(run.step(batch.slice(first, first + size), reduced=keep))
    while not file.exists():
        time.sleep(0.02)
    weights = {name: weight.detach() for name, weight in run.optimizer.weights.items()}
    rows: list[tuple[str, str, float, float]] = []
    with safe_open(file, framework="pt") as whole:
        losses, norms = whole.get_tensor("loss").tolist(), whole.get_tensor("norm").tolist()
        for number, (report, loss, norm) in enumerate(zip(reports, losses, norms, strict=True), 1):
            rows.append(("loss", f"step {number}", _finite(abs(report.loss - loss)), abs(loss)))
            rows.append(("gradient norm", f"step {number}", _finite(abs(report.grad_norm - norm)), abs(norm)))
        for part in run.sharding.parts:
            for quantity, mine, layout in (("gradient", gradients, part.grad), ("weight", weights, part.stored)):
                reference = whole.get_tensor(f"{quantity}/{part.name}")
                held = mine.get(part.name)
                rows.append(
                    (quantity, part.name, _deviation(held, reference, layout, world), float(reference.abs().max()))
                )
    worst = torch.tensor([row[2] for row in rows], dtype=torch.float64, device=world.device)
    all_reduce(worst, world.everyone, why="check", op="max")
    return [Row(row[0], row[1], found, row[3]) for row, found in zip(rows, worst.tolist(), strict=True)]


def _deviation(held: Tensor | None, reference: Tensor, layout: Layout, world: World) -> float:
    """max |d| over this rank's slice; -1 where the rank holds none, so that a tensor that no one holds shows."""
    box = layout.box(world.mesh, world.rank)
    if (held is None) != (box is None):
        return float("inf")
    if held is None or box is None:
        return -1.0
    expected = reference[tuple(slice(start, stop) for start, stop in box)]
    if held.shape != expected.shape:
        return float("inf")
    return _finite(float((held.cpu() - expected).abs().max())) if expected.numel() else 0.0


def _finite(value: float) -> float:
    return value if value == value else float("inf")


def summary(rows: list[Row]) -> dict[str, Row]:
    """The worst row of each quantity, by its relative deviation; a tensor that no rank held counts as the worst."""

    def badness(row: Row) -> float:
        return float("inf") if row.deviation < 0 else row.relative

    return {quantity: max((r for r in rows if r.quantity == quantity), key=badness) for quantity in QUANTITIES}


QUANTITIES = ("loss", "gradient norm", "gradient", "weight")


def passed(rows: list[Row]) -> bool:
    return all(row.passes and row.deviation >= 0 for row in rows)


def to_json(rows: list[Row]) -> list[Any]:
    return [[row.quantity, row.name, row.deviation, row.scale] for row in rows]


def from_json(rows: list[Any]) -> list[Row]:
    return [Row(*row) for row in rows]
