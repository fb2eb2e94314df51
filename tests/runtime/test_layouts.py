"""Every layout computes what one process does, place by place: wide, and for several as shipped too."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest

from plait.check.batches import awkward_batches
from plait.check.places import BYTES, WORDS, Verdict
from plait.check.proof import prove
from plait.design.plan import Plan, stage_blocks
from plait.runtime.hf.read import read
from tests.conftest import Models
from tests.nursery import Nursery

STEPS = 3


def proof(changes: dict[str, Any], shipped: bool) -> list[Any]:
    """The verdicts on one plan (its steps are 3 unless changed)."""
    plan = Plan(**{"steps": STEPS, "seq": 16, **changes})
    model = read(plan.model)
    batches = partial(awkward_batches, plan, model.facts.vocabulary, STEPS)
    return [verdict.to_json() for verdict in prove(plan, model, batches, shipped=shipped)]


def assert_equal(nursery: Nursery, *, shipped: bool = False, **changes: Any) -> None:
    wide, *others = [Verdict.from_json(verdict) for verdict in nursery(proof, changes, shipped)]
    assert wide.passed, (wide.departures[:5], wide.cause)
    # Noise of fp64, far below the bound: an error that the bound would let through does not hide.
    assert wide.largest.relative < 1e-10, wide.largest
    assert (wide.numerics, wide.steps) == ("wide", STEPS)
    plan = Plan(**changes)
    alone = {BYTES} if plan.world == 1 else set()
    # One process has no gradient before the first thing that trains.
    may_lack = {"input gradient", "output gradient"} if plan.freeze or plan.train_only else set()
    for verdict in (wide, *others):
        assert verdict.passed, (verdict.departures[:5], verdict.cause)
        assert alone <= set(WORDS) - {row.quantity for row in verdict.worst} <= alone | may_lack
    assert [verdict.numerics for verdict in others] == [Plan(**changes).compute] * shipped


PRODUCTS = [dict(zip(("dp", "tp", "pp"), degrees, strict=True)) for degrees in product((1, 2), repeat=3)]
FOURS: list[dict[str, Any]] = [
    {"pp": 4}, {"dp": 4}, {"tp": 4}, {"dp": 2, "pp": 4}, {"dp": 4, "tp": 2}, {"tp": 4, "pp": 2}, {"pp": 4, "tp": 2},
]  # fmt: skip


def name(layout: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in layout.items())


@pytest.mark.parametrize("layout", PRODUCTS + FOURS, ids=name)
def test_p132_products_of_degrees(nursery: Nursery, layout: dict[str, Any]) -> None:
    batch = 4 * layout.get("dp", 1) * 2
    assert_equal(nursery, model="llama-tiny", batch=batch, microbatches=2, **layout)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_all_three_axes_with_each_schedule(nursery: Nursery, schedule: str) -> None:
    m = 1 if schedule == "naive" else 4
    assert_equal(nursery, model="llama-tiny", dp=2, tp=2, pp=2, batch=8 * m, microbatches=m, schedule=schedule)


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_degree_8(nursery: Nursery, tiny: Models, axis: str) -> None:
    model = tiny(num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8)
    assert_equal(nursery, model=model, batch=16, microbatches=2, **{axis: 8})


@pytest.mark.parametrize("pp", [3, 4])
def test_p047_blocks_that_do_not_divide(nursery: Nursery, tiny: Models, pp: int) -> None:
    """10 blocks on 3 and on 4 stages: each block exactly once, numbers equal."""
    assert_equal(nursery, model=tiny(num_hidden_layers=10), pp=pp, batch=8, microbatches=2)


def test_p047_blocks_that_are_dealt_by_hand(nursery: Nursery, tiny: Models) -> None:
    """10 blocks on 3 stages that differ, and on two stages a rank."""
    model = tiny(num_hidden_layers=10)
    assert_equal(nursery, model=model, pp=3, balance="2,7,1", batch=8, microbatches=2)
    assert_equal(nursery, model=model, pp=2, tp=2, balance="1,4,2,3", schedule="interleaved", batch=8, microbatches=4)


@pytest.mark.parametrize("balance", ["parameters", "cost"])
def test_blocks_that_are_dealt_by_what_they_hold_and_cost(nursery: Nursery, tiny: Models, balance: str) -> None:
    """A head as large as several blocks, tied to the embedding or not: the stages are not those of a uniform deal."""
    for tied in (False, True):
        model = tiny(num_hidden_layers=8, vocab_size=1200, tie_word_embeddings=tied)
        plan = Plan(model=model, dp=2, pp=3, balance=balance, batch=8, microbatches=2)
        blocks = stage_blocks(plan, read(model).facts)
        assert blocks != stage_blocks(plan.model_copy(update={"balance": "uniform"}), read(model).facts)
        assert_equal(nursery, **plan.model_dump(exclude_unset=True))


def test_p049_eight_rows_in_three_microbatches(nursery: Nursery, tiny: Models) -> None:
    """3, 3 and 2 rows over two stages, wide and as shipped, with packed rows among them."""
    assert_equal(nursery, shipped=True, model=tiny(), pp=2, batch=8, microbatches=3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_rows_that_do_not_divide_by_the_microbatches(nursery: Nursery, tiny: Models, schedule: str) -> None:
    """14 rows over dp 2, in 4 microbatches of 2 or 1."""
    assert_equal(nursery, model=tiny(), dp=2, tp=2, pp=2, batch=14, microbatches=4, schedule=schedule)


def test_rows_that_do_not_divide_accumulate(nursery: Nursery, tiny: Models) -> None:
    assert_equal(nursery, model=tiny(), dp=2, batch=10, microbatches=4)


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_p050_fewer_microbatches_than_stages(nursery: Nursery, tiny: Models, schedule: str, m: int) -> None:
    model = tiny(num_hidden_layers=8) if schedule == "interleaved" else tiny()
    assert_equal(nursery, model=model, pp=4, batch=2 * m, microbatches=m, schedule=schedule)


def test_p015_many_microbatches_through_stages(nursery: Nursery, tiny: Models) -> None:
    """4 microbatches three times over: what is accumulated through two stages, and without any, is one process's."""
    for layout in ({"pp": 2}, {"pp": 2, "schedule": "gpipe"}, {"pp": 1}):
        assert_equal(nursery, model=tiny(), batch=12, microbatches=12, **layout)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 4}, {"pp": 4}, {"dp": 2, "tp": 2, "pp": 2}], ids=name)
