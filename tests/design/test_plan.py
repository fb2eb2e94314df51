"""Every rule's sentence has the numbers in it and a way out, and the way out is accepted when followed."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.design.cost.traffic import traffic
from plait.design.errors import PlanError, listed
from plait.design.facts import ModelFacts
from plait.design.mesh import AXES
from plait.design.plan import Plan
from plait.design.rules import RULES, Rule, legal_tp, validate
from plait.design.schedule import METHODS, RUNS
from plait.design.sharding import shard
from tests.design.facts import llama

NUMBERS = r"(\d+(?:(?:, | or )\d+)*)"


def sentence(plan: Plan, facts: ModelFacts) -> str:
    with pytest.raises(PlanError) as error:
        validate(plan, facts)
    text = str(error.value)
    assert text.endswith((".", "?"))
    return text


def numbers(words: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", words)]


def said(rule: Rule, plan: Plan, facts: ModelFacts) -> str | None:
    """A rule's sentence: what it returns, or what is raised on the way."""
    try:
        return rule(plan, facts)
    except PlanError as error:
        return str(error)


def ways(text: str) -> list[dict[str, Any]]:
    """The changes that a sentence proposes."""
    found: list[dict[str, Any]] = []
    for field in ("batch", "pp", "seq", "dp"):
        found += [{field: int(n)} for n in re.findall(rf"set {field} (\d+)", text)]
    found += [{"ranks": int(n)} for n in re.findall(r"start (\d+) ranks", text)]
    found += [{"microbatches": int(n)} for n in re.findall(r"or microbatches (\d+) or less", text)]
    found += [{"balance": word} for word in re.findall(r"set balance (\w+)", text)]
    for product, each in re.findall(rf"product is (\d+) \(each one of {NUMBERS}\)", text):
        found += [
            dict(zip(("dp", "tp", "pp"), degrees, strict=True))
            for degrees in itertools.product(numbers(each), repeat=3)
            if degrees[0] * degrees[1] * degrees[2] == int(product)
        ]
    for field, words in (("microbatches", "Set microbatches "), ("tp", "tp ")):
        end = r"\." if field == "tp" else ","
        found += [{field: n} for match in re.findall(rf"{words}{NUMBERS}{end}", text) for n in numbers(match)]
    for names in re.findall(r"use ([\w, -]+?)[.]", text):
        found += [{"schedule": name} for name in re.split(", | or ", names)]
    found += [{"schedule": name} for name in re.findall(r"set schedule ([\w-]+), which", text)]
    found += [{"chunks": int(n)} for n in re.findall(r"Set chunks (\d+)", text)]
    for degree in re.findall(r"set schedule 1f1b, chunks 0, pp (\d+)", text):
        found.append({"schedule": "1f1b", "chunks": 0, "pp": int(degree)})
    for names in re.findall(r"use ([\w, ]+) or the blocks", text):
        found += [{"balance": name} for name in names.split(", ")]
    return found


def follow(plan: Plan, change: dict[str, Any]) -> Plan:
    return Plan.read({**plan.model_dump(), **change})


def accepted(plan: Plan, facts: ModelFacts) -> bool:
    try:
        validate(plan, facts)
    except PlanError:
        return False
    return True


# --- the cases that users reported


def test_p131_degrees_must_make_the_ranks() -> None:
    plan = Plan(ranks=8, dp=8, tp=8, batch=8)
    facts = llama(heads=16, kv_heads=8)
    text = sentence(plan, facts)
    assert text == "dp 8 x tp 8 x pp 1 = 64 ranks are described, but 8 are asked for: set dp 1, or start 64 ranks."
    assert ways(text) == [{"dp": 1}, {"ranks": 64}]
    assert all(accepted(follow(plan, way), facts) for way in ways(text))


