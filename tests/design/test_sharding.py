"""Where every part lives and what its gradient is summed over, against a model simulated rank by rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from plait.design.errors import PlanError
from plait.design.facts import ModelFacts, ParameterFact, Piece
from plait.design.layout import Box, Cut, elements
from plait.design.plan import Plan, stage_of_block
from plait.design.sharding import Sharding, buckets, holdings, shard
from tests.design.facts import llama, parameter

Array = NDArray[np.int64]
VOCABULARY, HIDDEN, INNER, ROWS = 12, 4, 12, 24

LINEAR = ModelFacts(
    "linear", 1, HIDDEN, 1, 1, VOCABULARY, 64, "head",
    (
        parameter("embed.weight", (VOCABULARY, HIDDEN), "embedding_rowwise"),
        parameter("norm.weight", (HIDDEN,), block=0),
        parameter("up.weight", (INNER, HIDDEN), "colwise", block=0),
        parameter("up.bias", (INNER,), "colwise", block=0),
        parameter("down.weight", (HIDDEN, INNER), "rowwise", block=0),
        parameter("down.bias", (HIDDEN,), "rowwise", block=0),
        parameter("head.weight", (VOCABULARY, HIDDEN), "colwise_gather_output", after_blocks=True),
    ),
)  # fmt: skip
"""x = embed[token]; y = x + down(up(x * norm)); loss = sum(c * head(y)). Integers, so that sums are exact."""


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def gradients(
    weights: list[dict[str, Array]], first_row: list[int], tokens: Array, c: list[Array]
) -> list[dict[str, Array]]:
    """One step of the linear model over ranks that share their batch, each with its slices of the weights (a list
    of one is the whole model). Written from the styles' definitions: `total` is the sum that a rowwise output (forward)
    or a colwise input's gradient (backward) takes over tp; nothing else is summed."""

    def total(partial: Iterator[Array]) -> Array:
        summed: Array = np.stack(list(partial)).sum(axis=0)
        return summed

    def lookup(w: dict[str, Array], first: int) -> Array:
        local = tokens - first
        mine = (local >= 0) & (local < len(w["embed.weight"]))
        return np.where(mine[:, None], w["embed.weight"][np.where(mine, local, 0)], 0)

    pairs = list(zip(weights, first_row, strict=True))
    x = total(lookup(w, first) for w, first in pairs)
    normed = [x * w["norm.weight"] for w in weights]
    inner = [n @ w["up.weight"].T + w["up.bias"] for n, w in zip(normed, weights, strict=True)]
    summed = total(a @ w["down.weight"].T for a, w in zip(inner, weights, strict=True))
    y = [x + summed + w["down.bias"] for w in weights]
    d_y = total(dl @ w["head.weight"] for dl, w in zip(c, weights, strict=True))
    d_inner = [d_y @ w["down.weight"] for w in weights]
    d_normed = total(da @ w["up.weight"] for da, w in zip(d_inner, weights, strict=True))
    found = []
    for t, (w, first) in enumerate(pairs):
        d_x = d_y + d_normed * w["norm.weight"]
        d_embed = np.zeros_like(w["embed.weight"])
        for row, token in enumerate(tokens):
            if 0 <= token - first < len(d_embed):
                d_embed[token - first] += d_x[row]
        found.append(
            {
                "embed.weight": d_embed,
                "norm.weight": (d_normed * x).sum(0),
                "up.weight": d_inner[t].T @ normed[t],
                "up.bias": d_inner[t].sum(0),
                "down.weight": d_y.T @ inner[t],
                "down.bias": d_y.sum(0),
                "head.weight": c[t].T @ y[t],
            }
        )
    return found


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 4), (4, 3)])
def test_summed_over_is_the_only_sum_that_is_right(dp: int, tp: int) -> None:
    """Each rank's gradient, summed over `summed_over`, is its slice of the whole model's; over any other choice of the
    axes that do not cut the part, it is not."""
    random = np.random.default_rng(dp * 10 + tp)
    whole = {p.name: random.integers(1, 4, p.shape) for p in LINEAR.parameters}
    tokens = np.arange(ROWS) % VOCABULARY
    c = random.integers(1, 4, (ROWS, VOCABULARY))
    [expected] = gradients([whole], [0], tokens, [c])

    sharding = shard(LINEAR, Plan(dp=dp, tp=tp, sp=False, batch=ROWS))
    mesh, boxes = sharding.mesh, {}
    for part in sharding.parts:
        for rank, box in part.compute.holders(mesh):
            boxes[part.name, rank] = box
    local: dict[int, dict[str, Array]] = {}
    for d in range(dp):
        ranks = mesh.group(mesh.rank(dp=d), "tp")
        rows = slice(d * ROWS // dp, (d + 1) * ROWS // dp)
        weights = [{name: whole[name][at(boxes[name, rank])] for name in whole} for rank in ranks]
        first = [boxes["embed.weight", rank][0][0] for rank in ranks]
        slices = [c[rows, slice(*boxes["head.weight", rank][0])] for rank in ranks]
        local |= dict(zip(ranks, gradients(weights, first, tokens[rows], slices), strict=True))

    for part in sharding.parts:
        uncut = [axis for axis in ("dp", "tp") if axis not in part.compute.cut_axes and mesh.degree(axis) > 1]
        right = []
        for axes in itertools.chain.from_iterable(itertools.combinations(uncut, n) for n in range(len(uncut) + 1)):
            if all(
                np.array_equal(
                    sum(local[other][part.name] for other in mesh.group(rank, *axes)),
                    expected[part.name][at(boxes[part.name, rank])],
                )
                for rank in range(mesh.size)
            ):
                right.append(axes)
        assert right == [tuple(axis for axis in part.summed_over if mesh.degree(axis) > 1)], part.name


def test_the_cuts_are_the_styles() -> None:
    cuts = {p.name: p.compute.cuts for p in shard(LINEAR, Plan(tp=2)).parts}
    assert cuts == {
        "embed.weight": (Cut(0, ("tp",)),),
        "norm.weight": (),
        "up.weight": (Cut(0, ("tp",)),),
        "up.bias": (Cut(0, ("tp",)),),
        "down.weight": (Cut(1, ("tp",)),),
        "down.bias": (),
        "head.weight": (Cut(0, ("tp",)),),
    }


def test_attention_is_cut_by_whole_groups() -> None:
    """A rank's query heads are those that read its KV heads."""
    sharding = shard(llama(heads=12, kv_heads=4, head_dim=2), Plan(tp=2))
    for rank in range(2):
        rows = {
            name: sharding.part(f"model.layers.0.self_attn.{name}.weight").compute.box(sharding.mesh, rank)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
        assert all(rows.values())
        assert rows["q_proj"] == ((12 * rank, 12 * rank + 12), (0, 24))
        assert rows["k_proj"] == rows["v_proj"] == ((4 * rank, 4 * rank + 4), (0, 24))
        assert rows["o_proj"] == ((0, 24), (12 * rank, 12 * rank + 12))


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 10])
def test_ten_blocks_on_any_number_of_stages(pp: int) -> None:
    """Every parameter on exactly one stage, blocks in order, sizes that differ by at most one, nothing lost."""
    facts, plan = llama(blocks=10), Plan(pp=pp)
    sharding = shard(facts, plan)
    on = [sharding.on_stage(stage) for stage in range(pp)]
    assert [held.name for stage in on for held in stage] == [p.name for p in facts.parameters]
    assert sum(math.prod(held.shape) for stage in on for held in stage) == facts.elements
    blocks = [sorted({held.first.block for held in stage if held.first.block is not None}) for stage in on]
    assert list(itertools.chain(*blocks)) == list(range(10))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    assert [[stage_of_block(plan, facts, b) for b in held] for held in blocks] == [
        [stage] * len(held) for stage, held in enumerate(blocks)
    ]
    assert on[0][0].name == "model.embed_tokens.weight"
    assert [part.name for part in on[-1][-2:]] == ["model.norm.weight", "lm_head.weight"]
    for stage, held in enumerate(on):
        assert all(one.first.owner == stage and one.first.compute.places == (stage,) for one in held)


