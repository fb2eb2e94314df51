"""Loading: the moves from the slices in the files to what each rank keeps, in whatever layout.

    in the files      | rows 0-31 | rows 32-63 |  rows 64-95 |         each a slice with a checksum
    wanted                   [ rows 20-70 ]                            reads all three, checks each, keeps its part

A rank reads the slices that it needs something of, one at a time, whole, and checks each; one that it keeps as it is goes
straight to its place. Between them the ranks read every slice, so what is damaged is found by every load.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...design.errors import PlanError
from ...design.layout import box_shape, overlap
from ...design.slices import Slice
from . import disk
from .index import NAME, DamagedError, Index, Saved, SavedFile, TensorShape
from .save import view_of

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


SMALL = 1 << 16
"""Bytes of a slice that is summed up at once: to ask somebody else would take longer."""
AHEAD = 1 << 25
"""Bytes that are asked of the disk before they are needed. Of a file, a rank mostly needs what follows."""


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
    """The files of a checkpoint, read in slices; keeps them open, and no more than one slice in memory that has no
    place of its own. A thread beside this one makes the checksums, since both let the other go on meanwhile."""

    folder: Path
    _open: dict[str, int] = field(default_factory=dict)
    _expected: dict[str, int] = field(default_factory=dict)
    _space: bytearray = field(default_factory=bytearray)
    _checks: deque[tuple[Future[int], SavedFile, Saved]] = field(default_factory=deque)
    _beside: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def read(self, file: SavedFile, one: Saved) -> memoryview:
        """The bytes of a slice, found to be what was written; there until the next is read."""
        if len(self._space) < one.size:
            self._space = bytearray(one.size)
        into = memoryview(self._space)[: one.size]
        self._fill(file.name, into, one.offset, _where(one))
        self._hold(zlib.crc32(into), one.crc, file.name, _where(one))
        return into

    def read_into(self, into: memoryview, file: SavedFile, one: Saved) -> None:
        """The same at a place of its own, where it is summed up while the next is read: `settle` says whether all that
        was read is what was written."""
        self._fill(file.name, into, one.offset, _where(one))
        if one.size < SMALL:
            self._hold(zlib.crc32(into), one.crc, file.name, _where(one))
        else:
            self._checks.append((self._beside.submit(zlib.crc32, into), file, one))
            self.settle(2)

    def settle(self, but: int = 0) -> None:
        """Returns when what was read is summed up, but for the last few."""
        while len(self._checks) > but:
            found, file, one = self._checks.popleft()
            self._hold(found.result(), one.crc, file.name, _where(one))

    def check_header(self, file: SavedFile) -> None:
        """Reads what comes before the first slice, which must be what follows from the index, and the size."""
        wanted = file.header
        found, where = memoryview(bytearray(len(wanted))), f"its header, bytes 0 to {len(wanted)}"
        self._fill(file.name, found, 0, where)
        self._hold(zlib.crc32(found), file.crc, file.name, where)
        if found != wanted:
            raise DamagedError(self.folder / file.name, f"its header does not say what {NAME} says")

    def _hold(self, found: int, wanted: int, name: str, where: str) -> None:
        if found != wanted:
            path = self.folder / name
            raise DamagedError(path, f"{where} are not what was written: their CRC-32 is another")

    def _fill(self, name: str, into: memoryview, offset: int, where: str) -> None:
        path = self.folder / name
        try:
            if name not in self._open:
                self._open[name] = disk.open_plain(path)
            count = disk.fill(self._open[name], into, offset)
            self._expect(name, offset + count)
        except OSError as error:
            raise DamagedError(path, f"it cannot be read ({(error.strerror or str(error)).lower()})") from None
        if count < into.nbytes:
            raise DamagedError(path, f"it ends in {where}")

    def _expect(self, name: str, offset: int) -> None:
        """The disk is at work while what came is looked at."""
        if offset + AHEAD // 2 > self._expected.get(name, 0):
            self._expected[name] = offset + AHEAD
            disk.expect(self._open[name], offset, AHEAD)

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
