"""Real weights: every rank holds the saved bits of its slices, whatever the format and the names; what does not fit is
refused by a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from plait.check.batches import awkward_batches
from plait.check.proof import prove
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.sharding import shard
from plait.runtime.batch import Batch
from plait.runtime.hf import weights as real
from plait.runtime.hf.read import Model, read
from plait.runtime.hf.stage_model import StageModel
from plait.runtime.hf.whole import WholeModel
from tests.families import CONFIGS, OTHERS
from tests.nursery import Nursery

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "intermediate_size": 64, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OWN = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0},
    "mixtral": {"num_local_experts": 4},
}  # fmt: skip
LAYOUTS: list[dict[str, int]] = [{}, {"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}]
CPU = torch.device("cpu")


def instance(family: str, **changes: Any) -> Any:
    """A model of a family with weights that are no initial ones: norms and biases too."""
    sizes = {key: SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")} if family == "gpt2" else SIZES
    values = OTHERS.get(family) or {**sizes, **OWN.get(family, {})}
    config = AutoConfig.for_model(family.partition(",")[0], **{**values, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def held(model: Model, layout: dict[str, int]) -> Iterator[tuple[str, int, Tensor, list[Tensor], Any]]:
    """Of every rank: each parameter's name, its tensor, and the boxes it stands for."""
    plan = Plan(model=model.name, **layout)
    sharding = shard(model.facts, plan)
    attention = "own" if "attention plait" in dict(model.facts.cannot) else "plait"
    for rank in range(plan.world):
        stage = StageModel(
            model, sharding, rank, sharding.mesh.coordinate(rank)["pp"], torch.float32, seed=plan.seed,
            attention=attention,
        )  # fmt: skip
        stage.materialise(sharding, rank, plan.seed, CPU, {})
        assert not any(tensor.is_meta for tensor in (*stage.module.parameters(), *stage.module.buffers()))
        for name, tensor in stage.parameters().items():
            parameter = sharding.parameter(name)
            yield name, rank, tensor, list(parameter.boxes(sharding.mesh, rank)), parameter.first.dim


def assert_saved(model: Model, saved: dict[str, Tensor]) -> None:
    """Every rank of every layout has the saved bits; so has the whole model."""
    for layout in LAYOUTS:
        seen = set()
        for name, rank, tensor, boxes, dim in held(model, layout):
            slices = [saved[name][tuple(slice(start, stop) for start, stop in box)] for box in boxes]
            assert torch.equal(tensor, torch.cat(slices, dim) if len(slices) > 1 else slices[0]), (name, layout, rank)
            seen.add(name)
        assert seen == {fact.name for fact in model.facts.parameters}
    whole = dict(WholeModel(model, 7, torch.float32).module.named_parameters())
    assert all(torch.equal(value, saved[name]) for name, value in whole.items())


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["single", "sharded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_rank_holds_the_saved_bits(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    own = instance(family)
    model = read(str(save(own, tmp_path, **options)))
    assert model.weights is not None
    assert model.weights.said.endswith(" safetensors files in fp32" if options else "model.safetensors in fp32")
    assert_saved(model, own.state_dict())
    tokens = torch.arange(24).view(2, 12) % 96
    expected = own.train()(input_ids=tokens).logits
    found = WholeModel(model, 7, torch.float32).forward(Batch.of(torch.cat((tokens, tokens[:, :1]), 1)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", [family for family in OTHERS if "one KV head" not in family])
def test_so_it_does_of_other_families(family: str, tmp_path: Path) -> None:
    """Of a file in the names and pieces that their published weights have."""
    own = instance(family)
    assert_saved(read(str(save(own, tmp_path))), own.state_dict())


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float64, "fp64")]
)
def test_the_type_on_disk_is_converted(dtype: torch.dtype, word: str, tmp_path: Path) -> None:
    own = instance("llama").to(dtype)
    model = read(str(save(own, tmp_path)))
    assert model.weights is not None
    assert model.weights.said == f"model.safetensors in {word}"
    assert_saved(model, {name: value.float() for name, value in own.state_dict().items()})


