"""A model's tensor plan: which style each of its modules has, what its fused tensors are made of, which attributes of its
modules count what tp cuts; and what else its class asks of whoever lays it out.

Most families state their styles in their transformers config, which is taken as data. plans/FAMILY.toml adds what a
config leaves unsaid, or stands in its place:

    tuples = true                     blocks give a tuple, whose first is the hidden state
    after = [...]                     modules after the blocks
    [styles] [pieces] and so on       module = what TensorPlan says of it
    [when."FIELD".styles] and so on   more of it, where the config has FIELD true; "not FIELD", "FIELD and not FIELD"
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from torch import Tensor, nn

from ...design.facts import Piece
from ...design.styles import STYLES, Style

SECTIONS = ("styles", "pieces", "local", "reads", "masks", "heads", "cannot")


@dataclass(frozen=True)
class TensorPlan:
    """Patterns of names, '*' standing for a block's number: to styles; names of pieces; names of attributes; a word for
    what is read (modules of one block with the same one, or below it, read one tensor); the kind of mask that plait gives
    an attention ("added" to the scores, or what is "hidden"); and the arguments that are made for every head.
    `after` names modules that come after the blocks, though their class makes them before them. `cannot` says why a field
    of a plan ("tp" above 1, "attention plait") does not go with the model; `tuples` whether its blocks give tuples."""

    styles: dict[str, str]
    pieces: dict[str, list[str]]
    local: dict[str, list[str]]
    reads: dict[str, str]
    masks: dict[str, str]
    heads: dict[str, dict[str, str]]
    cannot: dict[str, str]
    tuples: bool = False
    after: tuple[str, ...] = ()

    def style(self, name: str) -> str | None:
        """The style of a module, or of a tensor that has one of its own."""
        found: str | None = _matching(self.styles, name)
        return found

    def style_of(self, module: str, tensor: str) -> str | None:
        """The style by which a tensor is cut: its own, or its module's."""
        return self.style(f"{module}.{tensor}") or self.style(module)

    def row(self, module: str, tensor: str) -> Style | None:
        """Of that style. One that is not known cuts nothing: it is refused by name where it would be used, at tp > 1."""
        return STYLES.get(self.style_of(module, tensor) or "")

    def read_by(self, module: str) -> str:
        """What a module reads, in a word: what its parent does, where the plan gives none."""
        parent = module.rpartition(".")[0]
        found: str | None = _matching(self.reads, module) or _matching(self.reads, parent)
        block = re.match(r"(.*?\.\d+)\.", module)
        return f"{block[1]} {found}" if found and block else f"{parent or module} input"

    def cuts_heads(self, module: str, attention: nn.Module) -> bool:
        """Whether each tp rank has heads of its own of an attention; where what it is given is gathered, it has all."""
        rows = [self.row(f"{module}.{name}", "weight") for name, _ in attention.named_children()]
        return any(row is not None and (row.cuts, row.leave) == ("out", "none") for row in rows)

    def mask_of(self, module: str) -> str | None:
        found: str | None = _matching(self.masks, module)
        return found

    def heads_of(self, module: str) -> dict[str, str]:
        return _matching(self.heads, module) or {}

    def pieces_of(self, module: str) -> list[str] | None:
        found: list[str] | None = _matching(self.pieces, module)
        return found

    def local_to(self, module: str) -> list[str]:
        """Attributes of a module instance that count what tp cuts: 'num_heads', or 'config.num_attention_heads' for one
        of a copy of the config that only this instance sees."""
        return _matching(self.local, module) or []


def _matching(patterns: dict[str, Any], name: str) -> Any:
    return next((value for pattern, value in patterns.items() if _compiled(pattern).fullmatch(name)), None)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def tensor_plan(model: Any, config: Any) -> TensorPlan:
    """The plan of an instance of a family's class."""
    own = _own_file(config.model_type, config)
    if not own["styles"]:
        prefix = model.base_model_prefix
        styles = {f"{prefix}.{name}": value for name, value in (config.base_model_tp_plan or {}).items()}
        styles |= getattr(type(model), "_tp_plan", None) or {}
        names = {id(module): name for name, module in model.named_modules()}
        embedding, head = names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]
        # transformers adds the first to every plan since 5.20, and some plans leave out their head.
        ends = {embedding: "embedding_rowwise", head: "colwise_gather_output"}
        own["styles"] = ends | styles if styles else {}
    return TensorPlan(**own)