def test_degrees_that_no_dp_can_complete() -> None:
    plan = Plan(ranks=8, tp=3)
    text = sentence(plan, llama())
    assert "= 3 ranks" in text
    assert "product is 8 (each one of 1, 2, 4 or 8)" in text
    assert any(accepted(follow(plan, way), llama()) for way in ways(text) if "dp" in way)


def test_p134_batch_smaller_than_dp() -> None:
    plan = Plan(batch=4, dp=8)
    text = sentence(plan, llama())
    assert text == "batch 4 < dp 8 x microbatches 1 = 8: set batch 8."
    assert accepted(follow(plan, {"batch": 8}), llama())


def test_p049_rows_that_do_not_divide_by_the_microbatches() -> None:
    plan = Plan(batch=16, dp=2, microbatches=3)
    validate(plan, llama())
    assert plan.microbatch_rows == (3, 3, 2)


def test_batch_that_does_not_divide_over_dp() -> None:
    plan = Plan(batch=13, dp=2, microbatches=4)
    text = sentence(plan, llama())
    assert text == "batch 13 does not divide into dp 2 equal parts: set batch 14."
    assert accepted(follow(plan, {"batch": 14}), llama())


def test_fewer_rows_than_microbatches() -> None:
    plan = Plan(batch=12, dp=2, microbatches=7)
    text = sentence(plan, llama())
    assert text == "batch 12 < dp 2 x microbatches 7 = 14: set batch 14, or microbatches 6 or less."
    assert ways(text) == [{"batch": 14}, {"microbatches": 6}]
    assert all(accepted(follow(plan, way), llama()) for way in ways(text))


def test_p045_more_tp_ranks_than_kv_heads() -> None:
    """Each KV head on as many ranks as every other, and for each of these query heads of its own; or refused."""
    facts = llama(heads=8, kv_heads=2)
    assert accepted(Plan(tp=4), facts)
    text = sentence(Plan(tp=5), facts)
    assert text.startswith(
        "tp 5 is more than the 2 KV heads (8 heads in groups of 4) of model.layers.0.self_attn.q_proj"
    )
    assert "no multiple of them" in text
    assert ways(text) == [{"tp": degree} for degree in (1, 2, 4, 6, 8)]
    text = sentence(Plan(tp=10), facts)
    assert text.startswith("tp 10 is more than the 8 heads that read the 2 KV heads")


def test_groups_of_heads_that_do_not_divide() -> None:
    """9 heads in 3 groups on 2 ranks are 6 and 3."""
    facts = llama(heads=9, kv_heads=3)
    assert legal_tp(facts) == [1, 2, 3, 6, 9]
    sharding = shard(facts, Plan(tp=2))
    assert [sharding.own_heads(rank) for rank in range(2)] == [((0, 6), (0, 2)), ((6, 9), (2, 3))]
    assert sharding.slices("model.layers.0.self_attn.q_proj.weight") == (12, 6)
    sharding = shard(facts, Plan(tp=6))
    assert [sharding.own_heads(rank) for rank in (0, 1, 5)] == [((0, 2), (0, 1)), ((2, 3), (0, 1)), ((8, 9), (2, 3))]


def test_p043_vocabulary_that_does_not_divide() -> None:
    facts = llama(vocabulary=97)
    assert accepted(Plan(tp=4), facts)
    assert shard(facts, Plan(tp=4)).slices("lm_head.weight") == (25, 24, 24, 24)
    text = sentence(Plan(tp=4), llama(vocabulary=3))
    assert text.startswith("tp 4 is more than the 3 vocabulary rows of model.embed_tokens.weight")
    assert ways(text) == [{"tp": 1}, {"tp": 2}, {"tp": 3}]


def test_columns_that_do_not_divide() -> None:
    assert accepted(Plan(tp=4), llama(intermediate=22))
    text = sentence(Plan(tp=4), llama(intermediate=3))
    assert text.startswith("tp 4 is more than the 3 columns of model.layers.0.mlp.gate_proj.weight")
    assert ways(text) == [{"tp": 1}, {"tp": 2}, {"tp": 3}]


