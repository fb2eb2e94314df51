"""plait's one attention, under the name that a model's config selects it by, and what a model's own is told instead.

    q kᵀ x scaling  ->  soft cap  ->  mask: back only, own document, own window  ->  softmax  ->  dropout  ->  x v

Where heads have sinks (gpt-oss), the softmax goes over one more score, which is a number of the head, and whose weight is
left out after it.

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
STRANGE = ("position_bias", "indices", "block_indices", "sinks")
"""What some classes hand over besides, which changes the numbers and is not carried out here."""


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
    `window` tokens with its own, and inside its own document. Each token of padding (-1) is a document of its own, as it
    is for whoever goes by positions, so that no row of the mask is empty."""
    length = batch.tokens.shape[1]
    narrow = window is not None and window < length
    if batch.plain and not narrow:
        return None
    place = torch.arange(length, device=batch.tokens.device)
    documents = torch.where(batch.document_ids < 0, -1 - place, batch.document_ids)
    may = (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril()
    if narrow:
        assert window is not None
        may = may.triu(1 - window)
    return may.unsqueeze(1)


def told_apart(batch: Batch) -> Tensor:
    """The positions of a batch for a model with attention of its own: transformers makes its masks (window, kinds of
    layers) from where they restart. Raises where they would tell it something else than the documents do."""
    if not batch.restarts:
        raise ValueError("attention own sees documents by their positions, which do not restart in each of this batch")
    return batch.positions


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **other: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Query [b, heads, s, d], key and value [b, kv heads, s, d] -> [b, s, heads, d]. `attention_mask` is what a model
    made of nothing: None; `s_aux` [heads] are its sinks."""
    strange = [name for name in STRANGE if other.get(name) is not None] + ["mask"] * (attention_mask is not None)
    if strange:
        raise NotImplementedError(f"plait's attention knows no {strange[0]}, which {type(module).__name__} gives it")
    sight: Sight = module.plait_sight  # type: ignore[assignment]
    mask = sight.mask(sliding_window)
    if dropout == 0.0 and softcap is None and s_aux is None:
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
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = weights if s_aux is None else weights[..., :-1]
    weights = keyed(weights, dropout, heads=getattr(module, "plait_heads", None))
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(PLAIT, attention)
