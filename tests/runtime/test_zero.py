"""ZeRO in every composition computes what one process does; its stages do it bit by bit alike."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
import torch

from plait.design.errors import PlanError
from plait.design.plan import Plan, validate
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from plait.runtime.training.replicas import digest
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.test_layouts import assert_equal, name
from tests.runtime.test_numbers import random_batch, rows_of

AXES: dict[str, tuple[Any, ...]] = {
    "zero": (1, 2, 3), "dp": (2, 3, 4), "microbatches": (1, 3), "tp": (1, 2), "pp": (1, 2),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"), "keep_gathered": ("auto", "yes", "no"),
    "reduce_every": ("auto", "step", "microbatch"),
}  # fmt: skip


FACTS = read("llama-tiny").facts


def possible(row: dict[str, Any]) -> bool:
    """Whether a plan takes it, on 8 ranks or fewer."""
    if row["dp"] * row["tp"] * row["pp"] > 8 or (row["pp"] == 1 and row["schedule"] != "1f1b"):
        return False
    try:
        validate(Plan(batch=row["dp"] * row["microbatches"], **row), FACTS)
    except PlanError:
        return False
    return True


def pairs(row: dict[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
    return set(combinations(row.items(), 2))


def covering() -> list[dict[str, Any]]:
    """Rows in which every pair of values of two axes occurs that occurs in any."""
    rows = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    rows = [row for row in rows if possible(row)]
    missing = set().union(*map(pairs, rows))
    found = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        found.append(best)
    return found


@pytest.mark.parametrize("layout", covering(), ids=name)
def test_a_covering_set_equals_one_process(nursery: Nursery, tiny: Models, layout: dict[str, Any]) -> None:
    """Sizes that divide by nothing, but heads and columns by tp."""
    sizes = {"hidden_size": 35, "intermediate_size": 53, "vocab_size": 97, "num_attention_heads": 5}
    sizes |= {"num_key_value_heads": 1, "head_dim": 6}
    if layout["tp"] == 2:
        sizes = {"hidden_size": 36, "intermediate_size": 54, "head_dim": 6, "vocab_size": 98}
    model = tiny(**sizes)
    assert_equal(nursery, model=model, batch=2 * layout["dp"] * layout["microbatches"], **layout)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("qwen3-tiny", {"zero": 3, "tp": 2, "pp": 2}), ("qwen3-tiny", {"zero": 1, "pp": 2, "schedule": "zb-v"}),
     ("gpt2-tiny", {"zero": 2, "tp": 2, "pp": 2}), ("gpt2-tiny", {"zero": 3}), ("gemma3-tiny", {"zero": 3, "tp": 2}),
     ("phi3-tiny", {"zero": 1, "tp": 2}), ("mixtral-tiny", {"zero": 3, "tp": 2}),
     ("llama-tiny", {"zero": 2, "compute": "bf16"}), ("llama-tiny", {"zero": 3, "pp": 2, "loss_at": "first"})],
    ids=str,
)  # fmt: skip
def test_models(nursery: Nursery, model: str, layout: dict[str, Any]) -> None:
    """Tied weights over stages, on one rank and in a V; q and k norms, which are summed over tp too; fused parts."""
    assert_equal(nursery, shipped=True, model=model, dp=2, microbatches=2, batch=8, **layout)


def trained(changes: dict[str, Any]) -> Any:
    """Three losses, and what the weights make of another batch after them."""
    plan = Plan(**{"model": "llama-tiny", "dp": 2, "batch": 8, "seq": 16, "clip": 0.0, **changes})

    def main(world: World) -> Any:
        run = build(plan, world)
        losses = [run.step(rows_of(random_batch(plan, 512, seed), world)).loss for seed in range(3)]
        last = run.forward_pipeline  # a forward gathers whatever is not whole
        with torch.no_grad():
            last.run(rows_of(random_batch(plan, 512, 9), world).split(1), None)
        return losses, digest(last.logits[0])

    return launch(main, plan)[0]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_stages_of_zero_are_bitwise_alike(nursery: Nursery, compute: str) -> None:
    """Shares are summed in the order of the ranks at every stage; without clipping nothing else depends on it."""
    found = [
        nursery(trained, {"zero": zero, "microbatches": 2, "compute": compute, "reduce_every": every})
        for zero, every in ((1, "auto"), (2, "step"), (3, "step"))
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"zero": 1}, "set dp 2 or more, or zero 0"), ({"dp": 2, "zero": 2, "keep_gathered": "yes"}, "leave it auto"),
     ({"dp": 2, "zero": 1, "reduce_every": "step"}, "for zero 2 and above"),
     ({"dp": 2, "pp": 2, "zero": 2, "schedule": "zb-h1", "reduce_every": "microbatch"}, "reduce_every step")],
    ids=str,
)  # fmt: skip
def test_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        validate(Plan(batch=8, **changes), FACTS)
