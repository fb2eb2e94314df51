"""Recomputed blocks give what kept ones give, bit for bit, dropout included."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from plait.runtime.training.replicas import digest
from tests.nursery import Nursery
from tests.runtime.test_layouts import assert_equal
from tests.runtime.test_numbers import random_batch, rows_of

WAYS: list[dict[str, Any]] = [
    {"recompute": "full"}, {"recompute": "full", "recompute_every": 3}, {"recompute": "attention"}
]  # fmt: skip


def trained(changes: dict[str, Any]) -> Any:
    """Two losses and norms, and the bits of every weight of rank 0 after them; how often a block's MLP ran in a step."""
    plan = Plan(**{"model": "gpt2-tiny", "batch": 4, "seq": 16, **changes})
    vocabulary = read(plan.model).facts.vocabulary

    def main(world: World) -> Any:
        run = build(plan, world)
        ran: list[int] = []
        for body in run.bodies.values():
            for block in body.blocks.values():
                (mlp,) = (m for m in block.children() if type(m).__name__.endswith("MLP"))
                assert isinstance(mlp, nn.Module)
                mlp.register_forward_hook(lambda *_: ran.append(1))
        reports = [run.step(rows_of(random_batch(plan, vocabulary, seed), world)) for seed in range(2)]
        return (
            [(report.loss, report.grad_norm) for report in reports],
            [digest(weight) for weight in run.parameters.values()],
            len(ran) / len(reports),
        )

    return launch(main, plan)[0]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2, "microbatches": 2}, {"compute": "bf16"}], ids=str)
def test_p027_what_is_computed_again_is_the_same_bit_for_bit(nursery: Nursery, layout: dict[str, Any]) -> None:
    numbers, weights, ran = nursery(trained, layout)
    for way in WAYS:
        again, after, runs = nursery(trained, layout | way)
        assert (again, after) == (numbers, weights), way
        share = {"full": 2.0, "attention": 1.0}[way["recompute"]] if way.get("recompute_every", 1) == 1 else 1.5
        assert runs == share * ran or "pp" in layout


@pytest.mark.parametrize(
    ("model", "layout"),
    [("gpt2-tiny", {"tp": 2, "pp": 2}), ("gemma2-tiny", {"dp": 2}), ("mixtral-tiny", {"tp": 2}),
     ("qwen3-tiny", {"pp": 2, "schedule": "zb-v"}),
     ("llama-tiny", {"pp": 2, "tp": 2, "schedule": "zb-h1"})],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_models_equal_one_process(nursery: Nursery, model: str, layout: dict[str, Any], way: dict[str, Any]) -> None:
    assert_equal(nursery, model=model, microbatches=2, batch=4 * layout.get("dp", 1), **layout, **way)


@pytest.mark.parametrize(
    ("changes", "says"), [({"recompute_every": 2}, "set recompute full")], ids=str
)  # fmt: skip
def test_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        validate(Plan(**changes), read("llama-tiny").facts)
