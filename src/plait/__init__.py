"""plait lays Hugging Face language models over devices: pipeline, tensor and data parallelism in any mix, proven equal to
one process.

    plan = plait.Plan(model="llama-tiny", dp=2, tp=2, pp=2, microbatches=2)

    def main(world):
        run = plait.build(plan, world)
        for batch in plait.batches(plan, world):
            report = run.step(batch)

    plait.launch(main, plan)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Batch": "plait.runtime.batch",
    "Plan": "plait.design.plan",
    "PlanError": "plait.design.errors",
    "RankError": "plait.runtime.comm.nursery",
    "World": "plait.runtime.comm.world",
    "batches": "plait.runtime.training.launch",
    "build": "plait.runtime.training.assemble",
    "launch": "plait.runtime.training.launch",
}

__all__ = ["Batch", "Plan", "PlanError", "RankError", "World", "__version__", "batches", "build", "launch"]


def __getattr__(name: str) -> Any:
    """Public names load what they need when first used: the design wing answers without torch."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"plait has no public name '{name}'")
