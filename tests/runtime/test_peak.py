"""The memory of a step, storage by storage: what is held and kept to the byte, the peak as predicted."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.design.cost.memory import memory
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.records import MemoryBill
from plait.design.rules import validate
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.training import loop, measure
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from plait.runtime.training.storages import Storages, size
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.test_memory_and_step_time import bills
from tests.runtime.test_numbers import random_batch, rows_of
from tests.runtime.test_zero import covering, some

FACTS = read("llama-tiny").facts
AXES: dict[str, tuple[Any, ...]] = {
    "dp": (1, 2, 4), "zero": (0, 1, 2, 3), "replicas": (1, 2), "microbatches": (1, 4), "tp": (1, 2), "pp": (1, 2),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"), "keep_gathered": ("auto", "yes", "no"),
    "reduce_every": ("auto", "step", "microbatch"), "recompute": ("none", "full", "attention"),
    "compute": ("fp32", "bf16"), "seq": (16, 64), "sp": (False,),
}  # fmt: skip
CUT: dict[str, tuple[Any, ...]] = {
    "dp": (1, 2), "zero": (0, 1, 2, 3), "microbatches": (1, 4), "tp": (2, 3, 4), "pp": (1, 2),
    "schedule": AXES["schedule"], "recompute": AXES["recompute"], "compute": ("fp32", "bf16"), "seq": (16, 64),
    "sp": (True,),
}  # fmt: skip
"""The same with rows cut, also by what does not divide them."""


def possible(row: dict[str, Any], ranks: int) -> bool:
    """Whether a plan takes it, on so many ranks or fewer."""
    if row["dp"] * row["tp"] * row["pp"] > ranks or (row["pp"] == 1 and row["schedule"] != "1f1b"):
        return False
    try:
        validate(Plan(batch=4 * row["dp"], **row), FACTS)
    except PlanError:
        return False
    return True


def layouts() -> list[dict[str, Any]]:
    """Rows in which every pair of values of two axes occurs that occurs in any."""
    rows = [*covering(AXES, 4, possible), *covering(CUT, 6, possible)]
    return [{**row, "batch": 4 * row["dp"]} for row in rows]


@pytest.mark.parametrize("layout", some(layouts(), 10), ids=lambda layout: "-".join(map(str, layout.values())))
def test_held_and_kept_to_the_byte_and_the_peak_as_predicted(nursery: Nursery, layout: dict[str, Any]) -> None:
    """The peak within 5 % of what a step takes, without what is held: that would hide an error."""
    plan = Plan(**{"model": "llama-tiny", "steps": 2, **layout})
    predicted = memory(plan, FACTS)
    measured = [MemoryBill(*row) for row in nursery(bills, "llama-tiny", layout)[0]]
    assert [bill.held for bill in measured] == [bill.held for bill in predicted]
    assert [bill.activations for bill in measured] == [bill.activations for bill in predicted]
    for one, other in zip(predicted, measured, strict=True):
        assert one.working is not None
        assert other.working is not None
        assert one.activations + one.working == pytest.approx(other.activations + other.working, rel=0.05), one.rank


@pytest.mark.parametrize("layout", [{}, {"compute": "bf16"}, {"tp": 2}, {"tp": 2, "compute": "bf16"}], ids=str)
def test_the_peak_where_activations_are_most_of_it(nursery: Nursery, layout: dict[str, Any]) -> None:
    """4 blocks, 4,096 tokens: to a thousandth, also where rows are cut."""
    layout = {"batch": 32, "seq": 128, **layout}
    predicted = memory(Plan(model="llama-tiny", **layout), FACTS)[0]
    measured = MemoryBill(*nursery(bills, "llama-tiny", layout)[0][0])
    assert predicted.activations > 5 * sum(predicted.held)
    assert predicted.peak == pytest.approx(measured.peak, rel=0.001)


def alive(changes: dict[str, Any]) -> Any:
    """After two steps: bytes of what the run says that it holds, by name, and of all other tensors on the rank."""
    plan = Plan(**{"model": "llama-tiny", "batch": 8, "seq": 16, "steps": 2, **changes})

    def main(world: World) -> Any:
        run = build(plan, world)
        loop.train(
            run, (rows_of(random_batch(plan, FACTS.vocabulary, seed), world) for seed in range(2)), lambda _: None
        )
        gc.collect()
        held = [tensor for tensors in run.holds.values() for tensor in tensors]
        # What ranks share is counted apart: World.shared_bytes.
        shared = world._near.segments.values() if world._near is not None else ()
        segments = {segment.data.untyped_storage().data_ptr() for segment in shared}
        found = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.device.type == "cpu"]
        found = [each for each in found if each.untyped_storage().data_ptr() not in segments]
        return [size(held), size([*held, *found]) - size(held)]

    return launch(main, plan)


@pytest.mark.parametrize(
    "layout",
    [{}, {"dp": 2, "zero": 3, "microbatches": 2}, {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2, "compute": "bf16"},
     {"pp": 2, "tp": 2, "schedule": "zb-v", "microbatches": 2, "recompute": "full"}],
    ids=str,
)  # fmt: skip
def test_nothing_else_is_held(nursery: Nursery, layout: dict[str, Any]) -> None:
    """Between steps: a few kB of frequencies and numbers. Whoever keeps a tensor that no bill has is found here."""
    predicted = memory(Plan(**{"batch": 8, "seq": 16, **layout}), FACTS)
    for bill, (held, others) in zip(predicted, nursery(alive, layout), strict=True):
        assert held == sum(bill.held)
        assert others < 16_384


def leftovers(changes: dict[str, Any]) -> Any:
    """Bytes that rank 0 has beyond what it holds, when the last send of a step is posted."""
    plan = Plan(**{"model": "llama-tiny", "batch": 64, "seq": 16, "steps": 2, **changes})

    def main(world: World) -> Any:
        run = build(plan, world)
        step = rows_of(random_batch(plan, FACTS.vocabulary), world)
        run.step(step)
        with Storages(run.holds, world.device) as storages:
            run.step(step)
        return storages.peak

    return launch(main, plan)[0]


def test_what_was_sent_is_let_go(nursery: Nursery) -> None:
    """With 1f1b a rank's peak does not grow with the number of microbatches (of the same size)."""
    few = nursery(leftovers, {"pp": 2, "microbatches": 8, "batch": 16})
    many = nursery(leftovers, {"pp": 2, "microbatches": 32, "batch": 64})
    # 24 more activations of 2 x 16 tokens would be 24 x 8 kB.
    assert many - few < 2 * 32 * FACTS.hidden * 4


