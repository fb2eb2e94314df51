"""The families that plait has proven, by the model_type of their config, and some that it refuses with a reason.

A family is here once `plait check` passes for a small model of it in a covering set of layouts
(tests/runtime/test_families.py). What its class asks of a layout beyond its config's tensor plan is in plans/.
"""

from __future__ import annotations

FAMILIES = (
    "arcee", "aria_text", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "llama", "minicpm3",
    "ministral3", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
)  # fmt: skip

REFUSED = {
    "codegen": "has q, k and v in four fused parts whatever its heads are, which no style cuts by heads",
    "doge": "gives its attention a mask that it computes, which plait's attention would leave out",
    "inkling_text": "has a tensor plan with the style all_reduce, and states of convolutions that go on across documents",
    "llama4_text": "sees chunks of a row that plait's masks do not know",
    "longcat_flash": "has a tensor plan with the style moe_identity_expert",
    "mamba": "carries a state through a row, across the documents in it, and has no heads that a tensor plan could cut",
    "mamba2": "carries a state through a row, across the documents in it, and has no tensor plan",
}
"""Why these are not among them."""

ON_OWN_TOKENS = (
    "arcee", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "granite_swa", "llama", "ministral3", "mistral", "mixtral",
    "mpt", "nemotron", "olmo", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm",
    "starcoder2", "vaultgemma",
)  # fmt: skip
"""Families whose blocks may have some tokens of every row each (sp): nothing in them looks from one token to others, or
at how many there are, but attention and MLP, and no rank does in a branch what all others do, but for a router."""
