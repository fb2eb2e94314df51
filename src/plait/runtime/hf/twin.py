"""The twin of a model: the same class and the same choices, shrunk until a check of its layout takes seconds.

A twin has to meet the same divisions, or it would pass where the model fails. So a size goes down to the smallest value,
from some least one on, that leaves the same remainder when divided by the degree that cuts it:

    80 blocks over pp 4          8     two a stage
    30 blocks over pp 4          10    3, 3, 2 and 2, as 8, 8, 7 and 7 were
    8 KV heads of 64 over tp 2   4     heads stay eight a KV head: 32
    50257 rows over tp 2         65    still odd, so still refused

Where patterns of names say which blocks are frozen, blocks of the twin are frozen as those that they stand for. Where the
blocks are not dealt evenly, each stage keeps its place among the sizes: 1, 8, 8 and 20 blocks become 1, 3, 3 and 4, and
the twin's plan says so.

What no one cuts becomes as small as its class lets it. What shapes no tensor stays: activations, biases, rotary
parameters, windows, positions. A size that is small already stays as it is, and so does a model that is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...design import frozen
from ...design.balance import UNIFORM, WORDS, refusal, written
from ...design.plan import Plan, stage_blocks
from .read import Model, from_config
from .tensor_plan import kv_heads

SMALL_MODEL = 2**20
"""Elements (1 MB of fp32) up to which a model is its own twin."""
LEAST = {"blocks": 2, "kv heads": 2, "head": 8, "hidden": 32, "mlp": 32, "vocabulary": 64, "experts": 4, "rank": 16}
MLP_WIDTHS = ("intermediate_size", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim",
              "ffn_hidden_size")  # fmt: skip
INNER_WIDTHS = {"qk_nope_head_dim": "head", "qk_rope_head_dim": "head", "v_head_dim": "head",
                "q_lora_rank": "rank", "kv_lora_rank": "rank"}  # fmt: skip


@dataclass(frozen=True)
class Twin:
    """The shrunk model, under the name of the one it stands for, the plan for it, and what was shrunk: "num_hidden_layers
    80 -> 8"."""

    model: Model
    plan: Plan
    shrunk: tuple[str, ...]


def twin(model: Model, plan: Plan) -> Twin:
    """The twin of `model` under `plan`. Every rule that `plan` keeps or breaks with the model, its own plan does with the
    twin."""
    if model.facts.elements <= SMALL_MODEL:
        return Twin(model, plan, ())
    dealt = plan
    if plan.balance in WORDS and plan.balance != UNIFORM and plan.stages <= model.facts.blocks:
        # The model's stages are what is checked, and the twin's own sizes would deal other ones.
        dealt = _dealing(plan, [stop - start for start, stop in stage_blocks(plan, model.facts)])
    config, lines = shrink(model.config, dealt)
    if not lines:
        return Twin(model, plan, ())
    if sizes := _sizes(model.config, dealt):
        dealt = _dealing(plan, sizes)
        lines = (f"balance {plan.balance} -> {dealt.balance}", *lines)
    small = from_config(model.name, config)
    if any(letter.isdigit() for letter in plan.freeze + plan.train_only):
        # Patterns that name blocks: what is frozen of the model's is frozen of those that stand for them.
        names = frozen.carried(plan.freeze, plan.train_only, model.facts, small.facts)
        dealt = dealt.model_copy(update={"freeze": names, "train_only": ""})
        count = len(frozen.patterns(names))
        lines = (f"frozen as in the model: {count} of {len(small.facts.parameters)} tensors", *lines)
    return Twin(small, dealt, lines)


def _dealing(plan: Plan, sizes: list[int]) -> Plan:
    return plan.model_copy(update={"balance": ",".join(map(str, sizes))})


