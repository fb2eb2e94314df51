"""What one rank posts in its segment for others to take, and what it finds of theirs.

A *channel* is what some ranks call in one order. Each has a row for it in its segment, with the numbers of the last calls
that it has posted, summed and taken, and a ring with place, size and tag of the last that it posted. A place is used
again when all have taken what stood there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b

from torch import Tensor

from .segment import ENTRY, POSTED, RING, ROW_WORDS, SUMMED, TAKEN, Neighbours

Post = tuple[int, int, int]
"""Sequence number, place, bytes."""
LENT = 1
"""The tag of a collective's post that stands in a room."""


def number_of(name: str) -> int:
    """A channel's name as a word; 0 is none's."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1


class Row:
    """This rank's row of a channel, `name`, and the others' rows of it, which they may call otherwise."""

    def __init__(self, near: Neighbours, others: Sequence[int], name: str, theirs: str = "") -> None:
        self.near, self.others = near, tuple(others)
        self._at = near.own.begin_row(number_of(name))
        self._name = number_of(theirs or name)
        self._rows: dict[int, int] = {}

    def entry(self, rank: int, sequence: int) -> int:
        """Where the post of that number stands among a rank's words."""
        return self.row(rank) + ROW_WORDS + sequence % RING * ENTRY

    def row(self, rank: int) -> int:
        """Where a rank's row begins: 0, where all words say nothing, until it is there."""
        if rank == self.near.rank:
            return self._at
        found = self._rows.get(rank) or self.near.segments[rank].row(self._name)
        if found is None:
            return 0
        self._rows[rank] = found
        return found

    def says(self, rank: int, word: int) -> int:
        row = self.row(rank)
        return self.near.segments[rank].words[row + word] if row else 0

    def all_say(self, word: int, least: int) -> bool:
        """Whether a word of everyone else's has come so far."""
        return all(self.says(rank, word) >= least for rank in self.others)

    def say(self, word: int, value: int) -> None:
        self.near.own.words[self._at + word] = value

    def until(self, done: Callable[[], bool]) -> None:
        self.near.until(done, self.others)

    def fits(self, rank: int, brings: int, expected: int) -> None:
        if brings != expected:
            raise RuntimeError(f"the local transport expects {expected} bytes of rank {rank}, which brings {brings}")


class Posts(Row):
    """A row, and what this rank has posted in it."""

    def __init__(self, near: Neighbours, others: Sequence[int], name: str, theirs: str = "") -> None:
        super().__init__(near, others, name, theirs)
        self.posted = 0
        self._held: deque[tuple[int, int, int | Tensor]] = deque()
        near.reclaim.append(self._reclaim)

    def taken(self, sequence: int) -> bool:
        """Whether all have taken a post."""
        return self.all_say(TAKEN, sequence)

    def post(self, x: Tensor, tag: int = 0) -> int:
        """Shares what x is now; gives the place."""
        self._reclaim_one()
        near, size = self.near, x.nbytes
        at, kind = near.take(size)
        if size:
            near.view(near.rank, at, x.numel(), x.dtype).copy_(x.view(-1))
        return self._say_where(at, size, kind, tag)

    def _say_where(self, at: int, size: int, kind: int | Tensor, tag: int) -> int:
        """Shares what stands at a place, of a kind that is given back, or in a room, which is held."""
        near = self.near
        self.posted += 1
        words, entry = near.own.words, self.entry(near.rank, self.posted)
        words[entry], words[entry + 1], words[entry + 2] = tag, at, size
        self.say(POSTED, self.posted)
        self._held.append((self.posted, at, kind))
        near.ring(self.others)
        return at

    def _reclaim_one(self) -> None:
        """Returns when one more can be posted."""
        if self._reclaim() == RING:
            self.until(lambda: self._reclaim() < RING)

    def _reclaim(self) -> int:
        """Takes back the places of what all have taken: how many are still held."""
        while self._held and self.taken(self._held[0][0]):
            _, at, kind = self._held.popleft()
            if isinstance(kind, int):
                self.near.give_back(at, kind)
        return len(self._held)


