"""Wide arithmetic: against models without any fp32, and over splits of a batch, where fp32 inside shows as noise."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from plait.check.wide import wide

ROWS, SEQ = 8, 24
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = ("LlamaConfig", {**SIZES, "tie_word_embeddings": False})
GPT2 = ("GPT2Config", {
    "n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 96, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
})  # fmt: skip
GEMMA3 = ("Gemma3TextConfig", {
    **SIZES, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
})  # fmt: skip
MIXTRAL = ("MixtralConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2})
DEEPSEEK = ("DeepseekV3Config", {
    **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
})  # fmt: skip
Kind = tuple[str, dict[str, Any]]


def build(kind: Kind, **choices: Any) -> nn.Module:
    """A model with fp64 weights, large enough that every block matters, drawn from one seed."""
    config = getattr(transformers, kind[0])(**kind[1])
    choices = {"attn_implementation": "sdpa", **choices}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64, **choices)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * 0.2 if parameter.dim() > 1 else parameter + 0.1 * drawn)
    return model.train()


def batch() -> Tensor:
    return torch.randint(0, 96, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1))


def token_sum(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def numbers(model: nn.Module, parts: int = 1, forward: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    """Logits, loss and gradients of the token mean over the whole batch, taken as `parts` microbatches."""
    model.zero_grad(set_to_none=True)
    logits, loss = [], torch.zeros((), dtype=torch.float64)
    for rows in batch().chunk(parts):
        out = forward(model, rows[:, :-1]) if forward else model(input_ids=rows[:, :-1], use_cache=False).logits
        share = token_sum(out, rows) / (ROWS * SEQ)
        share.backward()
        loss += share.detach()
        logits.append(out.detach())
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, "logits": torch.cat(logits), **gradients}


def deviation(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of any quantity, relative to the largest magnitude in that quantity."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max() / (wanted[name].abs().max() + 1e-300)) for name in wanted)


class Narrow(TorchDispatchMode):
    """Notes every operation below autograd, forward or backward, that gives fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = out if isinstance(out, tuple | list) else (out,)
        if any(isinstance(one, Tensor) and one.dtype in (torch.float32, torch.complex64) for one in given):
            self.seen.add(str(func))
        return out


# --- against float64 without any fp32


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_asks_for_no_fp32_and_stays_bitwise_the_same(attention: str) -> None:
    pure = numbers(build(GPT2, attn_implementation=attention))
    with wide():
        found = numbers(build(GPT2, attn_implementation=attention))
    assert all(torch.equal(found[name], pure[name]) for name in pure)


def test_the_loss_of_transformers_is_float64() -> None:
    """`labels=` asks for logits.float(), the one fp32 request of a GPT-2."""
    model, tokens = build(GPT2), batch()[:, :-1]
    pure = F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    with wide():
        found = model(tokens, labels=tokens).loss
    assert found.dtype is torch.float64
    assert torch.allclose(found, pure, rtol=1e-15, atol=0)
    assert not torch.allclose(model(tokens, labels=tokens).loss.double(), pure, rtol=1e-9, atol=0)


