"""Every layout computes what one process does: loss, gradients, norm and weights, wide."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from plait.check.batches import awkward_batches
from plait.check.compare import compare, from_json, passed, to_json
from plait.check.reference import reference
from plait.design.plan import Plan
from plait.runtime.comm.nursery import launch
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from tests.conftest import Models
from tests.nursery import Nursery

STEPS = 3


def proof(changes: dict[str, Any]) -> list[Any]:
    """The rows of the comparison of one plan (its steps are 3 unless changed)."""
    plan = Plan(**{"steps": STEPS, "seq": 16, **changes})
    model = read(plan.model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.safetensors"

        def main(rendezvous: Any) -> Any:
            with World(rendezvous, plan.mesh) as world:
                batches = awkward_batches(plan, model.facts.vocabulary, STEPS)
                return to_json(compare(plan, world, model, batches, file))

        helper = lambda: reference(plan, model, awkward_batches(plan, model.facts.vocabulary, STEPS), file)  # noqa: E731
        answers = launch(main, plan.world, helpers=(helper,))
    assert all(answer == answers[0] for answer in answers), "ranks disagree about the comparison"
    return answers[0]


def assert_equal(nursery: Nursery, **changes: Any) -> None:
    rows = from_json(nursery(proof, changes))
    assert {row.quantity for row in rows} == {"loss", "gradient norm", "gradient", "weight"}
    assert passed(rows), [row for row in rows if not row.passes]
    # Noise of fp64, far below the bound: an error that the bound would let through does not hide.
    assert max(row.relative for row in rows) < 1e-10


PRODUCTS = [dict(zip(("dp", "tp", "pp"), degrees, strict=True)) for degrees in product((1, 2), repeat=3)]
FOURS: list[dict[str, Any]] = [
    {"pp": 4}, {"dp": 4}, {"tp": 4}, {"dp": 2, "pp": 4}, {"dp": 4, "tp": 2}, {"tp": 4, "pp": 2}, {"pp": 4, "tp": 2},
]  # fmt: skip


def name(layout: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in layout.items())


@pytest.mark.parametrize("layout", PRODUCTS + FOURS, ids=name)
def test_products_of_degrees(nursery: Nursery, layout: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_p050_fewer_microbatches_than_stages(nursery: Nursery, tiny: Models, schedule: str, m: int) -> None:
    assert_equal(nursery, model=tiny(), pp=4, batch=2 * m, microbatches=m, schedule=schedule)


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


def test_small_buckets(nursery: Nursery, tiny: Models) -> None:
    """A bucket per tensor, and tensors larger than a bucket."""
    assert_equal(nursery, model=tiny(), dp=4, batch=8, microbatches=2, bucket_mb=0.001)


def test_p007_clip_by_one_global_norm(nursery: Nursery, tiny: Models) -> None:
    for pp in (2, 4):
        assert_equal(nursery, model=tiny(), pp=pp, tp=2, batch=8, microbatches=2, clip=0.1)


def test_without_clip_and_with_warm_up(nursery: Nursery, tiny: Models) -> None:
    assert_equal(nursery, model=tiny(), pp=2, dp=2, batch=8, clip=0, warmup=2, lr_schedule="linear")
