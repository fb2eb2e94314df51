"""ZeRO in every composition computes what one process does; its stages do it bit by bit alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

from plait.design.cost.traffic import traffic
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.records import Traffic
from plait.design.rules import validate
from plait.design.sharding import shard
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.parallel.zero import Shares
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from plait.runtime.training.replicas import digest
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.test_layouts import assert_equal, name
from tests.runtime.test_numbers import random_batch, rows_of
from tests.runtime.test_traffic_and_time import ledger

AXES: dict[str, tuple[Any, ...]] = {
    "zero": (1, 2, 3), "replicas": (1, 2), "dp": (2, 3, 4), "microbatches": (1, 3), "tp": (1, 2), "pp": (1, 2),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"), "keep_gathered": ("auto", "yes", "no"),
    "reduce_every": ("auto", "step", "microbatch"), "recompute": ("none", "full", "attention"),
    "local_transport": ("shared", "torch"),
}  # fmt: skip


FACTS = read("llama-tiny").facts


def possible(row: dict[str, Any], ranks: int = 8) -> bool:
    """Whether a plan takes it, on so many ranks or fewer."""
    if row["dp"] * row["tp"] * row["pp"] > ranks or (row["pp"] == 1 and row["schedule"] != "1f1b"):
        return False
    try:
        validate(Plan(batch=row["dp"] * row["microbatches"], **row), FACTS)
    except PlanError:
        return False
    return True


def pairs(row: dict[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
    return set(combinations(row.items(), 2))


def covering(
    axes: Mapping[str, Sequence[Any]], ranks: int = 8, possible: Callable[[dict[str, Any], int], bool] = possible
) -> list[dict[str, Any]]:
    """Rows in which every pair of values of two axes occurs that occurs in any."""
    rows = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    rows = [row for row in rows if possible(row, ranks)]
    missing = set().union(*map(pairs, rows))
    found = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        found.append(best)
    return found


def some(rows: Sequence[dict[str, Any]], each: int = 6) -> list[Any]:
    """One row in `each`, and the rest with --all-layouts."""
    return [pytest.param(row, marks=[pytest.mark.rest] * (number % each > 0)) for number, row in enumerate(rows)]


def odd(tp: int) -> dict[str, int]:
    """Sizes that divide by nothing, but heads and columns by tp."""
    sizes = {"hidden_size": 35, "intermediate_size": 53, "vocab_size": 97, "num_attention_heads": 5}
    sizes |= {"num_key_value_heads": 1, "head_dim": 6}
    if tp == 2:
        sizes = {"hidden_size": 36, "intermediate_size": 54, "head_dim": 6, "vocab_size": 98}
    return sizes


@pytest.mark.parametrize("layout", covering(AXES), ids=name)
def test_a_covering_set_equals_one_process(nursery: Nursery, tiny: Models, layout: dict[str, Any]) -> None:
    model = tiny(**odd(layout["tp"]))
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


def unused(zero: int) -> Any:
    """A weight that gets no gradient on one rank, another on none."""
    plan = Plan(model="llama-tiny", dp=2, batch=4, seq=8, zero=zero)

    def main(world: World) -> Any:
        run = build(plan, world)
        assert isinstance(run.sink, Shares)
        run.sink.begin()
        run.sink.final = True
        unit = run.sharding.units(world.rank)[0]
        name = unit.names[0]
        if world.rank == 0:
            parameter = run.parameters[name]
            run.sink.open(parameter).fill_(2.0)
            run.sink.ready(parameter)
        run.sink.finish(0)
        return [float(run.sink.gradients[each].abs().sum()) for each in unit.names]

    return launch(main, plan)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_p065_p066_missing_gradients_count_as_zero_and_never_hang(nursery: Nursery, zero: int) -> None:
    first, *others = zip(*nursery(unused, zero), strict=True)
    unit = shard(FACTS, Plan(dp=2, zero=zero)).units(0)[0]
    assert sum(first) == 2.0 * unit.sizes[0]
    assert all(share == (0.0, 0.0) for share in others)


def sequence(steps: int) -> Any:
    """What a rank does in each step: the units that it gathers, and the sums over the world."""
    from plait.runtime.parallel import gathering
    from plait.runtime.training import step

    plan = Plan(model="llama-tiny", dp=2, batch=4, seq=8, zero=3)

    def main(world: World) -> Any:
        run, found = build(plan, world), list[str]()
        assert isinstance(run.sink, Shares)
        units = {share.data_ptr(): unit.name for unit, share in run.sink.stored}
        gather, reduce = gathering.gather_shares, step.all_reduce

        def gathers(whole: Any, share: Any, *rest: Any, **more: Any) -> Any:
            found.append(units[share.data_ptr()])
            return gather(whole, share, *rest, **more)

        def reduces(*given: Any, why: str, **more: Any) -> Any:
            found.append(why)
            return reduce(*given, why=why, **more)

        gathering.gather_shares, step.all_reduce = gathers, reduces
        rows = []
        for seed in range(steps):
            found.clear()
            run.step(rows_of(random_batch(plan, 512, seed), world))
            rows.append(list(found))
        return list(units.values()), rows

    return launch(main, plan)[0]


def test_the_first_two_units_of_a_known_step_are_gathered_at_once(nursery: Nursery) -> None:
    units, (first, *later) = nursery(sequence, 3)
    count = "target tokens"
    assert first[0] == count
    assert all(row[:3] == [*first[1:3], count] for row in later)
    assert all(sorted(row) == sorted(first) for row in later)
    assert set(first) == {*units, count}


@pytest.mark.parametrize("model", ["qwen3-tiny", "gpt2-tiny"])
@pytest.mark.parametrize("pp", [1, 2])
def test_p013_p067_a_tied_weight_is_shared_by_one_group(model: str, pp: int) -> None:
    """It is a unit by itself, so that its owner and its other users share it alike, element by element."""
    sharding = shard(read(model).facts, Plan(model=model, dp=3, pp=pp, zero=3, batch=6))
    tied = next(p for p in sharding.parameters if len(p.first.uses) > 1)
    units = [sharding.unit_of(tied.name, rank) for rank in range(3 * pp)]
    assert {(unit.names, unit.sizes, unit.share) for unit in units} == {((tied.name,), units[0].sizes, units[0].share)}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_p123_there_are_as_many_calls_as_blocks(zero: int) -> None:
    """And one for each end: parameters do not travel one by one."""
    facts = read("llama-tiny").facts
    found = [row for row in traffic(Plan(dp=4, zero=zero), facts) if row.rank == 0 and row.axis == "dp"]
    assert {row.operation: row.calls for row in found} == {
        "reduce_scatter": facts.blocks + 2,
        "all_gather": facts.blocks + 2 + (facts.blocks - 2 if zero == 3 else 0),
    }


@pytest.mark.parametrize(
    "layout", [{"dp": 3}, {"dp": 4, "replicas": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}], ids=name
)
@pytest.mark.parametrize("model", ["qwen3-tiny", "gpt2-tiny", "phi3-tiny"])
def test_p034_p055_shares_tile_every_slice(model: str, layout: dict[str, Any]) -> None:
    """Whatever does not divide: each element of what ranks compute with is in one share, and counts once in the norm."""
    facts = read(model).facts
    sharding = shard(facts, Plan(model=model, zero=3, batch=12, **layout))
    mesh, counted = sharding.mesh, 0
    for rank in range(mesh.size):
        held = sharding.at(mesh.coordinate(rank)["pp"])
        assert sorted(n for unit in sharding.units(rank) for n in unit.names) == sorted(one.name for one in held)
        for one in held:
            group = mesh.group(rank, "shard")
            stretches = [sharding.stretch(one.name, "stored", other) for other in group]
            assert sum(stop - start for start, stop in stretches if stop > start) == one.elements(mesh, rank)  # type: ignore[misc]
            counted += sum(stop - start for start, stop in sharding.counted(one.name, rank))
    assert counted == facts.elements


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_p125_with_replicas_a_node_sends_no_more_than_its_gradients(nursery: Nursery, zero: int) -> None:
    """2 nodes of 4 ranks, a replica each: weights stay inside a node, and what leaves it in a step is once the gradients,
    where a ring over both sends more than twice as much over the same link."""
    layout = {"dp": 8, "zero": zero, "replicas": 2, "microbatches": 1}
    moved = [Traffic(*row) for mine, _ in nursery(ledger, "llama-tiny", layout) for row in mine]
    whole = sum(unit.padded for unit in shard(FACTS, Plan(batch=8, **layout)).units(0)) * 4
    between = [row for row in moved if row.axis == "replica"]
    assert {row.why for row in between} == {"gradients"}
    assert {row.why for row in moved if row.axis == "shard"} == {"gradients", "weights"}
    for node in range(2):
        assert sum(row.sent for row in between if row.rank // 4 == node) == whole
    # A ring over both nodes crosses each link with what any of its ranks sends.
    over_both = [r for r in traffic(Plan(model="llama-tiny", batch=8, seq=16, dp=8, zero=3), FACTS) if r.axis == "dp"]
    assert sum(row.sent for row in over_both if row.rank == 0) > 2 * whole
