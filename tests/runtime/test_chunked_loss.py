"""The loss in chunks is the loss: in every composition, with logits that are never whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from plait.check.wide import wide
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.runtime.batch import IGNORE, Batch
from plait.runtime.comm.ledger import Ledger
from plait.runtime.comm.world import Group, World
from plait.runtime.hf.after_head import AfterHead, after_head
from plait.runtime.hf.read import build_on_meta, find_blocks, read
from plait.runtime.parallel.loss import ChunkedLoss
from plait.runtime.training.assemble import build
from plait.runtime.training.evaluate import evaluate
from plait.runtime.training.launch import launch
from plait.runtime.training.sample import sample
from plait.runtime.training.storages import Storages
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.test_evaluation import evaluated, one_process
from tests.runtime.test_layouts import assert_equal, name
from tests.runtime.test_numbers import random_batch, rows_of
from tests.runtime.test_zero import covering, odd, some

AXES: dict[str, tuple[Any, ...]] = {
    "loss_chunks": (2, 5), "zero": (0, 1, 2, 3), "dp": (1, 2), "tp": (1, 2), "pp": (1, 2), "microbatches": (1, 3),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"), "recompute": ("none", "full"),
}  # fmt: skip


@pytest.mark.parametrize("layout", some(covering(AXES, ranks=4)), ids=name)
def test_a_covering_set_equals_one_process(nursery: Nursery, tiny: Models, layout: dict[str, Any]) -> None:
    """Calls and bytes as predicted too; sizes and chunks that divide by nothing, rows of padding, of many documents."""
    model = tiny(**odd(layout["tp"]))
    assert_equal(nursery, model=model, batch=2 * layout["dp"] * layout["microbatches"], **layout)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("gemma2-tiny", {"tp": 2, "pp": 2}), ("gemma2-tiny", {"dp": 2, "zero": 3, "compute": "bf16"}),
     ("gemma3-tiny", {"pp": 2, "schedule": "zb-v"}), ("qwen3-tiny", {"tp": 2, "dp": 2, "zero": 3}),
     ("qwen3-tiny", {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-h1"}), ("gpt2-tiny", {"tp": 2}),
     ("mixtral-tiny", {"tp": 2}), ("llama-tiny", {"dp": 2, "zero": 2, "compute": "bf16"}),
     ("llama-tiny", {"dp": 2, "compute": "fp16"}),
     ("phi3-tiny", {"split_backward": True}), ("mistral-tiny", {"pp": 2, "schedule": "auto", "attention": "own"})],
    ids=str,
)  # fmt: skip
def test_models(nursery: Nursery, model: str, layout: dict[str, Any]) -> None:
    """Soft caps; weights tied over stages, on one rank and in a V; as shipped as well."""
    assert_equal(
        nursery, shipped=True, model=model, microbatches=2, batch=4 * layout.get("dp", 1), loss_chunks=3, **layout
    )


# --- logits are never whole


class Widest(TorchDispatchMode):
    """The most rows that a tensor had whose last dim is `width`, `weights` left out."""

    def __init__(self, width: int, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.width, self.rows = width, 0
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(output):
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-1] != self.width:
                continue
            if value.untyped_storage().data_ptr() not in self.weights:
                self.rows = max(self.rows, value.numel() // self.width)
        return output


def widest(model: str, changes: dict[str, Any]) -> Any:
    """The most rows of logits at a time in a step, and in an evaluation, on every rank."""
    plan = Plan(model=model, batch=8, seq=28, **changes)
    vocabulary = read(model).facts.vocabulary

    def main(world: World) -> Any:
        run = build(plan, world)
        batch = rows_of(random_batch(plan, vocabulary), world)
        with Widest(vocabulary // plan.tp, run.parameters.values()) as step:
            run.step(batch)
        with Widest(vocabulary // plan.tp, run.parameters.values()) as evaluation:
            evaluate(run, [batch])
        return step.rows, evaluation.rows

    return launch(main, plan)


@pytest.mark.parametrize("model", ["llama-tiny", "gemma2-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2, "microbatches": 2, "schedule": "zb-h1"}], ids=str)
def test_logits_are_never_whole(nursery: Nursery, model: str, layout: dict[str, Any]) -> None:
    """A microbatch has 224 or 112 tokens; 3 chunks have at most a third of them, rounded up."""
    tokens = 8 * 28 // layout.get("microbatches", 1)
    whole, chunked = (nursery(widest, model, layout | {"loss_chunks": chunks}) for chunks in (1, 3))
    assert list(whole[-1]) == [tokens, tokens]
    assert list(chunked[-1]) == [-(-tokens // 3)] * 2
    if "pp" in layout:
        assert chunked[0][0] < tokens // 3, "the first stage has none"


# --- one head, against torch

ALONE = Group("tp", (0,), 0, Ledger(), None)
VOCABULARY, HIDDEN = 37, 11


def chunked(
    targets: Tensor, chunks: int, dtype: torch.dtype, after: Callable[[Tensor], Tensor] | None, *, bias: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """(loss, gradients of hidden, weight and bias) of a chunked loss, and of torch's over the same numbers in fp64."""
    torch.manual_seed(5)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(*targets.shape, HIDDEN).to(dtype).requires_grad_()
    exact = [value.detach().double().requires_grad_() for value in (hidden, *head.parameters())]
    batch = replace(Batch.of(torch.zeros(targets.shape[0], targets.shape[1] + 1, dtype=torch.int64)), targets=targets)
    sums = {p: torch.zeros_like(p, dtype=torch.promote_types(dtype, torch.float32)) for p in head.parameters()}
    ready: list[nn.Parameter] = []
    plan = Plan(loss_chunks=chunks)
    loss = ChunkedLoss(head, ALONE, 0, at_once=plan.tokens_at_once, after=after, enter=lambda x: x)
    loss.adopt(sums.__getitem__, ready.append)
    inverse = 1 / batch.weight.clamp(min=1).double()
    share = loss.share(hidden, batch, inverse)
    assert not any(value.any() for value in sums.values()), "forward adds nothing"
    share.backward()
    assert ready == list(head.parameters()), "each once, whatever the number of chunks"
    with torch.no_grad():
        again = loss.share(hidden, batch, inverse)
    assert torch.equal(again, share.detach())
    assert len(ready) == len(sums), "an evaluation makes no gradient"

    logits = F.linear(*exact)
    logits = logits if after is None else after(logits)
    goal = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum") * inverse
    goal.backward()
    assert hidden.grad is not None
    return [share.detach(), hidden.grad, *sums.values()], [goal.detach(), *(value.grad for value in exact)]  # type: ignore[misc]


