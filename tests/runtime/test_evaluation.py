"""Evaluation and samples between steps: each row once, the same in every layout, and training does not notice."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from plait.check.wide import wide
from plait.design.cost.traffic import traffic
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.design.schedule import FORWARD_ONLY, check, lower
from plait.runtime.batch import IGNORE
from plait.runtime.comm.nursery import BadNumbersError
from plait.runtime.comm.world import World
from plait.runtime.data.batches import Batches
from plait.runtime.data.held_out import EvalBatches, evaluation_part, held_out, seen_in_training, training_part
from plait.runtime.data.tokenizer import Bytes
from plait.runtime.data.tokens import Corpus, prepare
from plait.runtime.hf.read import read
from plait.runtime.hf.whole import WholeModel
from plait.runtime.training import measure
from plait.runtime.training.assemble import build
from plait.runtime.training.evaluate import evaluate
from plait.runtime.training.launch import launch
from plait.runtime.training.sample import sample
from tests.conftest import Models
from tests.families import write
from tests.nursery import Nursery

SEQ = 16


def corpus(rows: int, seed: int = 5) -> Corpus:
    """`rows` rows of 16 tokens below 96, the last one ragged, in documents of many lengths."""
    random = np.random.default_rng(seed)
    total = rows * SEQ - 6
    ends = np.unique(np.concatenate((random.integers(2, total - 2, rows), [total])))
    stream = random.integers(0, 96, total).astype(np.uint16)
    return Corpus(stream, np.concatenate(([0], ends)), 0.0, Bytes(), "", digests=random.permutation(len(ends)) + 1)


def evaluated(model: str, layout: dict[str, Any], rows: int) -> Any:
    """(loss, tokens) of an evaluation on every rank, wide."""
    plan = Plan(**{"model": model, "seq": SEQ, "batch": 8, "eval_every": 1, **layout})

    def main(world: World) -> Any:
        with wide():
            run = build(plan, world, wide=True)
            found = evaluate(run, EvalBatches(corpus(rows), plan, world.rank))
        return [found.loss, found.tokens]

    return launch(main, plan)


def one_process(model: str, rows: int) -> Any:
    """Row by row, with torch's own loss."""
    plan, total, tokens = Plan(model=model, seq=SEQ, batch=1, eval_every=1), 0.0, 0
    with wide(), torch.no_grad():
        whole = WholeModel(read(model), plan.seed, torch.float64)
        whole.module.eval()
        for row in EvalBatches(corpus(rows), plan, 0):
            total += float(F.cross_entropy(whole.forward(row)[0], row.targets[0], ignore_index=IGNORE, reduction="sum"))
            tokens += int(row.weight)
    return [total / tokens, tokens]


RAGGED: list[dict[str, Any]] = [
    {}, {"dp": 2}, {"dp": 4, "microbatches": 2}, {"dp": 8}, {"dp": 8, "batch": 16}, {"pp": 2, "microbatches": 4},
    {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2}, {"dp": 4, "batch": 4},
]  # fmt: skip


@pytest.mark.parametrize("layout", RAGGED, ids=str)
def test_p143_p052_each_row_counts_once_whatever_the_layout(
    nursery: Nursery, tiny: Models, layout: dict[str, Any]
) -> None:
    """13 rows: no dp divides them, ranks run out of rows at different times, and at dp 8 some have none."""
    begin = time.monotonic()
    ranks = nursery(evaluated, tiny(), layout, 13)
    assert time.monotonic() - begin < 60
    loss, tokens = nursery(one_process, tiny(), 13)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][1] == tokens
    assert ranks[0][0] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("rows", [1, 7, 8, 9])
def test_sets_of_any_size(nursery: Nursery, tiny: Models, rows: int) -> None:
    found = nursery(evaluated, tiny(), {"dp": 2, "pp": 2, "microbatches": 2}, rows)[0]
    assert found == pytest.approx(nursery(one_process, tiny(), rows), rel=1e-12)


