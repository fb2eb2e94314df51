"""Twins: small, of the same class, and under every plan with the same answers to every rule as the model."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.design.layout import balanced
from plait.design.plan import Plan, stage_blocks
from plait.design.rules import RULES
from plait.runtime.batch import Batch
from plait.runtime.comm.world import World
from plait.runtime.hf.read import Model, from_config, read
from plait.runtime.hf.twin import SMALL_MODEL, shrink, twin
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from tests.conftest import Models
from tests.nursery import Nursery

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama(
    blocks: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": blocks, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": mlp, "vocab_size": vocabulary,
        "tie_word_embeddings": False, **others,
    }  # fmt: skip


MODELS = {
    "7B": llama(32, 4096, 32, 32, 11008, 32000, pad_token_id=-1),
    "8B": llama(32, 4096, 32, 8, 14336, 128256, rope_parameters=LLAMA3_ROPE, max_position_embeddings=131072,
                bos_token_id=128000, eos_token_id=[128001, 128008], pad_token_id=128004),
    "70B": llama(80, 8192, 64, 8, 28672, 128256, rms_norm_eps=1e-5),
    "405B": llama(126, 16384, 128, 8, 53248, 128256),
    "SmolLM2": llama(30, 576, 9, 3, 1536, 49152),
    "odd": llama(31, 2000, 20, 5, 5001, 50257, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "multi-query": llama(26, 1024, 16, 1, 4097, 50257, head_dim=128),
    "shallow": llama(3, 3072, 24, 8, 8192, 32003),
    "one block": llama(1, 4096, 32, 4, 11008, 32000),
}  # fmt: skip


def model(name: str) -> Model:
    return from_config(name, transformers.LlamaConfig(**MODELS[name]))


def answers(plan: Plan, model: Model) -> list[bool]:
    return [rule(plan, model.facts) is None for rule in RULES]


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_that_holds_holds_for_the_twin_and_one_that_is_refused_is_refused(name: str) -> None:
    whole = model(name)
    seen = set()
    for tp, pp in itertools.product((1, 2, 3, 4, 5, 8, 132), (1, 2, 3, 4, 7)):
        plan = Plan(tp=tp, pp=pp, seq=128)
        small = twin(whole, plan)
        assert answers(plan, small.model) == answers(plan, whole), plan
        if tp * pp <= 8 and all(answers(plan, whole)):
            # 8 MB of fp32, and more where all KV heads stay, as they do not divide.
            all_stay = tp > 1 and small.model.facts.kv_heads == whole.facts.kv_heads
            assert small.model.facts.elements < 2 ** (22 if all_stay else 21), plan
        assert small.shrunk
        blocks = small.model.facts.blocks
        if pp <= blocks:
            full = [balanced(whole.facts.blocks, pp, stage) for stage in range(pp)]
            cut = [balanced(blocks, pp, stage) for stage in range(pp)]
            # The same stages are the larger ones.
            assert len({(a[1] - a[0]) - (b[1] - b[0]) for a, b in zip(full, cut, strict=True)}) == 1
        seen.add(tuple(answers(plan, whole)))
    assert len(seen) > 1, "every plan was accepted, or every one refused"
    too_long = Plan(seq=whole.facts.positions + 1)
    assert answers(too_long, twin(whole, too_long).model) == answers(too_long, whole)


def test_what_is_kept_and_what_is_shrunk() -> None:
    whole = model("8B")
    before = whole.config.to_dict()
    small = twin(whole, Plan(tp=2, pp=4))
    assert small.shrunk == (
        "num_hidden_layers 32 -> 8",
        "num_attention_heads 32 -> 16",
        "num_key_value_heads 8 -> 4",
        "head_dim 128 -> 8",
        "hidden_size 4096 -> 32",
        "vocab_size 128256 -> 64",
        "bos_token_id 128000 -> 63",
        "eos_token_id of 2 -> of 2",
        "pad_token_id 128004 -> 63",
        "intermediate_size 14336 -> 32",
    )
    assert small.model.name == "8B"
    assert type(small.model.config) is type(whole.config)
    assert whole.config.to_dict() == before
    after = small.model.config.to_dict()
    assert before.keys() == after.keys()
    assert {key for key in before if before[key] != after[key]} == {line.split()[0] for line in small.shrunk}
    assert after["rope_parameters"] == LLAMA3_ROPE
    assert small == twin(whole, Plan(tp=2, pp=4))


@given(
    blocks=st.integers(1, 200), kv_heads=st.integers(1, 64), group=st.integers(1, 16), width=st.integers(1, 160),
    mlp=st.integers(1, 60000), vocabulary=st.integers(1, 300000), tp=st.integers(1, 16), pp=st.integers(1, 16),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_sizes_leave_the_same_remainders_and_never_grow(
    blocks: int, kv_heads: int, group: int, width: int, mlp: int, vocabulary: int, tp: int, pp: int
) -> None:
    heads = kv_heads * group
    values = llama(blocks, heads * 2 * width, heads, kv_heads, mlp, vocabulary, bos_token_id=None, eos_token_id=None)
    config = transformers.LlamaConfig(**values)
    found, lines = shrink(config, Plan(tp=tp, pp=pp))
    for key, degree, least in (
        ("num_hidden_layers", pp, 2 * pp), ("num_key_value_heads", tp, 2 * tp), ("vocab_size", tp, 64),
        ("intermediate_size", tp, 32), ("hidden_size", tp, 1), ("head_dim", 2, 2), ("num_attention_heads", tp, 1),
    ):  # fmt: skip
        before, after = getattr(config, key), getattr(found, key)
        assert after % degree == before % degree
        assert min(before, least) <= after <= before
        assert (after != before) == (f"{key} {before} -> {after}" in lines)
    assert found.num_attention_heads == group * found.num_key_value_heads
    assert found.num_hidden_layers < 3 * pp + 2
    assert found.num_key_value_heads < 3 * tp + 2


def shape_of(plan: Plan, model: Model) -> list[int]:
    return [stop - start for start, stop in stage_blocks(plan, model.facts)]


@pytest.mark.parametrize(
    ("name", "balance", "pp", "fewer"),
    [
        ("8B", "7,9,9,7", 4, [2, 3, 3, 2]), ("8B", "1,11,19,1", 4, [1, 3, 4, 1]), ("8B", "16,16", 2, [2, 2]),
        ("shallow", "1,2", 2, [1, 2]), ("SmolLM2", "8,8,7,7", 4, [3, 3, 2, 2]), ("70B", "cost", 8, None),
        ("8B", "cost", 4, [4, 4, 3, 2]), ("8B", "parameters", 4, [2, 3, 3, 2]), ("SmolLM2", "parameters", 3, None),
    ],
)  # fmt: skip
def test_a_twin_keeps_the_order_of_the_stages_sizes(name: str, balance: str, pp: int, fewer: list[int] | None) -> None:
    whole, plan = model(name), Plan(pp=pp, balance=balance, seq=2048 if name == "8B" else 512)
    small = twin(whole, plan)
    before, after = shape_of(plan, whole), shape_of(small.plan, small.model)
    assert fewer in (None, after)
    for one, other in itertools.combinations(range(pp), 2):
        assert (before[one] > before[other]) == (after[one] > after[other])
        assert (before[one] == before[other]) == (after[one] == after[other])
    assert all(min(2, old) <= new <= old for old, new in zip(before, after, strict=True))
    assert f"balance {balance} -> {','.join(map(str, after))}" in small.shrunk
    assert answers(small.plan, small.model) == answers(plan, whole) == [True] * len(RULES)


@pytest.mark.parametrize("balance", ["16,17", "32", "0,32", "evenly"])
def test_a_deal_that_is_refused_is_refused_of_the_twin(balance: str) -> None:
    whole, plan = model("8B"), Plan(pp=2, balance=balance)
    small = twin(whole, plan)
    assert answers(small.plan, small.model) == answers(plan, whole) != [True] * len(RULES)


def test_a_deal_leaves_room_for_every_kind_of_block() -> None:
    found, _ = shrink(transformers.Gemma3TextConfig(), Plan(pp=2, balance="25,1"))
    assert found.num_hidden_layers == 4
    assert set(found.layer_types) == {"sliding_attention", "full_attention"}


def test_a_small_model_is_its_own_twin(tiny: Models) -> None:
    for name in ("llama-tiny", tiny()):
        whole = read(name)
        assert whole.facts.elements <= SMALL_MODEL
        small = twin(whole, Plan(tp=2, pp=2))
        assert small.model is whole
        assert small.shrunk == ()
        assert small.plan == Plan(tp=2, pp=2)
    assert twin(read("llama-10m"), Plan()).shrunk


# --- other families: the same code, their own names


def runs(config: Any) -> Any:
    """A forward and a backward of the config's model; every parameter gets a gradient that is finite."""
    torch.manual_seed(3)
    whole = transformers.AutoModelForCausalLM.from_config(config).train()
    tokens = torch.randint(0, config.vocab_size, (4, 32))
    whole(input_ids=tokens, use_cache=False).logits.square().mean().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in whole.parameters())
    assert sum(p.numel() for p in whole.parameters()) < 2**20
    return whole


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (2, 4)])
@pytest.mark.parametrize(
    "name", ["LlamaConfig", "GPT2Config", "Gemma3TextConfig", "MixtralConfig", "DeepseekV3Config", "Phi3Config"]
)
def test_twins_of_other_families_run(name: str, tp: int, pp: int) -> None:
    config = getattr(transformers, name)()
    found, lines = shrink(config, Plan(tp=tp, pp=pp))
    assert type(found) is type(config)
    assert len(lines) >= 6
    assert found.num_hidden_layers >= 2 * pp
    assert found.num_hidden_layers % pp == config.num_hidden_layers % pp
    assert found.vocab_size % tp == config.vocab_size % tp
    runs(found)