def test_a_rank_reads_no_more_than_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read(str(save(instance("llama"), tmp_path, max_shard_size="20KB")))
    read_elements: list[int] = []

    class Counting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getitem__(self, index: Any) -> Tensor:
            found: Tensor = self._inner[index]
            read_elements.append(found.numel())
            return found

    opened = real.Reader._open
    monkeypatch.setattr(real.Reader, "_open", lambda self, key: Counting(opened(self, key)))
    kept = [tensor.numel() for name, rank, tensor, _, _ in held(model, {"pp": 2, "tp": 2})]
    assert sorted(read_elements) == sorted(kept)
    assert max(kept) < max(fact.elements for fact in model.facts.parameters)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_weights_under_either_name(kept: str, tmp_path: Path) -> None:
    own = instance("llama", tie_word_embeddings=True)
    file = save(own, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if kept != "both":
        tensors = {key: value for key, value in tensors.items() if key == kept or "layers" in key or "norm" in key}
    save_file(tensors, file, {"format": "pt"})
    assert_saved(read(str(tmp_path)), own.state_dict())


def test_p069_tied_weights_with_two_values_are_refused(tmp_path: Path) -> None:
    folder = save(instance("llama", tie_word_embeddings=True), tmp_path)
    change(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    refused(folder, "different values for model.embed_tokens.weight and lm_head.weight", "tie_word_embeddings to false")


def test_experts_one_by_one_under_old_names_and_stacked(tmp_path: Path) -> None:
    """Mixtral as version 4 saved it (block_sparse_moe.experts.0.w1 ...), as version 5 names it, and half by half."""
    own = instance("mixtral")
    state = {name: value.clone() for name, value in own.state_dict().items()}
    folder = save(own, tmp_path / "old")
    old = load_file(folder / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in old
    assert_saved(read(str(folder)), state)
    shutil.copytree(folder, tmp_path / "new")
    save_file(state, tmp_path / "new" / "model.safetensors", {"format": "pt"})
    assert_saved(read(str(tmp_path / "new")), state)
    shutil.copytree(folder, tmp_path / "renamed")
    renamed = {key.replace("block_sparse_moe", "mlp"): value for key, value in old.items()}
    save_file(renamed, tmp_path / "renamed" / "model.safetensors", {"format": "pt"})
    assert_saved(read(str(tmp_path / "renamed")), state)


def test_a_bare_base_model_gives_a_causal_model_its_body(tmp_path: Path) -> None:
    """Saved without the head's model around it, a tied model's tensors lack the prefix."""
    own = instance("llama", tie_word_embeddings=True)
    save(own.model, tmp_path)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    assert_saved(read(str(tmp_path)), own.state_dict())


def test_tables_that_old_files_hold_are_no_surplus(tmp_path: Path) -> None:
    own = instance("llama")
    folder = save(own, tmp_path)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change(folder, lambda tensors: tensors | table)
    assert_saved(read(str(folder)), own.state_dict())
    gpt2 = save(instance("gpt2"), tmp_path / "gpt2")
    change(gpt2, lambda tensors: tensors | {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)})
    assert read(str(gpt2)).weights is not None


def verdicts(folder: str, layout: dict[str, Any]) -> list[Any]:
    plan = Plan(model=folder, steps=2, seq=12, batch=4, microbatches=2, **layout)
    model = read(folder)
    assert model.weights is not None
    found = prove(plan, model, lambda: awkward_batches(plan, model.facts.vocabulary, 2))
    return [[one.numerics, one.passed, one.steps] for one in found]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_layout_that_starts_from_real_weights_equals_one_process(
    family: str, nursery: Nursery, tmp_path: Path
) -> None:
    own = instance(family, tie_word_embeddings=family == "llama")
    save(own if family == "llama" else own.bfloat16(), tmp_path)
    assert nursery(verdicts, str(tmp_path), {"pp": 2, "tp": 2}) == [["wide", True, 2], ["fp32", True, 1]]


# --- refusals


def change(folder: Path, rewrite: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(rewrite(load_file(file)), file, {"format": "pt"})


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(str(folder))
    sentence = str(caught.value)
    assert all(word in sentence for word in words), sentence
    assert sentence.endswith("."), sentence


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(instance("llama"), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


UP = "model.layers.1.mlp.up_proj.weight"


def without(*keys: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key not in keys}


@pytest.mark.parametrize(
    ("rewrite", "words"),
    [
        (without(UP), ("lacks tensors of this model (1 of 21, the first " + UP, "copy config.json alone")),
        (without(UP, "lm_head.weight"), ("(2 of 21, the first lm_head.weight",)),
        (lambda tensors: tensors | {"model.layers.2.mlp.up_proj.weight": torch.ones(64, 32)},
         ("no place (1 of 22, the first model.layers.2.mlp.up_proj.weight", "describes another model")),
        (lambda tensors: tensors | {UP: torch.ones(48, 32)}, (UP + " is 48 x 32 in ", "config.json makes it 64 x 32")),
        (lambda tensors: tensors | {UP: torch.ones(64, 32, dtype=torch.int8)}, (UP, "stored as I8", "Dequantise")),
        (lambda tensors: tensors | {UP: torch.ones(64, 32).to(torch.float8_e4m3fn)}, ("stored as F8_E4M3",)),
    ],
    ids=["missing", "two missing", "surplus", "shape", "int8", "fp8"],
)  # fmt: skip
def test_tensors_that_do_not_fit(folder: Path, rewrite: Any, words: tuple[str, ...]) -> None:
    change(folder, rewrite)
    refused(folder, *words)


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    folder = save(instance("mixtral"), tmp_path)
    change(folder, without("model.layers.1.block_sparse_moe.experts.2.w3.weight"))
    refused(folder, "model.layers.1.mlp.experts.gate_up_proj", "experts.0.w1.weight", "missing or damaged")
    shutil.rmtree(tmp_path)
    save(instance("mixtral"), tmp_path)
    change(folder, without("model.layers.1.block_sparse_moe.experts.2.w2.weight"))
    refused(folder, "model.layers.1.mlp.experts.down_proj is 3 x 32 x 64", "config.json makes it 4 x 32 x 64")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[:-8], "damaged or cut short"),
        (lambda raw: raw[:40], "damaged or cut short"),
        (lambda raw: b"", "damaged or cut short"),
        (lambda raw: raw + b"more", "damaged or cut short"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "run git lfs pull"),
    ],
    ids=["cut", "cut in the header", "empty", "too long", "git-lfs"],
)
def test_damaged_files(folder: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refused(folder, str(file), words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", ("pytorch_model.bin; plait reads safetensors", "from_pretrained(", "save_pretrained(")),
        ("consolidated.00.pth", ("plait reads safetensors",)),
        ("model-Q4_1.gguf", ('gguf_file="model-Q4_1.gguf"', "GgufConfig(dequantize=True)")),
        ("adapter_model.safetensors", ("has adapter_model.safetensors, but weights are read from model.safetensors",)),
        ("model-00001-of-00002.safetensors", ("download the index too",)),
    ],
)
def test_other_formats(folder: Path, name: str, words: tuple[str, ...]) -> None:
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, *words)


def test_a_config_alone_is_trained_from_random_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert read(str(folder)).weights is None


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    folder = save(instance("llama"), tmp_path, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    right = index.read_text()
    places = json.loads(right)["weight_map"]
    shards = sorted(set(places.values()))
    assert len(shards) > 2

    index.write_text(json.dumps({"weight_map": places | {UP: shards[0]}}))
    refused(folder, f"says that {UP} is in {shards[0]}, where it is not")
    index.write_text(json.dumps({"weight_map": places | {UP: "../elsewhere.safetensors"}}))
    refused(folder, "'../elsewhere.safetensors', which is not a file beside it")
    for text in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "\xff"):
        index.write_text(text, encoding="latin-1")
        refused(folder, "is not an index of weights")
    index.write_text(right)
    (folder / shards[1]).unlink()
    refused(
        folder, f"lacks files that its model.safetensors.index.json names (1 of {len(shards)}, the first {shards[1]})"
    )


# --- the hub, as it is in a cache: no test has a network


def cached(monkeypatch: pytest.MonkeyPatch, folder: Path, cache: Path) -> str:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repo = cache / "models--somebody--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repo / "snapshots" / ("0" * 40))
    return "somebody/tiny"


def test_a_hub_id_brings_its_weights(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = cached(monkeypatch, folder, tmp_path / "cache")
    model = read(name)
    assert model.name == name
    assert model.weights is not None
    assert read(name, weights=False).weights is None


def test_a_hub_id_without_weights(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").unlink()
    name = cached(monkeypatch, folder, tmp_path / "cache")
    with pytest.raises(
        PlanError, match=r"has no weights in safetensors \(the copy that is here, and the hub cannot be"
    ):
        read(name)
    with pytest.raises(PlanError, match="HF_HUB_OFFLINE is set, and no copy of it is here"):
        read("somebody/else")