def targets_of(kind: str) -> Tensor:
    targets = torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(2))
    if kind == "a chunk without targets":
        targets[1] = IGNORE  # the second of three chunks
    elif kind == "none":
        targets[:] = IGNORE
    return targets


@pytest.mark.parametrize("kind", ["all", "a chunk without targets", "none"])
@pytest.mark.parametrize("chunks", [2, 3, 4, 21, 50])
@pytest.mark.parametrize("after", [None, lambda x: (x / 3).tanh() * 3], ids=["plain", "capped"])
def test_the_same_as_torch(kind: str, chunks: int, after: Callable[[Tensor], Tensor] | None) -> None:
    """Of 21 tokens, in chunks of any size down to one, and more chunks than tokens."""
    found, exact = chunked(targets_of(kind), chunks, torch.float64, after, bias=chunks == 4)
    for one, other in zip(found, exact, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
    assert bool(found[0]) == (kind != "none")


def test_chunks_add_up_in_fp32() -> None:
    """In bf16 the head's gradient loses nothing by the number of its chunks: sums are fp32, each product is rounded."""

    def off(chunks: int) -> float:
        found, exact = chunked(targets_of("all"), chunks, torch.bfloat16, None, bias=False)
        return float((found[2] - exact[2]).norm() / exact[2].norm())

    assert max(off(chunks) for chunks in (2, 3, 21)) < 1.2 * off(1)


def test_p115_the_peak_does_not_grow_with_the_number_of_chunks() -> None:
    """Forward keeps no chunk for backward: 4, 8 or 16 chunks of 256 tokens take what one takes."""

    def most(tokens: int) -> int:
        head, hidden = nn.Linear(16, 4096, bias=False), torch.randn(1, tokens, 16, requires_grad=True)
        learnt = torch.zeros_like(head.weight)
        loss = ChunkedLoss(head, ALONE, 0, at_once=lambda n: [256] * (n // 256), after=None, enter=lambda x: x)
        loss.adopt(lambda _: learnt, lambda _: None)
        batch = Batch.of(torch.randint(0, 4096, (1, tokens + 1)))
        one = torch.ones((), dtype=torch.float64)
        fields = [batch.tokens, batch.targets, batch.positions, batch.document_ids, batch.sample_ids]
        with Storages({"held": [head.weight, hidden, learnt, *fields]}, torch.device("cpu")) as storages:
            loss.share(hidden, batch, one).backward()
        return storages.peak

    peaks = [most(tokens) for tokens in (1024, 2048, 4096)]
    assert peaks[0] > 256 * 4096 * 4
    assert max(peaks) < 1.2 * peaks[0], peaks


# --- what follows the head


def observed(kind: str, **sizes: Any) -> tuple[Any, AfterHead]:
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=32, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, **sizes,
    )  # fmt: skip
    module = build_on_meta(config)
    return config, after_head(module, find_blocks(module)[1])


@pytest.mark.parametrize(
    ("kind", "sizes", "steps"),
    [("llama", {}, []), ("gemma2", {"final_logit_softcapping": 5.0}, ["div", "tanh", "mul"]),
     ("granite", {"logits_scaling": 8.0}, ["div"]), ("cohere", {"logit_scale": 0.25}, ["mul"])],
    ids=str,
)  # fmt: skip
def test_what_follows_the_head_is_found(kind: str, sizes: dict[str, Any], steps: list[str]) -> None:
    """And is what the model's own code makes of any chunk, bit for bit."""
    config, after = observed(kind, **sizes)
    assert [step.function.overloadpacket.__name__ for step in after.steps] == steps
    assert not after.why
    torch.manual_seed(0)
    model = type(build_on_meta(config))(config).eval()
    given: list[Tensor] = []
    model.get_output_embeddings().register_forward_hook(lambda _, args, output: given.append(output.clone()))
    tokens = torch.randint(1, 64, (2, 9))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits.flatten(0, 1)
    chunks = torch.cat([after(part) for part in given[0].flatten(0, 1).split(5)])
    assert torch.equal(chunks, logits)


ROW = torch.ones(512, device="meta")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(lambda logits: logits.softmax(-1), "softmax"), (lambda logits: logits - logits.mean(-1, keepdim=True), "mean"),
     (lambda logits: logits[..., :8], "slice"), (lambda logits: logits.mul_(2), "mul_"),
     (lambda logits: logits + ROW, "add"), (lambda logits: F.dropout(logits), "empty_like"),
     (lambda logits: torch.empty_like(logits), "empty_like")],
    ids=["softmax", "mean", "slice", "in-place", "by-row", "dropout", "other"],
)  # fmt: skip
def test_what_needs_whole_logits_is_refused_by_name(spoil: Callable[[Tensor], Tensor], why: str) -> None:
    config = read("llama-tiny").config
    module = build_on_meta(config)
    forward = module.forward

    def spoiled(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = spoil(output.logits)
        return output

    module.forward = spoiled
    found = after_head(module, find_blocks(module)[1])
    assert why in found.why
    facts = replace(read("llama-tiny").facts, whole_logits=f"LlamaForCausalLM {found.why}")
    with pytest.raises(PlanError, match=rf"loss_chunks 2 never has whole logits, but LlamaForCausalLM .*{why}"):
        validate(Plan(loss_chunks=2), facts)


# --- beside training


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2, "microbatches": 2}, {"dp": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("model", ["llama-tiny", "gemma2-tiny"])
def test_evaluation_is_the_same(nursery: Nursery, tiny: Models, model: str, layout: dict[str, Any]) -> None:
    """With rows of padding, and fewer rows than a pass has."""
    loss, tokens = nursery(one_process, model, 11)
    for found in nursery(evaluated, model, layout | {"loss_chunks": 3}, 11):
        assert found[0] == pytest.approx(loss, rel=1e-12)
        assert found[1] == tokens


def written(model: str, changes: dict[str, Any]) -> Any:
    plan = Plan(model=model, batch=4, seq=16, **changes)
    vocabulary = read(model).facts.vocabulary

    def main(world: World) -> Any:
        with wide():
            run = build(plan, world, wide=True)
            run.step(rows_of(random_batch(plan, vocabulary), world))
            return sample(run, [1, 2, 3], 6, temperature=0.0)

    return launch(main, plan)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_samples_are_the_same(nursery: Nursery, layout: dict[str, Any]) -> None:
    """A sample takes the head's logits of one prompt, with the soft cap on them."""
    whole, *_ = nursery(written, "gemma2-tiny", {})
    for found in nursery(written, "gemma2-tiny", layout | {"loss_chunks": 4}):
        assert found == whole


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"loss_at": "first", "pp": 2}, "set loss_at last"), ({"batch": 2, "seq": 8, "loss_chunks": 17}, "16 or less")],
    ids=str,
)  # fmt: skip
def test_refusals(changes: dict[str, Any], says: str) -> None:
    plan = Plan(**{"loss_chunks": 2, **changes})
    with pytest.raises(PlanError, match=says):
        validate(plan, read("llama-tiny").facts)


def test_a_plain_list_is_refused() -> None:
    facts = replace(read("llama-tiny").facts, head="", family="sequential")
    with pytest.raises(PlanError, match="a plain list does not say which that is: set loss_chunks 1"):
        validate(Plan(loss_chunks=2), facts)