def pure_llama(model: Any, tokens: Tensor) -> Tensor:
    """A Llama's logits written out on the model's weights, in the weights' dtype throughout."""
    config, weight = model.config, dict(model.named_parameters())
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight[name]

    steps = torch.tensor([10000.0 ** (-i / width) for i in range(0, width, 2)], dtype=torch.float64)
    angle = torch.outer(torch.arange(tokens.shape[1]).double(), steps).repeat(1, 2)

    def turn(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * angle.cos() + torch.cat((-right, left), -1) * angle.sin()

    x = weight["model.embed_tokens.weight"][tokens]
    ahead = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    for block in range(config.num_hidden_layers):
        at = f"model.layers.{block}"
        y = norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (
            (y @ weight[f"{at}.self_attn.{n}_proj.weight"].T).unflatten(-1, (count, width)).transpose(1, 2)
            for n, count in (("q", heads), ("k", groups), ("v", groups))
        )
        k, v = (one.repeat_interleave(heads // groups, 1) for one in (k, v))
        scores = (turn(q) @ turn(k).transpose(-1, -2) / math.sqrt(width)).masked_fill(ahead, -math.inf)
        power = (scores - scores.amax(-1, keepdim=True)).exp()
        mixed = (power / power.sum(-1, keepdim=True)) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ weight[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = (y @ weight[f"{at}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + (-gate).exp()) * up) @ weight[f"{at}.mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weight["lm_head.weight"].T


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_llama_equals_one_written_out_in_float64(attention: str) -> None:
    narrow = build(LLAMA, attn_implementation=attention)
    pure = numbers(narrow, forward=pure_llama)
    with wide():
        found = numbers(build(LLAMA, attn_implementation=attention))
    assert deviation(found, pure) <= 1e-14
    assert deviation(numbers(narrow), pure) > 1e-9


# --- over splits of the batch


class Choices(TorchFunctionMode):
    """The experts that routers choose, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            self.seen.append(out.indices.flatten(0, -2).sort(-1).values)
        return out


def chosen(model: nn.Module, parts: int) -> list[Tensor]:
    calls = []
    for rows in batch().chunk(parts):
        with Choices() as choices, torch.no_grad():
            model(input_ids=rows[:, :-1], use_cache=False)
        calls.append(choices.seen)
    return [torch.cat(one) for one in zip(*calls, strict=True)]


@pytest.mark.parametrize(
    ("kind", "experts"),
    [(GEMMA3, ""), (MIXTRAL, "eager"), (MIXTRAL, "grouped_mm"), (DEEPSEEK, "eager"), (DEEPSEEK, "grouped_mm")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_splits_of_a_batch_give_the_same_gradients(kind: Kind, experts: str) -> None:
    choices = {"experts_implementation": experts} if experts else {}
    with wide(), Narrow() as narrow:
        model = build(kind, **choices)
        one = numbers(model)
        worst = max(deviation(numbers(model, parts), one) for parts in (2, 4, 8))
        routes = [chosen(model, parts) for parts in (1, 2, 4, 8)]
    assert narrow.seen == set()
    assert worst <= 1e-14
    assert bool(routes[0]) == (kind is not GEMMA3)
    assert all(torch.equal(mine, whole) for split in routes for mine, whole in zip(split, routes[0], strict=True))


@pytest.mark.parametrize(
    ("kind", "noise"), [(GEMMA3, 1e-11), (MIXTRAL, 0.0), (DEEPSEEK, 1e-11)], ids=["gemma3", "mixtral", "deepseek"]
)
def test_without_wide_there_is_noise(kind: Kind, noise: float) -> None:
    """What the bounds above would be worth without it. A Mixtral's fp32 works row by row: a split does not show it, but
    its numbers are off all the same."""
    choices = {} if kind is GEMMA3 else {"experts_implementation": "eager"}
    with Narrow() as narrow:
        model = build(kind, **choices)
        one = numbers(model)
        assert max(deviation(numbers(model, parts), one) for parts in (2, 4, 8)) > noise
    assert narrow.seen
    with wide():
        assert deviation(one, numbers(build(kind, **choices))) > 1e-9


# --- the mode itself


REQUESTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float()": lambda x: x.float(),
    "float(memory_format)": lambda x: x.float(memory_format=torch.preserve_format),
    "to(dtype)": lambda x: x.to(torch.float32),
    "to(dtype=)": lambda x: x.to(dtype=torch.float),
    "to(device, dtype)": lambda x: x.to("cpu", torch.float32),
    "to(other)": lambda x: x.to(x.float()),
    "type(dtype)": lambda x: x.type(torch.float32),
    "type(name)": lambda x: x.type("torch.FloatTensor"),
    "type(class)": lambda x: x.type(torch.FloatTensor),
    "type_as": lambda x: x.type_as(x.float()),
    "softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "log_softmax": lambda x: x.log_softmax(-1, dtype=torch.float32),
    "sum": lambda x: x.sum(dtype=torch.float32),
    "arange(dtype)": lambda x: torch.arange(3, dtype=torch.float32),
    "zeros_like": lambda x: torch.zeros_like(x, dtype=torch.float32),
    "new_ones": lambda x: x.new_ones(3, dtype=torch.float32),
    "ones": lambda x: torch.ones(3),
    "tensor": lambda x: torch.tensor([1.0]),
    "int / int": lambda x: torch.arange(1, 4) / 3,
    "module.float()": lambda x: nn.Linear(2, 2).float().weight,
    "module.to(dtype)": lambda x: nn.Linear(2, 2).to(torch.float32).weight,
    "autocast off": lambda x: _without_autocast(x),
    "from int": lambda x: torch.arange(3).float(),
    "from bf16": lambda x: x.bfloat16().float(),
}


def _without_autocast(x: Tensor) -> Tensor:
    with torch.autocast(device_type="cpu", enabled=False):
        return x.float() @ x.float().transpose(0, 1)


@pytest.mark.parametrize("request_", REQUESTS)
def test_every_request_for_fp32_is_widened(request_: str) -> None:
    x = torch.rand(3, 3, dtype=torch.float64)
    assert REQUESTS[request_](x).dtype is torch.float32
    with wide():
        assert REQUESTS[request_](x).dtype is torch.float64
    assert REQUESTS[request_](x).dtype is torch.float32


def test_other_requests_stay() -> None:
    x = torch.rand(3, dtype=torch.float64)
    with wide():
        assert x.bfloat16().dtype is torch.bfloat16
        assert x.to(torch.int32).dtype is torch.int32
        assert x.to(torch.complex64).dtype is torch.complex128
        assert torch.finfo(torch.float32).bits == 32


def test_it_nests_and_leaves_nothing_behind() -> None:
    mode = wide()
    with wide(), mode, mode:
        assert torch.ones(1).dtype is torch.float64
    with pytest.raises(KeyError), mode:
        raise KeyError
    assert torch.get_default_dtype() is torch.float32
    assert torch.ones(1, dtype=torch.float64).float().dtype is torch.float32


class Doubled(torch.autograd.Function):
    """2 x, whose backward asks for fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x.float().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient.float() / torch.full((1,), 0.5)).to(gradient.dtype)


def _starts() -> Iterable[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    def tensor(y: Tensor, x: Tensor) -> Tensor:
        y.backward(retain_graph=True)
        return x.grad

    def autograd(y: Tensor, x: Tensor) -> Tensor:
        torch.autograd.backward([y], inputs=[x])
        return x.grad

    def one(y: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(y, x)[0]

    return [("tensor.backward", tensor), ("autograd.backward", autograd), ("autograd.grad", one)]


@pytest.mark.parametrize(("name", "start"), _starts(), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("depth", [1, 2])
def test_backward_runs_wide(name: str, start: Callable[[Tensor, Tensor], Tensor], depth: int) -> None:
    """Custom functions and hooks, however backward starts: a third of a third shows what fp32 would lose."""
    third = torch.tensor([1 / 3], dtype=torch.float64)

    def gradient() -> Tensor:
        x = third.clone().requires_grad_(True)
        y = Doubled.apply(x)
        y.register_hook(lambda g: g.float().to(g.dtype) / 3)
        return start((y * third).sum(), x)

    with contextlib.ExitStack() as stack:
        for _ in range(depth):
            stack.enter_context(wide())
        found = gradient()
        assert torch.ones(1).dtype is torch.float64
    assert abs(float(found) - 2 / 9) <= 1e-16
    assert abs(float(gradient()) - 2 / 9) > 1e-10


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks_run_wide(reentrant: bool) -> None:
    def block(x: Tensor) -> Tensor:
        return x.float().square().to(x.dtype)

    def gradient() -> Tensor:
        x = torch.full((2,), 1 / 3, dtype=torch.float64, requires_grad=True)
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        return x.grad

    with wide():
        assert torch.equal(gradient(), torch.full((2,), 2 / 3))
    assert not torch.equal(gradient(), torch.full((2,), 2 / 3, dtype=torch.float64))


def test_a_model_that_recomputes_equals_one_that_does_not() -> None:
    with wide(), Narrow() as narrow:
        model: Any = build(LLAMA)
        plain = numbers(model)
        # The public name differs between versions.
        model._set_gradient_checkpointing(gradient_checkpointing_func=partial(checkpoint, use_reentrant=False))
        assert deviation(numbers(model), plain) == 0
    assert narrow.seen == set()


def test_grouped_products_have_gradients_and_leave_the_rest() -> None:
    """Rows after the last offset belong to no group; a group may be empty."""
    x = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)
    experts = torch.rand(3, 3, 2, dtype=torch.float64, requires_grad=True)
    with wide():
        found = torch._grouped_mm(x, experts, offs=torch.tensor([2, 2, 6], dtype=torch.int32))
    wanted = torch.cat((x[:2] @ experts[0], x[2:6] @ experts[2], x.new_zeros(1, 2)))
    assert torch.equal(found, wanted)
    assert all(
        torch.equal(*pair)
        for pair in zip(*(torch.autograd.grad(y.sum(), (x, experts)) for y in (found, wanted)), strict=True)
    )
