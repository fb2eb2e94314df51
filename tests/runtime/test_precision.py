"""Types of gradients and of their sums, and fp16 with its loss scale."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from plait.check.batches import awkward_batches
from plait.check.faults.fault import instead
from plait.check.proof import prove
from plait.design.cost.memory import memory
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.precision import kept
from plait.design.rules import validate
from plait.runtime.comm import collectives
from plait.runtime.comm.failure import RankError
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.training import gradients
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from plait.runtime.training.loop import train
from plait.runtime.training.loss_scale import LossScale
from plait.runtime.training.optimizer import learning_rate
from plait.runtime.training.replicas import digest
from plait.runtime.training.step import Run
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.test_layouts import assert_equal, name
from tests.runtime.test_numbers import random_batch, rows_of
from tests.runtime.test_zero import covering, some

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "compute": "fp16"}, {"tp": 2, "pp": 2, "compute": "fp16", "schedule": "zb-h1"},
    {"dp": 2, "reduce": "bf16"},
    {"dp": 2, "zero": 1, "compute": "bf16", "accumulate": "bf16"},
    {"dp": 4, "replicas": 2, "zero": 3, "compute": "bf16", "accumulate": "bf16", "reduce": "fp32"},
    {"dp": 2, "pp": 2, "zero": 2, "compute": "fp16", "reduce": "fp16", "recompute": "full"},
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_layouts_equal_one_process(nursery: Nursery, tiny: Models, layout: dict[str, Any]) -> None:
    assert_equal(nursery, shipped=True, model=tiny(), microbatches=2, batch=4 * layout.get("dp", 1), **layout)


def not_brought_back() -> None:
    """What is summed in another type stays there: each rank goes on with its own."""

    @instead(collectives, "all_reduce")
    def wrong(right: Any, x: torch.Tensor, *args: Any, through: torch.Tensor | None = None, **more: Any) -> Any:
        return right(x if through is None else through.copy_(x), *args, **more)


def departs(planted: bool) -> Any:
    plan = Plan(model="llama-tiny", seq=16, steps=3, dp=2, batch=8, reduce="bf16")
    model = read(plan.model)
    batches = partial(awkward_batches, plan, model.facts.vocabulary, 3)
    verdict = prove(plan, model, batches, plant=not_brought_back if planted else None)[1]
    return [str(verdict.departures[0].place), verdict.cause] if verdict.departures else []


def test_a_sum_that_is_not_brought_back_is_found_as_shipped(nursery: Nursery) -> None:
    assert nursery(departs, False) == []
    place, cause = nursery(departs, True)
    assert "the reduced gradient of lm_head.weight" in place
    assert "the sum over dp is missing" in cause


# --- the loss scale changes nothing but range


def trained(changes: dict[str, Any], wide: bool) -> Any:
    """(loss, norm) of three steps on every rank, and the bits of its weights after them."""
    plan = Plan(**{"model": "qwen3-tiny", "batch": 8, "seq": 16, "microbatches": 2, **changes})

    def main(world: World) -> Any:
        run = build(plan, world, wide=wide)
        reports = [run.step(rows_of(random_batch(plan, 512, seed), world)) for seed in range(3)]
        assert not any(report.skipped for report in reports)
        return [[(r.loss, r.grad_norm) for r in reports], [digest(w) for w in run.optimizer.weights.values()]]

    return launch(main, plan)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "layout",
    [{}, {"tp": 2, "pp": 2, "schedule": "zb-v"}, {"dp": 2, "zero": 2}, {"pp": 2, "loss_at": "first"}],
    ids=name,
)
def test_a_power_of_two_changes_no_bit(nursery: Nursery, layout: dict[str, Any], wide: bool) -> None:
    """Of numbers that have the range for it: every gradient is so many times as large, and then is not."""
    assert nursery(trained, layout | {"loss_scale": "65536"}, wide) == nursery(trained, layout, wide)


@pytest.mark.parametrize(
    "types",
    [{"compute": "fp16"}, {"compute": "fp16", "reduce": "fp16"}, {"compute": "bf16", "accumulate": "bf16"},
     {"reduce": "bf16"}],
    ids=name,
)  # fmt: skip
def test_the_stages_of_zero_are_bitwise_alike(nursery: Nursery, types: dict[str, Any]) -> None:
    found = [
        nursery(alike, {"model": "llama-tiny", "dp": 2, "zero": zero, "clip": 0.0, "reduce_every": every, **types})
        for zero, every in ((1, "auto"), (2, "step"), (3, "step"))
    ]
    assert found[0] == found[1] == found[2]


def alike(changes: dict[str, Any]) -> Any:
    """Losses of three steps, and what the weights make of another batch after them."""
    plan = Plan(**{"batch": 8, "seq": 16, "microbatches": 2, **changes})

    def main(world: World) -> Any:
        run = build(plan, world)
        losses = [run.step(rows_of(random_batch(plan, 512, seed), world)).loss for seed in range(3)]
        with torch.no_grad():
            run.forward_pipeline.run(rows_of(random_batch(plan, 512, 9), world).split(1), None)
        return losses, digest(run.forward_pipeline.logits[0])

    return launch(main, plan)[0]


# --- steps that overflow


def state_of(run: Run) -> list[int]:
    """The bits of all that an update changes on this rank."""
    held = [weight for _, weight in sorted(run.optimizer.weights.items())]
    held += [moment for name in sorted(run.optimizer.weights) for moment in run.optimizer.moments(name)]
    return [digest(tensor) for tensor in (*held, *(run.stored[name] for name in sorted(run.stored)))]


def overflowing(run: Run) -> Callable[[], None]:
    """From now on one gradient is infinite on one rank, until what is returned is called: on the last place of dp and pp,
    and the first of tp, whose copy is the one that counts. Autograd gives it where backward is in halves, too."""
    names = [name for name, parameter in run.parameters.items() if parameter.dim() == 1]
    if run.world.rank != run.world.mesh.size - run.plan.tp:
        return lambda: None

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt[0] = torch.inf
        return spoilt

    return run.parameters[names[-1]].register_hook(spoil).remove


def one_rank_updates() -> None:
    rank: list[int] = []

    @instead(Run, "_watch_gradients")
    def watch(right: Any, self: Run) -> None:
        right(self)
        rank[:] = [self.world.rank]

    @instead(gradients, "overflow")
    def wrong(right: Any, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = right(loss, norm)
        return found & (rank[0] != 1)


def ranks_decide_by_themselves() -> None:
    """Each goes by the norm of its own gradients, before they are summed."""
    own: list[torch.Tensor] = []

    @instead(Run, "_watch_gradients")
    def watch(right: Any, self: Run) -> None:
        right(self)
        own.clear()
        self.sink.leaves = lambda name, gradient: own.append(gradient.double().square().sum())

    @instead(gradients, "loss_and_norm")
    def wrong(right: Any, *args: Any) -> Any:
        loss, norm = right(*args)
        mine = torch.stack(own).sum()
        return loss, torch.where(mine.isfinite() & ~norm.isfinite(), mine.sqrt(), norm)


def skipped_steps_count() -> None:
    @instead(LossScale, "learn")
    def wrong(right: Any, self: LossScale, *, finite: bool) -> Any:
        found = right(self, finite=finite)
        self.skipped = 0
        return found


PLANTS = {plant.__name__: plant for plant in (one_rank_updates, ranks_decide_by_themselves, skipped_steps_count)}


def spoilt(changes: dict[str, Any], plant: str = "") -> Any:
    """What is wrong on the ranks of a run whose second step of three overflows on one rank."""
    plan = Plan(**{"model": "qwen3-tiny", "batch": 8, "seq": 16, "steps": 4, "compute": "fp16", **changes})

    def main(world: World) -> Any:
        if plant:
            PLANTS[plant]()
        run, batches = build(plan, world), [rows_of(random_batch(plan, 512, seed), world) for seed in range(3)]
        first = run.step(batches[0])
        before = state_of(run)
        put_right = overflowing(run)
        second = run.step(batches[1])
        put_right()
        kept = state_of(run) == before
        third = run.step(batches[2])
        numbers = [(r.scale, r.skipped, r.lr, r.finite) for r in (first, second, third)]
        return [numbers, kept, state_of(run)]

    return launch(main, plan)


def passed_over(changes: dict[str, Any]) -> Any:
    """The bits of every rank of a run that never saw the second batch."""
    plan = Plan(**{"model": "qwen3-tiny", "batch": 8, "seq": 16, "steps": 4, "compute": "fp16", **changes})

    def main(world: World) -> Any:
        run = build(plan, world)
        for seed in (0, 2):
            run.step(rows_of(random_batch(plan, 512, seed), world))
        return state_of(run)

    return launch(main, plan)


def wrong_of(ranks: Any, others: Any, layout: dict[str, Any]) -> list[str]:
    """What does not hold of a step that was skipped."""
    plan = Plan(**{"steps": 4, "compute": "fp16", **layout})
    rates = [learning_rate(plan, update, 4) for update in (0, 1, 1)]
    scale = plan.first_loss_scale
    scales = [scale, scale, scale / 2 if plan.scales_dynamically else scale]
    expected = [[s, n == 1, rate, n != 1] for n, (s, rate) in enumerate(zip(scales, rates, strict=True))]
    found = [f"rank {rank} reports {numbers}" for rank, (numbers, _, _) in enumerate(ranks) if numbers != expected]
    found += [f"rank {rank} has changed" for rank, (_, kept, _) in enumerate(ranks) if not kept]
    if not plan.scales_dynamically:
        found += [f"rank {n} is not that of a run without" for n, (_, _, bits) in enumerate(ranks) if bits != others[n]]
    return found


def skipping() -> list[dict[str, Any]]:
    """Layouts in which every pair of values occurs."""
    axes: dict[str, tuple[Any, ...]] = {
        "zero": (0, 1, 2, 3), "dp": (1, 2), "microbatches": (1, 3), "tp": (1, 2), "pp": (1, 2),
        "schedule": ("1f1b", "zb-h1", "zb-v"), "recompute": ("none", "full"), "reduce": ("auto", "fp16"),
        "loss_scale": ("dynamic", "1024"), "compute": ("fp16",),
    }  # fmt: skip
    return covering(axes, ranks=4)


@pytest.mark.parametrize("layout", some(skipping()), ids=name)
def test_all_ranks_skip_a_step_that_overflows_on_one(nursery: Nursery, layout: dict[str, Any]) -> None:
    """Weights, moments and learning rate are those of before, to the bit; with a scale that stays the run is that of one
    that never had the step. The model is tied."""
    layout = {"batch": 4 * layout["dp"] * layout["microbatches"], **layout}
    assert wrong_of(nursery(spoilt, layout), nursery(passed_over, layout), layout) == []


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_of_a_skip_are_found(nursery: Nursery, plant: str) -> None:
    layout = {"dp": 2, "loss_scale": "1024"}
    assert wrong_of(nursery(spoilt, layout, plant), nursery(passed_over, layout), layout) != []


@pytest.mark.parametrize("initial", [2.0**24, 2.0**16])
def test_the_scale_falls_until_steps_are_good_and_then_rises(nursery: Nursery, initial: float) -> None:
    """From where it is too large; and after four good steps, and four more."""
    found = nursery(scales, {"dp": 2, "initial_loss_scale": initial, "loss_scale_window": 4})
    assert all(rank == found[0] for rank in found)
    scale, good = initial, 0
    for used, skipped, _ in found[0]:
        assert used == scale
        good = 0 if skipped else good + 1
        if skipped:
            scale /= 2
        elif good == 4:
            scale, good = scale * 2, 0
    assert any(skipped for _, skipped, _ in found[0]) == (initial == 2.0**24)
    assert found[0][-1][2] < found[0][0][2], "it does not learn"


def scales(changes: dict[str, Any]) -> Any:
    """(scale, skipped, loss) of twenty steps on one batch, on every rank."""
    plan = Plan(**{"model": "llama-tiny", "batch": 8, "seq": 16, "steps": 20, "compute": "fp16", **changes})

    def main(world: World) -> Any:
        run, batch = build(plan, world), rows_of(random_batch(plan, 512), world)
        return [(r.scale, r.skipped, r.loss) for r in (run.step(batch) for _ in range(20))]

    return launch(main, plan)


# --- the end of a run that overflows on and on


def ended(changes: dict[str, Any]) -> Any:
    """[exit code, sentence] of a training on one batch, all of whose steps overflow."""
    plan = Plan(**{"model": "llama-tiny", "batch": 8, "seq": 16, "steps": 40, "compute": "fp16", **changes})

    def main(world: World) -> Any:
        run, batch = build(plan, world), rows_of(random_batch(plan, 512), world)
        overflowing(run)
        train(run, [batch] * plan.steps, lambda report: None)

    try:
        launch(main, plan)
    except RankError as error:
        return [error.code, str(error)]
    raise AssertionError("it did not end")


@pytest.mark.parametrize(
    ("layout", "rank"),
    [({"dp": 2}, 1), ({"dp": 2, "zero": 2, "microbatches": 2}, 1), ({"dp": 2, "zero": 3}, 1), ({"tp": 2, "pp": 2}, 2),
     ({"pp": 2, "schedule": "zb-h1", "microbatches": 2}, 1)],
    ids=str,
)  # fmt: skip
def test_p032_the_run_ends_after_so_many_skips_and_names_the_tensor(
    nursery: Nursery, layout: dict[str, Any], rank: int
) -> None:
    """And the rank that made it, though its sum is infinite on others too."""
    code, sentence = nursery(ended, layout | {"max_skips": 5})
    assert code == 7
    assert "step 5 is skipped in fp16, as 5 steps in a row overflowed (max_skips 5)" in sentence
    assert "the last at a loss scale of 4096" in sentence
    assert f"the first gradient that is not finite is that of model.norm.weight on rank {rank}: " in sentence


def test_p032_the_run_ends_at_the_floor(nursery: Nursery) -> None:
    """From 2^3: 8, 4, 2 and 1 overflow, and the scale does not fall further."""
    code, sentence = nursery(ended, {"initial_loss_scale": 8.0})
    assert code == 7
    assert "step 4 is skipped in fp16, as 4 steps in a row overflowed" in sentence
    assert "the last at a loss scale of 1;" in sentence


def test_in_fp32_the_first_step_that_overflows_is_the_last(nursery: Nursery) -> None:
    code, sentence = nursery(ended, {"compute": "fp32", "dp": 2})
    assert code == 7
    assert "step 1 has loss" in sentence
    assert "that is not finite is that of model.norm.weight on ranks 0, 1: lower lr" in sentence


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"accumulate": "bf16"}, "set accumulate fp32, or compute bf16"),
     ({"accumulate": "bf16", "compute": "fp16"}, "that compute fp16 gives 11 bits"),
     ({"reduce": "bf16"}, "set reduce auto, or dp 2 or more"),
     ({"reduce": "fp16", "dp": 2}, "set reduce bf16, or compute fp16"),
     ({"loss_scale": "dynamic", "compute": "bf16"}, "set loss_scale auto, or compute fp16"),
     ({"loss_scale": "0"}, "loss_scale cannot be '0'"), ({"loss_scale": "inf"}, "a number above 0, dynamic or auto"),
     ({"initial_loss_scale": 8.0, "loss_scale": "4", "compute": "fp16"}, "or set loss_scale dynamic"),
     ({"loss_scale_window": 9}, "leave it 2000, or set compute fp16"), ({"max_skips": 3}, "or set compute fp16")],
    ids=str,
)  # fmt: skip
def test_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        validate(Plan(**changes), read("llama-tiny").facts)


def test_a_scale_may_be_written_as_a_number() -> None:
    assert Plan(loss_scale=1024).first_loss_scale == Plan(loss_scale="1e3", compute="fp16").first_loss_scale + 24


@pytest.mark.parametrize(
    ("compute", "accumulate", "bytes_"), [("fp32", "auto", 16), ("bf16", "bf16", 16), ("fp16", "auto", 18)]
)
def test_bytes_a_parameter(compute: str, accumulate: str, bytes_: int) -> None:
    """The table of the page is the bill's."""
    facts = read("llama-tiny").facts
    for dp, reduce, more in ((1, "auto", 0), (2, "bf16", 2 if accumulate == "auto" else 0)):
        plan = Plan(compute=compute, accumulate=accumulate, dp=dp, reduce=reduce)
        assert sum(size for _, _, size in kept(plan)) == bytes_ + more
        assert sum(memory(plan, facts)[0].held) == (bytes_ + more) * facts.elements + 4 * len(facts.parameters)
