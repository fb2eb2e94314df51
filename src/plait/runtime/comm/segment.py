"""Memory that the ranks of one host share: each has a segment that it alone writes and all others read.

    words of control                                     | data: what was posted and not yet taken by all
    bell, process | a row a channel, each with a ring    | ...

A segment is a file without a name (memfd): the others open it through /proc while its owner waits for them, and it is
gone when the last process that has it ends, however that ends. It is as large as the machine's memory, and only what was
touched is there. All but the bell has one writer, and data is written before the word that says so. Processors other
than x86-64 may show the two in another order, so only that is supported.

Who waits sleeps on its own bell (a futex), which others ring when they have written something for it; before that it
gives up its processor a few times, since most waits are short. Each ringing writes a value that differs from all recent
ones, so that whoever goes to sleep on the one before is woken. Franke, Russell, Kirkwood, "Fuss, Futexes and Furwocks",
OLS 2002.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

WORDS = 2
"""Before the rows: the bell, and the owner's process."""
PROCESS = 1
MOST = 1 << 40
"""Bytes of a segment, most of which are never there."""
ROWS = 256
ROW_WORDS = 4
"""Of a row, before its ring: channel, posted, summed, taken."""
RING = 128
ROOM = 64
"""Rooms begin and end at multiples of so many bytes."""
ENTRY = 4
"""Words of a post: tag, place, bytes, and of a message from another rank the number that this one has taken."""
ROW = ROW_WORDS + RING * ENTRY
CONTROL = (8 * (WORDS + ROWS * ROW) + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
POSTED, SUMMED, TAKEN = 1, 2, 3
YIELDS = 40
SLEEP_S = 0.005
"""At most: then the bell is looked at again, whatever happened to it."""
LOOK_S = 0.5
"""How often it is asked whether the others are still there."""
_FUTEX = 202
_WAIT, _WAKE = 0, 1


def unsupported() -> str | None:
    """Why ranks cannot share memory on this system, as the end of a sentence; None where they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"is for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return "needs memfd_create and /proc, which this system does not have"
    return None


def host() -> str:
    """The same for processes that can open each other's files through /proc, and that see one network: what has another
    is another node, as far as anybody was told."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    return f"{boot} {spaces} {os.getuid()}"


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _syscall() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
    )  # fmt: skip
    call.restype = ctypes.c_long
    return call


