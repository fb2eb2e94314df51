"""Whatever happened to a checkpoint's files is found, with the file's name, and the checkpoint before is taken; files
that somebody made to do harm do none."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from plait.design.errors import PlanError
from plait.design.slices import Slice
from plait.runtime.checkpoint import disk, folders
from plait.runtime.checkpoint.contents import in_rows
from plait.runtime.checkpoint.index import LARGEST, NAME, DamagedError, Index
from plait.runtime.checkpoint.load import load, verify
from tests.checkpoint_files import LAYOUT, Writer, loaded, same

WRITER = Writer(LAYOUT)
FLIPS, MORE_FLIPS = 60, 1000
NEW, OLD = "step-00000002", "step-00000001"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("two")
    WRITER.save(run, 1)
    WRITER.save(run, 2)
    return run


@pytest.fixture
def run(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "run"))


def newest(run: Path, read: Callable[[Path, Index], Any] = verify) -> tuple[Path, Index, list[DamagedError]]:
    """The newest checkpoint that is whole, and what is wrong with those after it."""
    found, damaged = folders.whole(run)
    for folder, index in found:
        try:
            read(folder, index)
        except DamagedError as error:
            damaged.append(error)
        else:
            return folder, index, damaged
    raise folders.none_left(run, damaged)


def assert_found(run: Path, file: str, read: Callable[[Path, Index], Any] = verify) -> str:
    """The damage in `file` of the newer checkpoint is found, and the older one is taken: what was said."""
    folder, index, damaged = newest(run, read)
    assert folder.name == OLD
    (error,) = damaged
    assert error.file == run / folders.FOLDER / NEW / file
    assert str(error.file) in str(error)
    assert same(loaded(folder, index), WRITER.values(1))
    return str(error)


def files(run: Path) -> list[Path]:
    return sorted((run / folders.FOLDER / NEW).iterdir())


def test_what_is_whole_is_found_whole(run: Path) -> None:
    folder, index, damaged = newest(run)
    assert (folder.name, damaged) == (NEW, [])
    assert same(loaded(folder, index, {"dp": 3, "zero": 3}), WRITER.values(2))


def test_few_files_are_open_at_a_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.runtime.checkpoint.files.MOST_OPEN", 1)
    before = len(os.listdir("/proc/self/fd"))
    opened, old = list[int](), disk.open_plain

    def open_plain(path: Path) -> int:
        opened.append(len(os.listdir("/proc/self/fd")))
        return old(path)

    monkeypatch.setattr(disk, "open_plain", open_plain)
    folder, index, _ = newest(run)
    assert same(loaded(folder, index), WRITER.values(2))
    assert len(opened) >= 4
    assert max(opened) <= before + 2  # and the listing itself


def flipped(run: Path, seeds: Sequence[int]) -> None:
    places = [(file, at) for file in files(run) for at in (0, file.stat().st_size)]
    total = sum(size for _, size in places)
    for seed in seeds:
        at = random.Random(seed).randrange(8 * total)
        # Half of the bits in the index and the headers, which are small.
        file = random.Random(-seed - 1).choice(files(run)) if seed % 2 else None
        if file is None:
            place, (byte, bit) = 0, divmod(at, 8)
            for file in files(run):
                if byte < place + file.stat().st_size:
                    break
                place += file.stat().st_size
            byte -= place
        else:
            byte, bit = divmod(at % (8 * min(20000, file.stat().st_size)), 8)
        data = bytearray(file.read_bytes())
        data[byte] ^= 1 << bit
        file.write_bytes(data)
        assert_found(run, file.name)
        data[byte] ^= 1 << bit
        file.write_bytes(data)
    assert newest(run)[0].name == NEW


def test_a_flipped_bit_is_found(run: Path) -> None:
    flipped(run, range(FLIPS))


@pytest.mark.rest
def test_every_flipped_bit_of_a_thousand_is_found(run: Path) -> None:
    flipped(run, range(FLIPS, FLIPS + MORE_FLIPS))


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"dp": 4, "zero": 3}, {"pp": 2}], ids=str)
def test_a_load_into_any_layout_finds_a_flipped_bit(run: Path, layout: dict[str, Any]) -> None:
    for number, file in enumerate(file for file in files(run) if file.suffix == ".safetensors"):
        data = bytearray(file.read_bytes())
        at = [5, len(data) // 2, len(data) - 1, 300][number]
        data[at] ^= 1
        file.write_bytes(data)
        assert_found(run, file.name, lambda folder, index: loaded(folder, index, layout))
        data[at] ^= 1
        file.write_bytes(data)


def test_p079_files_that_are_cut_short_or_longer_or_gone_are_found(run: Path) -> None:
    """A load that lacks a file is no load of the others."""
    for file in files(run):
        data = file.read_bytes()
        for length in (0, 1, 7, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:length])
            assert_found(run, file.name)
        file.write_bytes(data + b"\0")
        assert_found(run, file.name)
        file.unlink()
        if file.name == NAME:
            assert "cannot be read (no such file" in assert_found(run, file.name)
        else:
            assert "it is not there" in assert_found(run, file.name)
        file.write_bytes(data)
    assert newest(run)[0].name == NEW


def test_swapped_stale_and_other_runs_files_are_found(run: Path, tmp_path: Path) -> None:
    place = run / folders.FOLDER / NEW
    ranks = [file for file in files(run) if file.suffix == ".safetensors"]
    first, second = (next(file for file in ranks if file.name == f"rank-0000{rank}.safetensors") for rank in (0, 2))
    data = {file: file.read_bytes() for file in (first, second)}
    first.write_bytes(data[second])
    assert_found(run, first.name)
    first.write_bytes(data[first])
    (tmp_path / "other").mkdir()
    for other in (run / folders.FOLDER / OLD, Writer(LAYOUT, seed=5).save(tmp_path / "other", 2)):
        for file in files(run):
            was = file.read_bytes()
            file.write_bytes((other / file.name).read_bytes())
            # Of the two that no longer go together, the index is the one that `latest` knows.
            assert_found(run, file.name)
            file.write_bytes(was)
    assert newest(run)[0] == place


def test_p081_the_order_in_which_a_folder_is_listed_is_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.iterdir
    for seed in range(20):

        def shuffled(path: Path, seed: int = seed) -> Any:
            found = list(real(path))
            random.Random(seed).shuffle(found)
            return iter(found)

        monkeypatch.setattr(Path, "iterdir", shuffled)
        folder, index, damaged = newest(run)
        assert (folder.name, damaged) == (NEW, [])
        assert same(loaded(folder, index), WRITER.values(2))


# --- files that somebody made


def rewritten(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """An index with a right digest, whatever it says; and the pointer to it."""
    values = json.loads(file.read_bytes())
    del values["digest"]
    change(values)
    forge(file, json.dumps(values, separators=(",", ":")).encode())


def forge(file: Path, text: bytes) -> None:
    digest = blake2b(text[:-1], digest_size=16).hexdigest()
    file.write_bytes(text[:-1] + f',"digest":"{digest}"}}\n'.encode())
    (file.parent.parent / folders.LATEST).write_text(f"{file.parent.name} {digest}\n")


def first_slice(values: dict[str, Any]) -> list[Any]:
    found: list[Any] = values["files"][0]["slices"][0]
    return found


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *way, last = path.split(".")

    def change(values: Any) -> None:
        for name in way:
            values = values[int(name) if name.isdigit() else name]
        values[int(last) if last.isdigit() else last] = value

    return change


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "a path outside": put("files.0.name", "../../../outside.safetensors"),
    "a path from the root": put("files.0.name", "/etc/passwd"),
    "a name with a zero": put("files.0.name", "rank-00000.safetensors\0"),
    "another spelling": put("files.0.name", "rank-000000.safetensors"),
    "another digit": put("files.0.name", "rank-0000\N{ARABIC-INDIC DIGIT ONE}.safetensors"),
    "a file twice": put("files.1.name", "rank-00000.safetensors"),
    "no file": put("files", []),
    "a negative offset": put("files.0.slices.0.4", -8),
    "an offset beyond": put("files.0.slices.0.4", 1 << 60),
    "an offset that is true": put("files.0.slices.0.4", True),
    "a float": put("step", 2.0),
    "no number": put("step", "2"),
    "a huge number": put("step", 1 << 200),
    "another step": put("step", 3),
    "a box upside down": put("files.0.slices.0.3", [[5, 1], [0, 64]]),
    "a box outside": put("files.0.slices.0.3", [[0, 1 << 40], [0, 64]]),
    "a box of other dims": put("files.0.slices.0.3", [[0, 1]]),
    "a box twice": lambda values: values["files"][0]["slices"].append(first_slice(values)),
    "a tensor that is not there": put("files.0.slices.0.0", 10**6),
    "a quantity of its own": put("files.0.slices.0.1", "__class__"),
    "a type of its own": put("files.0.slices.0.2", "object"),
    "a huge tensor": put("tensors.0.1", [1 << 40, 1 << 40]),
    "many dims": put("tensors.0.1", [1] * 5000),
    "a tensor less": lambda values: values["tensors"].pop(),
    "a slice less": lambda values: values["files"][0]["slices"].pop(),
    "another format": put("format", 99),
    "another plan": put("plan.steps", -5),
    "a plan of its own": put("plan.__init__", 1),
    "another size": put("files.0.size", 8),
    "no object": put("plan", []),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_an_index_that_was_edited_is_refused(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """With a right digest, so that it is its contents that are judged."""
    rewritten(run / folders.FOLDER / NEW / NAME, change)
    assert_found(run, NAME)


def test_an_index_that_does_not_fit_the_files_is_refused(run: Path) -> None:
    """A checksum, or the names of two slices of one shape changed: nothing but the files' own bytes can tell."""
    place = run / folders.FOLDER / NEW / NAME
    was = place.read_bytes()
    rewritten(place, put("files.0.slices.3.5", 12345))
    assert_found(run, "rank-00000.safetensors")
    place.write_bytes(was)

    def swap(values: dict[str, Any]) -> None:
        one, other = values["files"][0]["slices"][1:3]
        one[1], other[1] = other[1], one[1]

    rewritten(place, swap)
    assert_found(run, "rank-00000.safetensors")


