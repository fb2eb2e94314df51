"""All that a checkpoint does to a disk, operation by operation, so that a test can fail or end the process at each of
them.

Nothing here knows what is written. What fails raises an `OSError` whose `filename` says where.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

MOST_AT_ONCE = 512
"""Buffers in one call; Linux takes 1,024."""


def create(path: Path) -> int:
    """A new file, open for writing: its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def write(fd: int, views: Sequence[memoryview], path: Path) -> None:
    """Appends buffers of bytes to a file."""
    left = [view for view in views if view.nbytes]
    try:
        while left:
            _pass(left, os.writev(fd, left[:MOST_AT_ONCE]))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        left.clear()  # an error keeps this list, and what is left of a view would keep a mapping open


def sync(fd: int, path: Path) -> None:
    """Returns when the file's bytes are on the disk."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_folder(path: Path) -> None:
    """Returns when the names in a directory are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd, path)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    path.mkdir()


def rename(old: Path, new: Path) -> None:
    """At once; a file that has the new name is replaced."""
    old.rename(new)


def unlink(path: Path) -> None:
    path.unlink()


def remove_folder(path: Path) -> None:
    path.rmdir()


def open_plain(path: Path) -> int:
    """An ordinary file, open for reading. A link, which may lead anywhere, a pipe or a device is none."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return fd


def let_go(fd: int, offset: int, size: int) -> None:
    """Has the system begin to write bytes to the disk that nobody will change, where it can: to be synced later."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


def fill(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Reads into buffers, one after the other, from `offset` on: how many bytes there were."""
    left, done = [view for view in views if view.nbytes], 0
    while left:
        count = os.preadv(fd, left[:MOST_AT_ONCE], offset + done)
        if not count:
            break
        done += count
        _pass(left, count)
    return done


def _pass(left: list[memoryview], count: int) -> None:
    """Takes so many bytes off the front of buffers."""
    while left and count >= left[0].nbytes:
        count -= left.pop(0).nbytes
    if count:
        left[0] = left[0][count:]


def close(fd: int) -> None:
    os.close(fd)
