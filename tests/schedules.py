"""What schedules are like, for tests that hold for every one of them."""

from __future__ import annotations

from typing import Any

from plait.design.errors import PlanError
from plait.design.plan import Plan


def runs(**changes: Any) -> bool:
    """Whether a run takes this schedule with so many ranks, microbatches and stages a rank."""
    try:
        Plan(**changes).table()
    except PlanError:
        return False
    return True


def splits(name: str) -> bool:
    """Whether it parts backwards by itself."""
    return runs(schedule=name, pp=2, microbatches=2) and Plan(schedule=name, pp=2, microbatches=2).table().splits


def both_ends(name: str) -> bool:
    """Whether the first and the last stage are on one rank."""
    placement = Plan(schedule=name, pp=2).placement
    return placement[0] == placement[-1]
