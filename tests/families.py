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

FOUR = {**ROPED, "num_attention_heads": 8, "num_key_value_heads": 4}
SLIDES = {**FOUR, "sliding_window": WINDOW, "layer_types": KINDS}
EXPERTS = {**FOUR, "num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {**FOUR, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
          "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
LATENT = {**{key: value for key, value in SHARED.items() if key != "head_dim"}, "num_key_value_heads": 8,
          "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
          }  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 8, "n_positions": 64, "vocab_size": 96, "resid_pdrop": 0.0,
       "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
FALCON = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 96, "bias": True,
          "multi_query": False, "parallel_attn": False, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
OPT = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 96,
       "max_position_embeddings": 64, "word_embed_proj_dim": 64, "dropout": 0.1}  # fmt: skip
PLAIN = ("arcee", "cohere", "ernie4_5", "gemma", "glm", "glm4", "granite", "ministral3", "nemotron", "olmo", "olmo2",
         "phi", "gpt_neox", "seed_oss", "stablelm")  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(PLAIN, FOUR),
    **dict.fromkeys(("cohere2", "exaone4", "granite_swa", "olmo3", "vaultgemma"), SLIDES),
    "aria_text": {**FOUR, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "bloom": {"hidden_size": 64, "n_layer": 4, "n_head": 8, "vocab_size": 96, "hidden_dropout": 0.1},
    "deepseek_v2": LATENT,
    "deepseek_v2, queries without a latent": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 2, "n_routed_experts": 8},
    "dots1": SHARED,
    "ernie4_5_moe": {**FOUR, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    "falcon": FALCON,
    "falcon, ALiBi": {**FALCON, "alibi": True},
    "falcon, groups side by side": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 4, "parallel_attn": True,
                                    "bias": False},
    "falcon, one KV head": {**FALCON, "multi_query": True, "parallel_attn": True, "bias": False},
    "glm4_moe": SHARED,
    "glm4_moe_lite": LATENT,
    "gpt_bigcode": {**GPT, "multi_query": False},
    "gpt_bigcode, one KV head": {**GPT, "multi_query": True},
    "gpt_neo": {"hidden_size": 64, "num_layers": 4, "num_heads": 8, "attention_types": [[["global", "local"], 2]],
                "window_size": WINDOW, "vocab_size": 96, "max_position_embeddings": 64, "bos_token_id": 1,
                "eos_token_id": 2},
    "gpt_oss": {**SLIDES, **EXPERTS, "head_dim": 8, "sliding_window": WINDOW},
    "gptj": {**GPT, "rotary_dim": 2},
    "granitemoe": EXPERTS,
    "minicpm3": LATENT,
    "mpt": {"d_model": 64, "n_layers": 4, "n_heads": 8, "vocab_size": 96, "max_seq_len": 64},
    "olmoe": {**FOUR, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": OPT,
    "opt, norms after": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "phimoe": {**EXPERTS, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen2": {**FOUR, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen2_moe": {**FOUR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**FOUR, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "smollm3": {**SLIDES, "use_sliding_window": True},
    "stablelm, side by side": {**FOUR, "use_parallel_residual": True, "use_qkv_bias": True},
    "starcoder2": {**FOUR, "sliding_window": WINDOW},
}  # fmt: skip
"""Of families that add no mechanism to a preset's; after a comma, of another kind of their config. Eight heads and four
KV heads, so that tp 4 divides them."""


def write(folder: Path, family: str, **changes: Any) -> str:
    """A directory with the config of the family's small model, with some changes."""
    path = folder / "-".join([family, *(f"{key}={value}" for key, value in changes.items())])
    path.mkdir(exist_ok=True)
    values = {**CONFIGS, **OTHERS}[family]
    (path / "config.json").write_text(json.dumps({"model_type": family.partition(",")[0], **values, **changes}))
    return str(path)