@pytest.mark.parametrize(
    "text",
    [b"[" * 200000, b'{"a":' * 100000, b"{}", b"[]", b"null", b"\xff\xfe", b'{"format":1}', b'{"step":' + b"9" * 10000
    + b"}",
     pickle.dumps({"a": 1})],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_an_index_that_is_something_else_is_refused(run: Path, text: bytes) -> None:
    file = run / folders.FOLDER / NEW / NAME
    forge(file, text)
    assert_found(run, NAME)
    file.write_bytes(text)
    assert_found(run, NAME)


def test_an_endless_index_is_not_read(run: Path) -> None:
    with (run / folders.FOLDER / NEW / NAME).open("wb") as file:
        file.truncate(LARGEST + 1)
    assert "more than" in assert_found(run, NAME)


def test_links_pipes_and_devices_are_no_files(run: Path, tmp_path: Path) -> None:
    for name in (NAME, "rank-00001.safetensors"):
        file = run / folders.FOLDER / NEW / name
        moved = tmp_path / name
        file.rename(moved)
        file.symlink_to(moved)
        assert_found(run, name)
        file.unlink()
        os.mkfifo(file)
        assert_found(run, name)
        file.unlink()
        moved.rename(file)
    assert newest(run)[0].name == NEW


def test_a_header_may_say_what_it_likes(run: Path) -> None:
    """Its length, say, with a checksum that is right: it is never read, only held against what it has to be."""
    place = run / folders.FOLDER / NEW
    file = place / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    length = 8 + struct.unpack("<Q", data[:8])[0]
    for header in (struct.pack("<Q", 1 << 62), b"\x80\x04\x95" + b"\0" * 5):
        changed = header + bytes(data[8:])
        file.write_bytes(changed)
        rewritten(place / NAME, put("files.0.crc", zlib.crc32(changed[:length])))
        assert "header" in assert_found(run, file.name)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ['MARKER']}",)


