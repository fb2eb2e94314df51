"""Saving beside the training: the rank copies what it keeps and goes on; a process of its own writes the copy.

    rank      step 9 | copy | step 10 | step 11 | step 12 | ...       between steps, all ranks: is everybody's written?
    writer           |       file, fsync        |                     then rank 0's writer publishes
    rank 0's         |       file, fsync        | index, rename, pointer, old ones go |

The writer is forked before the rank has joined the others or has any weights: it shares no socket with it, no lock,
and no page that training will write to. What is copied is in memory without a name that both have mapped; what they
tell each other is lines of JSON. It dies with its rank.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import select
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...design.layout import box_shape
from ..comm.collectives import all_gather
from ..comm.nursery import die_with
from ..comm.world import World
from .contents import Contents, FileLayout
from .index import Index
from .load import TYPES
from .save import (
    RefusedError,
    Tensors,
    agreed,
    attempt,
    commit,
    failed,
    index_of,
    partial,
    piece,
    prepare,
    said,
    write_file,
)

LINE = b"\n"
GENTLY = 5
"""By how much a writer stands back behind those who compute."""


class Writer:
    """The process beside this rank; made before the world is joined, closed after the last save."""

    def __init__(self) -> None:
        self._memory = _nameless()
        orders, self._orders = os.pipe()
        self._reports, reports = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _live(orders, reports, self._memory, parent)
        os.close(orders)
        os.close(reports)
        self._heard = b""

    def room(self, size: int) -> mmap.mmap:
        """Memory of `size` bytes that the process sees too, every page of it there: a first touch costs as much as a
        copy."""
        os.ftruncate(self._memory, size)
        return mmap.mmap(self._memory, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))

    def order(self, what: dict[str, Any], more: bytes = b"") -> None:
        """Has the process do something; `more` are bytes that belong to it."""
        left = memoryview(json.dumps({**what, "more": len(more)}).encode() + LINE + more)
        try:
            while left:
                left = left[os.write(self._orders, left) :]
        except BrokenPipeError:  # what it said last, or that it is gone, is told by the next report
            return

    def report(self, *, wait: bool) -> dict[str, Any] | None:
        """What it says of its last order; None while it is at work."""
        while LINE not in self._heard:
            if not wait and not select.select([self._reports], [], [], 0)[0]:
                return None
            data = os.read(self._reports, 1 << 16)
            if not data:
                return {"error": "the process that writes its checkpoints is gone"}
            self._heard += data
        line, _, self._heard = self._heard.partition(LINE)
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        os.close(self._orders)
        os.waitpid(self.pid, 0)


def _nameless() -> int:
    """A file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("plait-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _live(orders: int, reports: int, memory: int, parent: int) -> NoReturn:
    """The life of the process: never returns, never touches a tensor."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        die_with(parent)
        os.nice(GENTLY)
        gc.disable()  # what is here is the rank's, and is not to be let go of twice
        _close_all_but(0, 1, 2, orders, reports, memory)
        with open(orders, "rb") as lines:
            while line := lines.readline():
                order = json.loads(line)
                more = lines.read(order["more"])
                try:
                    report: dict[str, Any] = {"numbers": _obey(order, more, memory)}
                except OSError as error:
                    report = {"error": said(error)}
                except Exception as error:  # whatever it is, the rank hears of it
                    report = {"error": f"{type(error).__name__}: {error}"}
                text = json.dumps(report).encode() + LINE
                while text:
                    text = text[os.write(reports, text) :]
    finally:
        os._exit(0)


def _obey(order: dict[str, Any], more: bytes, memory: int) -> list[int]:
    place = Path(order["folder"])
    if order["do"] == "commit":
        commit(place, more, order["keep"])
        return []
    with mmap.mmap(memory, order["size"], prot=mmap.PROT_READ) as mapped, memoryview(mapped) as whole:
        at, views = order["header"], []
        for size in order["sizes"]:
            views.append(whole[at : at + size])
            at += size
        try:
            return write_file(place, FileLayout(order["name"], bytes(whole[: order["header"]]), ()), views)
        finally:
            for view in views:
                view.release()


def _close_all_but(*kept: int) -> None:
    """Closes every file that is open here: a socket that stays open here would hide its rank's end from the others."""
    start = 0
    for fd in sorted(kept):
        if start < fd:  # an empty range is taken for an endless one
            os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


@dataclass
class _Pending:
    """A save under way; `publishes` once all files of it are on the disk."""

    folder: Path
    index: Index
    keep: int
    publishes: bool = False


class Background:
    """Saves of one rank that go on beside the training, one at a time; all ranks ask alike."""

    def __init__(self, world: World, contents: Contents, writer: Writer) -> None:
        self._world, self._contents, self._writer = world, contents, writer
        self._layout = contents.file(world.rank)
        self._copies = [] if self._layout is None else _copies(self._layout, writer.room(self._layout.size))
        self._pending: _Pending | None = None
        self._report: dict[str, Any] | None = None

    def begin(self, tensors: Tensors, index: Index, folder: Path, keep: int) -> None:
        """Copies what this rank writes and has it written. The save before must be over."""
        assert self._pending is None
        self._pending = _Pending(folder, index, keep)
        self._agree(lambda: attempt(self._world, lambda: prepare(folder) if self._world.rank == 0 else None))
        layout = self._layout
        if layout is None:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for copy, entry in zip(self._copies, layout.entries, strict=True):
                copy.copy_(piece(tensors, entry))
        self._writer.order({
            "do": "write", "folder": str(partial(folder)), "name": layout.name, "size": layout.size,
            "header": len(layout.header), "sizes": [entry.size for entry in layout.entries],
        })  # fmt: skip

    def look(self, *, wait: bool = False) -> Path | None:
        """Goes on with the save under way as far as all writers are, or with `wait` to its end: the checkpoint that is
        whole now, if one is. Raises a `SaveError` on all ranks where any writer has failed."""
        while self._pending is not None:
            pending, first = self._pending, self._world.rank == 0
            busy = first if pending.publishes else self._layout is not None
            if self._report is None:
                self._report = self._writer.report(wait=wait) if busy else {"numbers": []}
            ready = torch.tensor([self._report is not None], device=self._world.device)
            if not bool(all_gather(ready, self._world.everyone, why="checkpoint").all()):
                return None
            checksums = self._agree(self._told)
            self._report = None
            if pending.publishes:
                self._pending = None
                return pending.folder
            pending.publishes = True
            if first:
                text = index_of(pending.index, self._contents, checksums).text()
                self._writer.order({"do": "commit", "folder": str(pending.folder), "keep": pending.keep}, text)
        return None

    def _told(self) -> list[list[int]]:
        report = self._report or {}
        return agreed(self._world, report.get("error"), report.get("numbers", []))

    def _agree(self, ask: Callable[[], list[list[int]]]) -> list[list[int]]:
        pending = self._pending
        assert pending is not None
        try:
            return ask()
        except RefusedError as refusal:
            self._pending = None
            raise failed(pending.folder, pending.index, refusal, clear=self._world.rank == 0) from None


def _copies(layout: FileLayout, room: mmap.mmap) -> list[Tensor]:
    """Where each entry of a file is copied to, and the header."""
    room[: len(layout.header)] = layout.header
    found = []
    for entry in layout.entries:
        dtype, shape = TYPES[entry.dtype], box_shape(entry.slice.box)
        flat = torch.frombuffer(room, dtype=dtype, count=entry.size // dtype.itemsize, offset=entry.offset)
        found.append(flat.view(shape))
    return found
