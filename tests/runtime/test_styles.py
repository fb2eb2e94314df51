"""Every style of a tensor plan against the whole module, its bytes, and the names that transformers has."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.distributed import expert_parallel, tensor_parallel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plait.check.batches import awkward_batches
from plait.check.places import Verdict
from plait.check.proof import prove
from plait.design.errors import PlanError
from plait.design.mesh import Mesh
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.design.sharding import shard
from plait.design.styles import ALIASES, REFUSED, STYLES, style
from plait.runtime.comm.nursery import launch
from plait.runtime.comm.world import Rendezvous, World
from plait.runtime.hf.attention import attention
from plait.runtime.hf.read import read
from plait.runtime.hf.tensor_plan import TensorPlan, cut_dim
from plait.runtime.parallel import tensor
from tests.design.facts import llama
from tests.families import write
from tests.nursery import Nursery

TP4 = Mesh((("pp", 1), ("dp", 1), ("tp", 4)))
ROWS, INTO, OUT, TURNED = 3, 8, 12, 4
KNOWN = {*STYLES, *REFUSED}


def say_what_is_new(names: set[str], where: str) -> None:
    """A style that came after this version is no failure: it is refused by name where somebody asks for it."""
    if new := sorted(names - KNOWN):
        warnings.warn(f"{where} has styles that plait has no row for: {', '.join(new)}", stacklevel=2)


def test_the_styles_that_transformers_registers() -> None:
    assert expert_parallel
    say_what_is_new({str(name) for name in tensor_parallel.ALL_PARALLEL_STYLES.keys()}, "transformers")  # noqa: SIM118


def test_the_styles_that_plans_use() -> None:
    used: set[str] = set()
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        used |= set((getattr(CONFIG_MAPPING[family], "base_model_tp_plan", None) or {}).values())
    assert len(used) > 10
    say_what_is_new(used, "a plan of transformers")


def test_aliases_and_refusals() -> None:
    for alias, name in ALIASES.items():
        assert style(alias, "mixer") is style(name, "mixer")
    assert not set(REFUSED) & set(STYLES)
    for name, why in REFUSED.items():
        with pytest.raises(PlanError, match=f"mixer the style '{name}', which {why[:20]}.* use tp 1"):
            style(name, "mixer")


def test_a_style_that_only_a_tensor_has_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known cuts nothing, and a sum over ranks that all have it whole would be tp times too large."""
    right = TensorPlan.style
    strange = "model.layers.0.mlp.experts.down_proj"
    monkeypatch.setattr(TensorPlan, "style", lambda self, name: "new_style" if name == strange else right(self, name))
    facts = read(write(tmp_path, "mixtral")).facts
    validate(Plan(seq=16), facts)
    with pytest.raises(PlanError, match=r"layers.0.mlp.experts the style 'new_style'.* tp 1"):
        validate(Plan(tp=2, seq=16), facts)


def test_one_weight_that_is_cut_in_two_ways_is_refused() -> None:
    facts = llama()
    first = replace(facts.parameters[0], tied=(("lm_head", "colwise_gather_output"),))
    validate(Plan(tp=2), replace(facts, parameters=(first, *facts.parameters[1:-1])))
    columns = replace(first, style="embedding_colwise", cut=1)
    with pytest.raises(PlanError, match=r"embed_tokens and lm_head use one weight.* cut in two ways: set tp 1"):
        validate(Plan(tp=2), replace(facts, parameters=(columns, *facts.parameters[1:-1])))


def test_stacks_that_are_stored_the_other_way_round() -> None:
    """[experts, in, out]: packed_rowwise cuts gate and up each by itself, colwise the way out's input side."""
    plan = TensorPlan({"experts.up": "packed_rowwise", "experts.down": "colwise"}, {}, {}, {}, {}, {}, {})
    stacks = {"up": torch.empty(4, 8, 24), "down": torch.empty(4, 12, 8)}
    assert [cut_dim(plan, "experts", nn.Module(), name, stack) for name, stack in stacks.items()] == [2, 1]


