"""What a step keeps for backward, counted by autograd itself: every tensor that some backward saved, once, until the
graph lets go of it.

Costs a call of Python a saved tensor, so it counts one step and not all. Weights are not counted (they are held anyway).
A method that keeps tensors by itself, without autograd, notes them here: split backward does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Kept:
    """`peak`: the most bytes kept at one time. Storages are counted whole and once, however many views were saved."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._holders: dict[int, int] = {}
        self._bytes = 0
        self.peak = 0

    def add(self, place: int, size: int) -> None:
        held = self._holders.get(place, 0)
        self._holders[place] = held + 1
        if not held:
            self._bytes += size
            self.peak = max(self.peak, self._bytes)

    def drop(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place]
            self._bytes -= size

    def holds(self, tensor: Tensor) -> _Holder | Tensor:
        """What autograd keeps in the place of `tensor`."""
        storage = tensor.untyped_storage()
        return (
            tensor if storage.data_ptr() in self._own else _Holder(self, tensor, storage.data_ptr(), storage.nbytes())
        )


class _Holder:
    """Lives as long as autograd needs its tensor."""

    __slots__ = ("_place", "_seen", "_size", "tensor")

    def __init__(self, seen: Kept, tensor: Tensor, place: int, size: int) -> None:
        self.tensor, self._seen, self._place, self._size = tensor, seen, place, size
        seen.add(place, size)

    def __del__(self) -> None:
        self._seen.drop(self._place, self._size)


def _give(held: _Holder | Tensor) -> Tensor:
    return held.tensor if isinstance(held, _Holder) else held


class Keeper(Protocol):
    """What keeps tensors for backward by itself: asks `note` for something that lives as long as it keeps them."""

    note: Callable[[Tensor], object]


@contextmanager
def counted(weights: Iterable[Tensor], keepers: Iterable[Keeper]) -> Iterator[Kept]:
    """Counts what is kept for backward inside the block, by autograd and by `keepers`, `weights` left out."""
    kept, keepers = Kept(weights), tuple(keepers)
    before = [keeper.note for keeper in keepers]
    for keeper in keepers:
        keeper.note = kept.holds
    with torch.autograd.graph.saved_tensors_hooks(kept.holds, _give):
        yield kept
    for keeper, note in zip(keepers, before, strict=True):
        keeper.note = note
