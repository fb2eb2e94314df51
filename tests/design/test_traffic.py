"""The bytes of a step against closed forms, and against each other."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.design.cost.traffic import traffic
from plait.design.facts import ModelFacts
from plait.design.plan import Plan
from plait.design.records import Traffic, sent_per_axis
from plait.design.rules import validate
from plait.design.sharding import shard
from tests.design.facts import llama

FACTS = llama(blocks=4, bias=True)


def rows(found: list[Traffic], axis: str, rank: int | None = None) -> list[Traffic]:
    return [row for row in found if row.axis == axis and rank in (None, row.rank)]


def test_one_rank_moves_nothing() -> None:
    assert traffic(Plan(), FACTS) == []


@pytest.mark.parametrize("d", [2, 3, 4, 8])
def test_data_parallel_ring(d: int) -> None:
    """Each rank sends 2 (d - 1) / d of its gradients, once a step, however many microbatches."""
    for microbatches in (1, 2):
        found = rows(traffic(Plan(dp=d, batch=2 * d, microbatches=microbatches), FACTS), "dp")
        assert [row.payload for row in found] == [4 * FACTS.elements] * d
        assert {row.sent for row in found} == {Fraction(2 * (d - 1), d) * 4 * FACTS.elements}
        assert sent_per_axis(found) == {"dp": 2 * (d - 1) * 4 * FACTS.elements}


def test_bucket_calls_count_the_buckets() -> None:
    """Buckets that hold everything are two, the embedding's and the rest; such as hold no two parts are a call a part."""
    [two] = {row.calls for row in rows(traffic(Plan(dp=2, bucket_mb=1000), FACTS), "dp")}
    [each] = {row.calls for row in rows(traffic(Plan(dp=2, bucket_mb=1e-6), FACTS), "dp")}
    assert (two, each) == (2, len(FACTS.parameters))


