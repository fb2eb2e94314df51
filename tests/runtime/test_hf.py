"""What plait reads off transformers' models, and how it builds the modules of a stage."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from plait.design.plan import Plan
from plait.design.sharding import shard
from plait.runtime.batch import Batch
from plait.runtime.hf.read import build_on_meta, find_blocks, presets, read
from plait.runtime.hf.stage_model import StageModel
from plait.runtime.hf.tensor_plan import tensor_plan
from plait.runtime.hf.whole import WholeModel
from tests.conftest import Models

CPU = torch.device("cpu")


def test_facts_of_the_presets() -> None:
    assert {"llama-10m", "llama-tiny"} <= set(presets())
    for name in presets():
        model = read(name)
        whole = build_on_meta(model.config)
        assert {p.name: p.shape for p in model.facts.parameters} == {
            n: tuple(p.shape) for n, p in whole.named_parameters()
        }
    facts = read("llama-tiny").facts
    assert (facts.blocks, facts.heads, facts.kv_heads) == (4, 8, 4)
    assert 5e6 < read("llama-10m").facts.elements < 10e6
    styles = {p.module.rpartition(".")[2]: (p.style, p.pieces[0].quantum, p.decays) for p in facts.parameters}
    assert styles == {
        "embed_tokens": ("embedding_rowwise", 1, True),
        "q_proj": ("colwise", 16, True),  # two query heads of 8 with their KV head
        "k_proj": ("colwise", 8, True),
        "v_proj": ("colwise", 8, True),
        "o_proj": ("rowwise", 16, True),
        "gate_proj": ("colwise", 1, True),
        "up_proj": ("colwise", 1, True),
        "down_proj": ("rowwise", 1, True),
        "input_layernorm": (None, 1, False),
        "post_attention_layernorm": (None, 1, False),
        "norm": (None, 1, False),
        "lm_head": ("colwise_gather_output", 1, True),
    }


def test_longrope_is_as_long_as_its_first_frequencies(tiny: Models) -> None:
    """Beyond, the longest row of a microbatch decides the frequencies of all of them: numbers would follow the cut."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    assert read(tiny(rope_parameters=rope | {"original_max_position_embeddings": 8})).facts.positions == 8
    assert (
        read(tiny(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})).facts.positions == 64
    )


def test_the_model_stays_transformers_own(tiny: Models) -> None:
    model = read(tiny())
    before = dict(vars(LlamaForCausalLM))
    config = model.config.to_dict()
    plan = Plan(model=model.name, pp=2)
    stage = StageModel(model, shard(model.facts, plan), 1, 1, torch.float32, seed=plan.seed)
    assert type(stage.module) is LlamaForCausalLM
    assert model.config.to_dict() == config
    assert dict(vars(LlamaForCausalLM)) == before
    assert find_blocks(stage.module)[0] == "model.layers"
    assert tensor_plan(stage.module, model.config).style("lm_head") == "colwise_gather_output"


def test_stages_hold_their_parameters_once_and_equal_the_whole(tiny: Models) -> None:
    """Each stage built alone has the whole model's initial bits, and the stages in turn give its logits exactly."""
    model = read(tiny())
    plan = Plan(model=model.name, pp=3)
    sharding = shard(model.facts, plan)
    whole = WholeModel(model, plan.seed, torch.float32)
    expected = dict(whole.module.named_parameters())
    seen: set[str] = set()
    hidden = None
    batch = Batch.of(torch.arange(34).view(2, 17) % 96)
    for index in range(3):
        stage = StageModel(model, sharding, index, index, torch.float32, seed=plan.seed)
        stage.materialise(sharding, rank=index, seed=plan.seed, device=CPU, kept={})
        for name, parameter in stage.parameters().items():
            assert name not in seen
            seen.add(name)
            assert torch.equal(parameter, expected[name]), name
        hidden = stage.forward(batch, hidden)
    assert seen == set(expected)
    assert torch.equal(hidden, whole.forward(batch))


def test_initialisation_leaves_the_random_state_alone(tiny: Models) -> None:
    model = read(tiny())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = WholeModel(model, 7, torch.float32).module
    assert torch.equal(torch.rand(3), expected)
    other = WholeModel(model, 8, torch.float32).module
    again = WholeModel(model, 7, torch.float32).module
    assert torch.equal(one.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert abs(float(one.lm_head.weight.detach().std()) - 0.02) < 2e-3


def test_p038_packed_documents_do_not_see_each_other(tiny: Models) -> None:
    """Documents of 5 and 11 tokens in one row: each one's logits equal those alone, and the second does not move when
    the first changes."""
    whole = WholeModel(read(tiny()), 7, torch.float64)
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(0, 96, (1, n), generator=generator) for n in (5, 11))

    def packed(one: torch.Tensor, other: torch.Tensor) -> Batch:
        tokens = torch.cat((one, other), 1)
        positions = torch.cat((torch.arange(5), torch.arange(11))).unsqueeze(0)
        documents = torch.tensor([[0] * 5 + [1] * 11])
        return Batch(tokens, tokens, positions, documents, torch.arange(1))

    def logits(batch: Batch) -> torch.Tensor:
        return whole.forward(batch)[0]

    together = logits(packed(first, second))
    for part, alone in ((together[:5], first), (together[5:], second)):
        single = logits(Batch.of(torch.cat((alone, alone[:, :1]), 1)))
        assert float((part - single).detach().abs().max()) <= 1e-6 * float(single.detach().abs().max())
    moved = logits(packed((first + 1) % 96, second))
    assert torch.equal(moved[5:], together[5:])
    assert not torch.equal(moved[:5], together[:5])


def test_padding_gives_finite_numbers(tiny: Models) -> None:
    whole = WholeModel(read(tiny()), 7, torch.float32)
    batch = Batch.of(torch.arange(9).view(1, 9)).padded(3)
    assert batch.rows == 3
    assert int(batch.weight) == 8
    assert bool(whole.forward(batch).isfinite().all())
