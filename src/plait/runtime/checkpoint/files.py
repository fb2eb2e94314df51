"""The files of a checkpoint, read and checked, in a thread beside what asks for slices: it finds where the next ones go
while some are read.

    asks        | 1  | 2  | 3  |    waits     | 4  | ...        for slices that follow each other, some at a time
    reads            |    1    |    2    |    3    |    4    |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from . import disk
from .index import NAME, DamagedError, Saved, SavedFile

MOST_OPEN = 64
"""Files that are open at one time."""
TOGETHER = 1 << 23
"""Bytes of slices that are read in one call, at least, where there are as many."""
AHEAD = 2
"""Reads that are asked for and not done: one under way, and the next."""


class Files:
    """The files of a checkpoint in `folder`, read in slices; keeps some of them open, and no more than one slice in
    memory that has no place of its own. What is found wrong is raised by a later call, at the latest by `settle`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}
        self._space = bytearray()
        self._waiting: list[tuple[memoryview, Saved]] = []
        self._file: SavedFile | None = None
        """Which those that wait are in."""
        self._reader = ThreadPoolExecutor(1)
        self._reads: deque[Future[None]] = deque()

    def read(self, file: SavedFile, one: Saved) -> memoryview:
        """The bytes of a slice, found to be what was written; there until the next is read."""
        self._ask_for_waiting()
        self._wait_for(0)
        if len(self._space) < one.size:
            self._space = bytearray(one.size)
        into = memoryview(self._space)[: one.size]
        self._fill(file, [(into, _where(one))], one.offset)  # a thread would be waited for at once
        self._hold(crc32(into), one.crc, file, _where(one))
        return into

    def read_into(self, into: memoryview, file: SavedFile, one: Saved) -> None:
        """The same at a place of its own, together with those that follow in the file: `settle` says whether all that
        was read is what was written."""
        if self._waiting:
            last = self._waiting[-1][1]
            full = sum(view.nbytes for view, _ in self._waiting) >= TOGETHER or len(self._waiting) == disk.MOST_AT_ONCE
            if full or self._file is not file or last.offset + last.size != one.offset:
                self._ask_for_waiting()
        self._file = file
        self._waiting.append((into, one))

    def check_header(self, file: SavedFile) -> None:
        """Has what comes before the first slice read, which must be what follows from the index, and the size."""
        self._ask_for_waiting()
        self._ask(lambda: self._read_header(file))

    def settle(self) -> None:
        """Returns when all that was asked for is read and is what was written."""
        self._ask_for_waiting()
        self._wait_for(0)

    def _ask_for_waiting(self) -> None:
        waiting, file = self._waiting, self._file
        if not waiting or file is None:
            return
        self._waiting = []
        self._ask(lambda: self._read_slices(file, waiting))

    def _ask(self, read: Callable[[], None]) -> None:
        """Has something read after all that was asked for before."""
        self._wait_for(AHEAD - 1)
        self._reads.append(self._reader.submit(read))

    def _wait_for(self, left: int) -> None:
        """Returns when no more than `left` of the reads that were asked for are to be done."""
        while len(self._reads) > left:
            self._reads.popleft().result()

    # --- in the thread that reads, or in this one when that has nothing to do

    def _read_slices(self, file: SavedFile, slices: Sequence[tuple[memoryview, Saved]]) -> None:
        self._fill(file, [(view, _where(one)) for view, one in slices], slices[0][1].offset)
        for view, one in slices:
            self._hold(crc32(view), one.crc, file, _where(one))

    def _read_header(self, file: SavedFile) -> None:
        wanted = file.header
        found, where = memoryview(bytearray(len(wanted))), f"its header, bytes 0 to {len(wanted)}"
        self._fill(file, [(found, where)], 0)
        self._hold(crc32(found), file.crc, file, where)
        if found != wanted:
            raise DamagedError(self.folder / file.name, f"its header does not say what {NAME} says")

    def _fill(self, file: SavedFile, views: Sequence[tuple[memoryview, str]], offset: int) -> None:
        """Reads what stands one after the other, each with what it is."""
        path = self.folder / file.name
        try:
            if file.name not in self._open:
                if len(self._open) == MOST_OPEN:
                    disk.close(self._open.pop(next(iter(self._open))))
                self._open[file.name] = disk.open_plain(path)
            left = disk.fill(self._open[file.name], [view for view, _ in views], offset)
        except OSError as error:
            raise DamagedError(path, f"it cannot be read ({(error.strerror or str(error)).lower()})") from None
        for view, where in views:
            left -= view.nbytes
            if left < 0:
                raise DamagedError(path, f"it ends in {where}")

    def _hold(self, found: int, wanted: int, file: SavedFile, where: str) -> None:
        if found != wanted:
            path = self.folder / file.name
            raise DamagedError(path, f"{where} are not what was written: their CRC-32 is another")

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        for fd in self._open.values():
            disk.close(fd)
        self._open.clear()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _where(one: Saved) -> str:
    return f"{one.quantity} of {one.name}, bytes {one.offset} to {one.offset + one.size}"
