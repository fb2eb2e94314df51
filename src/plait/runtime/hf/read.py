"""From a word (preset, directory, hub id) to a config and the weights beside it, and from a config to the facts that the
design wing reads.

The model is built on the meta device, so that a model of any size is read in milliseconds and without memory.
"""

from __future__ import annotations

import copy
import json
import re
import socket
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ...design.errors import PlanError, listed, nearest
from ...design.facts import ModelFacts, ParameterFact
from ...design.styles import STYLES
from . import weights as real
from .after_head import after_head
from .attention import PLAIT
from .families import FAMILIES, ON_OWN_TOKENS, REFUSED
from .files import INDEX, SINGLE
from .initial import find_tied
from .refusals import refuse
from .tensor_plan import cut_dim, forbids, kv_heads, pieces, tensor_plan

BLOCK_LISTS = ("layers", "h", "blocks", "block", "layer")
TOKENIZER = "tokenizer.json"
FROM_HUB = ("config.json", SINGLE, INDEX, "model-*-of-*.safetensors", TOKENIZER, "tokenizer_config.json")
HUB_WAIT_S = 5
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
         "intermediate_size", "max_position_embeddings", "head_dim")  # fmt: skip
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")
"""What configs call the number of experts that a token goes to."""
LARGEST_SIZE = 2**31 - 1


@dataclass(frozen=True)
class Model:
    """A model that has been read, not yet built: its transformers config and its facts; where its weights are (None: they
    are drawn); and its tokenizer.json where it has one."""

    name: str
    config: Any
    facts: ModelFacts
    weights: real.Weights | None = None
    tokenizer: Path | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """The token ids that end a text, by the config."""
        found = getattr(self.config, "eos_token_id", None)
        return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def presets() -> list[str]:
    folder = resources.files(__package__) / "presets"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read(model: str, *, weights: bool = True, vocabulary: int = 0) -> Model:
    """The model named `model`, with a `vocabulary` of more rows than it has where one is given; whatever is wrong with
    the name, the config or the weights is a `PlanError`. Without `weights` they are left alone, and those of the result
    are drawn."""
    config, folder = _config(model, weights)
    refuse(model, config)
    grows_from = config.vocab_size if vocabulary else 0
    if vocabulary:
        _enlarge(model, config, vocabulary)
    found = from_config(model, config)
    if folder is None or not weights:
        return found
    meta = _on_paper(config)
    aliases = {name: f"{tied.owner}.{tied.tensor}" for name, tied in find_tied(meta).items()}
    tokenizer = folder / TOKENIZER
    return replace(
        found,
        weights=real.find(folder, meta, aliases, grows_from=grows_from),
        tokenizer=tokenizer if tokenizer.is_file() else None,
    )


def _enlarge(model: str, config: Any, vocabulary: int) -> None:
    if not config.vocab_size <= vocabulary <= LARGEST_SIZE:
        raise PlanError(
            f"vocabulary {vocabulary} takes rows away from the {config.vocab_size} of {model}: set {config.vocab_size} "
            f"or more, or 0."
        )
    config.vocab_size = vocabulary


def from_config(name: str, config: Any) -> Model:
    """The model of a config whose values are known to be right."""
    try:
        return Model(name, config, _facts(config))
    except PlanError:
        raise
    except Exception as error:  # whatever a class raises about values that its config let through
        raise PlanError(f"transformers cannot build {name} from its config: {said(error)}.") from None


