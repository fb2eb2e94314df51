"""The loss on the first rank computes what one process does, in evaluation and samples too."""

from __future__ import annotations

from typing import Any

import pytest

from plait.design.plan import Plan
from plait.runtime.comm.world import World
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from plait.runtime.training.sample import sample
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.test_evaluation import evaluated
from tests.runtime.test_layouts import assert_equal
from tests.runtime.test_numbers import random_batch, rows_of

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "tp": 2, "dp": 2, "microbatches": 2}, {"pp": 3, "schedule": "gpipe", "microbatches": 4},
    {"pp": 2, "tp": 2, "schedule": "zb-h1", "microbatches": 3}, {"pp": 2, "schedule": "interleaved", "microbatches": 3},
    {"pp": 4, "schedule": "naive"}, {"pp": 2, "split_backward": True, "microbatches": 3, "balance": "3,1"},
]  # fmt: skip


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_equals_one_process(nursery: Nursery, tiny: Models, layout: dict[str, Any], tied: bool) -> None:
    rows = 2 * layout.get("dp", 1) * layout.get("microbatches", 1)
    model = tiny(tie_word_embeddings=tied)
    assert_equal(nursery, shipped=not tied, model=model, batch=rows, loss_at="first", **layout)


def test_evaluation_counts_each_row_once(nursery: Nursery, tiny: Models) -> None:
    layout = {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2}
    ranks = nursery(evaluated, tiny(), {**layout, "loss_at": "first"}, 13)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0] == pytest.approx(nursery(evaluated, tiny(), {}, 13)[0], rel=1e-12)


def drawn(model: str, changes: dict[str, Any]) -> Any:
    """Tokens after a step, by rank."""
    plan = Plan(model=model, batch=4, seq=16, **changes)

    def main(world: World) -> Any:
        run = build(plan, world, wide=True)
        run.step(rows_of(random_batch(plan), world))
        return sample(run, [1, 2, 3], 6, temperature=0)

    return launch(main, plan)


def test_samples_are_the_same(nursery: Nursery, tiny: Models) -> None:
    one = nursery(drawn, tiny(), {})[0]
    ranks = nursery(drawn, tiny(), {"tp": 2, "pp": 2, "loss_at": "first"})
    assert ranks == [one] * 4