def test_evaluation_drops_nothing(nursery: Nursery, tmp_path: Path) -> None:
    shares = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    one, other = (nursery(evaluated, write(tmp_path, "gpt2", **drops), {"pp": 2}, 9)[0] for drops in (shares, {}))
    assert one == other


def both(model: str, looks: bool) -> Any:
    """Losses of some steps, with or without evaluations and samples between them; and what the ledger has at the end."""
    plan = Plan(model=model, dp=2, tp=2, pp=2, microbatches=2, batch=8, seq=SEQ, steps=4, eval_every=1)

    def main(world: World) -> Any:
        run = build(plan, world)
        texts, losses, held = [], [], EvalBatches(corpus(9), plan, world.rank)
        for batch in Batches(corpus(40, seed=6), plan, world.rank):
            losses.append(run.step(batch).loss)
            if looks:
                losses.append(evaluate(run, held).loss)
                texts.append(sample(run, [1, 2, 3], 6))
        expected = traffic(plan, run.model.facts)
        moved = measure.traffic(world, expected)
        same = {row: row.payload for row in moved} == {row: row.payload for row in expected}
        return [losses[:: 2 if looks else 1], losses[1::2] if looks else [], texts, same]

    return launch(main, plan)


def test_training_and_its_bytes_do_not_notice(nursery: Nursery, tiny: Models) -> None:
    with_looks, without = nursery(both, tiny(), True), nursery(both, tiny(), False)
    assert [rank[0] for rank in with_looks] == [rank[0] for rank in without]
    assert all(rank[3] for rank in (*with_looks, *without)), "bytes differ from the prediction"
    assert all(rank == with_looks[0] for rank in with_looks)
    held, texts = with_looks[0][1], with_looks[0][2]
    assert held[-1] < held[0] + 0.1
    # Samples: a seed a step.
    assert len({tuple(text) for text in texts}) > 1


def texts(model: str, layout: dict[str, Any]) -> Any:
    plan = Plan(**{"model": model, "batch": 8, "seq": SEQ, "steps": 2, **layout})

    def main(world: World) -> Any:
        with wide():
            run = build(plan, world, wide=True)
            found = [sample(run, [1, 2], 5), sample(run, [1, 2], 5), sample(run, [3], 5)]
            run.step(next(Batches(corpus(20), plan, world.rank)))
            return [*found, sample(run, [1, 2], 5)]

    return launch(main, plan)


def test_samples_depend_on_seed_step_and_prompt_alone(nursery: Nursery, tiny: Models) -> None:
    one = nursery(texts, tiny(), {})[0]
    first, again, other, later = one
    assert first == again
    assert first != other
    assert first != later
    for layout in ({"dp": 2, "pp": 2, "microbatches": 2}, {"tp": 2}):
        assert all(rank == one for rank in nursery(texts, tiny(), layout))
    assert nursery(texts, tiny(), {"seed": 8})[0] != one


def broken(model: str) -> Any:
    plan = Plan(model=model, dp=2, pp=2, batch=4, seq=SEQ, eval_every=1)

    def main(world: World) -> Any:
        run = build(plan, world)
        for weight in run.optimizer.weights.values():
            weight.data.fill_(float("nan"))
        said = []
        for look in (lambda: evaluate(run, EvalBatches(corpus(3), plan, world.rank)), lambda: sample(run, [1], 2)):
            try:
                look()
            except BadNumbersError as error:
                said.append(str(error))
        return said

    return launch(main, plan)


def test_numbers_that_are_not_finite_end_the_run_on_every_rank(nursery: Nursery, tiny: Models) -> None:
    for said in nursery(broken, tiny()):
        assert said[0].startswith("the held-out loss after step 0 is nan")
        assert said[1].startswith("the logits of a sample after step 0 are not finite")


