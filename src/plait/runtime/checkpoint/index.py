"""A checkpoint's index.json: what the run was and how far it had come, and every slice with its place and checksum.

    {"format": 1, "step": 40, ..., "files": [{"name": "rank-00000.safetensors", "slices": [[...], ...]}], "digest": "..."}

The index is written last, and is there only with all that it names. Its own last word is the digest of all before it, so
that no bit of it changes unseen. Whatever is read here may have been written by anyone: it is JSON and checked value by
value, names of files lead nowhere but to files beside it, and boxes must tile their tensors. There is no pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

from ...design.errors import PlanError
from ...design.layout import Box, box_shape, overlap
from ...design.plan import Plan
from .contents import SIZES, file_name, header, key, quantities
from .disk import open_plain

FORMAT = 1
NAME = "index.json"
LARGEST = 1 << 30
"""Bytes of an index. One of a million slices has a hundred million."""
MOST_DIMS, MOST_SIDE = 16, 1 << 48


class DamagedError(PlanError):
    """A checkpoint is not as it was written, in the way that the sentence says; `file` is where."""

    def __init__(self, file: Path, how: str) -> None:
        super().__init__(f"{file} is damaged: {how}.")
        self.file = file


@dataclass(frozen=True)
class Saved:
    """One slice of one quantity of a tensor, in bytes `offset` and on of a file, with their CRC-32."""

    name: str
    quantity: str
    dtype: str
    box: Box
    offset: int
    crc: int

    @property
    def size(self) -> int:
        return prod(box_shape(self.box)) * SIZES[self.dtype]


@dataclass(frozen=True)
class SavedFile:
    """A file of `size` bytes; `crc` is the CRC-32 of what comes before its first slice."""

    name: str
    size: int
    crc: int
    slices: tuple[Saved, ...]

    @cached_property
    def header(self) -> bytes:
        """What must come before the first slice."""
        return header([(key(one.name, one.quantity, one.box), one.dtype, one.box, one.size) for one in self.slices])


@dataclass(frozen=True)
class TensorShape:
    """A parameter of the model, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    trains: bool


@dataclass(frozen=True)
class Progress:
    """How far a run has come: `step` of `steps` are done, `updates` of them were no skips. `loss_scale` and `data` are
    the states of those, `corpus` the digest of the text's tokens."""

    step: int
    steps: int
    updates: int
    loss_scale: dict[str, Any]
    data: dict[str, int]
    corpus: str


@dataclass(frozen=True)
class Index:
    """All that a checkpoint says of itself. `config` is the model's own, None where it has none."""

    progress: Progress
    plan: Plan
    config: dict[str, Any] | None
    versions: dict[str, str]
    tensors: tuple[TensorShape, ...]
    files: tuple[SavedFile, ...] = ()

    def with_files(self, files: Iterable[SavedFile]) -> Index:
        return replace(self, files=tuple(files))

    @property
    def size(self) -> int:
        """Bytes of the slices."""
        return sum(one.size for file in self.files for one in file.slices)

    def text(self) -> bytes:
        """What is written: one value of JSON."""
        numbers = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        values = {
            "format": FORMAT,
            **vars(self.progress),
            "plan": self.plan.model_dump(),
            "config": self.config,
            "versions": self.versions,
            "tensors": [[tensor.name, list(tensor.shape), tensor.trains] for tensor in self.tensors],
            "files": [
                {
                    "name": file.name, "size": file.size, "crc": file.crc,
                    "slices": [
                        [numbers[one.name], one.quantity, one.dtype, [*map(list, one.box)], one.offset, one.crc]
                        for one in file.slices
                    ],
                }
                for file in self.files
            ],
        }  # fmt: skip
        body = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()[:-1]
        return body + _tail(body)


def _tail(body: bytes) -> bytes:
    """What an index ends with."""
    return f',"digest":"{blake2b(body, digest_size=16).hexdigest()}"}}\n'.encode()


TAIL = len(_tail(b""))


def digest_of(text: bytes) -> str:
    """The digest that an index ends with."""
    return text[-35:-3].decode(errors="replace")


def text_of(file: Path) -> bytes:
    """The bytes of an index or a pointer, no more than an index may have."""
    try:
        fd = open_plain(file)
    except OSError as error:
        raise DamagedError(file, f"it cannot be read ({(error.strerror or str(error)).lower()})") from None
    with open(fd, "rb") as raw:
        if os.fstat(fd).st_size > LARGEST:
            raise DamagedError(file, f"it has more than {LARGEST:,} bytes")
        return raw.read(LARGEST)


def read(folder: Path) -> Index:
    """The index of a checkpoint; a `DamagedError` where it is not whole, or not one."""
    file = folder / NAME
    text = text_of(file)
    body = text[:-TAIL]
    if text[-TAIL:] != _tail(body):
        raise DamagedError(file, "its bytes do not have the digest that it ends with")
    try:
        values = json.loads(body + b"}")
        if values["format"] != FORMAT:
            raise PlanError(f"it has format {values['format']!r}, and this version reads {FORMAT}")
        return _Reading(file).index(values)
    except PlanError as error:
        raise error if isinstance(error, DamagedError) else DamagedError(file, str(error).rstrip(".")) from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DamagedError(file, f"it is no index of a checkpoint ({type(error).__name__}: {error})") from None


