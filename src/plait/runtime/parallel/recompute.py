"""Recomputation: of a block (or of its attention) only the input is kept, and backward runs its forward again.

    forward    h -> block -> h'        nothing inside is kept
    backward   h -> block -> h' again, now with a graph; dh' -> dh, gradients

The second forward is the first: communication, dropout and masks included. It runs when the gradient of the output is
there, so at one time the inside of one block is kept. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016;
of attention alone: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..batch import Batch


class Body(Protocol):
    """What recomputation needs of the modules of a stage."""

    @property
    def at_hand(self) -> Batch | None:
        """The microbatch that goes forward."""
        ...

    def mark(self) -> object:
        """Where in it the forward is."""
        ...

    def again(self, batch: Batch, mark: object) -> AbstractContextManager[object]:
        """While it is entered, modules see a microbatch as they saw it at a mark."""
        ...


class _Again(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, once: Callable[[Tensor], Tensor], again: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.again = again
        output = once(hidden)
        return output.view_as(output) if output is hidden else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (hidden,) = ctx.saved_tensors
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            output = ctx.again(hidden)
        torch.autograd.backward(output, grads[0])
        return hidden.grad, None, None


class Recompute:
    """The recomputed modules of one stage."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._replays = False
        self.note: Callable[[Tensor], object] = _nobody
        """Asked for each tensor that is kept besides the input, for whoever counts them."""
        self.watch: Callable[[Batch], AbstractContextManager[object]] = nullcontext
        """Entered while a microbatch goes forward again, for whoever listens to modules."""

    def wrap(self, module: nn.Module) -> None:
        """Has `module` computed again in backward. Its first argument, or hidden_states, is what it reads; of what it
        gives only the first has a gradient."""
        forward = module.forward

        def recomputed(*args: Any, **named: Any) -> Any:
            hidden = args[0] if args else named["hidden_states"]
            batch = self._body.at_hand
            if self._replays or batch is None or not torch.is_grad_enabled() or not hidden.requires_grad:
                return forward(*args, **named)
            mark = self._body.mark()
            # Cosines, sines, masks that were made for it; positions are the batch's own. What it reads is not among them:
            # they live as long as the graph, and that no longer than it is needed.
            rest, words = args[1:], {name: value for name, value in named.items() if value is not hidden}
            notes = [self.note(value) for value in _tensors((*rest, *words.values())) if value.is_floating_point()]
            first = bool(args)
            others: list[Any] = []

            def call(run: Callable[..., Any], hidden: Tensor) -> Any:
                return run(hidden, *rest, **words) if first else run(hidden_states=hidden, **words)

            def once(hidden: Tensor) -> Tensor:
                output = call(forward, hidden)
                if isinstance(output, tuple):
                    others.extend(output[1:])
                    others.append(output)  # so that what comes out is a tuple, however short
                    return output[0]  # type: ignore[no-any-return]
                return output  # type: ignore[no-any-return]

            def again(hidden: Tensor) -> Tensor:
                with self._body.again(batch, mark), self.watch(batch):
                    self._replays = True
                    try:
                        output = call(module, hidden)
                    finally:
                        self._replays = False
                notes.clear()
                return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

            output = _Again.apply(hidden, once, again)
            if not others:
                return output
            others.pop()
            return (output, *others)

        module.forward = recomputed


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _nobody(tensor: Tensor) -> None: ...