@pytest.mark.parametrize(
    ("schedule", "chunks", "placement"),
    [
        ("interleaved", 2, (0, 1, 0, 1)), ("interleaved", 3, (0, 1, 0, 1, 0, 1)), ("zb-v", 0, (0, 1, 1, 0)),
        ("dualpipe-v", 0, (0, 1, 1, 0)), ("zb-h1", 0, (0, 1)),
    ],
)  # fmt: skip
def test_several_stages_at_a_place(schedule: str, chunks: int, placement: tuple[int, ...]) -> None:
    """Each stage's blocks are at its rank and nowhere else; a place holds its stages', each parameter once."""
    facts, plan = llama(blocks=7), Plan(pp=2, tp=2, schedule=schedule, chunks=chunks, microbatches=2)
    sharding = shard(facts, plan)
    assert sharding.placement == plan.placement == placement
    stages = range(len(placement))
    assert [held.name for stage in stages for held in sharding.on_stage(stage)] == [p.name for p in facts.parameters]
    for stage in stages:
        for held in sharding.on_stage(stage):
            for part in held.parts:
                assert part.places == part.compute.places == part.stored.places == (placement[stage],)
                assert part.owner == placement[stage]
                assert part.stages_at(placement[stage]) == (stage,)
                assert part.stages_at(1 - placement[stage]) == ()
    for place in (0, 1):
        here = sharding.stages_at(place)
        assert here == tuple(stage for stage in stages if placement[stage] == place)
        names = [held.name for held in sharding.at(place)]
        assert names == [held.name for stage in here for held in sharding.on_stage(stage)]
        assert len(names) == len(set(names))
        for rank in range(sharding.mesh.size):
            holds = any(part.compute.box(sharding.mesh, rank) for held in sharding.at(place) for part in held.parts)
            assert holds == (sharding.mesh.coordinate(rank)["pp"] == place)