def forbids(config: Any, choice: str) -> bool:
    """Whether a choice of a plan ("attention plait") does not go with the models of a config."""
    return choice in _own_file(config.model_type, config)["cannot"]


def _own_file(family: str, config: Any) -> dict[str, Any]:
    """The sections of the family's file, as they are for a config."""
    file = resources.files(__package__) / "plans" / f"{family}.toml"
    read = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = {section: dict(read.get(section, {})) for section in SECTIONS}
    for condition, more in read.get("when", {}).items():
        terms = [term.rpartition(" ") for term in condition.split(" and ")]
        if all(bool(getattr(config, field)) is not bool(negation) for negation, _, field in terms):
            for section, values in more.items():
                found[section] |= values
    return {**found, "tuples": read.get("tuples", False), "after": tuple(read.get("after", ()))}


def cut_dim(plan: TensorPlan, module_name: str, module: nn.Module, tensor_name: str, tensor: Tensor) -> int | None:
    """The dim of a tensor that tp cuts."""
    row = plan.row(module_name, tensor_name)
    if row is None or row.cuts not in ("out", "in"):
        return None
    side = row.cuts
    if tensor.dim() == 1:
        return 0 if side == "out" else None
    if type(module).__name__ == "Conv1D":  # its weight is [in, out]
        return 1 if side == "out" else 0
    return tensor.dim() - (2 if side == "out" else 1)


def pieces(
    plan: TensorPlan, module_name: str, module: nn.Module, parent: nn.Module, tensor_name: str, tensor: Tensor,
    dim: int | None, config: Any,
) -> tuple[Piece, ...]:  # fmt: skip
    """What the cut dim is made of. In attention a KV head stays together with the query heads that read it."""

    def piece(name: str, length: int) -> Piece:
        if not groups:
            return Piece(name, length)
        quantum, queries = length // groups, config.num_attention_heads // groups
        width = getattr(parent, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # A number a head, or as wide as the queries of a group: cut by the head, where keys and values are copied.
        if tensor_name not in ("weight", "bias") or quantum == queries * width:
            return Piece(name, length, quantum, quantum // queries)
        return Piece(name, length, quantum, quantum if quantum == width else None)

    if dim is None:
        return (Piece("", tensor.shape[0] if tensor.dim() else 1),)
    row = plan.row(module_name, tensor_name)
    assert row is not None
    # Where the way in is gathered and the way out takes slices, attention is whole on every rank.
    cut_by_heads = row.leave != "gather" and row.enter != "slice"
    groups = kv_heads(config) if cut_by_heads and (_attends(parent) or _attends(module)) else None
    length = tensor.shape[dim]
    names = plan.pieces_of(module_name) or ["gate", "up"]
    if not row.packed:
        return (piece("", length),)
    lengths = [length // len(names)] * len(names)
    if names == ["q", "k", "v"]:
        one = length // (config.num_attention_heads + 2 * kv_heads(config))
        lengths = [config.num_attention_heads * one, kv_heads(config) * one, kv_heads(config) * one]
    return tuple(piece(name, size) for name, size in zip(names, lengths, strict=True))


def _attends(module: nn.Module) -> bool:
    return hasattr(module, "head_dim") or type(module).__name__.endswith("Attention")


def kv_heads(config: Any) -> int:
    newer = getattr(config, "new_decoder_architecture", False)  # Falcon's
    if getattr(config, "multi_query", False) and not newer:
        return 1
    found = config.num_kv_heads if newer else getattr(config, "num_key_value_heads", None)
    return int(found or config.num_attention_heads)
