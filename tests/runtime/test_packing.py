"""Packing sorted: whole documents in full rows, steps of even cost, and the order kept over layouts and resumes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.runtime.batch import IGNORE, Batch
from plait.runtime.data.batches import Batches, global_batches, order
from plait.runtime.data.best_fit import BestFit, even, fit
from plait.runtime.data.packing import Stream
from plait.runtime.data.tokenizer import Bytes
from plait.runtime.data.tokens import Corpus

FIELDS = ("tokens", "targets", "positions", "document_ids", "sample_ids")
LENGTHS = st.lists(st.integers(1, 14), min_size=1, max_size=12).filter(lambda lengths: max(lengths) > 1)


def corpus_of(lengths: list[int]) -> Corpus:
    """Documents of the given lengths, the end token included; token i of the stream is i + 1000, so all differ."""
    offsets = np.cumsum([0, *lengths])
    return Corpus(np.arange(1000, 1000 + offsets[-1], dtype=np.uint32), offsets, 0.0, Bytes(), "")


def many(count: int = 400, seed: int = 3) -> Corpus:
    """Documents of very different lengths."""
    return corpus_of(np.random.default_rng(seed).lognormal(2.5, 1, count).astype(int).clip(2).tolist())


def everything(packing: Any) -> Batch:
    return packing.take(np.arange(packing.count))


def pieces(batch: Batch) -> list[list[int]]:
    """The tokens of every piece of a document, in order of their first."""
    found = []
    for tokens, documents in zip(batch.tokens.tolist(), batch.document_ids.tolist(), strict=True):
        both = itertools.groupby(zip(documents, tokens, strict=True), key=lambda pair: pair[0])
        found += [[token for _, token in group] for number, group in both if number >= 0]
    return sorted(found)


def cost(batch: Batch) -> list[int]:
    return [sum(int((row == n).sum()) ** 2 for n in row.unique() if n >= 0) for row in batch.document_ids]


# --- the rows


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(1, 9))
def test_documents_stay_whole_and_nothing_is_lost(lengths: list[int], seq: int) -> None:
    corpus = corpus_of(lengths)
    packing = BestFit(corpus, seq)
    batch = everything(packing)
    wanted = []
    for begin, length in zip(corpus.begins.tolist(), lengths, strict=True):
        cut = [list(range(at, min(at + seq, begin + length))) for at in range(begin, begin + length, seq)]
        # An end token by itself teaches nothing.
        wanted += [[1000 + i for i in piece] for piece in cut if piece != [begin + length - 1]]
    assert pieces(batch) == sorted(wanted)
    assert packing.costs.tolist() == cost(batch)
    assert batch.restarts or seq == 1
    firsts = (batch.positions == 0) & (batch.document_ids >= 0)
    assert int(firsts.sum()) == len(wanted)


@settings(deadline=None, max_examples=100)
@given(LENGTHS, st.integers(1, 9))
def test_both_packings_learn_the_same_tokens_from_the_same_documents(lengths: list[int], seq: int) -> None:
    corpus = corpus_of(lengths)
    learnt = []
    for packing in (Stream(corpus, seq), BestFit(corpus, seq)):
        batch = everything(packing)
        trained = batch.targets != IGNORE
        assert torch.equal(batch.targets[trained], batch.tokens[trained] + 1)
        learnt.append(sorted(batch.targets[trained].tolist()))
        assert int(batch.weight) == len(learnt[-1])
    firsts = {1000 + begin for begin in corpus.begins.tolist()}
    assert learnt[0] == learnt[1] == sorted(set(corpus.stream.tolist()) - firsts)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 9), max_size=30), st.integers(9, 12))
def test_each_piece_goes_where_the_least_room_is_left(lengths: list[int], seq: int) -> None:
    falling = sorted(lengths, reverse=True)
    rooms: list[int] = []
    for row, length in zip(fit(np.array(falling, int), seq).tolist(), falling, strict=True):
        fitting = [room for room in rooms if room >= length]
        if row == len(rooms):
            assert not fitting
            rooms.append(seq)
        assert rooms[row] == min(fitting, default=seq)
        rooms[row] -= length


def test_the_picture() -> None:
    packing = BestFit(corpus_of([3, 5, 2, 7]), 5)
    batch = everything(packing)
    assert batch.document_ids.tolist() == [[0] * 5, [0] * 5, [0, 0, 0, 1, 1], [0, 0, -1, -1, -1]]
    assert batch.tokens[2].tolist() == [1000, 1001, 1002, 1008, 1009]
    assert batch.positions[2].tolist() == [0, 1, 2, 0, 1]
    # The first piece of the long document ends before the document does: its last token has a target.
    assert batch.targets[1].tolist() == [1011, 1012, 1013, 1014, 1015]
    assert packing.costs.tolist() == [25, 25, 13, 4]
    with pytest.raises(IndexError, match="there are 4 rows of 5"):
        packing.take(np.array([4]))


def test_rows_are_full() -> None:
    """The stream fills every row but the last; whole documents come close."""
    corpus = many()
    for seq, least in ((32, 0.99), (64, 0.99)):
        packing = BestFit(corpus, seq)
        filled = float((everything(packing).document_ids >= 0).double().mean())
        assert filled >= least
        assert packing.count <= Stream(corpus, seq).count * 1.01 + 1


# --- the order


def spread(batches: list[Batch], parts: int) -> float:
    """The dearest microbatch of a step over the mean of its microbatches, the mean over steps."""
    steps = [np.array(cost(batch)).reshape(parts, -1).sum(1) for batch in batches]
    return float(np.mean([step.max() / step.mean() for step in steps]))


def full(packing: str, **values: Any) -> list[Batch]:
    """The batches of an epoch but the last, which is smaller."""
    plan = Plan(packing=packing, batch=8, seq=64, epochs=1, **values)
    return global_batches(many(1500), plan, 1000)[:-1]


def test_the_microbatches_of_a_step_cost_the_same() -> None:
    stream, sorted_ = full("stream"), full("sorted")
    assert len(sorted_) > 30
    for parts in (8, 4, 2):
        assert spread(sorted_, parts) < 1.05
        assert spread(stream, parts) > 1.15
    # Steps of all costs take turns: an epoch does not begin with the cheap ones.
    costs = [sum(cost(batch)) for batch in sorted_]
    assert abs(np.corrcoef(costs, np.arange(len(costs)))[0, 1]) < 0.5


def test_the_order_depends_on_seed_epoch_and_batch_alone() -> None:
    costs = BestFit(many(), 32).costs
    seen = {}
    for seed, epoch, size in itertools.product((7, 8), (0, 1), (4, 8)):
        found = even(costs, size, seed, epoch, order)
        assert sorted(found) == list(range(len(costs)))
        assert np.array_equal(found, even(costs, size, seed, epoch, order))
        seen[seed, epoch, size] = tuple(found)
    assert len(set(seen.values())) == 8
    # The rows of a group do not stay together from epoch to epoch.
    groups = [{frozenset(seen[7, epoch, 4][at : at + 4]) for at in range(0, 40, 4)} for epoch in (0, 1)]
    assert len(groups[0] & groups[1]) < 3


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_groups_of_any_size(size: int) -> None:
    costs = np.arange(20) ** 2
    assert sorted(even(costs, size, 7, 0, order)) == list(range(20))


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 4}, {"dp": 2, "pp": 2, "tp": 2}], ids=str)
def test_every_layout_reads_the_same_global_batches(layout: dict[str, int]) -> None:
    corpus = many(60)
    plan = Plan(batch=8, seq=32, epochs=2, packing="sorted", **layout)
    expected = global_batches(corpus, plan, 100)
    taken = [list(Batches(corpus, plan, rank)) for rank in range(plan.world)]
    for step, batch in enumerate(expected):
        for tp, pp in itertools.product(range(plan.tp), range(plan.pp)):
            ranks = [plan.mesh.rank(pp=pp, dp=dp, tp=tp) for dp in range(plan.dp)]
            parts = [taken[rank][step] for rank in ranks]
            joined = Batch(**{name: torch.cat([getattr(part, name) for part in parts]) for name in FIELDS})
            assert same(joined, batch)


@pytest.mark.parametrize("stop", [0, 1, 4, 9])
def test_resume_is_the_uninterrupted_run(stop: int) -> None:
    corpus, plan = many(60), Plan(batch=4, seq=32, steps=10, packing="sorted")
    whole, first, second = (Batches(corpus, plan, 0) for _ in range(3))
    before = list(itertools.islice(first, stop))
    second.restore(first.state)
    assert all(same(a, b) for a, b in zip(before + list(second), whole, strict=True))


@pytest.mark.parametrize(("first", "then", "dp"), [(4, 6, 3), (6, 4, 2), (5, 8, 4)])
def test_resume_with_another_batch_reads_each_row_once(first: int, then: int, dp: int) -> None:
    corpus = many(150)
    before = Batches(corpus, Plan(batch=first, seq=32, epochs=2, packing="sorted"), 0)
    seen = [*next(before).sample_ids.tolist(), *next(before).sample_ids.tolist()]
    assert before.state == {"epoch": 0, "row": 2 * first, "group": first}
    plan = Plan(batch=then, seq=32, epochs=2, packing="sorted", dp=dp)
    after = [Batches(corpus, plan, rank) for rank in range(dp)]
    for batches in after:
        batches.restore(before.state)
    while after[0].state["epoch"] == 0:
        seen += [i for batches in after for i in next(batches).sample_ids.tolist() if i >= 0]
    count = BestFit(corpus, 32).count
    assert sorted(seen) == list(range(count))
    # The next epoch is grouped for the batch of now.
    assert after[0].state == {"epoch": 1, "row": 0, "group": then}


def test_resume_with_another_packing_is_refused() -> None:
    corpus = many(60)
    states = {name: Batches(corpus, Plan(seq=32, packing=name), 0).state for name in ("stream", "sorted")}
    for name, other in (("stream", "sorted"), ("sorted", "stream")):
        with pytest.raises(PlanError, match=f"stopped with packing {name}: resume with it, not with {other}"):
            Batches(corpus, Plan(seq=32, packing=other), 0).restore(states[name])


# --- some of the documents


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 9), st.randoms())
def test_a_part_is_packed_as_if_it_were_all(lengths: list[int], seq: int, random: Any) -> None:
    corpus = corpus_of(lengths)
    chosen = np.array([random.random() < 0.6 for _ in lengths])
    if sum(length > 1 for length, here in zip(lengths, chosen, strict=True) if here) == 0:
        return
    part = corpus.part(chosen)
    kept = np.concatenate([np.arange(a, a + n) for a, n in zip(part.begins, part.lengths, strict=True)])
    alone = Corpus(corpus.stream[kept], part.offsets, 0.0, Bytes(), "")
    for packing in (Stream, BestFit):
        assert same(everything(packing(part, seq)), everything(packing(alone, seq)))
    again = part.part(np.ones(len(part.lengths), bool))
    assert same(everything(Stream(again, seq)), everything(Stream(alone, seq)))
