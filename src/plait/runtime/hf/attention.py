"""plait's one attention, under the name that a model's config selects it by, and the masks for a model's own.

    q kᵀ x scaling  ->  soft cap  ->  mask: back only, own document, own window  ->  softmax  ->  dropout  ->  x v

Models hand over queries [b, heads, s, d], keys and values [b, kv heads, s, d]; with tp these are a rank's own heads.
Which tokens may see each other follows from the batch, which the module's `Sight` holds: no mask travels through the
model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from ..batch import Batch
from .dropout import keyed

PLAIT = "plait"


class Sight:
    """Which tokens of the batch at hand see each other: one for all attention modules of a model. Masks are made once a
    microbatch and window."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._masks: dict[int | None, Tensor | None] = {}

    def look_at(self, batch: Batch) -> None:
        if self._batch is not batch:
            self._batch = batch
            self._masks = {}

    def mask(self, window: int | None) -> Tensor | None:
        """None where plain causal attention is right, else [b, 1, s, s], true where a token may look."""
        assert self._batch is not None
        if window not in self._masks:
            self._masks[window] = visible(self._batch, window)
        return self._masks[window]

    def attach(self, model: nn.Module) -> None:
        """Every module of `model` that asks for attention finds it; a module is recognised by its scaling."""
        for module in model.modules():
            if hasattr(module, "scaling") or hasattr(module, "layer_idx"):
                module.plait_sight = self  # type: ignore[assignment]


def visible(batch: Batch, window: int | None) -> Tensor | None:
    """None where plain causal attention is right; else [b, 1, s, s], true where a token may look: back, no further than
    `window` tokens with its own, and inside its own document. Padding (-1) is a document of its own, so that no row of
    the mask is empty."""
    length = batch.tokens.shape[1]
    narrow = window is not None and window < length
    if batch.plain and not narrow:
        return None
    documents = batch.document_ids
    may = (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril()
    if narrow:
        assert window is not None
        may = may.triu(1 - window)
    return may.unsqueeze(1)


def own_masks(batch: Batch, config: Any, dtype: torch.dtype) -> Any:
    """What a model's own attention takes in the place of a mask: nothing where its class makes the right one itself, one
    mask, or one for each kind of layer."""
    if batch.plain:
        return None
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if kinds == {"full_attention", "sliding_attention"} or config.model_type in ("gemma2", "gemma3_text"):
        windows = {"full_attention": None, "sliding_attention": window}
        return {kind: _additive(visible(batch, width), config, dtype) for kind, width in windows.items()}
    return _additive(visible(batch, window if config.model_type != "qwen3" else None), config, dtype)


def _additive(mask: Tensor | None, config: Any, dtype: torch.dtype) -> Tensor | None:
    """A mask of truths as eager attention takes it: added to the scores."""
    if mask is None or config._attn_implementation != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Query [b, heads, s, d], key and value [b, kv heads, s, d] -> [b, s, heads, d]. `attention_mask` is what a model
    made of nothing: None."""
    sight: Sight = module.plait_sight  # type: ignore[assignment]
    mask = sight.mask(sliding_window)
    if dropout == 0.0 and softcap is None:
        y = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return y.transpose(1, 2).contiguous(), None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        length = query.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = keyed(weights, dropout, heads=getattr(module, "plait_heads", None))
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(PLAIT, attention)
