"""Frozen parameters in every composition: what trains becomes what one process makes of it, the rest stays as it is."""

from __future__ import annotations

from typing import Any

import pytest

from plait.design.cost.memory import memory
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.design.sharding import shard
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.hf.twin import twin
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from plait.runtime.training.replicas import digest
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.test_layouts import assert_equal, name
from tests.runtime.test_numbers import random_batch, rows_of
from tests.runtime.test_zero import covering, some

WAYS: dict[str, dict[str, str]] = {
    "embedding": {"freeze": "*embed_tokens*"},
    "norms": {"freeze": "*norm*"},
    "all but norms": {"train_only": "*norm*"},
    "all but the head": {"train_only": "lm_head.weight"},
    "first blocks": {"freeze": "*embed_tokens*,model.layers.[01].*"},
    "last blocks": {"freeze": "model.layers.[23].*,model.norm.*,lm_head.*"},
    "all but one": {"train_only": "model.layers.2.mlp.down_proj.weight"},
    "projections": {"freeze": "*q_proj*,*down_proj*"},
}
AXES: dict[str, tuple[Any, ...]] = {
    "way": tuple(WAYS), "zero": (0, 1, 2, 3), "dp": (1, 2, 3), "microbatches": (1, 3), "tp": (1, 2), "pp": (1, 2),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"), "recompute": ("none", "full", "attention"),
}  # fmt: skip
FACTS = read("llama-tiny").facts


def fields(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "way"} | WAYS[row["way"]]


def possible(row: dict[str, Any]) -> bool:
    """Whether a plan takes it, on 6 ranks or fewer."""
    if row["dp"] * row["tp"] * row["pp"] > 6 or (row["pp"] == 1 and row["schedule"] != "1f1b"):
        return False
    try:
        validate(Plan(batch=row["dp"] * row["microbatches"], **fields(row)), FACTS)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("row", some(covering(AXES, possible=lambda row, _: possible(row))), ids=name)
def test_a_covering_set_equals_one_process(nursery: Nursery, tiny: Models, row: dict[str, Any]) -> None:
    """Numbers, memory's own places and bytes sent; a frozen weight is compared exactly."""
    assert_equal(nursery, model=tiny(), batch=2 * row["dp"] * row["microbatches"], **fields(row))


@pytest.mark.parametrize(
    ("model", "layout"),
    [("qwen3-tiny", {"freeze": "model.embed_tokens.weight", "pp": 2, "zero": 3}),
     ("qwen3-tiny", {"train_only": "*norm*", "tp": 2, "pp": 2, "schedule": "zb-v"}),
     ("gpt2-tiny", {"train_only": "*.bias", "tp": 2, "zero": 3}),
     ("gpt2-tiny", {"freeze": "*.bias,transformer.wpe.*", "tp": 2, "pp": 2, "schedule": "zb-h1"}),
     ("mixtral-tiny", {"train_only": "*experts*", "tp": 2, "zero": 2}),
     ("mixtral-tiny", {"freeze": "*experts*", "tp": 2, "zero": 3}),
     ("phi3-tiny", {"freeze": "*qkv_proj*", "tp": 2, "zero": 1}),
     ("llama-tiny", {"freeze": "*down_proj*", "zero": 3, "compute": "bf16"}),
     ("llama-tiny", {"train_only": "model.layers.3.*", "pp": 2, "loss_at": "first"}),
     ("llama-tiny", {"train_only": "model.layers.0.*", "pp": 2, "schedule": "auto", "microbatches": 3})],
    ids=str,
)  # fmt: skip
def test_models(nursery: Nursery, model: str, layout: dict[str, Any]) -> None:
    """Tied weights over stages; biases of row-parallel layers, with and without their weights; experts; fused parts."""
    assert_equal(nursery, shipped=True, model=model, dp=2, batch=8 * layout.get("microbatches", 1), **layout)


def held(changes: dict[str, Any]) -> Any:
    """By name: whether a rank's weight is the same bits after three steps; and what has a gradient or a state."""
    plan = Plan(**{"model": "llama-tiny", "dp": 2, "batch": 8, "seq": 16, "lr": 0.1, **changes})

    def main(world: World) -> Any:
        run = build(plan, world)
        before = {name: digest(weight) for name, weight in run.stored.items()}
        for seed in range(3):
            run.step(rows_of(random_batch(plan, 512, seed), world))
        # A rank's share of a parameter may be empty.
        same = {name: digest(weight) == before[name] for name, weight in run.stored.items() if weight.numel()}
        gradients = [name for name, weight in run.parameters.items() if weight.grad is not None]
        return [same, sorted({*gradients, *run.sink.gradients}), sorted(run.optimizer.weights), sorted(run.parameters)]

    return launch(main, plan)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "layout",
    [{}, {"compute": "bf16"}, pytest.param({"tp": 2}, marks=pytest.mark.rest),
     pytest.param({"pp": 2, "schedule": "zb-h1"}, marks=pytest.mark.rest)],
    ids=str,
)  # fmt: skip
def test_p117_frozen_weights_stay_bit_for_bit_and_have_nothing_but_themselves(
    nursery: Nursery, zero: int, layout: dict[str, Any]
) -> None:
    """Beside trained ones of the same block, whose every slice moves."""
    way = {"freeze": "model.layers.0.*,*norm*,*q_proj*"}
    plan = Plan(dp=2, zero=zero, **layout, **way)
    trained = {fact.name for fact in FACTS.parameters if plan.trains(fact)}
    for same, gradients, state, here in nursery(held, {"zero": zero, **layout, **way}):
        assert {name for name in same if not same[name]} == trained & set(same)
        assert set(gradients) == set(state) == trained & set(here)


