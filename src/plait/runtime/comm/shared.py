"""Collectives and messages through memory that the ranks of one host share.

    all_reduce, two ranks or few bytes    everyone posts x; each sums all of them, in the order of the group
    all_reduce, more                      each sums its piece of everyone's x, then all take each other's pieces
    reduce_scatter                        each sums its piece of everyone's x
    all_gather                            everyone posts its share, and takes the others'
    send, receive                         the sender posts x with the tag; the receiver takes it when it waits

A call copies what it brings into this rank's segment and returns, or copies nothing where it stands there already (in a
`room`, as gradients of data parallelism do). So nobody waits for a receiver, and a call under way needs no thread: it
goes on when this rank makes another call or waits for one, and the sum is made by whoever reads. On cores that are busy
a byte that is moved is work taken from computing, so the fewest copies are the fastest: Gloo's pass through the kernel
twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...design.layout import balanced
from .posts import Channel, Done, Inbox, Message, Outbox
from .segment import SUMMED, Neighbours
from .transport import Op, Work

FEW = 1 << 16
"""Bytes up to which every rank sums everything for itself: one wait less."""
BLOCK = 1 << 16
"""Numbers that are summed at a time where there are more than two to a sum."""
_COMBINE: dict[Op, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}


class SharedMemory:
    """A `Transport`. `ranks` are the group's, as the world counts them."""

    by_tag = True

    def __init__(self, near: Neighbours, ranks: tuple[int, ...]) -> None:
        self._near, self._ranks = near, ranks
        self._channel = Channel(near, ranks)
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}

    def _views(self, sequence: int, x: Tensor) -> list[Tensor]:
        """Everyone's post, flat, as numbers of the type of x."""
        near, count = self._near, x.numel()
        places = self._channel.places(sequence, x.nbytes)
        return [near.view(rank, at, count, x.dtype) for rank, at in zip(self._ranks, places, strict=True)]

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._near.room(count, dtype)

    def all_reduce(self, x: Tensor, op: Op) -> Work:
        return self._reduce(x.view(-1), op, lent=self._channel.lend(x))

    def all_reduced(self, x: Tensor, op: Op) -> tuple[Tensor, Work]:
        x = x.contiguous()
        self._channel.post(x)
        result = torch.empty_like(x)
        return result, self._reduce(result.view(-1), op)

    def _reduce(self, flat: Tensor, op: Op, *, lent: bool = False) -> Work:
        """Has everyone's last post summed into `flat`, which is this rank's post itself if it was `lent`."""
        channel, combine = self._channel, _COMBINE[op]
        sequence = channel.posted
        pieces: Callable[[], bool] | None = None

        def advance() -> bool:
            nonlocal pieces
            if pieces is None:
                # Who has lent its post writes into it while it is read: then nobody reads all of it. All see that alike.
                if not (channel.any_lent(sequence) or (len(self._ranks) > 2 and flat.nbytes > FEW)):
                    _combined(self._views(sequence, flat), combine, flat)
                    return True
                pieces = self._in_pieces(sequence, flat, combine, lent)
            return pieces()

        return channel.begin(advance, together=lent)

    def _in_pieces(
        self, sequence: int, flat: Tensor, combine: Callable[..., Tensor], lent: bool
    ) -> Callable[[], bool]:  # fmt: skip
        channel, size, index = self._channel, len(self._ranks), self._channel.index
        spans = [balanced(flat.numel(), size, piece) for piece in range(size)]
        done = False

        def advance() -> bool:
            nonlocal done
            if not done:
                posts, own = self._views(sequence, flat), slice(*spans[index])
                _combined([post[own] for post in posts], combine, flat[own])
                # Nobody else reads this rank's post there.
                if not lent:
                    posts[index][own].copy_(flat[own])
                channel.summed(sequence)
                done = True
            if not channel.all_say(SUMMED, sequence):
                return False
            for place, post in enumerate(self._views(sequence, flat)):
                if place != index:
                    piece = slice(*spans[place])
                    flat[piece].copy_(post[piece])
            return True

        return advance

    def all_gather(self, whole: Tensor, share: Tensor) -> Work:
        channel, flat = self._channel, whole.view(-1)
        channel.lend(share)
        sequence, count = channel.posted, share.numel()
        own = flat[channel.index * count :][:count]
        if count and own.data_ptr() != share.data_ptr():
            own.copy_(share.view(-1))

        def advance() -> bool:
            for place, post in enumerate(self._views(sequence, own)):
                if place != channel.index:
                    flat[place * count :][:count].copy_(post)
            return True

        return channel.begin(advance)

    def reduce_scatter(self, x: Tensor, share: Tensor, space: Tensor, add: bool) -> Work:
        channel, count = self._channel, share.numel()
        channel.lend(x)
        sequence = channel.posted

        def advance() -> bool:
            start = channel.index * count
            pieces = [post[start : start + count] for post in self._views(sequence, x)]
            in_place = share.dtype == x.dtype and not add
            _combined(pieces, torch.add, share if in_place else space[:count])
            if not in_place:
                (share.add_ if add else share.copy_)(space[:count])
            return True

        return channel.begin(advance)

    def send(self, x: Tensor, to: int, tag: int) -> Work:
        if to not in self._outboxes:
            self._outboxes[to] = Outbox(self._near, self._ranks[to], self._ranks)
        self._outboxes[to].post(x, tag)
        return Done()

    def receive(self, x: Tensor, source: int, tag: int) -> Work:
        if source not in self._inboxes:
            self._inboxes[source] = Inbox(self._near, self._ranks[source], self._ranks)
        return Message(x, self._inboxes[source], tag)


def _combined(posts: list[Tensor], combine: Callable[..., Tensor], into: Tensor) -> None:
    """All of them, one after the other. `into` may be one of them."""
    if len(posts) == 2:
        combine(posts[0], posts[1], out=into)
        return
    partial = into.new_empty(min(BLOCK, into.numel()))
    for start in range(0, into.numel(), BLOCK):
        *others, last = (post[start : start + BLOCK] for post in posts)
        block = partial[: len(last)]
        combine(others[0], others[1], out=block)
        for post in others[2:]:
            combine(block, post, out=block)
        combine(block, last, out=into[start : start + BLOCK])
