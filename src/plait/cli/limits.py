"""What one machine is not asked to do. A plan's own rules know no machine; these refuse the mistyped number that would
fill one before any rule is asked."""

from __future__ import annotations

import os
from pathlib import Path

from ..design.errors import PlanError
from ..design.facts import ModelFacts
from ..design.plan import Plan

MOST = {"ranks": 1 << 16, "dp": 1 << 16, "tp": 1 << 16, "pp": 1 << 16, "microbatches": 1 << 16, "chunks": 1 << 16,
        "batch": 1 << 20, "seq": 1 << 24, "seed": (1 << 63) - 1, "steps": 1 << 40, "epochs": 1 << 40, "warmup": 1 << 40,
        "eval_every": 1 << 40, "sample_every": 1 << 40}  # fmt: skip
MOST_SLOTS = 1 << 15
"""Stages x microbatches of one schedule. Its table is made and proven before a step: 32,768 take some seconds."""
BYTES_AN_ELEMENT = 16
"""Held in training: weight, gradient and AdamW's two moments, fp32 each."""


def refuse_sizes(plan: Plan) -> None:
    """Raises a `PlanError` for a number that no run has."""
    for key, most in MOST.items():
        value = getattr(plan, key)
        if value > most:
            raise PlanError(f"{key} {value} is more than any run has: the most is {most:,}.")
    refuse_schedule(plan.stages, plan.microbatches)


def refuse_schedule(stages: int, microbatches: int) -> None:
    if stages * microbatches > MOST_SLOTS:
        raise PlanError(
            f"{stages} pipeline stages x microbatches {microbatches} = {stages * microbatches} places in a schedule, and "
            f"the most is {MOST_SLOTS:,}: set microbatches {max(1, MOST_SLOTS // stages)} or less."
        )


def refuse_memory(plan: Plan, facts: ModelFacts, *, wide: bool = False) -> None:
    """Raises a `PlanError` when local ranks, and the one process that a check compares with, would hold more than this
    machine has. GPUs have memory of their own, which is not counted here."""
    if not hasattr(os, "sysconf") or Path("/dev/nvidiactl").exists():
        return
    copies = (plan.dp + 1) * 2 if wide else plan.dp
    needed = facts.elements * BYTES_AN_ELEMENT * copies
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > have:
        raise PlanError(
            f"{plan.model} has {facts.elements / 1e9:,.1f} billion parameters; {plan.dp} copies of them in training "
            f"{'and one process to compare with, in fp64, ' if wide else ''}take {needed / 2**30:,.0f} GiB, and this "
            f"machine has {have / 2**30:,.0f}: take a smaller model or dp, or more machines with torchrun."
        )