def _config(model: str, weights: bool) -> tuple[Any, Path | None]:
    """The config, and the directory that it stands in."""
    folder = Path(model)
    if model in presets():
        text = (resources.files(__package__) / "presets" / f"{model}.json").read_bytes()
        return _config_from_text(text, model), None
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as error:  # a name too long for the system, say
        raise PlanError(f"The model {model} cannot be read: {(error.strerror or 'unknown error').lower()}.") from None
    if is_folder:
        return _config_from_folder(folder), folder
    if exists:
        raise PlanError(f"{model} is a file; give the directory that holds config.json.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _from_hub(model, weights)
    raise PlanError(
        f"There is no preset or directory '{model}'.{nearest(model, presets())} Presets: {listed(presets())}."
    )


def _from_hub(model: str, weights: bool) -> tuple[Any, Path | None]:
    """The config of a hub id, and with `weights` the directory in the hub's cache that has those and the tokenizer."""
    endpoint = urlsplit(huggingface_hub.constants.ENDPOINT)
    host, port = endpoint.hostname or "", endpoint.port or (80 if endpoint.scheme == "http" else 443)
    offline = "HF_HUB_OFFLINE is set, and no copy of it is here" if huggingface_hub.constants.HF_HUB_OFFLINE else None
    try:
        # Asked first because the hub's client tries for half a minute when there is no network at all.
        if not offline and not getproxies():
            socket.create_connection((host, port), HUB_WAIT_S).close()
    except OSError as error:
        offline = f"{host} cannot be reached: {(error.strerror or str(error)).lower()}, and no copy of it is here"
    alone = offline is not None
    try:
        if weights:
            found = huggingface_hub.snapshot_download(model, allow_patterns=list(FROM_HUB), local_files_only=alone)
            file = Path(found) / "config.json"
        else:
            file = Path(huggingface_hub.hf_hub_download(model, "config.json", local_files_only=alone))
        config = _config_from_text(file.read_bytes(), model)
    except PlanError:
        raise
    except Exception as error:  # the hub's client raises many kinds; each means the same to the user
        raise PlanError(
            f"{model} is not a directory here, and the hub gave no config for it ({offline or said(error)}). "
            f"Presets that need no hub: {listed(presets())}."
        ) from None
    if weights and not any((file.parent / name).is_file() for name in (SINGLE, INDEX)):
        where = "the copy that is here, and the hub cannot be asked," if alone else "the hub"
        raise PlanError(
            f"{model} has no weights in safetensors ({where} holds no {SINGLE} or {INDEX}). To train it from random "
            f"weights, copy {file} alone into a directory."
        )
    return config, file.parent if weights else None


def _config_from_folder(folder: Path) -> Any:
    file = folder / "config.json"
    if not file.is_file():
        raise PlanError(f"{folder} has no config.json.")
    try:
        text = file.read_bytes()
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {(error.strerror or 'unknown error').lower()}.") from None
    return _config_from_text(text, str(file))


def _config_from_text(text: bytes, source: str) -> Any:
    try:
        values = json.loads(text.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{source} is not readable JSON: {said(error)}.") from None
    if not isinstance(values, dict):
        raise PlanError(f"{source} must hold a JSON object, not a {type(values).__name__}.")
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise PlanError(f"{source} has no model_type; a transformers config.json does.")
    if kind in REFUSED:
        raise PlanError(f"{source} has model_type '{kind}', which {REFUSED[kind]}: this version does not lay it out.")
    if kind not in FAMILIES:
        raise PlanError(
            f"{source} has model_type '{kind}'; this version has proven {listed(FAMILIES)} only.{nearest(kind, FAMILIES)}"
        )
    for key in SIZES:
        # null stands for a family's own choice where it has one.
        size = values.get(key)
        if size is not None and not (type(size) is int and 1 <= size <= LARGEST_SIZE):
            raise PlanError(f"{source} has {key} {size!r}; it must be a whole number from 1 to {LARGEST_SIZE:,}.")
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # validation inside transformers raises many kinds
        raise PlanError(f"transformers does not accept {source}: {said(error)}.") from None


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")


def said(error: BaseException) -> str:
    """An error's message on one line, no longer than a sentence may be."""
    # A KeyError prints the repr of what was looked for.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    text = " ".join(text.split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def build_on_meta(config: Any, *, attention: str = "plait") -> Any:
    """The whole model (a PreTrainedModel) as transformers writes it, without memory. `attention` is "plait" for plait's
    one function (attention.py), or "own" for the model's: sdpa where its class takes it, else eager."""
    with torch.device("meta"):
        if attention == "plait":
            return _from(config, PLAIT).train()
        # Dropout inside sdpa is drawn by its kernel, and depends on the layout.
        if attention_dropout(config):
            return _from(config, "eager").train()
        try:
            return _from(config, "sdpa").train()
        except ValueError:
            return _from(config, "eager").train()


def _on_paper(config: Any) -> Any:
    """The model of which facts are read: some classes do not know what another's attention is."""
    return build_on_meta(config, attention="own" if forbids(config, "attention plait") else "plait")


def attention_dropout(config: Any) -> float:
    inside = getattr(config, "attn_config", None)  # MPT's
    places = ((config, "attention_dropout"), (config, "attn_pdrop"), (inside, "attn_pdrop"))
    return next((float(share) for where, name in places if (share := getattr(where, name, None))), 0.0)


def _from(config: Any, attention: str) -> Any:
    # A copy: from_config writes the names of the implementations into the config that it is given.
    return AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention, experts_implementation="eager"
    )


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


def _facts(config: Any) -> ModelFacts:
    model = _on_paper(config)
    blocks_name, blocks = find_blocks(model)
    plan = tensor_plan(model, config)
    found: dict[int, ParameterFact] = {}
    after_blocks = False
    for module_name, module in model.named_modules():
        after_blocks = after_blocks or module_name == blocks_name
        inside = re.match(rf"{re.escape(blocks_name)}\.(\d+)\.", module_name + ".")
        parent = model.get_submodule(module_name.rpartition(".")[0])
        for tensor_name, tensor in module.named_parameters(recurse=False):
            if id(tensor) in found:
                first = found[id(tensor)]
                found[id(tensor)] = replace(first, tied=(*first.tied, (module_name, plan.style(module_name))))
                continue
            dim = cut_dim(plan, module_name, module, tensor_name, tensor)
            own = plan.style_of(module_name, tensor_name)
            found[id(tensor)] = ParameterFact(
                module=module_name,
                tensor=tensor_name,
                shape=tuple(tensor.shape),
                block=int(inside[1]) if inside else None,
                after_blocks=after_blocks or module_name in plan.after,
                # One that is not known is named as what refuses, also where only a tensor has it.
                style=plan.style(module_name) if own in STYLES else own,
                cut=dim,
                pieces=pieces(plan, module_name, module, parent, tensor_name, tensor, dim, config),
                reads=plan.read_by(module_name),
                decays=tensor.dim() > 1,
                looked_up=isinstance(module, nn.Embedding),
            )
    return ModelFacts(
        family=config.model_type,
        blocks=len(blocks),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=kv_heads(config),
        vocabulary=config.vocab_size,
        positions=_positions(config),
        head=next(name for name, module in model.named_modules() if module is model.get_output_embeddings()),
        parameters=tuple(sorted(found.values(), key=_turn)),
        experts_per_token=next((int(n) for name in CHOSEN if (n := getattr(config, name, None))), 0),
        attention_dropout=attention_dropout(config),
        whole_logits=_whole_logits(model, blocks, plan.tuples),
        cannot=tuple(plan.cannot.items()),
        shared_keys=int(getattr(config, "qk_rope_head_dim", 0) or 0),
        whole_rows=""
        if config.model_type in ON_OWN_TOKENS
        else f"blocks of {config.model_type} are not proven with it",
    )


def _turn(fact: ParameterFact) -> int:
    """Before the blocks, in them, or after them."""
    return 1 if fact.block is not None else 2 * fact.after_blocks


def _whole_logits(model: Any, blocks: nn.ModuleList, tuples: bool) -> str:
    """Why logits of this class have to be whole; empty if they need not. In bf16, where a cast to fp32 shows."""
    found = after_head(model.to(torch.bfloat16), blocks, tuples=tuples)
    return f"{type(model).__name__} {found.why}" if found.why else ""


def _positions(config: Any) -> int:
    """How long a row may be. Beyond its original positions longrope turns all rows of a microbatch at frequencies that
    follow from the longest of them, so that the numbers would depend on how a batch is cut. Where neither a table nor a
    field bounds them (ALiBi), nothing does."""
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or LARGEST_SIZE
    rope, positions = getattr(config, "rope_parameters", None) or {}, int(most)
    if rope.get("rope_type") != "longrope":
        return positions
    return min(positions, int(rope.get("original_max_position_embeddings") or positions))