def shrink(config: Any, plan: Plan) -> tuple[Any, tuple[str, ...]]:
    """A shrunk copy of a transformers config, of any decoder's class, and a line for each value that differs."""
    wanted = _blocks(config, plan) | _attention(config, plan) | _experts(config)
    vocabulary = _smallest(config.vocab_size, max(LEAST["vocabulary"], 2 * plan.tp), math.lcm(plan.tp, 8))
    wanted |= {"vocab_size": vocabulary} | _token_ids(config, vocabulary)
    for key in MLP_WIDTHS:
        if getattr(config, key, None) is not None:
            least = max(LEAST["mlp"], 2 * plan.tp)
            wanted[key] = _smallest(getattr(config, key), least, math.lcm(plan.tp, 2))
    names = config.attribute_map or {}
    changes = {names.get(key, key): value for key, value in wanted.items() if value != getattr(config, key)}
    lines = tuple(f"{key} {_size(getattr(config, key))} -> {_size(value)}" for key, value in changes.items())
    return type(config).from_dict(config.to_dict() | changes), lines


def _smallest(size: int, least: int, degree: int) -> int:
    """The smallest value from `least` on that leaves the remainder of `size` when divided by `degree`, or `size`."""
    return next((value for value in range(least, size) if value % degree == size % degree), size)


def _blocks(config: Any, plan: Plan) -> dict[str, Any]:
    """Fewer blocks, of every kind at least one, and the lists that say each block's kind cut to those that are kept."""
    blocks, lists = config.num_hidden_layers, _lists(config)
    dense = getattr(config, "first_k_dense_replace", None)
    firsts = _first_of_each_kind(config)
    sizes = _sizes(config, plan)
    if sizes:
        count = sum(sizes)
    else:
        count = _smallest(blocks, max(LEAST["blocks"], 2 * plan.stages, len(firsts)), plan.stages)
    others = (index for index in range(blocks) if index not in firsts.values())
    kept = sorted([*firsts.values(), *itertools.islice(others, count - len(firsts))])
    found: dict[str, Any] = {"num_hidden_layers": count}
    if dense is not None:
        found["first_k_dense_replace"] = sum(index < dense for index in kept)
    return found | {key: [value[index] for index in kept] for key, value in lists.items()}


def _lists(config: Any) -> dict[str, list[Any]]:
    """The values of a config that have an entry for each block."""
    return {
        key: value
        for key, value in config.to_dict().items()
        if "layer" in key and isinstance(value, list) and len(value) == config.num_hidden_layers
    }


def _first_of_each_kind(config: Any) -> dict[tuple[Any, ...], int]:
    """The first block of each kind."""
    dense = getattr(config, "first_k_dense_replace", None) or 0
    lists = _lists(config).values()
    kinds = [(index < dense, *(str(value[index]) for value in lists)) for index in range(config.num_hidden_layers)]
    return {kind: index for index, kind in reversed(list(enumerate(kinds)))}


def _sizes(config: Any, plan: Plan) -> list[int]:
    """The blocks of each stage of the twin where the plan writes out the model's, and these add up; else none. The least
    such sizes, 2 and more where the model's are, that are in the same order and leave room for every kind of block."""
    sizes = written(plan.balance)
    if sizes is None or refusal(plan.balance, plan.stages, config.num_hidden_layers):
        return []
    places = {size: place for place, size in enumerate(sorted(set(sizes)))}
    kinds = len(_first_of_each_kind(config))
    fewer = ([min(size, least + places[size]) for size in sizes] for least in itertools.count(2))
    return next(found for found in fewer if sum(found) >= kinds)


