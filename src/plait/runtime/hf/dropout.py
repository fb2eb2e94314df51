"""Dropout whose draws do not depend on the layout: keyed by (seed, step, sample, block, n-th call in the block).

Each row of the batch has a generator of its own for each call, draws what the whole row would need, and keeps the slice
that is here. So a row drops the same numbers on one rank or on eight, in one microbatch or in four, first time or when it
is computed again. Nothing of it needs saving.

    with Dropping(seed) as dropping:         every nn.Dropout, F.dropout, and dropout inside sdpa
        dropping.at(step, batch.sample_ids)  a microbatch begins
        dropping.block(3)                    block 3 begins
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_HERE: ContextVar[Dropping | None] = ContextVar("dropping", default=None)


class Dropping(TorchFunctionMode):
    """While it is entered, every dropout is keyed. One for a model; the places are told by `at` and `block`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._step = 0
        self._samples: list[int] = []
        self._own: tuple[int, int, int] | None = None
        self._block, self._call = -1, 0

    def at(self, step: int, samples: Tensor, own: tuple[int, int, int] | None = None) -> None:
        """A microbatch of these samples begins, before its first block (block -1). `own` (start, stop, of) says which of
        a row's tokens blocks have between their branches, where that is not all."""
        self._step, self._samples, self._own = step, samples.tolist(), own
        self.block(-1)

    @property
    def mark(self) -> tuple[int, int]:
        """The block and how many calls it has made: to go on from there."""
        return self._block, self._call

    def resume(self, mark: tuple[int, int]) -> None:
        self._block, self._call = mark

    def block(self, number: int) -> None:
        self._block, self._call = number, 0

    def draw(self, x: Tensor, p: float, heads: tuple[int, int, int] | None = None) -> Tensor:
        """x [b, ...] with shares of it dropped. `heads` (start, stop, of) says which of the row's heads dim 1 holds."""
        whole, own = list(x.shape[1:]), heads
        if len(x) > len(self._samples) > 0 and heads is None:  # some flatten rows and tokens (OPT)
            return self.draw(x.unflatten(0, (len(self._samples), -1)), p).flatten(0, 1)
        if heads is None and self._own is not None and whole[0] == self._own[1] - self._own[0]:
            own = self._own
        if own is not None:
            whole[0] = own[2]
        keep = []
        for sample in self._samples[: x.shape[0]]:
            key = f"{self._seed}/{self._step}/{sample}/{self._block}/{self._call}".encode()
            number = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
            row = torch.rand(whole, generator=torch.Generator().manual_seed(number), dtype=torch.float32) >= p
            keep.append(row if own is None else row[own[0] : own[1]])
        self._call += 1
        return x * torch.stack(keep).to(x.device) / (1 - p)

    def __enter__(self) -> Dropping:
        self._token = _HERE.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _HERE.reset(self._token)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **named)
        if func is F.scaled_dot_product_attention and named.get("dropout_p", 0.0):
            raise NotImplementedError("dropout inside fused attention is drawn by a kernel: choose attention plait")
        return func(*args, **named)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self.draw(x, p) if training and p else x


def begins(dropping: Dropping, number: int) -> Callable[..., None]:
    """A forward pre-hook for block `number`."""
    return lambda module, args: dropping.block(number)


def keyed(weights: Tensor, p: float, *, heads: tuple[int, int, int] | None) -> Tensor:
    """Attention weights [b, heads, s, s] with dropout: keyed where a run is under way, else torch's own."""
    if p == 0.0:
        return weights
    here = _HERE.get()
    return F.dropout(weights, p) if here is None else here.draw(weights, p, heads)


def drops(model: nn.Module) -> bool:
    """Whether a model drops anything: a module for it with a share above 0, or attention that is told one."""
    shares = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout")
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any(isinstance(share := getattr(module, name, 0), float) and share > 0 for name in shares)
        for module in model.modules()
    )
