"""Why a check: faults that it names at once are not to be seen in a loss curve (docs/methods/check.md has the others)."""

from __future__ import annotations

import pytest

from plait.check.faults import FAULTS
from tests.docs.conftest import load
from tests.nursery import Nursery

HIDDEN = (
    "no-sum-dp-norms", "bucket-leaves-early", "target-wraps-at-row-end", "ignored-targets-trained", "decay-on-norms",
    "samples-of-another-rank",
)  # fmt: skip


def right(seed: int) -> float:
    return load("faults").final_loss({"seed": seed})  # type: ignore[no-any-return]


def faulty(name: str) -> float:
    return load("faults").final_loss(FAULTS[name].layout, FAULTS[name].patch)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def spread(nursery: Nursery) -> list[float]:
    return [nursery(right, seed) for seed in load("faults").SEEDS]


@pytest.mark.parametrize("name", HIDDEN)
def test_a_fault_hides_among_five_seeds(nursery: Nursery, spread: list[float], name: str) -> None:
    assert not load("faults").others(FAULTS[name].layout), "the right runs are those of another setting"
    loss = nursery(faulty, name)
    assert min(spread) <= loss <= max(spread)
    assert loss != spread[0], "the fault did nothing at all"
