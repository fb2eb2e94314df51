"""A model's tensor plan: which style each of its modules has, what its fused tensors are made of, and which attributes of
its modules count what tp cuts.

Most families state their styles in their transformers config, which is taken as data. plans/FAMILY.toml adds what a
config leaves unsaid, or stands in its place.
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
from ...design.styles import STYLES


@dataclass(frozen=True)
class TensorPlan:
    """Patterns of names, '*' standing for a block's number: to styles, names of pieces, names of attributes."""

    styles: dict[str, str]
    pieces: dict[str, list[str]]
    local: dict[str, list[str]]

    def style(self, name: str) -> str | None:
        """The style of a module, or of a tensor that has one of its own."""
        found: str | None = _matching(self.styles, name)
        return found

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
    own = _own_file(config.model_type)
    if "styles" in own:
        return TensorPlan(own["styles"], own.get("pieces", {}), own.get("local", {}))
    prefix = model.base_model_prefix
    styles = {f"{prefix}.{name}": value for name, value in (config.base_model_tp_plan or {}).items()}
    styles |= getattr(type(model), "_tp_plan", None) or {}
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    # transformers adds this to every plan since 5.20; before that the plan leaves the embedding whole.
    styles = {embedding: "embedding_rowwise", **styles} if styles else {}
    return TensorPlan(styles, own.get("pieces", {}), own.get("local", {}))


def _own_file(family: str) -> dict[str, Any]:
    file = resources.files(__package__) / "plans" / f"{family}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def cut_dim(plan: TensorPlan, module_name: str, module: nn.Module, tensor_name: str, tensor: Tensor) -> int | None:
    """The dim of a tensor that tp cuts. A style that is not known cuts nothing here: it is refused by name where it would
    be used, at tp > 1."""
    name = plan.style(f"{module_name}.{tensor_name}") or plan.style(module_name)
    side = STYLES[name].cuts if name in STYLES else "none"
    if side not in ("out", "in"):
        return None
    if tensor.dim() == 1:
        return 0 if side == "out" else None
    if type(module).__name__ == "Conv1D":  # its weight is [in, out]
        return 1 if side == "out" else 0
    return tensor.dim() - (2 if side == "out" else 1)


def pieces(
    plan: TensorPlan, module_name: str, module: nn.Module, parent: nn.Module, tensor: Tensor, dim: int | None, config: Any
) -> tuple[Piece, ...]:  # fmt: skip
    """What the cut dim is made of. In attention a KV head stays together with the query heads that read it."""

    def piece(name: str, length: int) -> Piece:
        if not groups:
            return Piece(name, length)
        width: int = parent.head_dim  # type: ignore[assignment]
        return Piece(name, length, length // groups, min(width, length // groups))

    if dim is None:
        return (Piece("", tensor.shape[0] if tensor.dim() else 1),)
    groups = kv_heads(config) if hasattr(parent, "head_dim") else None
    length = tensor.shape[dim]
    names = plan.pieces_of(module_name)
    on_output_side = tensor.dim() == 1 or dim == (1 if type(module).__name__ == "Conv1D" else tensor.dim() - 2)
    if names is None or not on_output_side:
        return (piece("", length),)
    lengths = [length // len(names)] * len(names)
    if names == ["q", "k", "v"]:
        one = length // (config.num_attention_heads + 2 * kv_heads(config))
        lengths = [config.num_attention_heads * one, kv_heads(config) * one, kv_heads(config) * one]
    return tuple(piece(name, size) for name, size in zip(names, lengths, strict=True))


def kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