def epochs(model: str) -> Any:
    """Two epochs of 17 rows on dp 2 in batches of 4, an evaluation after each step: (training ids, evaluations)."""
    plan = Plan(model=model, dp=2, batch=4, seq=SEQ, epochs=2, eval_every=5)
    text = corpus(17)

    def main(world: World) -> Any:
        batches = Batches(text, plan.model_copy(update={"eval_every": 0}), world.rank)
        run = build(plan, world, steps=batches.steps_total)
        held, ids, losses = EvalBatches(corpus(7), plan, world.rank), [], []
        for batch in batches:
            ids.append([i for i in batch.sample_ids.tolist() if i >= 0])
            run.step(batch)
            if run.done % plan.eval_every == 0:
                losses.append(evaluate(run, held).loss)
        return [ids, losses]

    return launch(main, plan)


def test_p105_uneven_shares_end_together(nursery: Nursery, tiny: Models) -> None:
    """17 rows over two ranks, evaluation at each epoch's end. Nobody shards by hand: rows are dealt from one global
    order, so ranks have equally many batches, and only rows of padding more or less."""
    begin = time.monotonic()
    (first, one), (second, other) = nursery(epochs, tiny())
    assert time.monotonic() - begin < 60
    assert one == other
    assert len(one) == 2
    assert len(first) == len(second) == 10
    assert [len(ids) for ids in first] != [len(ids) for ids in second]
    for half in (slice(0, 5), slice(5, 10)):
        read_ = [i for ids in (*first[half], *second[half]) for i in ids]
        assert sorted(read_) == list(range(17))


# --- on paper


@pytest.mark.parametrize(("pp", "m"), list(itertools.product((1, 2, 3, 4), (1, 2, 5))))
def test_forward_tables_are_proven(pp: int, m: int) -> None:
    table = lower(FORWARD_ONLY(tuple(range(pp)), m))
    check(table)
    assert len(table.rows) == pp


