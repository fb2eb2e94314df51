"""Which rank each stage is on, for p ranks with v stages each.

straight  (p 4)        0 1 2 3
loop      (p 4, v 2)   0 1 2 3 0 1 2 3       from the last rank back to the first
vee       (p 4)        0 1 2 3 3 2 1 0       down and up again: both ends of the model on rank 0
                                             (or two copies of the model, the second from the last rank on)
"""

from __future__ import annotations

from collections.abc import Callable

Placement = Callable[[int, int], tuple[int, ...]]


def straight(ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(range(ranks))


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(range(ranks)) * chunks


def vee(ranks: int, chunks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))