def test_gpt2_speaks_its_own_names_and_stays_odd() -> None:
    _, lines = shrink(transformers.GPT2Config(), Plan(tp=2, pp=2))
    assert lines[:4] == ("n_layer 12 -> 4", "n_head 12 -> 4", "n_embd 768 -> 32", "vocab_size 50257 -> 65")


def test_gemma3_keeps_both_kinds_of_block_and_the_scale_of_its_queries() -> None:
    config = transformers.Gemma3TextConfig()
    for pp in (1, 2, 4):
        found, _ = shrink(config, Plan(pp=pp))
        assert len(found.layer_types) == found.num_hidden_layers
        assert set(found.layer_types) == {"sliding_attention", "full_attention"}
        assert found.query_pre_attn_scalar == found.head_dim == 8
        assert found.sliding_window == config.sliding_window
    found, _ = shrink(transformers.Gemma3TextConfig(query_pre_attn_scalar=144), Plan())
    assert found.query_pre_attn_scalar == 144


def test_deepseek_keeps_dense_and_routed_blocks_and_room_to_route() -> None:
    found, _ = shrink(transformers.DeepseekV3Config(), Plan(tp=2))
    assert (found.num_hidden_layers, found.first_k_dense_replace) == (2, 1)
    assert (found.n_routed_experts, found.num_experts_per_tok, found.n_group, found.topk_group) == (16, 8, 8, 4)
    kinds = [type(block.mlp).__name__ for block in runs(found).model.layers]
    assert kinds == ["DeepseekV3MLP", "DeepseekV3MoE"]


