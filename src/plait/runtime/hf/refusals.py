"""Configs that are refused: choices that nothing here proves, values that transformers would fail on later."""

from __future__ import annotations

import math
from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...design.errors import PlanError, divisors, listed, nearest
from .tensor_plan import kv_heads

MOST_BLOCKS = 10_000
"""Reading a model makes its modules: a mistyped count would take minutes and gigabytes before any rule is asked."""
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def refuse(model: str, config: Any) -> None:
    """Raises a `PlanError` for what a config asks for and is not carried out, or cannot be."""
    _refuse_what_is_not_proven(model, config)
    _refuse_bad_values(model, config)


def _refuse_what_is_not_proven(model: str, config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise PlanError(
            f"{model} has quantised weights, which this version does not train: remove quantization_config from its "
            f"config.json."
        )
    for key in ACTIVATIONS:
        name = getattr(config, key, None)
        own = [owned for owned, _ in ACT2FN[name].named_parameters()] if name in ACT2FN else []
        if own:
            raise PlanError(
                f"{model} has {key} '{name}', which has parameters of its own ({', '.join(own)}) that no rule of the "
                f"model draws: set {key} to one without, 'silu' say."
            )
    if getattr(config, "output_router_logits", False):
        raise PlanError(
            f"{model} has output_router_logits True, which asks for a loss that balances the experts, and this version "
            f"trains without one: set it to false in its config.json."
        )
    for key, what in (("router_jitter_noise", "noise"), ("input_jitter_noise", "noise"), ("layerdrop", "chance")):
        if getattr(config, key, 0.0):
            raise PlanError(
                f"{model} has {key} {getattr(config, key)}, {what} that is drawn in an order that depends on the layout: "
                f"set it to 0 in its config.json."
            )
    for key, wanted in (("return_dict", True), ("output_attentions", False), ("output_hidden_states", False)):
        if getattr(config, key, wanted) is not wanted:
            raise PlanError(f"{model} has {key} {getattr(config, key)}: remove it from its config.json.")


def _refuse_bad_values(model: str, config: Any) -> None:
    heads, groups = config.num_attention_heads, kv_heads(config)
    if heads % groups:
        raise PlanError(
            f"{model} has {heads} heads in groups for {groups} KV heads, which does not divide: set num_key_value_heads "
            f"to {listed(divisors(heads)) if heads <= 1024 else f'a divisor of {heads}'}."
        )
    if config.num_hidden_layers > MOST_BLOCKS:
        raise PlanError(f"{model} has num_hidden_layers {config.num_hidden_layers}; the most is {MOST_BLOCKS}.")
    for key in ACTIVATIONS:
        name = getattr(config, key, None)
        if name is not None and name not in ACT2FN:
            raise PlanError(f"{model} has {key} '{name}'.{nearest(str(name), ACT2FN)}")
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if width % 2:
        raise PlanError(f"{model} has head_dim {width}; rotary positions turn pairs, so it must be even.")
    # One set of parameters for all layers, or one for each kind of layer.
    for parameters in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        _refuse_bad_rope(model, parameters)


def _refuse_bad_rope(model: str, rope: Any) -> None:
    kind, kinds = rope.get("rope_type", "default"), ("default", *ROPE_INIT_FUNCTIONS)
    if kind not in kinds:
        raise PlanError(f"{model} has rope_type '{kind}'; transformers knows {listed(kinds)}.")
    for key in ("rope_theta", *rope):
        value = rope.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (is_number and not (math.isfinite(value) and value > 0)) or (key == "rope_theta" and not is_number):
            raise PlanError(f"{model} has {key} {value!r} among its rope_parameters; it must be a number above 0.")