def _attention(config: Any, plan: Plan) -> dict[str, Any]:
    """Fewer and narrower heads, the query heads of a KV head all kept, and a narrower hidden state."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    groups = kv_heads(config)
    fewer = _smallest(groups, max(LEAST["kv heads"], 2 * plan.tp), plan.tp)
    shares = fewer * (heads // groups)
    found: dict[str, Any] = {"num_attention_heads": shares}
    if hasattr(config, "num_key_value_heads"):
        found["num_key_value_heads"] = fewer
    if hasattr(config, "num_kv_heads"):  # Falcon's, which counts groups in its newer architecture
        found["num_kv_heads"] = fewer if config.new_decoder_architecture else shares
    own_width = config.to_dict().get("head_dim")
    width = own_width or hidden // heads
    if own_width is None:
        narrow = _head_width(config, width, shares, plan.tp)
        found["hidden_size"] = shares * narrow
    else:
        narrow = found["head_dim"] = _head_width(config, width)
        multiple = (
            shares if hidden % heads == 0 else 1
        )  # Llama's config insists on it though the width is its own field
        found["hidden_size"] = next(
            size
            for size in itertools.count(min(LEAST["hidden"], hidden * shares // heads))
            if size % multiple == 0 and size % plan.tp == hidden % plan.tp
        )
    if getattr(config, "word_embed_proj_dim", None) == hidden:
        found["word_embed_proj_dim"] = found["hidden_size"]
    if getattr(config, "rotary_dim", None):
        found["rotary_dim"] = max(2, config.rotary_dim * narrow // width // 2 * 2)
    if getattr(config, "query_pre_attn_scalar", None) == width:
        found["query_pre_attn_scalar"] = narrow
    if getattr(config, "rope_parameters", None) is not None:
        found["rope_parameters"] = _rotary(config.rope_parameters, width, narrow)
    return found | _latent_attention(config)


def _latent_attention(config: Any) -> dict[str, Any]:
    """The widths of heads that are made of parts, and the ranks of the products that make them (DeepSeek's MLA)."""
    found = {
        key: min(getattr(config, key), LEAST[least])
        for key, least in INNER_WIDTHS.items()
        if getattr(config, key, None) is not None
    }
    if "qk_rope_head_dim" in found:
        derived = {
            "head_dim": found["qk_rope_head_dim"],
            "qk_head_dim": found["qk_nope_head_dim"] + found["qk_rope_head_dim"],
        }
        found |= {key: value for key, value in derived.items() if hasattr(config, key)}
    return found


def _head_width(config: Any, width: int, heads: int = 1, tp: int = 1) -> int:
    """A narrow head that can be turned in pairs when the wide one can, also where only a part of it is turned. `heads` of
    them divide over `tp` as those of the wide ones do."""
    shares = list(_shares(config.to_dict()))

    def alike(value: int) -> bool:
        turned = all(int(value * share) > 0 and int(value * share) % 2 == int(width * share) % 2 for share in shares)
        return turned and value % 2 == width % 2 and (heads * value - heads * width) % tp == 0

    return next((value for value in range(LEAST["head"], width) if alike(value)), width)


def _shares(values: dict[str, Any]) -> Iterator[float]:
    """Every partial_rotary_factor in a config, also those of one kind of block."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _shares(value)
        elif key == "partial_rotary_factor" and value is not None:
            yield value


def _rotary(parameters: dict[str, Any], width: int, narrow: int, share: float = 1.0) -> dict[str, Any]:
    """The same rotary parameters; lists with a factor for each pair of a head lose the factors of pairs that are gone."""
    share = parameters.get("partial_rotary_factor") or share
    pairs, fewer = int(width * share) // 2, int(narrow * share) // 2
    found: dict[str, Any] = {}
    for key, value in parameters.items():
        if isinstance(value, dict):
            value = _rotary(value, width, narrow, share)
        elif isinstance(value, list) and len(value) == pairs:
            value = [value[index * pairs // fewer] for index in range(fewer)]
        found[key] = value
    return found


def _experts(config: Any) -> dict[str, Any]:
    """Fewer experts, in the same number of groups, enough for the router to choose as many as before and leave some."""
    key = next((key for key in ("num_experts", "num_local_experts", "n_routed_experts") if hasattr(config, key)), None)
    experts = getattr(config, key, None) if key else None
    if key is None or not experts:
        return {}
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    groups = getattr(config, "n_group", None) or 1
    open_groups = getattr(config, "topk_group", None) or groups
    least = max(LEAST["experts"], 2 * chosen, 2 * groups, -(-chosen * groups // open_groups))
    return {key: _smallest(experts, least, groups)}


def _token_ids(config: Any, vocabulary: int) -> dict[str, Any]:
    """Special tokens that are beyond the new vocabulary become its last one; an embedding insists on its padding."""
    found: dict[str, Any] = {}
    for key, value in sorted(config.to_dict().items()):
        if key.endswith("_token_id") and isinstance(value, int):
            found[key] = min(value, vocabulary - 1)
        elif key.endswith("_token_id") and isinstance(value, list):
            found[key] = [min(token, vocabulary - 1) for token in value]
    return found


def _size(value: Any) -> str:
    """A value as a line gives it; of a list or a table its length says enough."""
    if isinstance(value, list):
        return f"of {len(value)}"
    return "of longer lists" if isinstance(value, dict) else str(value)
