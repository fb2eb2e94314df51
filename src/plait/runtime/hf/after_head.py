"""What a model does with what its head gives, found by watching it.

    Gemma 2     logits / 30 -> tanh -> * 30        each logit by itself: the same for any chunk of tokens, and of rows
    Cohere      logits * 0.0625
    Llama       nothing

The model runs once on the meta device, two tokens and no block, and every operation from the head's output to the logits
that it returns is noted. If each takes nothing but the one before it and numbers, and is pointwise by torch's own tag,
they can be applied to any part of the logits. Whatever else happens is said in words, and the logits have to be whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS = 2
CASTS = (torch.ops.aten._to_copy.default,)
"""Pointwise, though they have no tag that says so."""
RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class Step:
    """One operation on what came out of the one before: `place` is its place among the arguments."""

    function: Any
    arguments: tuple[Any, ...]
    place: int
    named: Mapping[str, Any]

    def __call__(self, x: Tensor) -> Tensor:
        arguments = list(self.arguments)
        arguments[self.place] = x
        y: Tensor = self.function(*arguments, **self.named)
        return y


@dataclass(frozen=True)
class AfterHead:
    """The steps from the head's output to the logits; or in `why` what there is that is no such step."""

    steps: tuple[Step, ...] = ()
    why: str = ""

    def __call__(self, logits: Tensor) -> Tensor:
        """Of any part of the head's output [..., any rows of the vocabulary]."""
        for step in self.steps:
            logits = step(logits)
        return logits


class _Noting(TorchDispatchMode):
    """From `begin` on notes every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Tensor | None = None
        self.steps: list[Step] = []
        self.why = ""

    def begin(self, module: nn.Module, args: object, output: Tensor) -> None:
        if self.now is not None:
            self.why = self.why or "runs its head more than once"
        self.now = output

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        output = func(*args, **named)
        if self.now is None or self.why:
            return output
        tensors = [value for value in pytree.tree_leaves((args, named)) if isinstance(value, Tensor)]
        places = [place for place, value in enumerate(args) if value is self.now]
        pointwise = (torch.Tag.pointwise in func.tags or func in CASTS) and RANDOM not in func.tags
        pointwise = pointwise and not func._schema.is_mutable
        if len(tensors) != 1 or len(places) != 1 or not pointwise or not isinstance(output, Tensor):
            self.why = f"does {func} after its head, which takes more than each logit by itself"
            return output
        rest = (*args[: places[0]], None, *args[places[0] + 1 :])
        # Where a cast would put its result is wherever the logits are.
        named = {key: value for key, value in named.items() if key != "device"}
        self.steps.append(Step(func, rest, places[0], named))
        self.now = output
        return output


def after_head(module: Any, blocks: nn.ModuleList, *, tuples: bool = False) -> AfterHead:
    """What `module`, a whole model on the meta device, does after its head, in the type that its parameters have; its
    blocks give `tuples` or hidden states."""
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        return AfterHead(why=f"has a {type(head).__name__} for its head, and not a linear layer")
    noting = _Noting()
    handle = head.register_forward_hook(noting.begin)
    # Angles of positions, which nobody reads then: some classes look at the numbers, and there are none.
    turned = [part for part in module.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    for block in blocks:
        block.forward = _in_a_tuple if tuples else _as_it_came
    for part in turned:
        part.forward = _no_angles
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), noting:
            logits = module(input_ids=tokens, position_ids=tokens, use_cache=False).logits
    except Exception as error:  # whatever a class says to blocks that do nothing
        said = " ".join(str(error).split())[:100]
        return AfterHead(why=f"does not run without its blocks ({type(error).__name__}: {said})")
    finally:
        handle.remove()
        for part in (*blocks, *turned):
            del part.forward
    if noting.why:
        return AfterHead(why=noting.why)
    if logits is not noting.now:
        return AfterHead(why="returns something else than what its head gave")
    return AfterHead(tuple(noting.steps))


def _no_angles(*args: Any, **kwargs: Any) -> tuple[None, None]:
    return None, None


def _in_a_tuple(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return hidden_states, None


def _as_it_came(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states