@pytest.mark.parametrize(("m", "pp"), [(1, 1), (4, 1), (2, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize(("compute", "size"), [("fp32", 4), ("bf16", 2)])
def test_tensor_parallel_sums(m: int, pp: int, compute: str, size: int) -> None:
    """In units of b s h: 2 sums a block forward and 2 backward, one for the embedding, one for the head."""
    plan = Plan.read({"tp": 2, "sp": False, "pp": pp, "microbatches": m, "batch": 2 * m, "seq": 16, "compute": compute})
    validate(plan, FACTS)
    bs = 2 * 16
    found = traffic(plan, FACTS)
    for rank in range(plan.world):
        stage = plan.mesh.coordinate(rank)["pp"]
        blocks = len({p.first.block for p in shard(FACTS, plan).on_stage(stage)} - {None})
        mine = {row.why: row for row in rows(found, "tp", rank)}
        forward, backward = mine["row-parallel output"], mine["column-parallel input gradient"]
        assert forward.calls == m * (2 * blocks + (stage == 0))
        assert backward.calls == m * (2 * blocks + (stage == pp - 1))
        for row in (forward, backward):
            assert row.payload == row.calls * bs * FACTS.hidden * size
            assert row.sent == Fraction(2 * (2 - 1), 2) * row.payload
        if stage == pp - 1:
            # The loss is in fp32 whatever the compute type.
            assert [mine[why].payload for why in ("loss: maximum", "loss: sums")] == [m * bs * 4, m * 2 * bs * 4]
        else:
            assert len(mine) == 2


def test_four_sums_a_block() -> None:
    """One block more costs every tp rank 4 sums of b s h."""

    def units(blocks: int) -> Fraction:
        plan = Plan(tp=4, sp=False, batch=3, seq=8)
        facts = llama(blocks=blocks)
        payload = sum(row.payload for row in rows(traffic(plan, facts), "tp", 0) if "loss" not in row.why)
        return Fraction(payload, 3 * 8 * facts.hidden * 4)

    assert units(1) == 4 + 2
    assert units(3) - units(2) == 4


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(("sp", "units", "calls"), [(False, 8, 4), (True, 10, 10)])
def test_what_a_block_sends(tp: int, sp: bool, units: int, calls: int) -> None:
    """In (t - 1) / t of b s h: 4 all-reduces are 8; with sp 4 gathers, 4 reduce-scatters, and 2 gathers more."""

    def sent(blocks: int) -> tuple[Fraction, int]:
        found = rows(traffic(Plan(tp=tp, sp=sp, batch=3, seq=12), llama(blocks=blocks)), "tp", 0)
        return sum((row.sent for row in found), Fraction(0)), sum(row.calls for row in found)

    (less, fewer), (more, others) = sent(2), sent(3)
    assert more - less == units * Fraction(tp - 1, tp) * 3 * 12 * FACTS.hidden * 4
    assert others - fewer == calls


def test_own_tokens_that_are_not_as_many() -> None:
    """13 tokens on 3 ranks are 5, 4 and 4, and travel as 5 each; between stages they are as many as they are."""
    plan = Plan(tp=3, pp=2, sp=True, batch=2, seq=13)
    found = traffic(plan, FACTS)
    (joined,) = (row for row in rows(found, "tp", 0) if row.why == "own tokens to whole rows")
    assert joined.payload == 4 * 2 * 15 * FACTS.hidden * 4
    sent = [row.payload for rank in range(3) for row in rows(found, "pp", rank) if row.operation == "send"]
    assert sent == [2 * tokens * FACTS.hidden * 4 for tokens in (5, 4, 4)]


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize(("dp", "tp", "m"), [(1, 1, 1), (2, 1, 2), (1, 2, 4), (2, 2, 1)])
def test_pipeline_bytes(pp: int, dp: int, tp: int, m: int) -> None:
    """b s h forward and as much backward over each boundary, m times, in each of the dp x tp pipelines: with b the
    rows of a microbatch, (p - 1) x 2 x tp x batch x s x h in all."""
    plan = Plan(pp=pp, dp=dp, tp=tp, sp=False, microbatches=m, batch=8, seq=16)
    validate(plan, FACTS)
    found = rows(traffic(plan, FACTS), "pp")
    assert sent_per_axis(found) == {"pp": (pp - 1) * 2 * tp * 8 * 16 * FACTS.hidden * 4}
    for row in found:
        assert row.calls == m
        stage = plan.mesh.coordinate(row.rank)["pp"]
        ends = {("activation", "send"): pp - 1, ("gradient", "receive"): pp - 1}
        assert stage != ends.get((row.why, row.operation), 0)


@settings(max_examples=60)
@given(
    dp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 4),
    m=st.integers(1, 4),
    bias=st.booleans(),
)
def test_sums_over_the_ranks(dp: int, tp: int, pp: int, m: int, bias: bool) -> None:
    """What is sent is received; members of a group agree; dp's total is 2 (d - 1) x the gradients of all tp ranks."""
    facts: ModelFacts = llama(bias=bias)
    plan = Plan(dp=dp, tp=tp, sp=False, pp=pp, microbatches=m, batch=dp * m, seq=8, bucket_mb=0.001)
    found = traffic(plan, facts)
    keys = Counter((row.rank, row.axis, row.why, row.operation) for row in found)
    assert set(keys.values()) <= {1}
    for why in ("activation", "gradient"):
        ends = [
            sum(row.payload for row in found if (row.why, row.operation) == (why, operation))
            for operation in ("send", "receive")
        ]
        assert ends[0] == ends[1]
    for axis in ("dp", "tp"):
        for group in plan.mesh.groups(axis):
            views = {tuple((r.why, r.calls, r.payload, r.ranks) for r in rows(found, axis, rank)) for rank in group}
            assert len(views) == 1
    parts = shard(facts, plan).parts
    gradients = sum(math.prod(p.compute.shape) * (1 if p.compute.cuts else tp) for p in parts)
    assert sent_per_axis(found).get("dp", 0) == 2 * (dp - 1) * 4 * gradients
    world = rows(found, "world")
    assert len(world) == (2 * plan.world if plan.world > 1 else 0)
    assert sum(row.payload for row in world) == 24 * len(world) // 2


def test_wide_counts_eight_bytes_throughout() -> None:
    plan = Plan(dp=2, tp=2, pp=2, compute="bf16")
    narrow, wide = traffic(plan, FACTS), traffic(plan, FACTS, wide=True)
    for one, other in zip(narrow, wide, strict=True):
        assert (one.rank, one.axis, one.why) == (other.rank, other.axis, other.why)
        factor = 1 if one.axis == "world" else 2 if one.axis.startswith("dp") or "loss" in one.why else 4
        assert other.payload == factor * one.payload


def test_shares_of_the_ring() -> None:
    """Reduce-scatter then all-gather: an all-reduce costs twice an all-gather."""
    for n in (1, 2, 5):
        share = {op: Traffic(0, "dp", "", op, n, 1, n).sent for op in ("all_reduce", "all_gather", "send", "receive")}
        assert share == {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "send": n, "receive": 0}