def test_p145_nothing_is_ever_unpickled(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is a pickle, loading works where there is none, and a pickle in any file's place is a damaged file."""
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    bomb = pickle.dumps(Bomb())
    for file in files(run):
        with pytest.raises(ValueError, match=r"opcode|pickle"):
            list(pickletools.genops(file.read_bytes()))
        was = file.read_bytes()
        for data in (bomb, bomb + was[len(bomb) :]):
            file.write_bytes(data)
            assert_found(run, file.name)
        file.write_bytes(was)
    assert not (tmp_path / "marker").exists()

    def never(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    folder, index, _ = newest(run)
    assert same(loaded(folder, index), WRITER.values(2))


def test_a_checkpoint_of_another_model_is_refused_by_name(run: Path) -> None:
    from plait.runtime.checkpoint.index import TensorShape
    from plait.runtime.checkpoint.load import refuse_other_tensors

    folder, index, _ = newest(run)
    mine = {tensor.name: tensor for tensor in index.tensors}
    refuse_other_tensors(index, mine, folder)
    name = "model.norm.weight"
    bias = TensorShape("head.bias", (4,), True)
    less = {key: value for key, value in mine.items() if key != name}
    cases: list[tuple[dict[str, TensorShape], str]] = [
        ({**mine, "head.bias": bias}, "lacks 1 tensors of this model (the first head.bias)"),
        (less, f"that this model has not (the first {name})"),
        ({**mine, name: TensorShape(name, (65,), True)}, f"has {name} as (64,), and this model has it as (65,)"),
        ({**mine, name: TensorShape(name, (64,), False)}, f"has {name} trained, and here it is frozen"),
    ]
    for wanted, words in cases:
        with pytest.raises(PlanError) as refusal:
            refuse_other_tensors(index, wanted, folder)
        assert words in str(refusal.value)


def test_load_reads_no_more_than_it_needs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of a pipeline of two reads little more than half, and no slice of a tensor that is the other's."""
    folder, index, _ = newest(run)
    read, real = [0], disk.fill

    def counting(fd: int, views: Sequence[memoryview], offset: int) -> int:
        read[0] += sum(view.nbytes for view in views)
        return real(fd, views, offset)

    monkeypatch.setattr(disk, "fill", counting)
    loaded(folder, index, {"pp": 2})
    both = read[0]
    headers = 2 * sum(len(file.header) for file in index.files)
    assert both <= index.size + headers
    assert load(folder, index, lambda *which: []) is None
    assert read[0] == both


def test_load_holds_one_slice_beside_what_is_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the layouts: nothing larger than the largest slice is ever read at once."""
    folder, index, _ = newest(run)
    sizes, real = list[int](), disk.fill

    def noting(fd: int, views: Sequence[memoryview], offset: int) -> int:
        sizes.extend(view.nbytes if offset else 0 for view in views)
        return real(fd, views, offset)

    monkeypatch.setattr(disk, "fill", noting)
    loaded(folder, index, {"tp": 2, "dp": 2, "zero": 3})
    assert max(sizes) == max(one.size for file in index.files for one in file.slices)


def test_a_large_tensor_is_many_slices() -> None:
    one = Slice(((0, 4096), (0, 1024)), 0, (1024, 1))
    found = list(in_rows(one, 4))
    assert [piece.box[0] for piece in found] == [(0, 2048), (2048, 4096)]
    assert [piece.start for piece in found] == [0, 2048 * 1024]
    assert all(piece.strides == one.strides for piece in found)
    assert list(in_rows(Slice((), 0, ()), 4)) == [Slice((), 0, ())]
