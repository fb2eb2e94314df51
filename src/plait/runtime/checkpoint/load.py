"""Loading: the moves from the slices in the files to what each rank keeps, in whatever layout.

    in the files      | rows 0-31 | rows 32-63 |  rows 64-95 |         each a slice with a checksum
    wanted                   [ rows 20-70 ]                            reads all three, checks each, keeps its part

A rank reads the slices that it needs something of, one at a time, whole, and checks each; one that it keeps as it is goes
straight to its place. Between them the ranks read every slice, so what is damaged is found by every load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...design.errors import PlanError
from ...design.layout import box_shape, overlap
from ...design.slices import Slice
from . import disk
from .checksum import Checksum
from .index import NAME, DamagedError, Index, Saved, SavedFile, TensorShape
from .save import view_of

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


MOST_OPEN = 64
"""Files that are open at one time."""
TOGETHER = 1 << 23
"""Bytes of slices that are read in one call and summed up in one go, at least, where there are as many."""


@dataclass(frozen=True)
class Target:
    """Where a quantity of a parameter goes: `slices` of it stand in `flat`, which is contiguous."""

    name: str
    quantity: str
    slices: tuple[Slice, ...]
    flat: Tensor

    def view(self, box: tuple[tuple[int, int], ...], one: Slice) -> Tensor:
        """The elements of a box, which lies in one of the slices."""
        at = one.start + sum(
            (start - first) * stride for (start, _), (first, _), stride in zip(box, one.box, one.strides, strict=True)
        )
        return self.flat.as_strided(box_shape(box), one.strides, self.flat.storage_offset() + at)


@dataclass
class Files:
    """The files of a checkpoint, read in slices; keeps some of them open, and no more than one slice in memory that has
    no place of its own. A thread beside this one makes the checksums, since both let the other go on meanwhile."""

    folder: Path
    _open: dict[str, int] = field(default_factory=dict)
    _space: bytearray = field(default_factory=bytearray)
    _waiting: list[tuple[memoryview, Saved]] = field(default_factory=list)
    _file: SavedFile | None = None
    _sums: list[tuple[Future[list[int]], SavedFile, list[Saved]]] = field(default_factory=list)
    _sum: Checksum = field(default_factory=Checksum)
    _sum_beside: Checksum = field(default_factory=Checksum)
    _beside: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def read(self, file: SavedFile, one: Saved) -> memoryview:
        """The bytes of a slice, found to be what was written; there until the next is read."""
        self._read_waiting()
        if len(self._space) < one.size:
            self._space = bytearray(one.size)
        into = memoryview(self._space)[: one.size]
        self._fill(file, [(into, _where(one))], one.offset)
        self._hold(self._sum(into), one.crc, file, _where(one))
        return into

    def read_into(self, into: memoryview, file: SavedFile, one: Saved) -> None:
        """The same at a place of its own, together with those that follow in the file: `settle` says whether all that
        was read is what was written."""
        if self._waiting:
            last = self._waiting[-1][1]
            full = sum(view.nbytes for view, _ in self._waiting) >= TOGETHER or len(self._waiting) == disk.MOST_AT_ONCE
            if full or self._file is not file or last.offset + last.size != one.offset:
                self._read_waiting()
        self._file = file
        self._waiting.append((into, one))

    def _read_waiting(self) -> None:
        """Reads the slices that wait for it, and has them summed up while the next are read. Threads that wait for each
        other at every slice are slower than one."""
        waiting, file = self._waiting, self._file
        if not waiting or file is None:
            return
        self._waiting = []
        self._fill(file, [(view, _where(one)) for view, one in waiting], waiting[0][1].offset)
        views = [view for view, _ in waiting]
        sums = self._beside.submit(lambda: [self._sum_beside(view) for view in views])
        self._sums.append((sums, file, [one for _, one in waiting]))

    def settle(self) -> None:
        """Returns when all that was asked for is read and is what was written."""
        self._read_waiting()
        sums, self._sums = self._sums, []
        for found, file, slices in sums:
            for number, one in zip(found.result(), slices, strict=True):
                self._hold(number, one.crc, file, _where(one))

    def check_header(self, file: SavedFile) -> None:
        """Reads what comes before the first slice, which must be what follows from the index, and the size."""
        wanted = file.header
        found, where = memoryview(bytearray(len(wanted))), f"its header, bytes 0 to {len(wanted)}"
        self._fill(file, [(found, where)], 0)
        self._hold(self._sum(found), file.crc, file, where)
        if found != wanted:
            raise DamagedError(self.folder / file.name, f"its header does not say what {NAME} says")

    def _hold(self, found: int, wanted: int, file: SavedFile, where: str) -> None:
        if found != wanted:
            path = self.folder / file.name
            raise DamagedError(path, f"{where} are not what was written: their CRC-32 is another")

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

    def close(self) -> None:
        self._beside.shutdown(cancel_futures=True)
        for fd in self._open.values():
            disk.close(fd)
        self._open.clear()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _where(one: Saved) -> str:
    return f"{one.quantity} of {one.name}, bytes {one.offset} to {one.offset + one.size}"


def load(folder: Path, index: Index, targets: Iterable[Target]) -> None:
    """Fills every target from a checkpoint, whose index is right; a `DamagedError` where a file is not."""
    wanted: dict[tuple[str, str], list[Target]] = {}
    for target in targets:
        wanted.setdefault((target.name, target.quantity), []).append(target)
    with Files(folder) as files, torch.no_grad(), torch._C.DisableTorchFunction():
        for file in index.files:
            needed = [
                (one, wanted[one.name, one.quantity]) for one in file.slices if (one.name, one.quantity) in wanted
            ]
            if needed:
                files.check_header(file)
            for one, there in needed:
                _move(files, file, one, there)
        files.settle()


def _move(files: Files, file: SavedFile, one: Saved, targets: Iterable[Target]) -> None:
    """What `targets` need of one slice."""
    moves = [
        (target.view(shared, kept), shared)
        for target in targets
        for kept in target.slices
        if (shared := overlap(kept.box, one.box)) is not None
    ]
    if not moves:
        return
    dtype = TYPES[one.dtype]
    if len(moves) == 1:
        ((view, shared),) = moves
        if shared == one.box and view.dtype == dtype and view.device.type == "cpu" and view.is_contiguous():
            files.read_into(view_of(view), file, one)
            return
    whole = torch.frombuffer(files.read(file, one), dtype=dtype).view(box_shape(one.box))
    for view, shared in moves:
        inside = tuple(
            slice(start - first, stop - first) for (start, stop), (first, _) in zip(shared, one.box, strict=True)
        )
        view.copy_(whole[inside])


def refuse_other_tensors(index: Index, wanted: Mapping[str, TensorShape], where: Path) -> None:
    """Raises a `PlanError` that names the first tensor of a checkpoint that this model lacks, or has otherwise."""
    saved = {tensor.name: tensor for tensor in index.tensors}
    missing = [name for name in wanted if name not in saved]
    extra = [name for name in saved if name not in wanted]
    other = [name for name, tensor in wanted.items() if name in saved and saved[name].shape != tensor.shape]
    trained = [name for name, tensor in wanted.items() if name in saved and saved[name].trains != tensor.trains]
    if missing:
        how = f"lacks {_several(missing, 'tensors of this model')}"
    elif extra:
        how = f"has {_several(extra, 'tensors that this model has not')}"
    elif other:
        name = other[0]
        how = f"has {name} as {saved[name].shape}, and this model has it as {wanted[name].shape}"
    elif trained:
        name, now = trained[0], "trained" if wanted[trained[0]].trains else "frozen"
        how = f"has {name} {'frozen' if now == 'trained' else 'trained'}, and here it is {now}"
    else:
        return
    raise PlanError(f"{where} {how}: resume with the model, freeze and train_only that the run began with.")


def _several(names: list[str], what: str) -> str:
    return f"{len(names)} {what} (the first {names[0]})"


def verify(folder: Path, index: Index) -> None:
    """Reads every byte of a checkpoint; a `DamagedError` where one is not as it was written."""
    with Files(folder) as files:
        for file in index.files:
            files.check_header(file)
            for one in file.slices:
                files.read(file, one)
