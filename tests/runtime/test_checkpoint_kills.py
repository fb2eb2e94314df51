"""Whatever ends a save, and wherever: a checkpoint that is whole is there, and it is the newest that ever was.

Every operation on the disk goes through checkpoint/disk.py. They are counted in a dry run, and then the process is killed
after each of them; and the power is cut after each: then what was not synced is lost, in several ways.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from plait.runtime.checkpoint import disk, folders
from tests.checkpoint_files import LAYOUT, Writer, loaded, same
from tests.conftest import Models

OPERATIONS = ("create", "write", "sync", "sync_folder", "make_folder", "rename", "unlink", "remove_folder")
Told = Callable[[str, tuple[Any, ...], Any], None]


@contextmanager
def listening(told: Told) -> Iterator[None]:
    """While it is entered, every operation on the disk is told, once it is done."""
    before = {name: getattr(disk, name) for name in OPERATIONS}

    def telling(name: str) -> Callable[..., Any]:
        def done(*arguments: Any) -> Any:
            result = before[name](*arguments)
            told(name, arguments, result)
            return result

        return done

    for name in OPERATIONS:
        setattr(disk, name, telling(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(disk, name, function)


@pytest.fixture(scope="module")
def writer(tiny: Models) -> Writer:
    return Writer(LAYOUT, tiny())


@pytest.fixture(scope="module")
def two(writer: Writer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, of which one goes when the third comes; and what a killed save had left."""
    run = tmp_path_factory.mktemp("two")
    writer.save(run, 1)
    writer.save(run, 2)
    left = run / folders.FOLDER / "step-00000009.partial"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    return run


