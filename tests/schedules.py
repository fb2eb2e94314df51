"""What schedules are like, for tests that hold for every one of them."""

from __future__ import annotations

from typing import Any

from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.schedule import make, suitable


def runs(**changes: Any) -> bool:
    """Whether a run takes this schedule with so many ranks, microbatches and stages a rank."""
    plan = Plan(**changes)
    try:
        suitable(plan.schedule, plan.pp, plan.microbatches, plan.chunks)
    except PlanError:
        return False
    return True


def splits(name: str) -> bool:
    """Whether it parts backwards by itself."""
    return runs(schedule=name, pp=2, microbatches=2) and make(name, 2, 2).splits


def both_ends(name: str) -> bool:
    """Whether the first and the last stage are on one rank."""
    placement = Plan(schedule=name, pp=2).placement
    return placement[0] == placement[-1]
