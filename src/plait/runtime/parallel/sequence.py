"""Sequence parallelism: between the branches of a block each tp rank has its own tokens of every row.

    own tokens [b, s/t, h] -> norm -> join [b, s, h] -> q k v, attention, o -> scatter -> own tokens -> residual ...

What tensor parallelism does twice in a branch, an all-reduce forward and one backward, becomes two halves: what comes out
is summed to whoever has the tokens (reduce-scatter), what goes in is gathered. Norms, residuals and dropout work on 1/t
of the tokens and keep 1/t for backward. Column-parallel layers keep their share of the input, and gather it once more
for the gradients of their weights. Before the first block and after the last all tokens are everywhere.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..comm import collectives, differentiable
from ..comm.world import Group

Sizes = Callable[[], Sequence[int]]


class Rows:
    """Whole rows that were joined of `own` tokens: gathered again for gradients of weights, once for all layers that read
    them, and let go of when the last of these is done."""

    def __init__(self, own: Tensor, group: Group, sizes: Sequence[int]) -> None:
        self.own, self._group, self._sizes = own, group, sizes
        self._whole: Tensor | None = None
        self.readers = 0

    def whole(self) -> Tensor:
        if self._whole is None:
            self._whole = collectives.gather_tokens(
                self.own, self._group, self._sizes, why="whole rows for weight gradients"
            )
        found, self.readers = self._whole, self.readers - 1
        if not self.readers:
            self._whole = None
        return found


class Tokens:
    """The token cut of one stage. `sizes()` says how many tokens of a row of the microbatch at hand each rank has;
    `meanwhile` is called while the gradient of what was joined is summed."""

    def __init__(self, group: Group, sizes: Sizes, meanwhile: Callable[[], None] | None = None) -> None:
        self._group, self._sizes, self._meanwhile = group, sizes, meanwhile
        self._seen: weakref.ref[Tensor] | None = None
        self._joined: weakref.ref[Tensor] | None = None
        self._rows: Rows | None = None

    def join(self, x: Tensor) -> Tensor:
        """Into a branch. Branches that read the same tensor, one after the other, get the same rows."""
        whole = None if self._joined is None else self._joined()
        if whole is None or self._seen is None or self._seen() is not x:
            sizes = tuple(self._sizes())
            whole = differentiable.join(
                x,
                self._group,
                sizes,
                why="own tokens to whole rows",
                back="gradient of whole rows",
                meanwhile=self._meanwhile,
            )
            self._rows = Rows(x.detach(), self._group, sizes)
            self._seen, self._joined = weakref.ref(x), weakref.ref(whole, self._gone)
        return whole

    def _gone(self, joined: weakref.ref[Tensor]) -> None:
        # Who reads rows has them; without whole rows nobody will ask for them any more.
        if joined is self._joined:
            self._rows = None

    def rows_of(self, x: Tensor) -> Rows | None:
        """What x was joined of, if it was."""
        return self._rows if self._joined is not None and self._joined() is x else None

    def scatter(self, x: Tensor) -> Tensor:
        """Out of a branch."""
        return differentiable.scatter(
            x, self._group, tuple(self._sizes()), why="partial sums to own tokens", back="gradient of partial sums"
        )

    def forget(self) -> None:
        """Lets go of the last tensors."""
        self._seen = self._joined = self._rows = None

    def branch(self, module: nn.Module, *, scatters: bool) -> None:
        """Has a branch of a block read whole rows; with `scatters` what it gives is a partial sum, of which it gives the
        own tokens."""
        forward = module.forward

        def whole(*args: Any, **named: Any) -> Any:
            args, named = _with_hidden(args, named, self.join)
            output = forward(*args, **named)
            return _first(output, self.scatter) if scatters else output

        module.forward = whole

    def once(self, module: nn.Module) -> None:
        """Of a layer inside a branch that every rank does the same with (a router): its gradient counts once."""
        forward = module.forward
        module.forward = lambda x, *rest, **named: forward(differentiable.once(x, self._group), *rest, **named)

    def begin(self, block: nn.Module) -> None:
        """The first block gets whole rows, and goes on with the own tokens."""
        forward = block.forward

        def cut(x: Tensor) -> Tensor:
            return differentiable.take(x, self._group, tuple(self._sizes()), why="gradient of own tokens")

        def own(*args: Any, **named: Any) -> Any:
            args, named = _with_hidden(args, named, cut)
            return forward(*args, **named)

        block.forward = own

    def end(self, block: nn.Module) -> None:
        """The last block gives whole rows."""
        forward = block.forward

        def joined(x: Tensor) -> Tensor:
            return differentiable.give(x, self._group, tuple(self._sizes()), why="own tokens out of the blocks")

        block.forward = lambda *args, **named: _first(forward(*args, **named), joined)


def _with_hidden(
    args: tuple[Any, ...], named: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module, with the first, or hidden_states, changed."""
    if args:
        return (change(args[0]), *args[1:]), named
    return args, {**named, "hidden_states": change(named["hidden_states"])}


def _first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