class Channel(Posts):
    """Collectives, which end in the order in which they are called."""

    def __init__(self, near: Neighbours, ranks: tuple[int, ...]) -> None:
        super().__init__(near, [rank for rank in ranks if rank != near.rank], f"group {ranks}")
        self.ranks, self.index = ranks, ranks.index(near.rank)
        self.ended = 0
        self._under_way: deque[Callable[[], bool]] = deque()
        self._together: set[int] = set()

    def lend(self, x: Tensor) -> bool:
        """Shares x, which is not copied if it stands in a room: whether that is so."""
        at = self.near.place(x)
        if at is None:
            self.post(x)
            return False
        self._reclaim_one()
        self._say_where(at, x.nbytes, x, LENT)
        return True

    def any_lent(self, sequence: int) -> bool:
        """Whether a post of that number stands in a room; all have posted it."""
        return any(self.near.segments[rank].words[self.entry(rank, sequence)] == LENT for rank in self.ranks)

    def taken(self, sequence: int) -> bool:
        # This rank reads its own post, too.
        return self.ended >= sequence and super().taken(sequence)

    def places(self, sequence: int, size: int) -> list[int]:
        """Where everyone's post of that number stands, in the order of the group; all have posted it."""
        found = []
        for rank in self.ranks:
            words, entry = self.near.segments[rank].words, self.entry(rank, sequence)
            self.fits(rank, words[entry + 2], size)
            found.append(words[entry + 1])
        return found

    def begin(self, advance: Callable[[], bool], *, together: bool = False) -> Call:
        """A call was posted; once everyone has posted it `advance` does what can be done, and says whether that was the
        last. `together`: it ends when it has ended for all, and what was posted is nobody else's any more."""
        self._under_way.append(advance)
        self.near.active[self] = self._all_ended
        if together:
            self._together.add(self.posted)
        return Call(self, self.posted, together)

    def go_on(self) -> int:
        """Does what can be done: the number of the last call that has ended."""
        while self._under_way and self.all_say(POSTED, self.ended + 1) and self._under_way[0]():
            self._under_way.popleft()
            self.ended += 1
            self.say(TAKEN, self.ended)
            if self.ended in self._together:
                self._together.remove(self.ended)
                self.near.ring(self.others)
        return self.ended

    def summed(self, sequence: int) -> None:
        """Says that this rank's piece of a sum is there."""
        self.say(SUMMED, sequence)
        self.near.ring(self.others)

    def _all_ended(self) -> bool:
        self.go_on()
        return not self._under_way


class Call:
    """A collective under way."""

    def __init__(self, channel: Channel, sequence: int, together: bool) -> None:
        self._channel, self._sequence, self._together = channel, sequence, together

    def wait(self) -> None:
        if not self.is_completed():
            self._channel.until(self.is_completed)

    def is_completed(self) -> bool:
        channel, sequence = self._channel, self._sequence
        ended = channel.ended >= sequence or channel.go_on() >= sequence
        return ended and (not self._together or channel.all_say(TAKEN, sequence))


class Outbox(Posts):
    """Messages to one rank, which takes them in any order: it says of each by itself that it has it."""

    def __init__(self, near: Neighbours, to: int, group: tuple[int, ...]) -> None:
        super().__init__(near, (to,), f"to {to} {group}", f"from {near.rank} {group}")

    def taken(self, sequence: int) -> bool:
        to = self.others[0]
        return bool(self.row(to)) and self.near.segments[to].words[self.entry(to, sequence) + 3] >= sequence


class Inbox(Row):
    """Messages from one rank."""

    def __init__(self, near: Neighbours, source: int, group: tuple[int, ...]) -> None:
        super().__init__(near, (source,), f"from {source} {group}", f"to {near.rank} {group}")
        self.source = source
        self._seen = 0
        self._waiting: dict[int, deque[Post]] = {}

    def arrived(self, tag: int) -> Post | None:
        """The first message with that tag that is not taken yet."""
        words, posted = self.near.segments[self.source].words, self.says(self.source, POSTED)
        while posted > self._seen:
            self._seen += 1
            entry = self.entry(self.source, self._seen)
            post = (self._seen, words[entry + 1], words[entry + 2])
            self._waiting.setdefault(words[entry], deque()).append(post)
        waiting = self._waiting.get(tag)
        return waiting.popleft() if waiting else None

    def acknowledge(self, sequence: int) -> None:
        self.near.own.words[self.entry(self.near.rank, sequence) + 3] = sequence


class Message:
    """A receive that is posted: what has come is taken when it is asked for."""

    def __init__(self, x: Tensor, inbox: Inbox, tag: int) -> None:
        self._x, self._inbox, self._tag = x, inbox, tag
        self._taken = False

    def wait(self) -> None:
        if not self.is_completed():
            self._inbox.until(self.is_completed)

    def is_completed(self) -> bool:
        if self._taken:
            return True
        found = self._inbox.arrived(self._tag)
        if found is None:
            return False
        sequence, at, size = found
        inbox, x = self._inbox, self._x
        inbox.fits(inbox.source, size, x.nbytes)
        if size:
            x.view(-1).copy_(inbox.near.view(inbox.source, at, x.numel(), x.dtype))
        inbox.acknowledge(sequence)
        self._taken = True
        return True


class Done:
    """Nothing is left to do."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True