def test_every_layout_makes_the_same_passes() -> None:
    held = corpus(13)
    for dp, batch in ((1, 8), (2, 8), (4, 8), (8, 8), (8, 16), (1, 1)):
        plan = Plan(seq=SEQ, batch=batch, dp=dp, eval_every=1)
        ranks = [EvalBatches(held, plan, rank) for rank in range(dp)]
        passes = [list(batches) for batches in ranks]
        assert {len(found) for found in passes} == {len(ranks[0])} == {-(-13 // batch)}
        assert all(one.rows == batch // dp for found in passes for one in found)
        ids = [i for turn in zip(*passes, strict=True) for one in turn for i in one.sample_ids.tolist() if i >= 0]
        assert ids == list(range(13))
        assert [len(list(batches)) for batches in ranks] == [len(found) for found in passes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "texts"
    data.mkdir()
    for number in range(300):
        (data / f"{number:03}.txt").write_text(f"This is text {number}, and it says {number * number}.\n" * 3)
    return data


def texts_of(part: Corpus) -> list[str]:
    begins, lengths = part.begins, part.lengths
    return [part.tokenizer.decode(part.stream[a : a + n].tolist()) for a, n in zip(begins, lengths, strict=True)]


def test_what_is_held_out_depends_on_the_text_alone(folder: Path, tmp_path: Path) -> None:
    plan = Plan(data=str(folder), tokenizer="bytes", eval_every=1, eval_share=0.1)
    whole = prepare(plan, 320, cache=tmp_path / "cache")
    held = evaluation_part(whole, plan)
    assert held is not None
    assert 15 <= len(held.lengths) <= 45
    train = training_part(whole, plan)
    assert sorted(texts_of(held) + texts_of(train)) == sorted(texts_of(whole))
    assert not set(texts_of(held)) & set(texts_of(train))
    # Not on the layout, the seed or the tokenizer; nor on what else there is.
    for changes in ({"seed": 9, "dp": 2}, {"tokenizer": "bpe"}):
        other = plan.model_copy(update=changes)
        again = evaluation_part(prepare(other, 320, cache=tmp_path / "cache"), other)
        assert again is not None
        assert texts_of(again) == texts_of(held)
    for number in range(0, 300, 2):
        (folder / f"{number:03}.txt").unlink()
    fewer = evaluation_part(prepare(plan, 320, cache=tmp_path / "cache"), plan)
    assert fewer is not None
    assert texts_of(fewer) == [text for text in texts_of(held) if int(text.split()[3].rstrip(",")) % 2]


@pytest.mark.parametrize("packing", ["stream", "sorted"])
def test_training_never_reads_what_is_held_out(folder: Path, tmp_path: Path, packing: str) -> None:
    plan = Plan(data=str(folder), tokenizer="bytes", eval_every=1, eval_share=0.1, seq=64, epochs=1, packing=packing)
    whole = prepare(plan, 320, cache=tmp_path / "cache")
    held = evaluation_part(whole, plan)
    assert held is not None
    read_ = [batch.tokens[batch.document_ids >= 0] for batch in Batches(whole, plan, 0)]
    evaluated_ = [batch.tokens[batch.document_ids >= 0] for batch in EvalBatches(held, plan, 0)]
    counts = [int((torch.cat(found) == whole.tokenizer.end).sum()) for found in (read_, evaluated_)]
    # The end tokens count documents; the very last of a stream may lie outside of all rows.
    assert counts[0] in (len(whole.lengths) - len(held.lengths), len(whole.lengths) - len(held.lengths) - 1)
    assert counts[1] in (len(held.lengths), len(held.lengths) - 1)
    without = list(Batches(whole, plan.model_copy(update={"eval_every": 0}), 0))
    assert len(without) > len(read_)


def test_one_document_at_least_and_never_all() -> None:
    def of(digests: list[int]) -> Corpus:
        count = len(digests)
        return Corpus(
            np.zeros(2 * count, np.uint16), np.arange(count + 1) * 2, 0.0, Bytes(), "",
            digests=np.array(digests, np.uint64),
        )  # fmt: skip

    high = 2**64 - 1
    assert held_out(of([high, high // 2, high - 5]), 0.01).tolist() == [False, True, False]
    assert held_out(of([1, 2, 3]), 0.5).tolist() == [True, True, False]
    assert held_out(of([5, 7, 5, 7]), 0.5).tolist() == [True, False, True, False]
    with pytest.raises(PlanError, match="The data is 1 document"):
        held_out(of([4]), 0.01)
    with pytest.raises(PlanError, match="one and the same"):
        held_out(of([4, 4]), 0.01)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_text_of_its_own_is_read_in_the_tokens_of_the_data(folder: Path, tmp_path: Path, kind: str) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("And this is another text, with a ß in it.\n")
    plan = Plan(data=str(folder), tokenizer=kind, eval_every=1, eval_data=str(mine))
    whole = prepare(plan, 320, cache=tmp_path / "cache")
    assert training_part(whole, plan) is whole
    for _ in range(2):  # made, then read from the cache
        held = evaluation_part(whole, plan, cache=tmp_path / "cache")
        assert held is not None
        assert texts_of(held) == [mine.read_text()]
        assert held.tokenizer.fingerprint == whole.tokenizer.fingerprint
        assert held.stream.dtype == whole.stream.dtype
        assert seen_in_training(whole, held) == 0
    again = plan.model_copy(update={"eval_data": str(folder / "007.txt")})
    held = evaluation_part(whole, again, cache=tmp_path / "cache")
    assert held is not None
    assert seen_in_training(whole, held) == 1
    with pytest.raises(PlanError, match="no file or directory"):
        evaluation_part(whole, plan.model_copy(update={"eval_data": str(tmp_path / "nowhere")}))


def test_rules(tiny: Models) -> None:
    facts = read(tiny()).facts
    with pytest.raises(PlanError, match=r"eval_data x.txt is named, but eval_every 0"):
        validate(Plan(seq=16, eval_data="x.txt"), facts)
    validate(Plan(seq=16, eval_data="x.txt", eval_every=5), facts)
    assert Plan(eval_every=5).held_out == 0.01
    assert Plan().held_out == Plan(eval_every=5, eval_data="x.txt").held_out == 0