def tied(blocks: int) -> ModelFacts:
    """A llama whose head is its embedding's weight."""
    facts = llama(blocks=blocks)
    embedding = replace(facts.parameters[0], tied=(("lm_head", "weight"),))
    return replace(facts, parameters=(embedding, *facts.parameters[1:-1]))


@pytest.mark.parametrize(("schedule", "places"), [("1f1b", (0, 1)), ("interleaved", (0, 1)), ("zb-v", (0, 0))])
def test_a_tied_weight_is_where_its_stages_are(schedule: str, places: tuple[int, int]) -> None:
    """Two ends of a V are on one rank: its place holds the weight once, for two stages, and owns it."""
    plan = Plan(pp=2, schedule=schedule)
    sharding = shard(tied(4), plan)
    part = sharding.parameter("model.embed_tokens.weight").first
    last = plan.stages - 1
    assert part.uses == ((0, "model.embed_tokens"), (last, "lm_head"))
    assert part.places == places
    assert part.compute.places == tuple(dict.fromkeys(places))
    assert part.stages_at(0) == ((0, last) if places == (0, 0) else (0,))
    assert part.stages_at(1) == (() if places == (0, 0) else (last,))
    assert [part.parameter in {held.name for held in sharding.at(place)} for place in (0, 1)] == [True, 1 in places]
    assert part.stored.places == (0,)


def test_there_is_no_eleventh_block() -> None:
    with pytest.raises(ValueError, match="block 10"):
        stage_of_block(Plan(pp=3), llama(blocks=10), 10)


@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4]), st.booleans())
def test_each_element_is_counted_once_over_first_copies(dp: int, tp: int, pp: int, bias: bool) -> None:
    facts = llama(bias=bias)
    sharding = shard(facts, Plan(dp=dp, tp=tp, pp=pp))
    for layout in ("compute", "stored", "grad", "state"):
        counted = 0
        for part in sharding.parts:
            held = getattr(part, layout)
            counted += sum(elements(b) for r, b in held.holders(sharding.mesh) if held.is_first_copy(sharding.mesh, r))
        assert counted == facts.elements


# --- buckets


@given(st.integers(0, 20_000), st.sampled_from([2, 4]), st.sampled_from([(1, 1), (2, 2), (3, 4)]), st.booleans())
def test_buckets(limit: int, item: int, degrees: tuple[int, int], bias: bool) -> None:
    """Every parameter once, in the order in which backward finishes; no bucket above the limit unless it is one
    parameter; none that could have taken the next one, but for what comes before the blocks, which leaves by itself."""
    pp, tp = degrees
    sharding = shard(llama(bias=bias), Plan(dp=2, pp=pp, tp=tp, sp=False))
    for rank in range(sharding.mesh.size):
        held = sharding.at(sharding.mesh.coordinate(rank)["pp"])
        found = buckets(held, sharding.mesh, rank, limit, item)
        assert list(itertools.chain(*found)) == list(reversed(held))
        sizes = [[one.elements(sharding.mesh, rank) * item for one in bucket] for bucket in found]
        assert all(sum(size) <= limit or len(size) == 1 for size in sizes)
        for (bucket, size), (after, sizes_after) in itertools.pairwise(zip(found, sizes, strict=True)):
            embedding = bucket[-1].first.block is not None and after[0].first.block is None
            assert embedding or sum(size) + sizes_after[0] > limit
        assert all(len({one.summed_over for one in bucket}) == 1 for bucket in found)