class Segment:
    """One rank's segment, mapped here."""

    def __init__(self, fd: int, *, own: bool) -> None:
        size = os.fstat(fd).st_size
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0))
        self.memory = memory
        self.words = memoryview(memory)[:CONTROL].cast("Q")
        self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=CONTROL)
        self.bell = ctypes.c_uint32.from_buffer(memory, 0)
        self.address = ctypes.addressof(self.bell)
        self.fd = fd if own else -1
        self._rows: dict[int, int] = {}
        self._seen = 0

    @classmethod
    def made(cls) -> Segment:
        """This process's own."""
        fd = os.memfd_create("plait-segment")
        os.ftruncate(fd, CONTROL + min(MOST, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
        made = cls(fd, own=True)
        made.words[PROCESS] = os.getpid()
        return made

    @classmethod
    def opened(cls, pid: int, fd: int) -> Segment:
        """Another process's."""
        found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            return cls(found, own=False)
        finally:
            os.close(found)

    def row(self, channel: int) -> int | None:
        """Where a channel's row begins, None while its owner has not begun it."""
        found = self._rows.get(channel)
        while found is None and self._seen < ROWS:
            at = WORDS + self._seen * ROW
            name = self.words[at]
            if not name:
                return None
            self._rows[name] = at
            self._seen += 1
            if name == channel:
                found = at
        return found

    def begin_row(self, channel: int) -> int:
        """Begins a channel's row in this process's own segment."""
        found = self.row(channel)
        if found is None:
            if self._seen == ROWS:
                raise RuntimeError(f"the local transport has {ROWS} channels a rank: use local_transport torch")
            found = WORDS + self._seen * ROW
            self.words[found] = channel
            self.row(channel)
        return found


class Neighbours:
    """This rank and the others on its host. `limit_s` is how long it waits for them at a time."""

    def __init__(self, segments: dict[int, Segment], rank: int, limit_s: float) -> None:
        self.own, self.segments, self.rank, self._limit_s = segments[rank], segments, rank, limit_s
        self._call = _syscall()
        self._pause = _Time(0, int(SLEEP_S * 1e9))
        self._rung = 0
        self.active: dict[object, Callable[[], bool]] = {}
        """What may go on when others have: each says whether it has ended."""
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self.reclaim: list[Callable[[], object]] = []
        """What lets go of posts that all have taken."""
        self._gaps: list[tuple[int, int]] = []
        self._left: deque[tuple[int, int]] = deque()
        self._views: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    @property
    def size(self) -> int:
        """How many ranks are here."""
        return len(self.segments)

    def has(self, ranks: Iterable[int]) -> bool:
        return all(rank in self.segments for rank in ranks)

    # --- memory

    @property
    def used(self) -> int:
        """The bytes of data that this rank has shared so far, at the most at one time."""
        return self._end

    def take(self, size: int) -> tuple[int, int]:
        """A place for `size` bytes in this rank's segment, and its class, with which it is given back."""
        step = max(64, 1 << max(0, size.bit_length() - 3))
        kind = -(-max(size, 1) // step) * step
        free = self._free.setdefault(kind, [])
        return (free.pop() if free else self._appended(kind)), kind

    def give_back(self, at: int, kind: int) -> None:
        self._free[kind].append(at)

    def _appended(self, size: int) -> int:
        at, self._end = self._end, self._end + size
        if self._end > len(self.own.data):
            raise RuntimeError(f"the local transport cannot share {self._end} bytes, more than this machine's memory")
        return at

    def room(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] zeros in this rank's segment: what is posted of them need not be copied. Place and memory are free
        when nobody has a view of it any more, and all have taken what was posted of it."""
        if not count:
            return torch.zeros(0, dtype=dtype)
        size = -(-count * dtype.itemsize // ROOM) * ROOM
        for reclaim in self.reclaim:
            reclaim()
        left = [self._left.popleft() for _ in range(len(self._left))]  # more may come meanwhile
        self._gaps = _merged([*self._gaps, *left])
        at = next((at for at, free in self._gaps if free >= size), None)
        if at is None:
            at = self._appended(size)
        else:
            rest = [(start, free) if start != at else (at + size, free - size) for start, free in self._gaps]
            self._gaps = [(start, free) for start, free in rest if free]
        room = torch.frombuffer(self.own.memory, dtype=dtype, count=count, offset=CONTROL + at)
        weakref.finalize(room.untyped_storage(), self._leave, at, size).atexit = False
        return room.zero_()

    def _leave(self, at: int, size: int) -> None:
        """Called when the last view is gone, which may be in the middle of anything else here."""
        first, last = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE, (at + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            with contextlib.suppress(OSError):  # a system that cannot keeps them until they are used again
                self.own.memory.madvise(mmap.MADV_REMOVE, CONTROL + first, last - first)
        self._left.append((at, size))

    def place(self, x: Tensor) -> int | None:
        """Where x stands in this rank's segment, if it is a part of a `room`."""
        at = x.data_ptr() - self.own.data.data_ptr()
        return at if 0 <= at < self._end else None

    def view(self, rank: int, at: int, count: int, dtype: torch.dtype) -> Tensor:
        """[count] numbers of a rank's data."""
        key = (rank, at, count, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 4096:
                self._views.clear()
            found = self._views[key] = self.segments[rank].data[at : at + count * dtype.itemsize].view(dtype)
        return found

    # --- waiting

    def ring(self, ranks: Iterable[int]) -> None:
        """Wakes ranks that may wait for what this one has written."""
        self._rung = (self._rung + 1) & 0xFFFFF
        value = ((self.rank & 0xFFF) << 20 | self._rung) or 1
        for rank in ranks:
            segment = self.segments[rank]
            segment.bell.value = value
            self._call(_FUTEX, segment.address, _WAKE, 1, None, None, 0)

    def go_on(self) -> None:
        """Does what can be done for calls under way."""
        for key in [key for key, advance in self.active.items() if advance()]:
            del self.active[key]

    def until(self, done: Callable[[], bool], ranks: Iterable[int]) -> None:
        """Returns when `done()`, which waits for `ranks`; meanwhile the other calls go on."""
        tries, since, looked = 0, 0.0, 0.0
        while True:
            heard = self.own.bell.value
            if self.active:
                self.go_on()
            if done():
                return
            if tries < YIELDS:
                tries += 1
                os.sched_yield()
                continue
            self._call(_FUTEX, self.own.address, _WAIT, heard, ctypes.addressof(self._pause), None, 0)
            now = time.monotonic()
            since, looked = since or now, looked or now
            if now - looked > LOOK_S:
                looked = now
                self._are_there(ranks)
            if now - since > self._limit_s:
                raise RuntimeError(f"the local transport timed out after {self._limit_s:.0f} s")

    def _are_there(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            try:
                os.kill(self.segments[rank].words[PROCESS], 0)
            except OSError as error:
                if error.errno == errno.ESRCH:
                    raise RuntimeError(f"connection closed: the process of rank {rank} is gone") from None


def _merged(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(place, size) in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for at, size in sorted(gaps):
        if found and sum(found[-1]) == at:
            at, size = found[-1][0], found.pop()[1] + size
        found.append((at, size))
    return found


def meet(store: Any, rank: int, size: int, limit_s: float) -> Neighbours | None:
    """The ranks on this host, once all of them have each other's segments. None on every rank when one of them cannot
    have what it should (a limit of memory, a /proc that hides others), and when this rank is alone on its host."""
    own, here = _or_none(Segment.made), host()
    store.set(f"segment/{rank}", "" if own is None else f"{os.getpid()} {own.fd} {here}")
    found: dict[int, Segment | None] = {rank: own}
    for other in range(size):
        pid, fd, place = (store.get(f"segment/{other}").decode() or "0 0 ").split(" ", 2)
        if other != rank and place == here:
            found[other] = _or_none(partial(Segment.opened, int(pid), int(fd)))
    segments = {other: segment for other, segment in found.items() if segment is not None}
    store.set(f"segment/{rank}/has", "all" if len(segments) == len(found) else "not all")
    everyone = [store.get(f"segment/{other}/has") == b"all" for other in range(size)]
    if own is not None:
        os.close(own.fd)
    if own is None or len(segments) == 1 or not all(everyone):
        return None
    return Neighbours(segments, rank, limit_s)


def _or_none(make: Callable[[], Segment]) -> Segment | None:
    try:
        return make()
    except (OSError, ValueError, OverflowError):  # of the last two mmap's, for sizes that it cannot take
        return None
