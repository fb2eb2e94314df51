"""Slices that go straight to their places are read several in a call and summed up beside: what is wrong with any of
them is found all the same, and it is the one that is named."""

from __future__ import annotations

import errno
import os
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from plait.runtime.checkpoint import disk, writer
from plait.runtime.checkpoint.contents import FileLayout, file_name, header, key
from plait.runtime.checkpoint.files import TOGETHER, Files
from plait.runtime.checkpoint.index import DamagedError, Saved, SavedFile
from plait.runtime.checkpoint.save import write_file

LENGTHS = [130_000, 1, 64, TOGETHER // 4, 3, 7, 700_001, 260_000, 0, 130_001, 5]
"""Elements of four bytes: runs that end within and at slices, large ones and small."""


@pytest.fixture(scope="module")
def slices() -> list[bytes]:
    return [random.Random(number).randbytes(4 * length) for number, length in enumerate(LENGTHS)]


@pytest.fixture
def file(tmp_path: Path, slices: list[bytes]) -> SavedFile:
    boxes = [((0, length),) for length in LENGTHS]
    names = [f"tensor.{number}" for number in range(len(LENGTHS))]
    begin = header(
        [(key(name, "weight", box), "F32", box, 4 * box[0][1]) for name, box in zip(names, boxes, strict=True)]
    )
    layout = FileLayout(file_name(0), begin, ())
    first, *others = write_file(tmp_path, layout, map(memoryview, slices))
    saved, at = [], len(begin)
    for name, box, crc in zip(names, boxes, others, strict=True):
        saved.append(Saved(name, "weight", "F32", box, at, crc))
        at += saved[-1].size
    return SavedFile(layout.name, at, first, tuple(saved))


def read(folder: Path, file: SavedFile, chosen: Sequence[int]) -> list[bytes]:
    into = [bytearray(file.slices[number].size) for number in chosen]
    with Files(folder) as files:
        files.check_header(file)
        for number, place in zip(chosen, into, strict=True):
            files.read_into(memoryview(place), file, file.slices[number])
        files.settle()
    return [bytes(place) for place in into]


def test_the_checksums_are_those_of_zlib(tmp_path: Path, file: SavedFile, slices: list[bytes]) -> None:
    begin = (tmp_path / file.name).read_bytes()[: len(file.header)]
    assert file.crc == zlib.crc32(begin)
    assert [one.crc for one in file.slices] == [zlib.crc32(data) for data in slices]


def test_every_slice_comes_to_its_place(
    tmp_path: Path, file: SavedFile, slices: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = list[int](), disk.fill

    def noting(fd: int, views: Sequence[memoryview], offset: int) -> int:
        calls.append(sum(view.nbytes for view in views))
        return real(fd, views, offset)

    monkeypatch.setattr(disk, "fill", noting)
    everything = range(len(LENGTHS))
    assert read(tmp_path, file, everything) == slices
    assert len(calls) < len(LENGTHS)
    assert max(calls) < TOGETHER + max(one.size for one in file.slices)
    for chosen in (everything[::2], everything[::-1], [3, 4, 6, 7, 0]):
        assert read(tmp_path, file, chosen) == [slices[number] for number in chosen]


def test_reads_that_come_in_parts(
    tmp_path: Path, file: SavedFile, slices: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may give less than it was asked for, and ends wherever it likes."""
    real, chosen = os.preadv, random.Random(0)

    def less(fd: int, views: Sequence[memoryview], offset: int) -> int:
        return real(fd, [views[0][: chosen.randrange(1, len(views[0]) + 1)]], offset)

    monkeypatch.setattr(os, "preadv", less)
    assert read(tmp_path, file, range(len(LENGTHS))) == slices


@pytest.mark.parametrize("number", [number for number, length in enumerate(LENGTHS) if length])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, file: SavedFile, number: int) -> None:
    path, one = tmp_path / file.name, file.slices[number]
    whole, chosen = path.read_bytes(), random.Random(number)
    for at in (0, one.size - 1, chosen.randrange(one.size)):
        data = bytearray(whole)
        data[one.offset + at] ^= 1 << chosen.randrange(8)
        path.write_bytes(data)
        with pytest.raises(DamagedError, match=rf"weight of tensor\.{number}, bytes {one.offset} to") as found:
            read(tmp_path, file, range(len(LENGTHS)))
        assert found.value.file == path
        assert "CRC-32" in str(found.value)


@pytest.mark.parametrize("number", [number for number, length in enumerate(LENGTHS) if length])
def test_a_file_that_ends_early_is_found(tmp_path: Path, file: SavedFile, number: int) -> None:
    path, one = tmp_path / file.name, file.slices[number]
    data = path.read_bytes()
    for length in (one.offset, one.offset + one.size // 2, one.offset + one.size - 1):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedError, match=rf"it ends in weight of tensor\.{number}, ") as found:
            read(tmp_path, file, range(len(LENGTHS)))
        assert found.value.file == path


def test_a_disk_that_fills_up_within_a_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's views of what it was given are all let go of, so that what is said is the disk's error."""
    old, calls = os.writev, list[int]()

    def writev(fd: int, buffers: Sequence[memoryview]) -> int:
        calls.append(len(buffers))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return old(fd, [buffers[0][:3]])

    monkeypatch.setattr(os, "writev", writev)
    memory = os.memfd_create("test")
    os.write(memory, bytes(100))
    order = {"do": "write", "folder": str(tmp_path), "name": "rank-0", "size": 100, "header": 10, "sizes": [50, 40]}
    with pytest.raises(OSError, match=r"No space left on device: '.*rank-0'$"):
        writer._obey(order, b"", memory)
    os.close(memory)
    assert calls == [3, 3]
