"""The way into a check: a launch of the layout's ranks with the reference beside them, and a verdict a pass."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..design.plan import Plan
from ..design.table import settled
from ..runtime.batch import Batch
from ..runtime.comm.nursery import launch
from ..runtime.comm.world import World
from ..runtime.hf.read import Model
from .compare import compare
from .places import Verdict
from .reference import reference

SHIPPED_STEPS = 1
"""As shipped one step is compared: after it, what rounding makes of AdamW's division decides."""


def prove(
    plan: Plan, model: Model, batches: Callable[[], list[Batch]], *, shipped: bool = True,
    plant: Callable[[], None] | None = None,
) -> list[Verdict]:  # fmt: skip
    """The verdict of the wide pass, and with `shipped` of that in the plan's own compute type (a model with experts: in
    fp32). `batches` draws the global batches; it is called in each process, because what forks must not have computed.
    `plant` is called in every rank before anything is built, and in no other process: a fault goes in there, and the
    checker is not told."""
    plan = settled(plan, model.facts)
    # In bf16 rounding decides which expert a token goes to, and no bound holds for what follows.
    as_shipped = "fp32" if model.facts.experts_per_token else plan.compute
    passes = ["wide", as_shipped] if shipped else ["wide"]
    with tempfile.TemporaryDirectory(prefix="plait-check-") as scratch:
        folder = Path(scratch)

        def rank(meeting: Any) -> Any:
            drawn = batches()
            if plant is not None:
                plant()
            verdicts = []
            with World(meeting, plan.mesh) as world:
                for numerics in passes:
                    verdicts.append(compare(plan, world, model, _of_pass(numerics, drawn), folder, numerics))
                    if not verdicts[-1].passed:
                        break
                    # The pass's run and its observer know each other: without this both passes would be held at once.
                    gc.collect()
            return [verdict.to_json() for verdict in verdicts]

        def single() -> None:
            for numerics in passes:
                reference(plan, model, _of_pass(numerics, batches()), folder, numerics)

        return [
            Verdict.from_json(values)
            for values in launch(
                rank,
                plan.world,
                helpers=(single,),
                hang_timeout=plan.hang_timeout,
                comm_check=plan.comm_check,
                local_transport=plan.local_transport,
            )[0]
        ]


def _of_pass(numerics: str, batches: list[Batch]) -> list[Batch]:
    return batches if numerics == "wide" else batches[:SHIPPED_STEPS]
