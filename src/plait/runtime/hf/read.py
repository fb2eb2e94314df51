"""From a word (preset, directory, hub id) to a config, and from a config to the facts that the design wing reads.

The model is built on the meta device, so that a model of any size is read in milliseconds and without memory.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ...design.errors import PlanError, listed, nearest
from ...design.facts import ModelFacts, ParameterFact
from ...design.styles import style

FAMILIES = ("llama",)
"""Families that plait has proven. Others come with the checks that prove them."""

BLOCK_LISTS = ("layers", "h", "blocks", "block", "layer")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


@dataclass(frozen=True)
class Model:
    """A model that has been read, not yet built: its transformers config and its facts."""

    name: str
    config: Any
    facts: ModelFacts


def presets() -> list[str]:
    folder = resources.files(__package__) / "presets"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read(model: str) -> Model:
    """The model named `model`; whatever is wrong with the name or the config is a `PlanError`."""
    config = _config(model)
    _refuse_what_is_not_proven(model, config)
    try:
        return Model(model, config, _facts(config))
    except (ValueError, TypeError, ZeroDivisionError, RuntimeError, AttributeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"transformers cannot build {model} from its config: {_first_line(error)}.") from None


def _config(model: str) -> Any:
    folder = Path(model)
    if model in presets():
        text = (resources.files(__package__) / "presets" / f"{model}.json").read_text()
        return _config_from(json.loads(text), model)
    if folder.is_dir():
        return _config_from_folder(folder)
    if folder.exists():
        raise PlanError(f"{model} is a file; give the directory that holds config.json.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        try:
            return AutoConfig.from_pretrained(model)
        except Exception as error:  # the hub client raises many kinds; each means the same to the user
            raise PlanError(
                f"{model} is not a directory here, and the hub gave no config for it ({_first_line(error)}). "
                f"Presets that need no hub: {listed(presets())}."
            ) from None
    raise PlanError(
        f"There is no preset or directory '{model}'.{nearest(model, presets())} Presets: {listed(presets())}."
    )


def _config_from_folder(folder: Path) -> Any:
    file = folder / "config.json"
    if not file.is_file():
        raise PlanError(f"{folder} has no config.json.")
    weights = sorted(found.name for pattern in WEIGHTS for found in folder.glob(pattern))
    if weights:
        raise PlanError(
            f"{folder} holds weights ({weights[0]}), which this version cannot load yet; it trains from random "
            f"weights only. Copy config.json alone into a directory to do that."
        )
    try:
        values = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise PlanError(f"{file} is not readable JSON: {_first_line(error)}.") from None
    if not isinstance(values, dict):
        raise PlanError(f"{file} must hold a JSON object, not a {type(values).__name__}.")
    return _config_from(values, str(file))


def _config_from(values: dict[str, Any], source: str) -> Any:
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise PlanError(f"{source} has no model_type; a transformers config.json does.")
    try:
        return AutoConfig.for_model(kind, **{k: v for k, v in values.items() if k != "model_type"})
    except Exception as error:  # validation inside transformers raises many kinds
        raise PlanError(f"transformers does not accept {source}: {_first_line(error)}.") from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _refuse_what_is_not_proven(model: str, config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise PlanError(f"{model} is a '{config.model_type}' model; this version has proven {listed(FAMILIES)} only.")
    if config.tie_word_embeddings:
        raise PlanError(
            f"{model} ties its embedding and its head, which this version does not lay out yet: set "
            f"tie_word_embeddings to false in its config.json."
        )
    if config.attention_dropout:
        raise PlanError(
            f"{model} has attention_dropout {config.attention_dropout}, whose numbers would depend on the layout in "
            f"this version: set it to 0 in its config.json."
        )
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
             "intermediate_size", "max_position_embeddings")  # fmt: skip
    for key in sizes:
        value = getattr(config, key, None)
        if not isinstance(value, int) or value < 1:
            raise PlanError(f"{model} has {key} {value!r}; it must be a whole number of at least 1.")
    if config.num_attention_heads % config.num_key_value_heads:
        raise PlanError(
            f"{model} has {config.num_attention_heads} heads in groups for {config.num_key_value_heads} KV heads, "
            f"which does not divide."
        )


def build_on_meta(config: Any) -> Any:
    """The whole model (a PreTrainedModel) as transformers writes it, without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model.train()


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """The list of decoder blocks: the shallowest list with a usual name, the one with most parameters among equals."""
    found = [
        (name.count("."), -sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in BLOCK_LISTS
    ]
    if not found:
        raise PlanError(f"{type(model).__name__} has no list of decoder blocks that plait knows how to find.")
    _, _, name, module = min(found, key=lambda entry: entry[:3])
    return name, module


def tensor_plan(model: Any, config: Any) -> dict[str, str]:
    """Style by module name pattern ('*' stands for a block's number), as the family's config and class state it."""
    prefix = model.base_model_prefix
    plan = {f"{prefix}.{name}": value for name, value in (config.base_model_tp_plan or {}).items()}
    plan |= getattr(type(model), "_tp_plan", None) or {}
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    # transformers adds this to every plan since 5.20; before that the plan leaves the embedding whole.
    return {embedding: "embedding_rowwise", **plan} if plan else {}


def _facts(config: Any) -> ModelFacts:
    model = build_on_meta(config)
    blocks_name, blocks = find_blocks(model)
    patterns = {
        re.compile(re.escape(pattern).replace(r"\*", r"\d+")): name
        for pattern, name in tensor_plan(model, config).items()
    }
    parameters: list[ParameterFact] = []
    after_blocks = False
    for module_name, module in model.named_modules():
        after_blocks = after_blocks or module_name == blocks_name
        inside = re.match(rf"{re.escape(blocks_name)}\.(\d+)\.", module_name + ".")
        found = next((name for pattern, name in patterns.items() if pattern.fullmatch(module_name)), None)
        parent = model.get_submodule(module_name.rpartition(".")[0])
        for tensor_name, tensor in module.named_parameters(recurse=False):
            parameters.append(
                ParameterFact(
                    module=module_name,
                    tensor=tensor_name,
                    shape=tuple(tensor.shape),
                    block=int(inside[1]) if inside else None,
                    after_blocks=after_blocks,
                    style=found,
                    quantum=_quantum(found, module_name, tensor_name, tensor.shape, parent, config),
                    # In the proven families modules side by side under one parent read one input.
                    reads=f"{module_name.rpartition('.')[0] or module_name} input",
                    decays=tensor.dim() > 1,
                )
            )
    return ModelFacts(
        family=config.model_type,
        blocks=len(blocks),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        parameters=tuple(parameters),
    )


def _quantum(name: str | None, module: str, tensor: str, shape: torch.Size, parent: nn.Module, config: Any) -> int:
    """Elements of the cut dim that stay together: in attention, one KV head with the query heads that read it."""
    if name is None or not hasattr(parent, "head_dim"):
        return 1
    dim = style(name, module).cut_dim(tensor)
    return 1 if dim is None else shape[dim] // config.num_key_value_heads
