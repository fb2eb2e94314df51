"""Facts of small models written by hand, so that the design is tested without torch and without a model library."""

from __future__ import annotations

from plait.design.facts import ModelFacts, ParameterFact, Piece
from plait.design.styles import STYLES


def parameter(
    name: str,
    shape: tuple[int, ...],
    style: str | None = None,
    *,
    block: int | None = None,
    after_blocks: bool = False,
    quantum: int = 1,
    grain: int | None = None,
) -> ParameterFact:
    module, _, tensor = name.rpartition(".")
    side = STYLES[style].cuts if style in STYLES else "none"
    cut = {"out": 0, "in": 1 if len(shape) > 1 else None}.get(side)
    return ParameterFact(
        module,
        tensor,
        shape,
        block,
        after_blocks,
        style,
        cut,
        (Piece("", shape[cut or 0], quantum, grain),),
        reads=module.rpartition(".")[0] or module,
        decays=len(shape) > 1,
    )


def llama(
    *,
    blocks: int = 4,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 2,
    intermediate: int = 24,
    vocabulary: int = 64,
    positions: int = 128,
    bias: bool = False,
) -> ModelFacts:
    """A llama: its parameters in the order of the model. `bias` adds one to each projection."""
    hidden = heads * head_dim
    group = heads // kv_heads * head_dim
    projections = (
        ("self_attn.q_proj", (hidden, hidden), "colwise", group),
        ("self_attn.k_proj", (kv_heads * head_dim, hidden), "colwise", head_dim),
        ("self_attn.v_proj", (kv_heads * head_dim, hidden), "colwise", head_dim),
        ("self_attn.o_proj", (hidden, hidden), "rowwise", group),
        ("mlp.gate_proj", (intermediate, hidden), "colwise", 1),
        ("mlp.up_proj", (intermediate, hidden), "colwise", 1),
        ("mlp.down_proj", (hidden, intermediate), "rowwise", 1),
    )
    found = [parameter("model.embed_tokens.weight", (vocabulary, hidden), "embedding_rowwise")]
    for block in range(blocks):
        at = f"model.layers.{block}"
        for name, shape, style, quantum in projections:
            grain = head_dim if name.startswith("self_attn") else None
            found.append(parameter(f"{at}.{name}.weight", shape, style, block=block, quantum=quantum, grain=grain))
            if bias:
                found.append(
                    parameter(f"{at}.{name}.bias", shape[:1], style, block=block, quantum=quantum, grain=grain)
                )
        for name in ("input_layernorm", "post_attention_layernorm"):
            found.append(parameter(f"{at}.{name}.weight", (hidden,), block=block))
    found.append(parameter("model.norm.weight", (hidden,), after_blocks=True))
    found.append(parameter("lm_head.weight", (vocabulary, hidden), "colwise_gather_output", after_blocks=True))
    return ModelFacts("llama", blocks, hidden, heads, kv_heads, vocabulary, positions, "lm_head", tuple(found))