def test_as_shipped(nursery: Nursery, layout: dict[str, Any], compute: str) -> None:
    assert_equal(nursery, shipped=True, model="llama-tiny", batch=16, microbatches=2, compute=compute, **layout)


def test_biases_everywhere(nursery: Nursery, tiny: Models) -> None:
    """Column biases are cut, row biases are whole and added once."""
    model = tiny(attention_bias=True, mlp_bias=True)
    assert_equal(nursery, model=model, tp=2, pp=2, dp=2, batch=8, microbatches=2)


@pytest.mark.parametrize("seq", [1, 7, 17])
def test_odd_lengths(nursery: Nursery, tiny: Models, seq: int) -> None:
    assert_equal(nursery, model=tiny(), tp=2, pp=2, batch=6, microbatches=3, seq=seq)


def test_odd_sizes(nursery: Nursery, tiny: Models) -> None:
    model = tiny(
        hidden_size=36, intermediate_size=66, vocab_size=98, num_attention_heads=6, num_key_value_heads=2, head_dim=10
    )
    assert_equal(nursery, model=model, tp=2, pp=2, dp=2, batch=8, microbatches=2)


@pytest.mark.parametrize("token", [5, 90])
def test_a_padding_token_learns_in_no_layout(nursery: Nursery, tiny: Models, token: int) -> None:
    """Its row of the embedding gets no gradient, whichever tp rank holds it."""
    assert_equal(nursery, model=tiny(pad_token_id=token), tp=2, dp=2, batch=8, microbatches=2)


def test_what_rounding_leaves_of_a_zero_gradient_is_no_departure(nursery: Nursery, tiny: Models) -> None:
    """A row of one token attends to itself alone: q and k have no gradient but rounding's, which AdamW divides by 1e-8,
    and their biases begin at zero."""
    heads = {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10}
    model = tiny(attention_bias=True, initializer_range=0.2, intermediate_size=9, vocab_size=39, **heads)
    assert_equal(nursery, shipped=True, model=model, tp=3, seq=1, batch=4)


def test_small_buckets(nursery: Nursery, tiny: Models) -> None:
    """A bucket per tensor, and tensors larger than a bucket."""
    assert_equal(nursery, model=tiny(), dp=4, batch=8, microbatches=2, bucket_mb=0.001)


def test_p007_clip_by_one_global_norm(nursery: Nursery, tiny: Models) -> None:
    for pp in (2, 4):
        assert_equal(nursery, model=tiny(), pp=pp, tp=2, batch=8, microbatches=2, clip=0.1)


def test_without_clip_and_with_warm_up(nursery: Nursery, tiny: Models) -> None:
    assert_equal(nursery, model=tiny(), pp=2, dp=2, batch=8, clip=0, warmup=2, lr_schedule="linear")