def test_storages_are_counted_once_and_until_they_are_freed() -> None:
    """Views and work in place make nothing new; what was there before is nobody's; a freed one no longer counts."""
    before, held = torch.ones(10), torch.ones(100)
    with Storages({"held": [held, held[1:]], "again": [held]}, torch.device("cpu")) as storages:
        assert storages.held == {"held": 400, "again": 0}
        before.view(2, 5).add_(1)
        held.mul_(2)
        assert storages.bytes == 0
        new = torch.empty(1000)
        part = new[10:20].view(2, 5)
        new.add_(1)
        assert storages.bytes == 4000
        del new
        assert storages.bytes == 4000, "a view keeps it"
        both = torch.stack((part, part))
        del part
        assert (storages.bytes, storages.peak) == (80, 4080)
        del both
    assert (storages.bytes, storages.peak) == (0, 4080)


def test_a_run_of_one_step_has_no_peak(nursery: Nursery, tiny: Models) -> None:
    """There is no second step, which would find all that is held."""
    (row,) = nursery(one_step, tiny())
    assert MemoryBill(*row).working is None
    assert replace(MemoryBill(*row), working=5).peak == MemoryBill(*row).total + 5


def one_step(model: str) -> Any:
    plan = Plan(model=model, batch=4, seq=8, steps=1)

    def main(world: World) -> Any:
        run = build(plan, world)
        watch = loop.train(run, [rows_of(random_batch(plan), world)], lambda report: None)
        return [list(vars(bill).values()) for bill in measure.memory(run, watch)]

    return launch(main, plan)[0]
