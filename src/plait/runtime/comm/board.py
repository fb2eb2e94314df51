"""The board: each rank writes there what it calls and what it waits for, and whoever looks can read it at any moment.

    slot of a rank = state, step, wait | seal of even steps, of odd steps | channels: name, last calls | texts

A channel is what must be called in one order by more than one rank: the collectives of one set of ranks, or the messages
that go one way between two. Each call on it gets the next sequence number and changes a running hash, so that two ranks
that called the same in the same order have the same pair of numbers. A text is written the first time that an operation
is seen; later calls are a look-up, a mix and one `pack_into`, so the board is always on. A slot has one writer and no
lock: the sequence number is written last, and a reader takes only what it reads twice alike.

Local ranks share one piece of memory with their parent. A launcher's rank has a slot of its own memory, and
comm/remote.py carries what is in it to the others.
"""

from __future__ import annotations

import mmap
import struct
import sys
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

ABSENT, JOINING, RUNNING, ENDED = range(4)
"""States of a rank: not come yet, waiting for the others to come, in its run, through."""

CHANNELS, KEPT, TEXTS = 40, 64, 256
"""In a slot: the most channels, the calls kept of each, the texts kept."""
NAME_BYTES, TEXT_BYTES = 256, 320
HEAD = struct.Struct("=IIQIiIQ")  # state, channels, step; whether it waits, and the channel, text and sequence number
CALL = struct.Struct("=QIiQ")  # hash, text, tag, sequence number
SEALED = struct.Struct("=QQ")  # step, channels; then their sequence numbers and hashes
TEXT = struct.Struct("=II")  # number, bytes
CHANNEL_BYTES = NAME_BYTES + KEPT * CALL.size
SEALS_AT = 64
SEAL_BYTES = SEALED.size + CHANNELS * 16
CHANNELS_AT = SEALS_AT + 2 * SEAL_BYTES
TEXTS_AT = CHANNELS_AT + CHANNELS * CHANNEL_BYTES
SLOT = -(-(TEXTS_AT + TEXTS * TEXT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

WAIT = struct.Struct("=IiIQ")
WAIT_AT = HEAD.size - WAIT.size
FLAG = struct.Struct("=I")
LONG_AGO = -1
MASK, PRIME = (1 << 64) - 1, 0x9E3779B97F4A7C15

Memory = mmap.mmap | bytearray
Name = tuple[str, tuple[int, ...]]
"""Of a channel: ("group", its ranks), ("to", (rank,)) or ("from", (rank,))."""
Mark = tuple[int, int, int]
"""A call on the board: channel, text, sequence number."""


class Channel:
    """One channel as its rank writes it."""

    __slots__ = ("at", "hash", "index", "known", "memory", "name", "sequence")

    def __init__(self, name: Name, index: int, memory: Memory, at: int) -> None:
        self.name, self.index, self.memory, self.at = name, index, memory, at
        self.sequence = self.hash = 0
        self.known: dict[object, tuple[int, int]] = {}

    def hash_of(self, sequence: int) -> int | None:
        """The hash that one of the last calls had."""
        mixed, _, _, found = CALL.unpack_from(self.memory, self.at + sequence % KEPT * CALL.size)
        return int(mixed) if found == sequence else None


class Board:
    """This rank's slot, for writing. `memory` holds the slots of all local ranks, or this one alone."""

    def __init__(self, memory: Memory, place: int = 0) -> None:
        self.memory, self.base = memory, place * SLOT
        self.channels: dict[Name, Channel] = {}
        self._texts = 0
        self._owners: list[tuple[dict[object, tuple[int, int]], object]] = [({}, None)] * TEXTS
        self._pauses: dict[object, tuple[int, int]] = {}
        self._paused = 0

    @classmethod
    def private(cls) -> Board:
        return cls(bytearray(SLOT))

    def enter(self, state: int) -> None:
        FLAG.pack_into(self.memory, self.base, state)

    def at_step(self, step: int) -> None:
        struct.pack_into("=Q", self.memory, self.base + 8, step)

    def channel(self, name: Name) -> Channel:
        """The channel of that name, made when first asked for."""
        if name in self.channels:
            return self.channels[name]
        index, written = len(self.channels), name_to_text(name).encode()
        if index == CHANNELS or len(written) > NAME_BYTES:
            raise ValueError(f"the board has room for {CHANNELS} channels of a rank, each named in {NAME_BYTES} bytes")
        start = self.base + CHANNELS_AT + index * CHANNEL_BYTES
        self.memory[start : start + len(written)] = written
        channel = Channel(name, index, self.memory, start + NAME_BYTES)
        FLAG.pack_into(self.memory, self.base + 4, index + 1)
        self.channels[name] = channel
        return channel

    def note(self, channel: Channel, operation: str, x: Tensor, axis: str, why: str, tag: int = 0) -> Mark:
        """Writes down a call that is about to be made. What both ends of a message have in common decides the hash."""
        key = (operation, x.dtype, x.shape, axis, why)
        number, word = channel.known.get(key) or self._first(channel, operation, x, axis, why)
        channel.sequence = sequence = channel.sequence + 1
        channel.hash = mixed = ((channel.hash ^ word) * PRIME + tag) & MASK
        CALL.pack_into(channel.memory, channel.at + sequence % KEPT * CALL.size, mixed, number, tag, sequence)
        return channel.index, number, sequence

    def wait(self, mark: Mark) -> None:
        """From now on this rank waits for a call to be done. Not undone by an error: it shows where the rank was."""
        WAIT.pack_into(self.memory, self.base + WAIT_AT, 1, *mark)

    def go_on(self) -> None:
        """It is done; it stays on the board as the last thing that this rank came through."""
        FLAG.pack_into(self.memory, self.base + WAIT_AT, 0)

    def pause(self, what: str) -> None:
        """From now on this rank waits for something that is no call."""
        number, _ = self._pauses.get(what) or self._write(self._pauses, what, what, what)
        self._paused += 1
        self.wait((-1, number, self._paused))

    def seal(self, step: int) -> None:
        """Keeps the state of every channel, as it is at one place of a step, until the step after the next."""
        at = self.base + SEALS_AT + step % 2 * SEAL_BYTES
        values = [number for channel in self.channels.values() for number in (channel.sequence, channel.hash)]
        struct.pack_into(f"={len(values)}Q", self.memory, at + SEALED.size, *values)
        SEALED.pack_into(self.memory, at, step, len(self.channels))

    def _first(self, channel: Channel, operation: str, x: Tensor, axis: str, why: str) -> tuple[int, int]:
        tensor = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        text = f"{operation} {tensor} over {axis} ({why}) at {_call_site()}"
        common = f"{operation if channel.name[0] == 'group' else 'message'} {tensor} {axis} {why}"
        return self._write(channel.known, (operation, x.dtype, x.shape, axis, why), text, common)

    def _write(self, known: dict[object, tuple[int, int]], key: object, text: str, common: str) -> tuple[int, int]:
        """Writes a text in the place of the oldest one."""
        self._texts += 1
        place = self._texts % TEXTS
        owner, old = self._owners[place]
        owner.pop(old, None)
        self._owners[place] = (known, key)
        written = text.encode()[: TEXT_BYTES - TEXT.size]
        at = self.base + TEXTS_AT + place * TEXT_BYTES
        self.memory[at + TEXT.size : at + TEXT.size + len(written)] = written
        TEXT.pack_into(self.memory, at, self._texts, len(written))
        known[key] = (self._texts, int.from_bytes(blake2b(common.encode(), digest_size=8).digest(), "little"))
        return known[key]


def _call_site() -> str:
    """Where the call that is being noted comes from: the innermost frame outside this room and torch."""
    frame = sys._getframe(1)
    place = frame
    while place.f_back is not None:
        module = place.f_globals.get("__name__", "")
        if not module.startswith((__package__, "torch.")):
            break
        place = place.f_back
    module = place.f_globals.get("__name__", "")
    file = module.removeprefix("plait.").replace(".", "/") + ".py" if module.startswith("plait.") else ""
    return f"{file or Path(place.f_code.co_filename).name}:{place.f_lineno}"


# --- reading


@dataclass(frozen=True)
class Call:
    """One call on a channel: its sequence number, the hash of it and all before it, and its words."""

    sequence: int
    hash: int
    text: str


@dataclass(frozen=True)
class Wait:
    """What a rank waits for: a call on a channel, or, without one, what the text says."""

    channel: Name | None
    sequence: int
    text: str


@dataclass(frozen=True)
class Slot:
    """What one rank's slot said when it was read: `wait` is what it waits for, `last` what it last waited for, and
    `calls` the last ones of each channel, oldest first."""

    rank: int
    state: int = ABSENT
    step: int = 0
    wait: Wait | None = None
    last: Wait | None = None
    calls: dict[Name, tuple[Call, ...]] = field(default_factory=dict)

    def came(self, channel: Name) -> int:
        """The sequence number of the last call on a channel."""
        calls = self.calls.get(channel)
        return calls[-1].sequence if calls else 0

    def at(self, channel: Name, sequence: int) -> Call | None:
        return next((call for call in self.calls.get(channel, ()) if call.sequence == sequence), None)


def glance(memory: Memory, place: int) -> bytes:
    """State, step and wait as they stand: as long as these bytes stay alike the rank waits for the same thing."""
    return bytes(memory[place * SLOT : place * SLOT + HEAD.size])


def waits(seen: bytes) -> bool:
    state, _, _, waiting, *_ = HEAD.unpack(seen)
    return bool(state == RUNNING and waiting)


def state_of(seen: bytes) -> int:
    return int(HEAD.unpack(seen)[0])


def read(memory: Memory, place: int, rank: int, *, last: int = KEPT) -> Slot:
    """The slot at `place`, which is rank `rank`'s, with the last few calls of each channel."""
    base = place * SLOT
    state, channels, step, waiting, channel, number, sequence = HEAD.unpack(glance(memory, place))
    texts: dict[int, str] = {}

    def text(number: int) -> str:
        if number not in texts:
            at = base + TEXTS_AT + number % TEXTS * TEXT_BYTES
            found, size = TEXT.unpack(_twice(memory, at, TEXT.size))
            words = bytes(memory[at + TEXT.size : at + TEXT.size + size]).decode(errors="replace")
            texts[number] = words if found == number else "a call whose words are not kept"
        return texts[number]

    names = [name_at(memory, place, index) for index in range(channels)]
    calls = {
        name: tuple(
            Call(sequence, mixed, text(number) + (f", tag {tag}" if tag else ""))
            for sequence, mixed, number, tag in _calls(memory, place, index, last)
        )
        for index, name in enumerate(names)
    }
    mark = None
    if number:
        mark = Wait(names[channel] if 0 <= channel < channels else None, sequence, text(number))
    return Slot(rank, state, step, mark if waiting else None, None if waiting else mark, calls)


def channels_of(memory: Memory, place: int) -> int:
    """How many channels a rank has named."""
    return int(HEAD.unpack(glance(memory, place))[1])


def name_at(memory: Memory, place: int, index: int) -> Name:
    at = place * SLOT + CHANNELS_AT + index * CHANNEL_BYTES
    return name_from_text(bytes(memory[at : at + NAME_BYTES]).rstrip(b"\0").decode())


def name_from_text(text: str) -> Name:
    kind, _, ranks = text.partition(" ")
    if ":" in ranks:
        return kind, tuple(range(*map(int, ranks.split(":"))))
    return kind, tuple(map(int, ranks.split(",")))


def hash_at(memory: Memory, place: int, index: int, sequence: int) -> int | None:
    """The hash of one call on a channel: None when it has not been made, `LONG_AGO` when it is not kept any more."""
    at = place * SLOT + CHANNELS_AT + index * CHANNEL_BYTES + NAME_BYTES + sequence % KEPT * CALL.size
    mixed, _, _, found = CALL.unpack(_twice(memory, at, CALL.size))
    if found > sequence:
        return LONG_AGO
    return int(mixed) if found == sequence else None


def sealed(memory: Memory, place: int, step: int) -> tuple[int, ...] | None:
    """Sequence number and hash of every channel by index, as sealed in that step; None when it is not sealed yet."""
    at = place * SLOT + SEALS_AT + step % 2 * SEAL_BYTES
    found, count = SEALED.unpack_from(memory, at)
    return struct.unpack_from(f"={2 * count}Q", memory, at + SEALED.size) if found == step else None


def _calls(memory: Memory, place: int, index: int, last: int) -> list[tuple[int, int, int, int]]:
    """(sequence number, hash, text, tag) of the calls kept of a channel, oldest first."""
    at = place * SLOT + CHANNELS_AT + index * CHANNEL_BYTES + NAME_BYTES
    found = [
        (sequence, mixed, number, tag)
        for mixed, number, tag, sequence in CALL.iter_unpack(_twice(memory, at, KEPT * CALL.size))
        if sequence
    ]
    found.sort()
    # What was overwritten between two writes leaves numbers of an earlier round.
    return [call for call in found if call[0] > found[-1][0] - KEPT][-last:]


def _twice(memory: Memory, at: int, size: int) -> bytes:
    """Bytes that were read twice alike: not those of a write under way."""
    seen = bytes(memory[at : at + size])
    for _ in range(8):
        again = bytes(memory[at : at + size])
        if again == seen:
            break
        seen = again
    return seen


def name_to_text(name: Name) -> str:
    """'group 0:8:2' for ranks at one distance, which those of a mesh's groups are; 'group 0,1,5' for others."""
    kind, ranks = name
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    spaced = step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step))
    words = f"{ranks[0]}:{ranks[-1] + 1}:{step}" if spaced else ",".join(map(str, ranks))
    return f"{kind} {words}"
