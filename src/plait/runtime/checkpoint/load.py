"""Loading: the moves from the slices in the files to what each rank keeps, in whatever layout.

    in the files      | rows 0-31 | rows 32-63 |  rows 64-95 |         each a slice with a checksum
    wanted                   [ rows 20-70 ]                            reads all three, checks each, keeps its part

A rank reads the slices that it needs something of, one at a time, whole, and checks each; one that it keeps as it is goes
straight to its place. Between them the ranks read every slice, so what is damaged is found by every load.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
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
    """The files of a checkpoint, read in slices; keeps them open, and one slice in memory."""

    folder: Path
    _open: dict[str, int] = field(default_factory=dict)
    _expected: dict[str, int] = field(default_factory=dict)
    _space: bytearray = field(default_factory=bytearray)

    def read(self, file: SavedFile, one: Saved, into: memoryview | None = None) -> memoryview:
        """The bytes of a slice, found to be what was written: in `into`, or until the next is read."""
        if into is None:
            if len(self._space) < one.size:
                self._space = bytearray(one.size)
            into = memoryview(self._space)[: one.size]
        where = f"{one.quantity} of {one.name}, bytes {one.offset} to {one.offset + one.size}"
        self._check(file.name, into, one.offset, one.crc, where)
        return into

    def check_header(self, file: SavedFile) -> None:
        """Reads what comes before the first slice, which must be what follows from the index, and the size."""
        wanted = file.header
        found = memoryview(bytearray(len(wanted)))
        self._check(file.name, found, 0, file.crc, f"its header, bytes 0 to {len(wanted)}")
        if found != wanted:
            raise DamagedError(self.folder / file.name, f"its header does not say what {NAME} says")

    def _check(self, name: str, into: memoryview, offset: int, crc: int, where: str) -> None:
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
        if zlib.crc32(into) != crc:
            raise DamagedError(path, f"{where} are not what was written: their CRC-32 is another")

    def _expect(self, name: str, offset: int) -> None:
        """The disk is at work while what came is looked at."""
        if offset + AHEAD // 2 > self._expected.get(name, 0):
            self._expected[name] = offset + AHEAD
            disk.expect(self._open[name], offset, AHEAD)

    def close(self) -> None:
        for fd in self._open.values():
            disk.close(fd)
        self._open.clear()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


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
            files.read(file, one, view_of(view))
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