def losses(changes: dict[str, Any]) -> list[float]:
    plan = Plan(**{"model": "llama-tiny", "dp": 2, "batch": 8, "seq": 16, "microbatches": 2, "clip": 0.0, **changes})

    def main(world: World) -> Any:
        run = build(plan, world)
        return [run.step(rows_of(random_batch(plan, 512, seed), world)).loss for seed in range(4)]

    return launch(main, plan)[0]  # type: ignore[no-any-return]


def test_the_stages_of_zero_are_bitwise_alike(nursery: Nursery) -> None:
    """With frozen units that are gathered ahead beside the trained ones of their block."""
    way = {"freeze": "*q_proj*,*norm*,model.layers.1.*", "reduce_every": "step"}
    found = [nursery(losses, way | {"zero": zero, "keep_gathered": kept}) for zero, kept in ((2, "auto"), (3, "no"))]
    assert found[0] == found[1]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_is_frozen_has_no_place_on_paper(zero: int) -> None:
    """No bucket, no unit with a gradient, no stretch of a sum; with ZeRO-3 a share, with ZeRO-1 and -2 all of it."""
    plan = Plan(dp=3, zero=zero, batch=6, freeze="*norm*,model.layers.1.*")
    sharding = shard(FACTS, plan)
    frozen = [one for one in sharding.parameters if not one.first.trains]
    assert {one.name for one in frozen} == {fact.name for fact in FACTS.parameters if not plan.trains(fact)}
    assert all(part.kind == "frozen" and part.summed_over == () for one in frozen for part in one.parts)
    for rank in range(3):
        names = {name for unit in sharding.trained_units(rank) for name in unit.names}
        assert not names & {one.name for one in frozen}
        assert all(sharding.counted(one.name, rank) == [] for one in frozen)
        assert {unit.trains for unit in sharding.units(rank)} == ({True, False} if zero == 3 else {True})
        for one in frozen:
            cut = sharding.stretch(one.name, "stored", rank)
            assert (cut is None) == (zero < 3)
            assert sharding.stretch(one.name, "state", rank) == cut


def test_memory_of_a_trained_head(tiny: Models) -> None:
    """By hand: 4 bytes of every weight, 12 more and a counter of what is trained; nothing kept but for the head."""
    facts = read(tiny()).facts
    plan = Plan(model="x", batch=4, seq=16, train_only="lm_head.weight")
    (bill,) = memory(plan, facts)
    head = facts.head_weight.elements
    assert bill.held == (4 * facts.elements, 0, 4 * head, 8 * head + 4, 0)
    assert bill.activations == 4 * 16 * (4 * facts.hidden + 4 * facts.vocabulary + 18) + 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"freeze": "model.embed_token.weight"}, "Did you mean 'model.embed_tokens.weight'?"),
     ({"freeze": "model.layers.1"}, r"Did you mean 'model.layers.1\*'\?"),
     ({"freeze": "*norm*,nothing.*"}, "freeze names nothing.*, but none of the 39 parameters"),
     ({"train_only": "*nrom*"}, "train_only names .nrom., but none"),
     ({"freeze": "*"}, r"freeze '\*' leaves none of its 39 parameters to train: leave a pattern out"),
     ({"train_only": "*norm*", "freeze": "model.*"}, "leaves none of its 39"), ({"freeze": ","}, "has no pattern in it"),
     ({"model": "qwen3-tiny", "freeze": "lm_head.weight"}, "the weight model.embed_tokens.weight, used twice")],
    ids=str,
)  # fmt: skip
def test_refusals(changes: dict[str, Any], says: str) -> None:
    plan = Plan(**changes)
    with pytest.raises(PlanError, match=says):
        validate(plan, read(plan.model).facts)


@pytest.mark.parametrize(
    ("way", "wanted"),
    [({"freeze": "model.embed_tokens.*,model.layers.[0-9].*,model.layers.1[0-9].*"}, "FT"),
     ({"train_only": "model.layers.29.*"}, "FT"), ({"train_only": "model.layers.12.mlp.*"}, "FTF"),
     ({"freeze": "model.layers.*[02468].*"}, "FTFT")],
    ids=str,
)  # fmt: skip
def test_a_twin_is_frozen_as_its_model_is(tiny: Models, way: dict[str, str], wanted: str) -> None:
    """Runs of blocks that are frozen alike, or, where they are too many, some of either kind."""
    model = read(tiny(num_hidden_layers=30, hidden_size=512, intermediate_size=1024))
    plan = Plan(pp=2, batch=8, microbatches=2, seq=32, **way)
    small = twin(model, plan)
    facts = small.model.facts
    validate(small.plan, facts)
    trains = [
        any(small.plan.trains(fact) for fact in facts.parameters if fact.block == block)
        for block in range(facts.blocks)
    ]
    runs = "".join("T" if one else "F" for one, before in zip(trains, [None, *trains], strict=False) if one != before)
    assert runs == wanted or (len(wanted) > 3 and set(runs) == {"T", "F"})
    ends = {fact.name: small.plan.trains(fact) for fact in facts.parameters if fact.block is None}
    assert ends == {fact.name: plan.trains(fact) for fact in model.facts.parameters if fact.block is None}


def test_ways_are_all_different() -> None:
    found = {tuple(Plan(**way).trains(fact) for fact in FACTS.parameters) for way in WAYS.values()}
    assert len(found) == len(WAYS)
    one_rank = {axis: values[0] for axis, values in AXES.items()} | {"dp": 1}
    assert all(possible(one_rank | {"way": way}) for way in WAYS)