class _Reading:
    """Turns values of JSON, which nobody has looked at, into an index."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def index(self, values: Any) -> Index:
        tensors = [
            TensorShape(self._is(str, name), self._shape(shape), self._is(bool, trains))
            for name, shape, trains in values["tensors"]
        ]
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise DamagedError(self._file, "it names a tensor twice")
        progress = Progress(
            **{name: self._number(values[name]) for name in ("step", "steps", "updates")},
            loss_scale=self._is(dict, values["loss_scale"]),
            data={self._is(str, name): self._number(value) for name, value in values["data"].items()},
            corpus=self._is(str, values["corpus"]),
        )
        config = values["config"]
        found = Index(
            progress, Plan.read(self._is(dict, values["plan"]), source="its plan"),
            None if config is None else self._is(dict, config),
            {self._is(str, name): self._is(str, value) for name, value in values["versions"].items()},
            tuple(tensors), tuple(self._saved_file(one, tensors) for one in values["files"]),
        )  # fmt: skip
        self._tile(found)
        return found

    def _saved_file(self, values: Any, tensors: list[TensorShape]) -> SavedFile:
        name = self._is(str, values["name"])
        number = name.removeprefix("rank-").removesuffix(".safetensors")
        if not (number.isascii() and number.isdigit() and len(number) < 10 and file_name(int(number)) == name):
            raise DamagedError(self._file, f"it names {name!r}, which is no file of a checkpoint")
        slices = []
        for which, quantity, dtype, box, offset, crc in values["slices"]:
            tensor = tensors[self._number(which)]
            if quantity not in quantities(trains=tensor.trains) or dtype not in SIZES:
                raise DamagedError(self._file, f"it has {quantity!r} of {tensor.name} as {dtype!r}")
            sides = tuple((self._number(start), self._number(stop)) for start, stop in box)
            if len(sides) != len(tensor.shape) or not all(
                start < stop <= size for (start, stop), size in zip(sides, tensor.shape, strict=True)
            ):
                raise DamagedError(self._file, f"the slice {list(sides)} is none of {tensor.name}'s {tensor.shape}")
            slices.append(Saved(tensor.name, quantity, dtype, sides, self._number(offset), self._number(crc)))
        found = SavedFile(name, self._number(values["size"]), self._number(values["crc"]), tuple(slices))
        at = len(found.header)
        for one in slices:
            if one.offset != at:
                raise DamagedError(self._file, f"in {name} a slice of {one.name} is not where the one before ends")
            at += one.size
        if at != found.size:
            raise DamagedError(self._file, f"{name} has {found.size} bytes in it, and its slices end at {at}")
        return found

    def _tile(self, index: Index) -> None:
        """Each element of every quantity is there once."""
        boxes: dict[tuple[str, str], list[Box]] = {}
        types: dict[str, str] = {}
        for file in index.files:
            for one in file.slices:
                boxes.setdefault((one.name, one.quantity), []).append(one.box)
                if types.setdefault(one.name, one.dtype) != one.dtype:
                    raise DamagedError(self._file, f"it has {one.name} as {types[one.name]} and as {one.dtype}")
        if len({file.name for file in index.files}) < len(index.files):
            raise DamagedError(self._file, "it names a file twice")
        for tensor in index.tensors:
            for quantity in quantities(trains=tensor.trains):
                found = boxes.get((tensor.name, quantity), [])
                covered, whole = sum(prod(box_shape(box)) for box in found), prod(tensor.shape)
                if covered != whole or _overlapping(found):
                    raise DamagedError(
                        self._file, f"its slices of {tensor.name} ({quantity}) are {covered} of {whole} elements"
                        + (", some of them twice" if covered >= whole else "")
                    )  # fmt: skip

    def _is(self, kind: type, value: Any) -> Any:
        if type(value) is not kind:
            raise DamagedError(self._file, f"it has {value!r:.40} where {kind.__name__} belongs")
        return value

    def _number(self, value: Any) -> int:
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise DamagedError(self._file, f"it has {value!r:.40} where a number from 0 on belongs")
        return value

    def _shape(self, value: Any) -> tuple[int, ...]:
        shape = tuple(self._number(side) for side in self._is(list, value))
        if len(shape) > MOST_DIMS or prod(shape) > MOST_SIDE:
            raise DamagedError(self._file, f"it has a tensor of shape {shape!r:.80}")
        return shape


def _overlapping(boxes: list[Box]) -> bool:
    """Whether two boxes share an element; those that begin far apart in the first dim are not compared."""
    active: list[Box] = []
    for box in sorted(boxes):
        active = [other for other in active if not box or other[0][1] > box[0][0]]
        if any(overlap(box, other) is not None for other in active):
            return True
        active.append(box)
    return False
