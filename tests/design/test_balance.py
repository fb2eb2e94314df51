"""How blocks are dealt to stages: against every deal that there is, and by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.design.balance import UNIFORM, WORDS, dealt, refusal, weights
from plait.design.cost.memory import memory
from plait.design.errors import PlanError
from plait.design.facts import ModelFacts
from plait.design.layout import balanced
from plait.design.plan import Plan, stage_blocks
from plait.design.rules import validate
from plait.design.sharding import shard
from plait.report.sharding import deal
from tests.design.facts import llama, parameter


def every_deal(counts: list[int], stages: int) -> list[tuple[int, ...]]:
    ends = combinations(range(1, len(counts)), stages - 1)
    return [tuple(b - a for a, b in pairwise((0, *inner, len(counts)))) for inner in ends]


def loads(counts: list[int], sizes: tuple[int, ...]) -> list[int]:
    found, start = [], 0
    for size in sizes:
        found.append(sum(counts[start : start + size]))
        start += size
    return found


@settings(max_examples=400)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 40), st.integers(0, 40), st.data())
def test_the_largest_stage_is_as_small_as_any_deal_makes_it(
    counts: list[int], first: int, last: int, data: st.DataObject
) -> None:
    """And of equal ones it is the most even, then the one with more blocks in front."""
    counts[0] += first
    counts[-1] += last
    stages = data.draw(st.integers(1, len(counts)))
    best = min(
        every_deal(counts, stages),
        key=lambda sizes: (
            max(loads(counts, sizes)),
            sum(load**2 for load in loads(counts, sizes)),
            [-size for size in sizes],
        ),
    )
    assert dealt(counts, stages) == best


@given(st.integers(1, 60), st.data())
def test_blocks_that_count_alike_differ_by_at_most_one_larger_first(blocks: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, blocks))
    spans = [balanced(blocks, stages, stage) for stage in range(stages)]
    assert dealt([1] * blocks, stages) == tuple(stop - start for start, stop in spans)
    assert stage_blocks(Plan(pp=stages), llama(blocks=blocks)) == spans


FACTS = llama(blocks=6, heads=4, kv_heads=2, head_dim=3, intermediate=20, vocabulary=64)
"""Hidden 12: a block has 2 x 12 x 12 + 2 x 6 x 12 of attention, 3 x 20 x 12 of the MLP and 2 norms of 12."""


def test_what_a_block_counts_by_hand() -> None:
    elements = 2 * 144 + 2 * 72 + 3 * 240 + 24
    assert weights(FACTS, "uniform", 10) == [1] * 6
    assert weights(FACTS, "parameters", 10) == [elements + 64 * 12, *[elements] * 4, elements + 64 * 12 + 12]
    assert sum(weights(FACTS, "parameters", 10)) == FACTS.elements
    # Forward 2 an element and 2 a (s + 1) for the scores and their mix, backward twice as much.
    flops = 3 * (2 * (elements - 24) + 2 * 12 * 11)
    assert weights(FACTS, "cost", 10) == [*[flops] * 5, flops + 3 * 2 * 64 * 12]


def test_one_block_carries_both_ends() -> None:
    facts = llama(blocks=1)
    assert weights(facts, "parameters", 8) == [facts.elements]


def tied(facts: ModelFacts) -> ModelFacts:
    """The embedding is the head, too."""
    first, *others = facts.parameters
    head = others.pop()
    return replace(facts, parameters=(replace(first, tied=((head.module, head.style),)), *others))


def test_a_tied_weight_counts_where_it_is_used() -> None:
    untied, both = llama(blocks=4), tied(llama(blocks=4))
    assert weights(both, "parameters", 8) == weights(untied, "parameters", 8)
    assert weights(both, "cost", 8) == weights(untied, "cost", 8)
    one = tied(llama(blocks=1))
    assert weights(one, "parameters", 8) == [one.elements], "on one stage it is held once"


def test_a_weight_of_several_blocks_counts_in_each() -> None:
    shared = replace(parameter("3.weight", (5, 7), block=3), tied=(("1", None), ("3.again", None)), tied_blocks=(1, 3))
    more = replace(FACTS, parameters=(*FACTS.parameters, shared))
    before, after = weights(FACTS, "parameters", 8), weights(more, "parameters", 8)
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 35, 0, 35, 0, 0]


def test_of_experts_those_count_that_a_token_goes_to() -> None:
    stack = parameter("model.layers.0.mlp.experts.gate_up_proj", (8, 40, 12), block=0)
    routed = replace(FACTS, parameters=(*FACTS.parameters, stack), experts_per_token=2)
    more = [after - before for before, after in zip(weights(FACTS, "cost", 9), weights(routed, "cost", 9), strict=True)]
    assert more == [6 * 2 * 40 * 12, 0, 0, 0, 0, 0]


def test_a_large_head_shortens_the_last_stage() -> None:
    """16 blocks on 4 stages, a head as heavy as several blocks: fewer blocks beside it, and the stages' memory is evener
    where elements are what is balanced."""
    facts = llama(blocks=16, vocabulary=2000)
    sizes = {word: [stop - start for start, stop in stage_blocks(Plan(pp=4, balance=word), facts)] for word in WORDS}
    assert sizes["uniform"] == [4, 4, 4, 4]
    assert sizes["cost"][0] > 4 > sizes["cost"][-1]
    assert sizes["parameters"][0] == sizes["parameters"][-1] < 4

    def fullest(balance: str) -> int:
        return max(sum(bill.held) for bill in memory(Plan(pp=4, balance=balance), facts))

    assert fullest("parameters") < fullest("uniform")


@given(
    st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.sampled_from(WORDS), st.integers(1, 128),
    st.sampled_from([8, 97, 3000]),
)  # fmt: skip
def test_every_block_is_on_one_stage_whatever_the_balance(
    blocks: int, pp: int, chunks: int, balance: str, seq: int, vocabulary: int
) -> None:
    facts = llama(blocks=blocks, vocabulary=vocabulary)
    schedule = "1f1b" if chunks == 1 else "interleaved"
    plan = Plan(pp=pp, chunks=chunks, schedule=schedule, balance=balance, seq=seq, microbatches=4)
    if plan.stages > blocks:
        with pytest.raises(PlanError, match="need a block each"):
            validate(plan, facts)
        return
    validate(plan, facts)
    spans = stage_blocks(plan, facts)
    assert len(spans) == plan.stages
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == blocks
    assert all(start < stop for start, stop in spans)
    sharding = shard(facts, plan)
    for stage, span in enumerate(spans):
        held = {one.first.block for one in sharding.on_stage(stage) if one.first.block is not None}
        assert held == set(range(*span))
    counts = weights(facts, balance, seq)
    even = [sum(counts[slice(*balanced(blocks, plan.stages, stage))]) for stage in range(plan.stages)]
    assert max(sum(counts[slice(*span)]) for span in spans) <= max(even)


@pytest.mark.parametrize("text", ["2,1,2,1", "2, 1, 2,1", " 3,1,1,1 "])
def test_blocks_may_be_written_out(text: str) -> None:
    plan = Plan(pp=2, chunks=2, schedule="interleaved", balance=text)
    validate(plan, FACTS)
    assert [stop - start for start, stop in stage_blocks(plan, FACTS)] == [int(size) for size in text.split(",")]


WAY = ": set balance uniform, or 4 numbers from 1 that add up to 6."
KNOWN = "use uniform, parameters, cost or the blocks of every stage ('5,6,6,5')."


@pytest.mark.parametrize(
    ("balance", "sentence"),
    [
        ("2,2,2", f"balance 2,2,2 deals blocks to 3 stages, but there are 4{WAY}"),
        ("6", f"balance 6 deals blocks to 1 stage, but there are 4{WAY}"),
        ("3,0,2,1", f"balance 3,0,2,1 leaves stage 1 without a block{WAY}"),
        ("2,2,2,2", f"balance 2,2,2,2 deals 8 blocks, but the model has 6{WAY}"),
        ("costs", f"There is no balance 'costs'; {KNOWN} Did you mean 'cost'?"),
        ("3,-1,2,2", f"There is no balance '3,-1,2,2'; {KNOWN}"),
        ("", f"There is no balance ''; {KNOWN}"),
    ],
)
def test_deals_that_cannot_be(balance: str, sentence: str) -> None:
    with pytest.raises(PlanError) as error:
        validate(Plan(pp=4, balance=balance), FACTS)
    assert str(error.value) == sentence


def test_one_stage_has_all_blocks() -> None:
    with pytest.raises(PlanError, match=r"^balance 3,3 .* 2 stages, but there is 1: set balance uniform, or 6\.$"):
        validate(Plan(balance="3,3"), FACTS)
    validate(Plan(balance="6"), FACTS)


@given(st.text("0123456789,. -", max_size=12))
def test_whatever_is_written_is_dealt_or_refused(text: str) -> None:
    if refusal(text, 3, 6) is None:
        spans = stage_blocks(Plan(pp=3, balance=text), FACTS)
        assert (len(spans), spans[-1][1]) == (3, 6)
    else:
        with pytest.raises(PlanError):
            validate(Plan(pp=3, balance=text), FACTS)


def test_a_deal_is_said_with_what_it_brings() -> None:
    facts = llama(blocks=16, vocabulary=2000)
    assert deal(Plan(pp=4), facts) == deal(Plan(balance="cost"), facts) == ""
    said = deal(Plan(pp=4, balance="parameters"), facts)
    sizes = ", ".join(str(stop - start) for start, stop in stage_blocks(Plan(pp=4, balance="parameters"), facts))
    counts = weights(facts, "parameters", 128)
    even = 100 * sum(counts[12:]) / sum(counts)
    assert said.startswith(f"blocks of the stages (balance parameters): {sizes}; the largest has ")
    assert said.endswith(f"% of the parameters, {even:.1f}% if uniform")
    assert "of the FLOPs" in deal(Plan(pp=2, balance="9,7"), facts)
    assert Plan().balance == UNIFORM