def killer(last: int) -> Told:
    """Ends this process after so many operations."""
    seen = [0]

    def told(name: str, arguments: tuple[Any, ...], result: Any) -> None:
        seen[0] += 1
        if seen[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return told


def assert_newest_is_whole(writer: Writer, run: Path, *, published: bool) -> None:
    found, damaged = folders.whole(run)
    assert found, damaged
    assert not damaged
    folder, index = found[0]
    step = index.progress.step
    assert step == (3 if published else 2)
    assert same(loaded(folder, index), writer.values(step))


def test_p073_a_save_may_be_killed_after_any_operation(writer: Writer, two: Path, tmp_path: Path) -> None:
    """And the next save goes through."""
    count, published = [0], [0]

    def counting(name: str, arguments: tuple[Any, ...], result: Any) -> None:
        count[0] += 1
        if name == "rename" and arguments[1].name == folders.name_of(3):
            published[0] = count[0]

    dry = shutil.copytree(two, tmp_path / "dry")
    with listening(counting):
        writer.save(dry, 3, keep=2)
    assert count[0] > 25
    assert published[0]
    for last in range(1, count[0] + 1):
        run = shutil.copytree(two, tmp_path / str(last))
        child = os.fork()
        if child == 0:
            with listening(killer(last)):
                writer.save(run, 3, keep=2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        assert_newest_is_whole(writer, run, published=last >= published[0])
        writer.save(run, 3, keep=2)
        assert_newest_is_whole(writer, run, published=True)
        assert sorted(path.name for path in (run / folders.FOLDER).iterdir()) == [
            "latest", "step-00000002", "step-00000003"
        ]  # fmt: skip
        shutil.rmtree(run)


def test_a_step_that_is_saved_again_may_be_killed_too(writer: Writer, two: Path, tmp_path: Path) -> None:
    """After its name and before the pointer, which must not be to the one that bore the name before."""
    run = shutil.copytree(two, tmp_path / "run")
    folders.set_aside(run / folders.FOLDER / folders.name_of(2))
    again = Writer(LAYOUT, writer.model, seed=1)
    child = os.fork()
    if child == 0:

        def kill(name: str, arguments: tuple[Any, ...], result: Any) -> None:
            if name == "rename" and arguments[1].name == folders.name_of(2):
                os.kill(os.getpid(), signal.SIGKILL)

        with listening(kill):
            again.save(run, 2)
        os._exit(0)
    os.waitpid(child, 0)
    found, damaged = folders.whole(run)
    assert not damaged
    assert same(loaded(*found[0]), again.values(2))


# --- a disk that forgets


@dataclass(eq=False)
class File:
    data: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """What was done to a disk, and what is left of it when the power goes: of a file what was synced; of a folder the
    names that were synced, or those of the last moment, and of a folder in it the same or the other."""

    def __init__(self, root: Path) -> None:
        self._root, self._open = root, dict[int, File]()
        self.root = self._read(root)

    def _read(self, path: Path) -> Folder:
        found = Folder()
        for one in path.iterdir():
            found.names[one.name] = self._read(one) if one.is_dir() else File(one.read_bytes(), one.read_bytes())
        found.synced = dict(found.names)
        return found

    def _folder(self, path: Path) -> Folder:
        found = self.root
        for name in path.relative_to(self._root).parts:
            inner = found.names[name]
            assert isinstance(inner, Folder)
            found = inner
        return found

    def told(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        match name, arguments:
            case "create", (path,):
                self._folder(path.parent).names[path.name] = self._open[result] = File()
            case "write", (fd, views, _):
                self._open[fd].data += b"".join(map(bytes, views))
            case "sync", (fd, path):
                if fd in self._open and path.is_file():
                    self._open[fd].synced = self._open[fd].data
            case "sync_folder", (path,):
                self._folder(path).synced = dict(self._folder(path).names)
            case "make_folder", (path,):
                self._folder(path.parent).names[path.name] = Folder()
            case "rename", (old, new):
                self._folder(new.parent).names[new.name] = self._folder(old.parent).names.pop(old.name)
            case "unlink" | "remove_folder", (path,):
                del self._folder(path.parent).names[path.name]

    def left(self, into: Path, ways: tuple[bool, ...], folder: Folder | None = None, depth: int = 0) -> None:
        """Makes what is left: at each depth of folders the names of the last moment, or those that were synced."""
        here = self.root if folder is None else folder
        into.mkdir()
        for name, one in (here.names if ways[min(depth, len(ways) - 1)] else here.synced).items():
            if isinstance(one, Folder):
                self.left(into / name, ways, one, depth + 1)
            else:
                (into / name).write_bytes(one.synced)


def test_the_power_may_go_after_any_operation(writer: Writer, two: Path, tmp_path: Path) -> None:
    """The checkpoint before is whole at every moment, and the new one from the moment when its name is synced."""
    run = shutil.copytree(two, tmp_path / "run")
    forgetful, moments, safe = Disk(run), [0], [False]
    named = [False]

    def cut(name: str, arguments: tuple[Any, ...], result: Any) -> None:
        forgetful.told(name, arguments, result)
        named[0] = named[0] or (name == "rename" and arguments[1].name == folders.name_of(3))
        safe[0] = safe[0] or (named[0] and name == "sync_folder" and arguments[0].name == folders.FOLDER)
        if name == "write" and moments[0] % 7:  # files in the middle of their writes are all alike
            moments[0] += 1
            return
        moments[0] += 1
        for number, ways in enumerate(product((True,), (True, False), (True, False))):
            left = tmp_path / f"{moments[0]}-{number}"
            forgetful.left(left, ways)
            found, damaged = folders.whole(left)
            assert not damaged
            assert found[0][1].progress.step == 3 if safe[0] else found[0][1].progress.step in (2, 3)
            folder, index = found[0]
            if number in (0, 3) or index.progress.step == 3:
                assert same(loaded(folder, index), writer.values(index.progress.step))
            shutil.rmtree(left)

    with listening(cut):
        writer.save(run, 3, keep=2)
    assert safe[0]
    assert moments[0] > 25


def test_a_save_that_syncs_nothing_is_seen(
    writer: Writer, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forgetful disk can tell: without the sync of a file, it is empty under its name."""
    run = shutil.copytree(two, tmp_path / "run")
    forgetful = Disk(run)

    def told(name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name != "sync":
            forgetful.told(name, arguments, result)

    with listening(told):
        writer.save(run, 3, keep=2)
    forgetful.left(tmp_path / "left", (True,))
    found, damaged = folders.whole(tmp_path / "left")
    assert [index.progress.step for _, index in found] == [2]
    assert len(damaged) == 1
