"""What one machine is not asked to do. A plan's own rules know no machine; these refuse the mistyped number that would
fill one before any rule is asked."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ..design.cost.memory import memory
from ..design.errors import PlanError
from ..design.facts import ModelFacts
from ..design.plan import Plan

MOST = {"ranks": 1 << 16, "dp": 1 << 16, "tp": 1 << 16, "pp": 1 << 16, "microbatches": 1 << 16, "chunks": 1 << 16,
        "batch": 1 << 20, "seq": 1 << 24, "seed": (1 << 63) - 1, "steps": 1 << 40, "epochs": 1 << 40, "warmup": 1 << 40,
        "eval_every": 1 << 40, "sample_every": 1 << 40, "save_every": 1 << 40, "keep": 1 << 40}  # fmt: skip
SAVED = 12
"""Bytes of a trained parameter in a checkpoint: its weight and two moments, fp32."""
MOST_SLOTS = 1 << 15
"""Stages x microbatches of one schedule. Its table is made and proven before a step: 32,768 take some seconds."""


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


def refuse_memory(plan: Plan, facts: ModelFacts) -> None:
    """Raises a `PlanError` when local ranks would hold more than this machine has: by their bills."""
    bills = memory(plan, facts)
    held, activations = sum(sum(bill.held) for bill in bills), sum(bill.peak - sum(bill.held) for bill in bills)
    have = _memory()
    if have is not None and held + activations > have:
        raise PlanError(
            f"{plan.model} has {_parameters(facts)}: over {plan.world} local ranks training takes {_gib(held)} for "
            f"weights, gradients and moments and {_gib(activations)} for activations, and this machine has {_gib(have)}: "
            f"take a smaller model, dp, batch or seq, or more machines with torchrun."
        )


def refuse_disk(plan: Plan, facts: ModelFacts, folder: Path) -> None:
    """The same where the disk of `folder` has no room for a checkpoint."""
    trained = sum(fact.elements for fact in facts.parameters if plan.trains(fact))
    one = SAVED * trained + 4 * (facts.elements - trained)
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if plan.save_every and one > free:
        raise PlanError(
            f"A checkpoint of {plan.model} takes {_gib(one)} ({_parameters(facts)}), and the disk of {folder} has "
            f"{_gib(free)} free: name another --out, or set save_every 0."
        )


def refuse_check(plan: Plan, facts: ModelFacts, steps: int, *, shipped: bool, way: str) -> None:
    """The same for the ranks with the one process that they are compared with, and for the files that they leave for each
    other in the temporary folder. `way` is what to do about it."""
    from ..check.bill import bill

    found, have = bill(plan, facts, steps, shipped=shipped), _memory()
    said = f"{plan.model} has {_parameters(facts)}: to check {steps} steps of it in fp64 takes"
    if have is not None and found.memory > have:
        raise PlanError(
            f"{said} {_gib(found.reference)} of memory for one process and {_gib(found.ranks)} for {plan.world} ranks, "
            f"and this machine has {_gib(have)}: {way}."
        )
    scratch = tempfile.gettempdir()
    free = shutil.disk_usage(scratch).free
    if found.files > free:
        raise PlanError(
            f"{said} {_gib(found.files)} of files in {scratch}, which has {_gib(free)} free: set TMPDIR to a folder with "
            f"more, or {way}."
        )


def _memory() -> int | None:
    """Bytes of this machine's memory. None where they are not known, and where ranks run on GPUs, whose memory is not
    counted here."""
    if not hasattr(os, "sysconf") or Path("/dev/nvidiactl").exists():
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _parameters(facts: ModelFacts) -> str:
    millions = facts.elements / 1e6
    return f"{millions:,.0f} M parameters" if millions >= 10 else f"{facts.elements:,} parameters"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
