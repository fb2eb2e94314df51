"""The ranks compare what they called: before every optimizer step, and with --comm-check before every call.

Each rank seals its channels before the step's last sum over the world, and after it holds everyone's seals against each
other: all ranks of a group must have made the same calls, and what one rank sent another must have received. So no step
is taken by ranks that did not make the same calls, even if every call went through. `Peers` is where the others' part of
the board is read: in shared memory here, in the store in comm/remote.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from . import board
from .board import Board, Channel, Mark, Name, Slot
from .watch import MismatchError, Verdict, edge, mismatch, ranks_named, story

Seal = dict[Name, tuple[int, int]]
"""Sequence number and hash of each of a rank's channels."""


class Peers(Protocol):
    """The board, as one rank reads it."""

    def seal(self, step: int) -> None:
        """Seals this rank's channels, for the others to read."""
        ...

    def seals(self, step: int) -> list[Seal | None]:
        """What each rank has sealed in this step, None where it has not yet."""
        ...

    def announce(self, channel: Channel, mark: Mark) -> None:
        """Lets the others read a call that this rank is about to make."""
        ...

    def hashes(self, name: Name, sequence: int, ranks: Iterable[int]) -> dict[int, int | None]:
        """The hash that each rank has under a sequence number of one of its channels, None where it has not come, and
        `LONG_AGO` where it is not kept any more."""
        ...

    def slots(self) -> list[Slot]:
        """Everything, for a message."""
        ...


class Shared:
    """`Peers` in memory that all ranks share."""

    def __init__(self, own: Board, ranks: int) -> None:
        self._own, self._memory, self._ranks = own, own.memory, ranks
        self._names: list[list[Name]] = [[] for _ in range(ranks)]

    def seal(self, step: int) -> None:
        self._own.seal(step)

    def seals(self, step: int) -> list[Seal | None]:
        return [self._seal(rank, step) for rank in range(self._ranks)]

    def announce(self, channel: Channel, mark: Mark) -> None:
        """The call is on the board already."""

    def hashes(self, name: Name, sequence: int, ranks: Iterable[int]) -> dict[int, int | None]:
        return {rank: self._hash(rank, name, sequence) for rank in ranks}

    def slots(self) -> list[Slot]:
        return [board.read(self._memory, rank, rank) for rank in range(self._ranks)]

    def _seal(self, rank: int, step: int) -> Seal | None:
        values = board.sealed(self._memory, rank, step)
        if values is None:
            return None
        return dict(zip(self._named(rank, len(values) // 2), zip(values[::2], values[1::2], strict=True), strict=True))

    def _hash(self, rank: int, name: Name, sequence: int) -> int | None:
        names = self._names[rank]
        if name not in names:
            names = self._named(rank, board.channels_of(self._memory, rank))
        return board.hash_at(self._memory, rank, names.index(name), sequence) if name in names else None

    def _named(self, rank: int, count: int) -> list[Name]:
        """The names of a rank's first channels; a channel keeps its name and its place."""
        names = self._names[rank]
        while len(names) < count:
            names.append(board.name_at(self._memory, rank, len(names)))
        return names[:count]


class Agreement:
    """Holds this rank's calls against the others'. `limit_s`: how long it waits for them to come."""

    def __init__(self, own: Board, peers: Peers, rank: int, ranks: int, limit_s: float) -> None:
        self._own, self._peers, self._rank, self._ranks, self._limit_s = own, peers, rank, ranks, limit_s

    def on_step(self, step: int) -> None:
        """Returns when all ranks have sealed this step and their seals agree; raises a `MismatchError` otherwise."""
        sealed = self._peers.seals(step)
        if None in sealed:
            # A GPU's host runs ahead of its collectives, and a store is not as fast as the network.
            self._own.pause("the other ranks' account of the step")
            deadline, pause = time.monotonic() + self._limit_s, 50e-6
            while None in (sealed := self._peers.seals(step)):
                pause = _slept(pause, deadline, "seal step", step)
            self._own.go_on()
        differs = disagreement([one for one in sealed if one is not None])
        if differs is not None:
            raise MismatchError(self._told(step, differs, sealed))

    def before_call(self, channel: Channel, mark: Mark) -> None:
        """Returns when every rank of a group has come to the same call; raises a `MismatchError` on a different one."""
        self._peers.announce(channel, mark)
        others = [rank for rank in channel.name[1] if rank != self._rank]
        self._compare(channel, mark, channel.name, others)

    def after_receive(self, channel: Channel, mark: Mark) -> None:
        """The same for a message that has come: waiting for its sender before could make both wait forever."""
        self._compare(channel, mark, ("to", (self._rank,)), list(channel.name[1]))

    def before_send(self, channel: Channel, mark: Mark) -> None:
        self._peers.announce(channel, mark)

    def _compare(self, channel: Channel, mark: Mark, name: Name, others: list[int]) -> None:
        mine, sequence = channel.hash_of(mark[2]), mark[2]
        found = self._peers.hashes(name, sequence, others)
        if None in found.values():
            self._own.wait(mark)
            deadline, pause = time.monotonic() + self._limit_s, 20e-6
            while None in (found := self._peers.hashes(name, sequence, others)).values():
                pause = _slept(pause, deadline, "make call", sequence)
            self._own.go_on()
        if any(theirs not in (mine, board.LONG_AGO) for theirs in found.values()):
            slots = self._peers.slots()
            verdict = mismatch(slots)
            if verdict is None:
                words = f"call {sequence} of {ranks_named(channel.name[1])} is not the same on all of them"
                verdict = Verdict(
                    "mismatch", self._rank, f"The ranks' calls do not go together: {words}.", story(slots)
                )
            raise MismatchError(verdict)

    def _told(self, step: int, shared: Name, sealed: list[Seal | None]) -> Verdict:
        """What differs, in words: the first calls that do, or, when all there are agree, how many there are."""
        slots = self._peers.slots()
        verdict = mismatch(slots)
        if verdict is not None:
            sentence = f"{verdict.sentence} No rank takes step {step}."
            return Verdict("mismatch", verdict.rank, sentence, verdict.lines)
        counts: dict[int, list[int]] = {}
        for rank in shared[1]:
            made = [pair[0] for name, pair in (sealed[rank] or {}).items() if edge(name, rank) == shared]
            counts.setdefault(sum(made), []).append(rank)
        told = ", ".join(f"{ranks_named(ranks)} made {count}" for count, ranks in sorted(counts.items()))
        who = ranks_named(shared[1])
        what = f"of the calls that {who} make together" if shared[0] == "group" else f"of the messages between {who}"
        fewest = counts[min(counts)][0]
        return Verdict("mismatch", fewest, f"Before step {step}, {what}, {told}: no rank takes the step.", story(slots))


def disagreement(seals: list[Seal]) -> Name | None:
    """The group or pair of ranks whose seals are not the same, None when all are. `seals` by rank."""
    found: dict[Name, list[tuple[int, int]]] = {}
    for rank, seal in enumerate(seals):
        for name, pair in seal.items():
            found.setdefault(edge(name, rank), []).append(pair)
    for shared, pairs in found.items():
        if pairs.count(pairs[0]) != len(shared[1]):
            return shared
    return None


def _slept(pause: float, deadline: float, what: str, number: int) -> float:
    """Sleeps, and returns for how long next time."""
    if time.monotonic() > deadline:
        raise RuntimeError(f"timed out: not all ranks came to {what} {number} within the limit of --hang-timeout")
    time.sleep(pause)
    return min(2 * pause, 2e-3)
