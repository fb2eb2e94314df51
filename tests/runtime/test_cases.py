"""Cases that people met elsewhere, by id, as far as no other file has them (docs/cases.md lists all): compared with one
process, and with the schedules that came later than the case."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.check.batches import awkward_batches
from plait.check.places import Verdict
from plait.check.proof import prove
from plait.check.wide import wide
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.schedule import RUNS
from plait.runtime.batch import Batch
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.hf.whole import WholeModel
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from plait.runtime.training.sample import sample
from tests.conftest import Models
from tests.families import write
from tests.nursery import Nursery

STEPS = 3
LATER = [name for name in RUNS if name not in ("naive", "gpipe", "1f1b")]
LATER_IN_TURN = [
    name if name in ("interleaved", "zb-h1", "zb-v") else pytest.param(name, marks=pytest.mark.rest) for name in LATER
]
"""One of each kind, and the rest."""
"""Schedules with several stages a rank, or with gradients of weights that come late."""


def proof(changes: dict[str, Any], one_token: bool) -> list[Any]:
    """The verdict of the wide pass; with `one_token` over rows that say one token all along, each row another."""
    plan = Plan(**{"steps": STEPS, "seq": 16, **changes})
    model = read(plan.model)
    batches = partial(awkward_batches, plan, model.facts.vocabulary, STEPS)
    if one_token:
        rows = torch.arange(plan.batch)[:, None].expand(-1, plan.seq + 1)
        batches = lambda: [Batch.of(rows + step) for step in range(STEPS)]  # noqa: E731
    return [verdict.to_json() for verdict in prove(plan, model, batches, shipped=False)]


def assert_equal(nursery: Nursery, *, one_token: bool = False, **changes: Any) -> None:
    (wide_,) = [Verdict.from_json(verdict) for verdict in nursery(proof, changes, one_token)]
    assert wide_.passed, (wide_.departures[:5], wide_.cause)
    assert wide_.steps == STEPS
    # Noise of fp64, far below the bound: an error that the bound would let through does not hide.
    assert wide_.largest.relative < 1e-10, wide_.largest


# --- numbers


@pytest.mark.parametrize("layout", [{"dp": 4}, {"tp": 2, "dp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_p011_experts_under_every_axis(nursery: Nursery, tmp_path: Path, layout: dict[str, int]) -> None:
    """The norm, and the gradient of every expert."""
    assert_equal(nursery, model=write(tmp_path, "mixtral"), batch=8, clip=0.1, **layout)


TIED: list[dict[str, Any]] = [
    {"dp": 2}, {"dp": 2, "bucket_mb": 0.001}, {"pp": 4, "tp": 2}, *({"dp": 2, "schedule": name} for name in LATER),
]  # fmt: skip


@pytest.mark.parametrize("layout", TIED, ids=str)
def test_p013_a_tied_weight_is_summed_over_dp_and_both_stages(
    nursery: Nursery, tiny: Models, layout: dict[str, Any]
) -> None:
    """Its gradient is that of both its uses; what the owner publishes has the same bits on both stages."""
    assert_equal(nursery, **{"model": tiny(tie_word_embeddings=True), "pp": 2, "batch": 8, "microbatches": 2, **layout})


def test_p021_p023_a_balance_loss_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    """What is not carried out is said, and not left out in silence."""
    with pytest.raises(PlanError, match=r"has output_router_logits True, .* set it to false"):
        read(write(tmp_path, "mixtral", output_router_logits=True))


def test_p025_noise_that_depends_on_the_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has router_jitter_noise 0\.1, .* set it to 0"):
        read(write(tmp_path, "mixtral", router_jitter_noise=0.1))


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_p034_sizes_that_nothing_divides(nursery: Nursery, tiny: Models, dp: int) -> None:
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8}
    model = tiny(hidden_size=35, vocab_size=97, intermediate_size=61, **heads)
    assert_equal(nursery, model=model, dp=dp, batch=12, bucket_mb=0.01)


@pytest.mark.parametrize("schedule", LATER_IN_TURN)
def test_p005_p007_p015_one_norm_an_empty_rank_and_accumulation(nursery: Nursery, tiny: Models, schedule: str) -> None:
    """12 microbatches on each dp rank, batches in which one of them has no target, and a clip that bites."""
    assert_equal(nursery, model=tiny(), dp=2, pp=2, batch=48, microbatches=12, clip=0.1, schedule=schedule)


# --- shapes that do not divide


@pytest.mark.parametrize("schedule", LATER_IN_TURN)
def test_p047_p050_blocks_that_do_not_divide_and_few_microbatches(
    nursery: Nursery, tiny: Models, schedule: str
) -> None:
    """10 blocks over 3 or 6 stages, with 2 microbatches."""
    assert_equal(nursery, model=tiny(num_hidden_layers=10), pp=3, batch=4, microbatches=2, schedule=schedule)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"pp": 2, "microbatches": 2}], ids=str)
def test_p057_experts_that_get_no_token(nursery: Nursery, tmp_path: Path, layout: dict[str, int]) -> None:
    """Each row says one token all along, so all of its places go to the same two experts of four."""
    model = write(tmp_path, "mixtral")
    assert_equal(nursery, one_token=True, model=model, batch=2, **layout)
    assert any(nursery(idle, model)), "no expert was idle"


def idle(model: str) -> list[bool]:
    """For every tensor of experts: whether the one row of token 3 leaves some expert without gradient."""
    with wide():
        whole = WholeModel(read(model), 7, torch.float64)
        logits = whole.forward(Batch.of(torch.full((1, 17), 3)))
        logits.square().sum().backward()
    stacks = [p.grad for name, p in whole.module.named_parameters() if ".experts." in name and p.dim() == 3]
    return [bool((stack.flatten(1) == 0).all(1).any()) for stack in stacks if stack is not None]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_p084_fused_projections_are_cut_piece_by_piece(nursery: Nursery, tmp_path: Path, schedule: str) -> None:
    """4 heads in 2 groups: a slice holds its own rows of q, of k and of v, of gate and of up."""
    assert_equal(
        nursery, model=write(tmp_path, "phi3"), tp=2, pp=2, batch=8, microbatches=4, schedule=schedule
    )  # fmt: skip


# --- tokens


def greedy(model: str, layout: dict[str, Any], uneven: bool = False) -> Any:
    """8 prompts, each with the likeliest tokens after it, 16 of them, or 2 and 9 in turns, on every rank."""
    plan = Plan(**{"model": model, "batch": 4, "seq": 8, "steps": 1, **layout})

    def main(world: World) -> Any:
        with wide():
            run = build(plan, world, wide=True)
            counts = (2, 9) if uneven else (16, 16)
            return [sample(run, [prompt, prompt + 1], counts[prompt % 2], temperature=0) for prompt in range(8)]

    return launch(main, plan)


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2}, {"tp": 4}, {"pp": 2}, {"pp": 2, "schedule": "interleaved"}, {"pp": 2, "schedule": "zb-h1", "dp": 2},
    {"dp": 2, "zero": 3}, {"dp": 2, "pp": 2, "zero": 3},
]  # fmt: skip


def test_p100_p137_the_likeliest_tokens_are_the_same_in_every_layout(nursery: Nursery, tiny: Models) -> None:
    """And every rank ends with them."""
    model = tiny(num_key_value_heads=4, initializer_range=0.3)
    (one,) = nursery(greedy, model, {})
    assert len({tuple(tokens) for tokens in one}) == 8
    for layout in LAYOUTS:
        assert all(rank == one for rank in nursery(greedy, model, layout)), layout


@pytest.mark.parametrize("layout", [{}, {"microbatches": 2, "pp": 2}, {"keep_gathered": "yes"}], ids=str)
def test_p100_texts_of_2_and_9_tokens_from_shares_of_weights(
    nursery: Nursery, tiny: Models, layout: dict[str, Any]
) -> None:
    """Each forward gathers weights on all ranks: none is done before the others."""
    model = tiny(num_key_value_heads=4, initializer_range=0.3)
    (one,) = nursery(greedy, model, {}, True)
    assert [len(tokens) for tokens in one] == [2, 9] * 4
    assert nursery(greedy, model, {"dp": 2, "zero": 3, **layout}, True) == [one] * (2 * layout.get("pp", 1))
