"""Where checkpoints are, under which names, and which of them are whole.

    RUN/checkpoints/latest                     the newest, by name and by the digest of its index
                    step-00000040/             index.json, rank-00000.safetensors, ...
                    step-00000050.partial/     being written, or left by a run that was ended while it wrote

A checkpoint appears under its name by one rename, when all that belongs to it is on the disk; one that is removed
loses its name first. So whatever ends a run at any moment, what bears a name is whole. `latest` is moved after that,
and tells people and other programs; plait itself takes the highest step that is whole, which is the same or newer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ...design.errors import PlanError
from . import disk
from .index import NAME, DamagedError, Index, digest_of, read, text_of

FOLDER = "checkpoints"
LATEST = "latest"
PARTIAL, REMOVED, ASIDE = ".partial", ".removed", ".aside"
_STEP = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    return f"step-{step:08}"


def step_of(folder: Path) -> int | None:
    """The step that a folder's name says; None where it is no checkpoint's."""
    found = _STEP.fullmatch(folder.name)
    return int(found[1]) if found and name_of(int(found[1])) == folder.name else None


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder of them, by their names, the newest first: whatever order the system lists them in."""
    try:
        here = [path for path in folder.iterdir() if step_of(path) is not None]
    except OSError:
        return []
    return sorted(here, key=lambda path: step_of(path) or 0, reverse=True)


def at_hand(run: Path) -> list[Path]:
    """The checkpoints that `run` names, the newest first: a run's folder, or one checkpoint."""
    if step_of(run) is not None and (run / NAME).exists():
        return [run]
    return steps(run / FOLDER)


def opened(folder: Path) -> Index:
    """The index of a checkpoint whose files are there, each of its size; a `DamagedError` else."""
    index = read(folder)
    step = step_of(folder)
    if step is not None and index.progress.step != step:
        raise DamagedError(folder / NAME, f"it is of step {index.progress.step}")
    pointer = folder.parent / LATEST
    if pointer.exists():
        name, digest = _pointed(pointer)
        if name == folder.name and digest != digest_of(text_of(folder / NAME)):
            raise DamagedError(folder / NAME, f"it is not the one that {pointer} names")
    for file in index.files:
        path = folder / file.name
        try:
            size = path.lstat().st_size
        except OSError:
            raise DamagedError(path, "it is not there") from None
        if size != file.size:
            raise DamagedError(path, f"it has {size:,} bytes, and {NAME} says {file.size:,}")
    return index


def whole(run: Path) -> tuple[list[tuple[Path, Index]], list[DamagedError]]:
    """The checkpoints that `run` names whose index and files can be told to be whole without reading these, the newest
    first; and what is wrong with the others."""
    found, damaged = [], []
    for folder in at_hand(run):
        try:
            found.append((folder, opened(folder)))
        except DamagedError as error:
            damaged.append(error)
    return found, damaged


def none_left(run: Path, damaged: list[DamagedError]) -> PlanError:
    """What is said where no checkpoint can be loaded."""
    if damaged:
        return PlanError(f"{run} holds no checkpoint that is whole: {' '.join(map(str, damaged))}")
    if not run.exists():
        return PlanError(
            f"There is no directory {run}: name one that plait train --save-every N has written (runs/...)."
        )
    left = [path.name for path in (run / FOLDER).glob(f"*{PARTIAL}")] if (run / FOLDER).is_dir() else []
    more = f" ({left[0]} was never finished)" if left else ""
    return PlanError(f"{run} holds no checkpoint{more}: plait train writes them with --save-every N.")


# --- what changes them


def leftovers(folder: Path) -> Iterator[Path]:
    """What runs that were ended left half written or half removed."""
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if path.suffix in (PARTIAL, REMOVED))


def erase(folder: Path) -> None:
    """Removes a folder of files, which bears no checkpoint's name."""
    for path in sorted(folder.iterdir()):
        disk.unlink(path)
    disk.remove_folder(folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint: its name at once, then its files."""
    nameless = folder.with_name(folder.name + REMOVED)
    if nameless.exists():
        erase(nameless)
    _unpoint(folder)
    disk.rename(folder, nameless)
    disk.sync_folder(folder.parent)
    erase(nameless)


def set_aside(folder: Path) -> Path:
    """Takes a checkpoint's name away and keeps its files: where they are now."""
    number, aside = 1, folder.with_name(folder.name + ASIDE)
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}{ASIDE}{number}")
    _unpoint(folder)
    disk.rename(folder, aside)
    return aside


def _pointed(pointer: Path) -> tuple[str, str]:
    """What a pointer says: the name of a checkpoint, and the digest of its index."""
    name, _, digest = text_of(pointer).decode(errors="replace").strip().partition(" ")
    return name, digest


def _unpoint(folder: Path) -> None:
    """Removes the pointer if it is to this checkpoint: another may come to bear its name."""
    pointer = folder.parent / LATEST
    if pointer.exists() and _pointed(pointer)[0] == folder.name:
        disk.unlink(pointer)


def publish(partial: Path, folder: Path) -> None:
    """Gives a checkpoint that is written its name, and moves the pointer to it."""
    if folder.exists():  # written again, since the run went back to before it
        remove(folder)
    disk.rename(partial, folder)
    disk.sync_folder(folder.parent)
    point(folder)


def point(folder: Path) -> None:
    """Moves the pointer to a checkpoint, whose index is there."""
    pointer, digest = folder.parent / LATEST, digest_of(text_of(folder / NAME))
    new = pointer.with_name(LATEST + PARTIAL)
    if new.exists():
        disk.unlink(new)
    fd = disk.create(new)
    with open(fd, "wb"):
        disk.write(fd, [memoryview(f"{folder.name} {digest}\n".encode())], new)
        disk.sync(fd, new)
    disk.rename(new, pointer)
    disk.sync_folder(folder.parent)


def prune(folder: Path, keep: int) -> None:
    """Removes all checkpoints but the newest `keep` (0: keeps all)."""
    for old in steps(folder)[keep:] if keep else ():
        remove(old)