def one_layer(name: str) -> Any:
    """Output, gradients and calls of a layer cut over 4 ranks, against the whole one."""

    def main(meeting: Rendezvous) -> Any:
        with World(meeting, TP4) as world:
            group, row = world.group("tp"), STYLES[name]
            generator = torch.Generator().manual_seed(5)
            weight, bias, x, by = (
                torch.randn(shape, generator=generator, dtype=torch.float64)
                for shape in ((OUT, INTO), (OUT,), (ROWS, INTO), (ROWS, OUT))
            )
            own = slice(group.index * 3, group.index * 3 + 3) if row.cuts == "out" else slice(None)
            columns = slice(group.index * 2, group.index * 2 + 2) if row.cuts == "in" else slice(None)
            module = nn.Linear(1, 1, dtype=torch.float64)
            module.weight = nn.Parameter(weight[own, columns].clone())
            module.bias = nn.Parameter(bias[own].clone())
            tensor.split(
                module, row, group, enter=tensor.SharedInput(group), add=None, start=0,
                sizes=[3 if row.cuts == "out" else 2] * 4, transposed=False, multiply=tensor.product, turned=TURNED,
            )  # fmt: skip
            mine, whole = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
            whole_weight, whole_bias = weight.clone().requires_grad_(True), bias.clone().requires_grad_(True)
            y, expected = module(mine), torch.nn.functional.linear(whole, whole_weight, whole_bias)
            (expected * by).sum().backward()
            if row.leave == "turned":  # each rank's heads read a share of the last columns
                by = by.clone()
                by[:, -TURNED:] *= torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)[group.index]
            (y * by).sum().backward()
            pairs: list[tuple[Tensor, Tensor]] = [
                (y, expected), (mine.grad, whole.grad), (module.weight.grad, whole_weight.grad[own, columns]),
                (module.bias.grad, whole_bias.grad[own]),
            ]  # fmt: skip
            calls = {f"{r.why} ({r.operation})": [r.calls, r.payload // 8] for r in world.ledger.rows(world.rank)}
            return [float((a - b).abs().max()) for a, b in pairs], calls

    return launch(main, 4)


CALLS = {
    "colwise_gather_output": {
        "column-parallel output (all_gather)": [1, ROWS * OUT],
        "column-parallel input gradient (all_reduce)": [1, ROWS * INTO],
    },
    "rowwise_split_input": {
        "row-parallel output (all_reduce)": [1, ROWS * OUT],
        "row-parallel input gradient (all_gather)": [1, ROWS * INTO],
    },
    "mla_kv_a_proj": {"shared keys' gradient (all_reduce)": [1, ROWS * TURNED]},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_cut_layer_is_the_whole_one(nursery: Nursery, name: str) -> None:
    for differences, calls in nursery(one_layer, name):
        assert max(differences) < 1e-13
        assert calls == CALLS[name]


def columns_of_an_embedding(_: str) -> Any:
    def main(meeting: Rendezvous) -> Any:
        with World(meeting, TP4) as world:
            group = world.group("tp")
            generator = torch.Generator().manual_seed(5)
            weight = torch.randn(10, 8, generator=generator, dtype=torch.float64)
            by = torch.randn(5, 8, generator=generator, dtype=torch.float64)
            tokens = torch.tensor([1, 3, 3, 9, 0])
            own = slice(2 * group.index, 2 * group.index + 2)
            module = nn.Embedding(10, 2, dtype=torch.float64)
            module.weight = nn.Parameter(weight[:, own].clone())
            tensor.split(
                module, STYLES["embedding_colwise"], group, enter=tensor.SharedInput(group), add=None, start=0,
                sizes=[2] * 4, transposed=False, multiply=tensor.product,
            )  # fmt: skip
            whole = weight.clone().requires_grad_(True)
            y, expected = module(tokens), torch.nn.functional.embedding(tokens, whole)
            (y * by).sum().backward()
            (expected * by).sum().backward()
            pairs = ((y, expected), (module.weight.grad, whole.grad[:, own]))
            return [float((a - b).abs().max()) for a, b in pairs]

    return launch(main, 4)


def test_an_embedding_cut_by_columns(nursery: Nursery) -> None:
    assert all(max(rank) == 0 for rank in nursery(columns_of_an_embedding, ""))


def attention_again(folder: str) -> Any:
    plan = Plan(model=folder, tp=2, recompute="attention", seq=20, batch=4, steps=2)
    model = read(folder)
    draw = lambda: awkward_batches(plan, model.facts.vocabulary, 2)  # noqa: E731
    return prove(plan, model, draw, shipped=False)[0].to_json()


def test_attention_that_runs_again_beside_its_mlp(nursery: Nursery, tmp_path: Path) -> None:
    """Attention and MLP of GPT-J read one tensor: the copy that attention made without a graph is not the MLP's, and the
    ledger has two sums for the block."""
    folder = write(tmp_path, "gptj")
    assert len(shard(read(folder).facts, Plan(tp=2)).parameters) > 10
    verdict = Verdict.from_json(nursery(attention_again, folder))
    assert verdict.passed, (verdict.first, verdict.cause)


@pytest.mark.parametrize(
    ("family", "changes", "choice", "words"),
    [
        ("bloom", {}, {}, "attention plait does not go with this bloom model.* set attention own"),
        ("bloom", {}, {"attention": "own", "recompute": "attention"}, "recompute attention .* set recompute full"),
        ("bloom", {"slow_but_exact": True}, {"attention": "own", "tp": 2}, "tp 2 .* slow_but_exact false"),
        ("gpt_neo", {}, {}, "attention plait .* set attention own"),
        ("stablelm", {"qk_layernorm": True}, {"tp": 2}, "tp 2 .* a norm for each head.* set tp 1"),
        ("cohere", {"use_qk_norm": True}, {"tp": 4}, "tp 4 .* set tp 1"),
        ("phimoe", {"sliding_window": 6}, {}, "attention plait .* not told its window"),
        ("falcon, groups side by side", {}, {"attention": "own", "tp": 5}, "tp 5 is more than the 4 groups of heads"),
    ],
)
def test_what_does_not_go_with_a_family(
    tmp_path: Path, family: str, changes: dict[str, Any], choice: dict[str, Any], words: str
) -> None:
    """Refused by a sentence whose advice, followed, is accepted."""
    facts = read(write(tmp_path, family, **changes)).facts
    with pytest.raises(PlanError, match=words):
        validate(Plan(seq=16, **choice), facts)
    way: dict[str, Any] = {"attention": "own"} if "attention plait" in words else {"tp": 1}
    way = {"recompute": "full"} if "recompute" in words else way
    validate(Plan(seq=16, **choice | way), facts)


def test_mask_and_biases_of_a_class_are_not_left_out() -> None:
    """What plait's attention does not know, and a class hands over, is refused when it does."""
    q = torch.zeros(1, 2, 3, 4)
    for given in ({"position_bias": q}, {"sinks": q}):
        with pytest.raises(NotImplementedError, match=f"no {next(iter(given))}, which Linear"):
            attention(nn.Linear(1, 1), q, q, q, None, **given)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="no mask"):
        attention(nn.Linear(1, 1), q, q, q, q)