def test_more_stages_than_blocks() -> None:
    plan, facts = Plan(pp=5), llama(blocks=4)
    text = sentence(plan, facts)
    assert text == "pp 5 stages need a block each, but the model has 4 blocks: set pp 4 or less."
    assert accepted(follow(plan, {"pp": 4}), facts)
    assert accepted(follow(plan, {"pp": 3}), facts)


def test_rows_longer_than_the_model() -> None:
    plan, facts = Plan(seq=129), llama(positions=128)
    assert sentence(plan, facts) == "seq 129 is longer than the 128 positions of this model: set seq 128 or less."
    assert accepted(follow(plan, {"seq": 128}), facts)


def test_schedules_that_cannot_be() -> None:
    plan = Plan(schedule="naive", microbatches=2)
    text = sentence(plan, llama())
    assert "microbatches is 2" in text
    assert ways(text) == [{"microbatches": 1}, {"schedule": "gpipe"}, {"schedule": "1f1b"}]
    assert all(accepted(follow(plan, way), llama()) for way in ways(text))
    text = sentence(Plan(schedule="1f1v"), llama())
    assert text == f"There is no schedule '1f1v'; use {listed(RUNS)}. Did you mean '1f1b'?"


def test_a_schedule_that_no_run_takes() -> None:
    text = sentence(Plan(schedule="dualpipe", pp=3), llama())
    assert text == (
        "The schedule dualpipe is for plait schedule only. It keeps two copies of the model, whose gradients no run "
        "sums: set schedule dualpipe-v, which has the same pairs and one copy."
    )
    assert ways(text) == [{"schedule": "dualpipe-v"}]
    assert accepted(Plan(schedule="dualpipe-v", pp=2), llama())


@pytest.mark.parametrize(
    ("schedule", "chunks", "near"), [("zb-v", 1, 2), ("v-min", 3, 2), ("1f1b", 2, 1), ("interleaved", 1, 2)]
)
def test_stages_that_a_schedule_does_not_put_on_a_rank(schedule: str, chunks: int, near: int) -> None:
    plan = Plan(schedule=schedule, chunks=chunks, pp=2)
    text = sentence(plan, llama())
    assert f"The schedule {schedule} puts {near}" in text
    assert f"but chunks is {chunks}" in text
    assert ways(text) == [{"chunks": near}]
    assert accepted(follow(plan, {"chunks": near}), llama())


def test_more_stages_on_the_ranks_than_blocks() -> None:
    text = sentence(Plan(schedule="zb-v", pp=3), llama(blocks=4))
    assert text == "pp 3 x 2 stages a rank = 6 stages need a block each, but the model has 4 blocks: set pp 2 or less."
    text = sentence(Plan(schedule="zb-v", pp=3), llama(blocks=1))
    assert ways(text) == [{"schedule": "1f1b", "chunks": 0, "pp": 1}]


# --- all rules at once

plans = st.builds(
    Plan,
    ranks=st.sampled_from([0, 0, 1, 2, 6, 8, 12]),
    dp=st.integers(1, 4),
    tp=st.integers(1, 5),
    pp=st.integers(1, 6),
    schedule=st.sampled_from([*METHODS, "zigzag"]),
    balance=st.sampled_from(["uniform", "uniform", "parameters", "cost", "2,1", "1,2,1,1", "even"]),
    microbatches=st.integers(1, 5),
    batch=st.integers(1, 30),
    seq=st.sampled_from([8, 128, 200]),
)
models = st.builds(
    llama,
    blocks=st.integers(1, 5),
    heads=st.just(12),
    kv_heads=st.sampled_from([1, 2, 4, 6, 12]),
    intermediate=st.sampled_from([24, 30, 36]),
    vocabulary=st.sampled_from([60, 64, 97]),
)


