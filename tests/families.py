"""A small model of every proven family: d 32, 4 blocks, 4 heads, 2 KV heads, 96 tokens; windows shorter than the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WINDOW = 6
ROPED = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"] * 2
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {**ROPED, "head_dim": 8, "sliding_window": WINDOW, "layer_types": KINDS, "query_pre_attn_scalar": 8},
    "gemma3_text": {**ROPED, "head_dim": 8, "sliding_window": WINDOW, "layer_types": KINDS},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 96, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    "llama": {**ROPED},
    "mistral": {**ROPED, "sliding_window": WINDOW},
    "mixtral": {**ROPED, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {**ROPED, "sliding_window": WINDOW},
    "qwen3": {**ROPED, "head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
}  # fmt: skip


def write(folder: Path, family: str, **changes: Any) -> str:
    """A directory with the config of the family's small model, with some changes."""
    path = folder / "-".join([family, *(f"{key}={value}" for key, value in changes.items())])
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": family, **CONFIGS[family], **changes}))
    return str(path)
