"""Saving: every rank writes its file, all agree that they have, and rank 0 publishes what is there.

    rank 0    folder.partial   file, fsync    . index.json, fsync, rename, fsync . pointer . old ones go
    rank 1                     file, fsync    .
                             agree          agree                              agree

Whatever fails on any rank fails the save on all of them, with the same words, and the checkpoints of before stay. A save
may go on beside the training: then the ranks' parts are done by processes beside them (writer.py), and only the agreeing
is done here, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from ...design.layout import box_shape
from ..comm.collectives import all_gather
from ..comm.world import World
from . import disk, folders
from .contents import Contents, Entry, FileLayout
from .index import NAME, Index, Saved, SavedFile

WORDS = 512
"""Bytes of what a rank says of a failure."""
TOGETHER = 1 << 22
"""Bytes of slices that are written in one call, at least, where there are as many."""

Tensors = Callable[[str, str], Tensor]
"""What a rank keeps of a quantity of a parameter, flat and contiguous: by the parameter's name and the quantity's."""


class SaveError(Exception):
    """A checkpoint could not be written."""


class RefusedError(Exception):
    """A rank could not do its part: which, and why."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.why = why


def said(error: OSError) -> str:
    """What went wrong with a file, in words."""
    return f"{error.filename or 'the disk'}: {(error.strerror or str(error)).lower()}"


def piece(tensors: Tensors, entry: Entry) -> Tensor:
    """The elements of an entry where the rank keeps them, as a tensor of its box's shape."""
    flat, one = tensors(entry.name, entry.quantity), entry.slice
    return flat.as_strided(box_shape(one.box), one.strides, flat.storage_offset() + one.start)


def view_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU, where they are."""
    found: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(found)


def bytes_of(tensors: Tensors, layout: FileLayout) -> Iterator[memoryview]:
    """The bytes of every entry, in order; one that does not lie in one place is copied, one at a time."""
    for entry in layout.entries:
        yield view_of(piece(tensors, entry).detach().cpu().contiguous())


def write_file(folder: Path, layout: FileLayout, slices: Iterable[memoryview]) -> list[int]:
    """Writes a rank's file, and returns when it is on the disk: the CRC-32 of the header and of every slice."""
    path, header = folder / layout.name, memoryview(layout.header)
    fd = disk.create(path)
    with open(fd, "wb", buffering=0):
        found, waiting, size, done = [crc32(header)], [header], header.nbytes, 0
        for view in slices:
            found.append(crc32(view))
            waiting.append(view)
            size += view.nbytes
            if size >= TOGETHER:
                disk.write(fd, waiting, path)
                # The disk is at work while the next are summed up.
                disk.let_go(fd, done, size)
                waiting, size, done = [], 0, done + size
        disk.write(fd, waiting, path)
        disk.sync(fd, path)
    return found


def prepare(folder: Path) -> None:
    """Makes the folder that a checkpoint is written to before it bears its name, and clears what was left there."""
    for place in reversed([place for place in folder.parents if not place.exists()]):
        disk.make_folder(place)
        disk.sync_folder(place.parent)
    for left in folders.leftovers(folder.parent):
        folders.erase(left) if left.is_dir() else disk.unlink(left)
    disk.make_folder(partial(folder))


def partial(folder: Path) -> Path:
    return folder.with_name(folder.name + folders.PARTIAL)


def index_of(index: Index, contents: Contents, checksums: list[list[int]]) -> Index:
    """The index with all files: where every slice is follows from the sharding, and only the `checksums` of each rank's
    file travel."""
    files = []
    for rank, found in enumerate(checksums):
        layout = contents.file(rank)
        if layout is None:
            continue
        header, *crcs = found
        slices = tuple(
            Saved(entry.name, entry.quantity, entry.dtype, entry.slice.box, entry.offset, crc)
            for entry, crc in zip(layout.entries, crcs, strict=True)
        )
        files.append(SavedFile(layout.name, layout.size, header, slices))
    return index.with_files(files)


def commit(folder: Path, text: bytes, keep: int) -> None:
    """Publishes a checkpoint whose files are all on the disk, with `text` for an index, and then removes the oldest."""
    place = partial(folder)
    file = place / NAME
    fd = disk.create(file)
    with open(fd, "wb", buffering=0):
        disk.write(fd, [memoryview(text)], file)
        disk.sync(fd, file)
    disk.sync_folder(place)
    folders.publish(place, folder)
    folders.prune(folder.parent, keep)


def agreed(world: World, error: str | None, numbers: list[int]) -> list[list[int]]:
    """Everyone's numbers, by rank; a `RefusedError` on all ranks where any has an error to tell: of the first that has.
    All ranks must ask."""
    words = (error or "").encode()[:WORDS]
    mine = torch.zeros(2 + WORDS, dtype=torch.int64)
    mine[0], mine[1] = error is not None, len(numbers)
    mine[2 : 2 + len(words)] = torch.tensor(list(words), dtype=torch.int64)
    told = all_gather(mine.to(world.device), world.everyone, why="checkpoint").cpu()
    for rank, one in enumerate(told):
        if one[0]:
            text = bytes(byte for byte in one[2:].tolist() if byte).decode(errors="replace")
            raise RefusedError(rank, text)
    counts = told[:, 1].tolist()
    padded = torch.zeros(max(counts), dtype=torch.int64)
    padded[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    if not max(counts):
        return [[] for _ in counts]
    rows = all_gather(padded.to(world.device), world.everyone, why="checkpoint").tolist()
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def attempt(world: World, do: Callable[[], list[int] | None]) -> list[list[int]]:
    """Does this rank's part of something, and agrees with the others on how it went."""
    error: str | None = None
    numbers: list[int] = []
    try:
        numbers = do() or []
    except OSError as failure:
        error = said(failure)
    return agreed(world, error, numbers)


def save(
    world: World, contents: Contents, tensors: Tensors, index: Index, folder: Path, *, keep: int = 0
) -> None:  # fmt: skip
    """Writes a checkpoint to `folder`; all ranks must call, and all raise the same `SaveError` where one of them could
    not. `index` is without files, the same on every rank."""
    first = world.rank == 0
    layout = contents.file(world.rank)

    def own_file() -> list[int]:
        return [] if layout is None else write_file(partial(folder), layout, bytes_of(tensors, layout))

    try:
        attempt(world, lambda: prepare(folder) if first else None)
        checksums = attempt(world, own_file)
        attempt(world, lambda: commit(folder, index_of(index, contents, checksums).text(), keep) if first else None)
    except RefusedError as refusal:
        raise failed(folder, index, refusal, clear=first) from None


def failed(folder: Path, index: Index, why: RefusedError, *, clear: bool) -> SaveError:
    """What is raised for a checkpoint that could not be written, of which nothing is left behind if the disk lets it."""
    if clear:
        with suppress(OSError):
            folders.erase(partial(folder))
    left = next((old.name for old in folders.steps(folder.parent) if old != folder), None)
    kept = f"{left} is kept" if left else "no checkpoint is there"
    return SaveError(f"the checkpoint of step {index.progress.step} cannot be written ({why}); {kept}")