@settings(max_examples=300)
@given(plans, models)
def test_advice_is_accepted_when_followed(plan: Plan, facts: ModelFacts) -> None:
    """Every way out of a sentence silences its rule, and following the first way again and again ends in a plan that
    is accepted, for there is no advice that goes in a circle."""
    for _ in range(2 * len(RULES)):
        # Each rule may take for granted what those before it hold.
        failing = next(((rule, text) for rule in RULES if (text := said(rule, plan, facts))), None)
        if failing is None:
            break
        rule, text = failing
        assert sentence(plan, facts) == text
        options = ways(text)
        assert options, text
        for way in options:
            if way == {"schedule": "naive"} and plan.microbatches > 1:
                continue  # a list of all schedules names naive too, which then asks for one microbatch
            assert said(rule, follow(plan, way), facts) is None, (text, way)
        plan = follow(plan, options[0])
    validate(plan, facts)
    assert sum(plan.microbatch_rows) * plan.dp == plan.batch
    assert len(plan.microbatch_rows) == plan.microbatches
    assert 1 <= min(plan.microbatch_rows) <= plan.microbatch_rows[0] <= min(plan.microbatch_rows) + 1
    assert len(shard(facts, plan).parts) == len(facts.parameters)


@given(models, st.integers(1, 13))
def test_the_legal_degrees_are_the_accepted_ones(facts: ModelFacts, tp: int) -> None:
    assert (tp in legal_tp(facts)) == accepted(Plan(tp=tp), facts)


def test_p132_any_degree_may_be_one() -> None:
    """All eight choices of 1 or 2: the axes are all there, whatever their size; one rank moves nothing."""
    facts = llama()
    for dp, tp, pp in itertools.product((1, 2), repeat=3):
        plan = Plan(dp=dp, tp=tp, pp=pp, batch=4)
        validate(plan, facts)
        assert plan.mesh.names == AXES
        assert plan.mesh.size == plan.world == dp * tp * pp
        sharding = shard(facts, plan)
        # With tp every rank has tokens of its own at the norms.
        assert all(part.summed_over[:1] == ("dp",) for part in sharding.parts)
        assert any(part.summed_over == ("dp", "tp") for part in sharding.parts) == (tp > 1)
        moved = {"dp": dp > 1, "tp": tp > 1, "dp.tp": tp > 1, "pp": pp > 1, "world": plan.world > 1}
        assert {row.axis for row in traffic(plan, facts)} == {axis for axis, on in moved.items() if on}


# --- reading


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"^run\.toml has an unknown key 'microbatch'\. Did you mean 'microbatches'\?$"):
        Plan.read({"microbatch": 2}, source="run.toml")
    with pytest.raises(PlanError, match=r"^the plan has an unknown key 'qqqqq'\.$"):
        Plan.read({"qqqqq": 2})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dp", "two"), ("dp", 0), ("tp", -1), ("pp", 1.5), ("batch", None), ("batch", [8]), ("seq", 0), ("lr", 0),
        ("lr", "fast"), ("lr", float("nan")), ("clip", -1.0), ("lr_floor", 2), ("beta1", 1), ("schedule", 3),
        ("compute", "fp8"), ("tokenizer", "words"), ("lr_schedule", "step"), ("bucket_mb", 0), ("seed", -1),
    ],
)  # fmt: skip
def test_an_impossible_value_is_one_sentence(key: str, value: object) -> None:
    with pytest.raises(PlanError) as error:
        Plan.read({key: value})
    text = str(error.value)
    assert text.startswith(f"the plan: {key} cannot be {value!r}: ")
    assert "\n" not in text
    assert text.endswith(".")


def test_a_plan_is_frozen_and_reads_what_it_writes() -> None:
    plan = Plan(dp=2, pp=3, schedule="gpipe", microbatches=2)
    assert Plan.read(plan.model_dump()) == plan
    with pytest.raises(ValueError, match="frozen"):
        plan.dp = 3  # type: ignore[misc]