def test_factors_of_single_pairs_are_cut_with_the_head() -> None:
    factors = [1.0 + pair for pair in range(48)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors}
    found, _ = shrink(transformers.Phi3Config(rope_parameters=rope), Plan())
    pairs = found.hidden_size // found.num_attention_heads // 2
    assert pairs == 4
    assert found.rope_parameters["long_factor"] == [1.0, 13.0, 25.0, 37.0]
    runs(found)
    partial = transformers.Phi3Config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.4})
    runs(shrink(partial, Plan())[0])


# --- laid out


def losses(folder: str, tp: int, pp: int, dp: int) -> list[list[float]]:
    """Loss and norm of two steps of the twin for tp 2 x pp 2, under a layout, on every rank, in fp64."""
    plan = Plan(model=folder, tp=tp, pp=pp, dp=dp, batch=8, seq=16, steps=2, microbatches=2)
    small = twin(read(folder), Plan(tp=2, pp=2)).model

    def main(world: World) -> Any:
        run = build(plan, world, model=small, wide=True)
        tokens = torch.randint(0, small.facts.vocabulary, (8, 17), generator=torch.Generator().manual_seed(1))
        size = 8 // dp
        first = world.coordinate["dp"] * size
        reports = [run.step(Batch.of(tokens).slice(first, first + size)) for _ in range(2)]
        return [number for report in reports for number in (report.loss, report.grad_norm)]

    return launch(main, plan)


def test_a_twin_trains_on_eight_ranks_as_on_one(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **MODELS["8B"]}))
    one = nursery(losses, str(tmp_path), 1, 1, 1)[0]
    for rank in nursery(losses, str(tmp_path), 2, 2, 2):
        assert rank == pytest.approx(one, rel=1e-7)


OF_OTHERS: dict[str, dict[str, Any]] = {
    "gptj": {}, "opt": {}, "gpt_neo": {"vocab_size": 50304}, "mpt": {"vocab_size": 50368}, "gpt_oss": {}, "minicpm3": {},
    "bloom": {"hidden_size": 1024, "n_layer": 24, "n_head": 16}, "olmo2": {}, "qwen3_moe": {}, "smollm3": {},
    "falcon": {"hidden_size": 4096, "num_attention_heads": 64, "new_decoder_architecture": True, "num_kv_heads": 8},
}  # fmt: skip


@pytest.mark.parametrize("family", OF_OTHERS)
def test_twins_of_other_families(family: str) -> None:
    """Of the sizes that their configs have by default: a twin has every part that the model has, and the same answers."""
    config = transformers.AutoConfig.for_model(family, **OF_OTHERS[family])
    whole, plan = from_config(family, config), Plan(tp=2, attention="own", seq=16)
    small = twin(whole, plan)
    assert small.model.facts.elements < SMALL_MODEL * 2
    assert answers(plan, whole) == answers(small.plan, small.model)
    # Every kind of parameter, with its style.
    kinds = [
        {(re.sub(r"\d+", "*", p.name), p.style) for p in facts.parameters} for facts in (whole.facts, small.model.facts)
    ]
    assert kinds[0] == kinds[1]
