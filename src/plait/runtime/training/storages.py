"""How much memory a step takes, counted by a dispatch mode: every storage once, from the operation that makes it until
the last tensor lets go of it.

    held        weights, gradients, optimizer state, units: there before the step, and named by the run
    new         y = x @ w        a storage that no argument has: counted
                y.view(..), y.add_(..), gradients that are views of their buckets: nothing new
    gone        when the storage is freed, which Python is told of

It sees what torch's operations make, not what a kernel or a backend of communication uses while it runs, and what an
allocator rounds up. It costs a call of Python an operation, so it counts one step and not all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of some tensors, each once, however many are views of it."""
    return sum({_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


class Storages(TorchDispatchMode):
    """While it is entered, counts the bytes of storages on `device` that are made besides those that are `held`."""

    def __init__(self, held: Mapping[str, Iterable[Tensor]], device: torch.device) -> None:
        super().__init__()
        self._device = device.type
        self._known: dict[int, object] = {}
        self.held: dict[str, int] = {}
        """Bytes by name; what stands under two names counts for the first."""
        self.bytes = 0
        self.peak = 0
        """The most bytes at one time, without what is held."""
        for name, tensors in held.items():
            new = {_key(tensor): tensor for tensor in tensors if _key(tensor) not in self._known}
            self.held[name] = size(new.values())
            self._known.update(new)

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> object:  # fmt: skip
        named = kwargs or {}
        given = function(*args, **named)
        made = [tensor for tensor in _tensors(given) if _key(tensor) not in self._known]
        if made:
            # A view of what was there before the step, as of the batch, is not new.
            read = {_key(tensor) for tensor in _tensors((args, tuple(named.values())))}
            for tensor in made:
                if tensor.device.type == self._device and _key(tensor) not in read | self._known.keys():
                    self._add(tensor)
        return given

    def _add(self, tensor: Tensor) -> None:
        storage, key, count = tensor.untyped_storage(), _key(tensor), tensor.untyped_storage().nbytes()

        def gone(_: object) -> None:
            del self._known[key]
            self.bytes -= count

        self._known[key] = weakref.ref(storage, gone)
        self.bytes += count
        self.peak = max(self.peak, self.bytes)


def _key(tensor: Tensor) -> int:
    """Of the storage: the same for all its views, and nobody else's while it lives."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
