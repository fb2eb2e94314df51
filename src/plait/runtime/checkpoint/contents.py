"""What stands where in the files of a checkpoint, on paper: every rank's file follows from the sharding alone.

    rank-00003.safetensors     | length | header: a name for every slice | slice | slice | ...

A file is safetensors' own format, so any reader of that opens it; plait's goes by the index and never trusts a header.
A slice's name says what it is: "model.norm.weight.exp_avg[0:16]".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ...design.layout import Box, box_shape
from ...design.part import Parameter
from ...design.sharding import Sharding
from ...design.slices import Slice, Writers

TRAINED = ("weight", "exp_avg", "exp_avg_sq")
"""What is saved of a parameter that is trained: the optimizer's weight, and AdamW's two moments of its gradient."""
FROZEN = ("weight",)
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes of an element, by safetensors' names."""
MOST = 1 << 23
"""Bytes of a slice: larger ones are written as several, some rows each. A reader holds one at a time, and reads no
more than one beyond each end of what it needs."""


def quantities(*, trains: bool) -> tuple[str, ...]:
    return TRAINED if trains else FROZEN


@dataclass(frozen=True)
class Entry:
    """One slice of one quantity in a file, `offset` bytes from its begin."""

    name: str
    quantity: str
    dtype: str
    slice: Slice
    offset: int = 0

    @property
    def size(self) -> int:
        return prod(box_shape(self.slice.box)) * SIZES[self.dtype]


@dataclass(frozen=True)
class FileLayout:
    """One rank's file; `header` is all that comes before the first slice."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(entry.size for entry in self.entries)


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def key(name: str, quantity: str, box: Box) -> str:
    """What a slice is called in its file."""
    return f"{name}.{quantity}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def header(rows: Sequence[tuple[str, str, Box, int]]) -> bytes:
    """The begin of a safetensors file whose tensors are (key, type, box, bytes), in order."""
    values: dict[str, object] = {"__metadata__": {"format": "pt", "made by": "plait"}}
    at = 0
    for name, dtype, box, size in rows:
        values[name] = {"dtype": dtype, "shape": list(box_shape(box)), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class Contents:
    """The files of a checkpoint of `sharding`, where what is trained is kept as `wide` and what is frozen as `compute`
    (safetensors' names of types). `together`: see `Writers`."""

    sharding: Sharding
    wide: str
    compute: str
    together: bool = True

    @cached_property
    def _writers(self) -> Writers:
        return Writers(self.sharding, together=self.together)

    def dtype(self, parameter: Parameter) -> str:
        return self.wide if parameter.first.trains else self.compute

    @cached_property
    def _files(self) -> dict[int, FileLayout | None]:
        return {}

    def file(self, rank: int) -> FileLayout | None:
        """What `rank` writes; None where it writes nothing. The same at every save."""
        if rank not in self._files:
            self._files[rank] = self._file(rank)
        return self._files[rank]

    def _file(self, rank: int) -> FileLayout | None:
        entries = list(self._entries(rank))
        if not entries:
            return None
        # Wide ones first, so that every slice begins at a multiple of its elements' size.
        entries.sort(key=lambda entry: -SIZES[entry.dtype])
        rows = [(key(one.name, one.quantity, one.slice.box), one.dtype, one.slice.box, one.size) for one in entries]
        begin = header(rows)
        placed, at = [], len(begin)
        for entry in entries:
            placed.append(replace(entry, offset=at))
            at += entry.size
        return FileLayout(file_name(rank), begin, tuple(placed))

    def _entries(self, rank: int) -> Iterator[Entry]:
        for name, slices in self._writers.writes(rank).items():
            parameter = self.sharding.parameter(name)
            dtype = self.dtype(parameter)
            for one in (part for whole in slices for part in in_rows(whole, SIZES[dtype])):
                for quantity in quantities(trains=parameter.first.trains):
                    yield Entry(name, quantity, dtype, one)


def in_rows(whole: Slice, item: int) -> Iterator[Slice]:
    """A slice as slices of some rows each that have no more than `MOST` bytes, where a row has no more."""
    if not whole.box:
        yield whole
        return
    (start, stop), *rest = whole.box
    row = prod(box_shape(tuple(rest))) * item
    step = max(1, MOST // row) if row else stop - start
    for first in range(start, stop, step):
        box = ((first, min(first + step, stop)), *rest)
        yield Slice(box, whole.start + (first - start) * whole.strides[0], whole.strides)