@pytest.mark.parametrize(("schedule", "first"), [("interleaved", 2), ("zb-v", 3)])
@pytest.mark.parametrize("limit", [0, 5_000, 1 << 30])
def test_buckets_are_of_one_stage_the_last_first(schedule: str, first: int, limit: int) -> None:
    """Backward ends with the last stage first; a bucket that mixed stages would wait for the earlier ones. A weight that
    both ends of a V use is whole with the first of them."""
    sharding = shard(tied(4), Plan(dp=2, pp=2, schedule=schedule))
    found = buckets(sharding.at(0), sharding.mesh, 0, limit, 4)
    names = [{one.first.stages_at(0)[0] for one in bucket} for bucket in found]
    assert all(len(stages) == 1 for stages in names)
    order = [stages.pop() for stages in names]
    assert order == sorted(order, reverse=True)
    assert set(order) == {0, first}
    assert sorted(one.name for bucket in found for one in bucket) == sorted(one.name for one in sharding.at(0))
    assert found[-1][-1].name == "model.embed_tokens.weight"


def test_no_parts_no_buckets() -> None:
    assert buckets((), Plan().mesh, 0, 1, 4) == []


# --- holdings


def bytes_by_rank(sharding: Sharding, item: int) -> list[int]:
    rows = holdings(sharding, item)
    return [sum(row.bytes for row in rows if row.rank == rank) for rank in range(sharding.mesh.size)]


@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 3), (2, 2, 2)])
def test_holdings_add_up(dp: int, tp: int, pp: int) -> None:
    """Bytes over ranks = item x (dp x what tp cuts + dp x tp x what every tp rank holds whole)."""
    facts = llama(bias=True)
    sharding = shard(facts, Plan(dp=dp, tp=tp, pp=pp))
    cut = sum(math.prod(p.compute.shape) for p in sharding.parts if p.compute.cuts)
    whole = facts.elements - cut
    assert (cut == 0) == (tp == 1)
    assert sum(bytes_by_rank(sharding, 4)) == 4 * dp * (cut + tp * whole)
    rows = holdings(sharding)
    assert [row.rank for row in rows] == sorted(row.rank for row in rows)
    for row in rows:
        assert row.bytes == 4 * elements(row.box)
        assert row.copies == dp * (1 if sharding.part(row.part).compute.cuts else tp)


def test_data_parallel_ranks_hold_the_same() -> None:
    sharding = shard(llama(), Plan(dp=3, tp=2, pp=2))
    sizes = bytes_by_rank(sharding, 2)
    for group in sharding.mesh.groups("dp"):
        assert len({sizes[rank] for rank in group}) == 1


def test_a_style_that_plait_does_not_know_is_named() -> None:
    facts = ModelFacts("odd", 1, 4, 1, 1, 8, 8, "head", (parameter("mixer.weight", (8, 4), "colwize", block=0),))
    assert shard(facts, Plan()).parts[0].compute.cuts == ()
    with pytest.raises(PlanError, match=r"mixer the style 'colwize'.*Did you mean 'colwise'\?.*tp 1"):
        shard(facts, Plan(tp=2))


def test_keys_and_values_that_several_ranks_have() -> None:
    """With 2 KV heads on 4 ranks each head's keys and values are on two, whose gradients are of their own queries."""
    facts = llama(heads=8, kv_heads=2)
    sharding = shard(facts, Plan(dp=2, tp=4, batch=2))
    at = "model.layers.0.self_attn"
    sums = {name: sharding.parameter(f"{at}.{name}_proj.weight").summed_over for name in "qkvo"}
    assert sums == {"q": ("dp",), "k": ("dp", "tp%2"), "v": ("dp", "tp%2"), "o": ("dp",)}
    keys = sharding.parameter(f"{at}.k_proj.weight")
    assert [keys.spans(sharding.mesh, rank)[0] for rank in range(4)] == [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert sharding.mesh.group(5, "dp", "tp%2") == (0, 1, 4, 5)
    assert [sharding.counted(keys.name, rank) for rank in range(8)] == [[(0, 32)], [], [(0, 32)], *[[]] * 5]
    assert sharding.has_copies(f"{at}.k_proj")
    assert not sharding.has_copies(f"{at}.o_proj")


def test_parts_of_one_tensor_that_are_summed_over_different_axes() -> None:
    """Multi-query attention, fused: what the parts do not share is summed in each backward."""
    pieces = (Piece("q", 8, 8, 2), Piece("k", 2, 2, 2), Piece("v", 2, 2, 2))
    fused = ParameterFact(
        "attn", "weight", (12, 4), 0, False, "packed_colwise", 0, pieces, reads="x", decays=True
    )  # fmt: skip
    facts = ModelFacts("llama", 1, 4, 4, 1, 8, 8, "attn", (fused,))
    sharding = shard(facts, Plan(dp=2, tp=2, batch=2))
    one = sharding.parameter("attn.weight")
    assert one.summed_over == ("dp",)
    assert one.summed_early(sharding.mesh, 1) == (("tp%2",), ((4, 6), (6, 8)))
    assert one.spans(sharding.mesh, 1) == ((4, 8), (8, 10), (10, 12))
