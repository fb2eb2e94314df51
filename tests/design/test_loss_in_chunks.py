"""What a loss in chunks keeps, computes and sends on paper, beside the whole one."""

from __future__ import annotations

from plait.design.cost.memory import memory
from plait.design.cost.traffic import traffic
from plait.design.per_token import Here, at_work, kept, operations
from plait.design.plan import Plan
from plait.design.sharding import shard
from tests.design.facts import llama

FACTS = llama(blocks=4)
WHOLE = Plan(pp=2, tp=2, microbatches=3, batch=7, seq=9, schedule="zb-h1")
CHUNKED = WHOLE.model_copy(update={"loss_chunks": 4})
LOSS = CHUNKED.loss_stage


def test_chunks_hold_every_token_once() -> None:
    """Rows of 3, 2 and 2 x 9 tokens; of fewer tokens than chunks one each."""
    assert [CHUNKED.tokens_at_once(rows * 9) for rows in CHUNKED.microbatch_rows] == [
        [7, 7, 7, 6], [5, 5, 4, 4], [5, 5, 4, 4]
    ]  # fmt: skip
    assert CHUNKED.tokens_at_once(3) == [1, 1, 1]
    assert WHOLE.tokens_at_once(63) == [63]


def test_nothing_of_the_logits_is_kept() -> None:
    """And at work there is one chunk, in fp32, and in bf16 the type of compute besides."""
    vocabulary = FACTS.vocabulary // 2
    whole, chunked, bf16 = (
        Here(plan, FACTS, shard(FACTS, plan), 2)
        for plan in (WHOLE, CHUNKED, CHUNKED.model_copy(update={"compute": "bf16"}))
    )
    assert kept(chunked.at(0), 0) == kept(whole.at(0), 0)
    assert kept(chunked, LOSS) == kept(whole, LOSS) - 4 * vocabulary - 18
    assert (at_work(chunked.at(0), 0), at_work(whole, LOSS)) == (0, 0)
    assert at_work(chunked, LOSS) == 4 * vocabulary
    assert at_work(bf16, LOSS) == 6 * vocabulary
    for mine, other in zip(memory(CHUNKED, FACTS), memory(WHOLE, FACTS), strict=True):
        assert mine.held == other.held
        last = CHUNKED.mesh.coordinate(mine.rank)["pp"] == 1
        assert (mine.activations < other.activations) == last


def test_the_head_s_three_products_are_in_one_place() -> None:
    head = 2 * FACTS.head_weight.elements
    sharding = shard(FACTS, WHOLE)
    forward, backward, weights = operations(WHOLE, FACTS, sharding, LOSS)
    assert operations(CHUNKED, FACTS, sharding, LOSS) == (forward - head, backward + 2 * head, weights - head)
    assert operations(CHUNKED, FACTS, sharding, 0) == operations(WHOLE, FACTS, sharding, 0)


def test_as_many_bytes_in_more_calls() -> None:
    def rows(plan: Plan) -> dict[tuple[int, str, str], tuple[int, int]]:
        return {(row.rank, row.axis, row.why): (row.calls, row.payload) for row in traffic(plan, FACTS)}

    whole, chunked = rows(WHOLE), rows(CHUNKED)
    assert whole.keys() == chunked.keys()
    for key, (calls, payload) in whole.items():
        assert chunked[key] == (calls * (4 if key[2].startswith("loss: ") else 1), payload)
