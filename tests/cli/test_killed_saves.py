"""A run is killed while it saves or loads, rank by rank or all at once, or its disk fails; whoever goes on with it
ends with the very bits of a run that nothing happened to."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Driver, until
from tests.cli.test_resume import SAVES, checkpoints, losses

KILL = """
import os, signal
import plait.runtime.checkpoint.disk as disk
old = disk.{name}
def killing(*given):
    result = old(*given)
    if any({part!r} in str(one) for one in given):
        {how}
    return result
disk.{name} = killing
"""
FAIL = """
import errno, os
import plait.runtime.checkpoint.disk as disk
old = disk.{name}
def failing(*given):
    if any({part!r} in str(one) for one in given):
        raise OSError({number}, os.strerror({number}), str(given[-1]))
    return old(*given)
disk.{name} = failing
"""
ONE, ITS_RANK = "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getppid(), signal.SIGKILL)"
ALL = "os.killpg(0, signal.SIGKILL)"
MOMENTS = {
    "a writer after its write": ("async", "write", "step-00000004.partial/rank-00001", ONE),
    "a writer before it begins": ("async", "create", "step-00000002.partial/rank-00000", ONE),
    "a rank while its writer writes": ("async", "write", "step-00000004.partial/rank-00001", ITS_RANK),
    "a rank after its write": ("sync", "write", "step-00000004.partial/rank-00001", ONE),
    "all when it has its name": ("async", "rename", "checkpoints/step-00000006.partial", ALL),
    "all when a file is synced": ("async", "sync", "step-00000004.partial/rank-00000", ALL),
    "all with the index there": ("sync", "sync", "step-00000006.partial/index.json", ALL),
    "all while an old one goes": ("async", "unlink", "step-00000002.removed", ALL),
}


def some_of(cases: dict[str, tuple[str, ...]]) -> list[Any]:
    """Every other, and the rest with --all-layouts."""
    return [
        pytest.param(*case, id=name, marks=[pytest.mark.rest] * (number % 2))
        for number, (name, case) in enumerate(cases.items())
    ]


@pytest.fixture(scope="module")
def straight(plait: Driver, small: Sequence[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    assert plait.run(*small, *SAVES, "--dp", 2, "--out", out).code == 0
    return out


def assert_the_same_end(out: Path, straight: Path) -> None:
    assert checkpoints(out) == checkpoints(straight)
    assert losses(out) == losses(straight)
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        here, there = (run / "checkpoints" / "step-00000008" / name for run in (out, straight))
        assert here.read_bytes() == there.read_bytes(), name


@pytest.mark.parametrize(("method", "name", "part", "how"), some_of(MOMENTS))
def test_a_killed_run_goes_on_to_the_same_end(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path, method: str, name: str, part: str,
    how: str,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    before = KILL.format(name=name, part=part, how=how)
    command = (*small, *SAVES, "--dp", 2, "--out", out, "--resume", "auto", "--save-method", method)
    ended = plait.run(*command, before=before)
    assert ended.code == (137 if how == ALL else 3), ended.err
    ended = plait.run(*command)
    assert ended.code == 0, ended.err
    assert_the_same_end(out, straight)


def test_a_run_that_is_killed_while_it_loads_can_be_loaded(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert plait.run(*small, *SAVES, "--dp", 2, "--out", out, "--stop-after", 4).code == 0
    before = KILL.format(name="fill", part="", how=ONE)
    assert plait.run("train", "--resume", out, before=before).code == 3
    assert plait.run("train", "--resume", out, "--sample", 0).code == 0
    assert_the_same_end(out, straight)


@pytest.mark.parametrize(
    ("method", "number", "name", "part", "words"),
    [("async", 28, "write", "step-00000004.partial/rank-00001", ("rank 1: ", "no space left on device")),
     pytest.param("sync", 28, "write", "step-00000004.partial/rank-00001", ("rank 1: ", "no space left on device"),
                  marks=pytest.mark.rest),
     ("async", 5, "sync", "step-00000004.partial/rank-00000", ("rank 0: ", "input/output error")),
     pytest.param("async", 30, "make_folder", "step-00000004", ("rank 0: ", "read-only file system"),
                  marks=pytest.mark.rest),
     ("sync", 28, "write", "step-00000004.partial/index.json", ("rank 0: ", "no space left")),
     ("async", 5, "rename", "step-00000004.partial", ("rank 0: ", "input/output error"))],
    ids=str,
)  # fmt: skip
def test_a_disk_that_fails_ends_the_run_and_leaves_what_was_there(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path, method: str, number: int, name: str,
    part: str, words: Sequence[str],
) -> None:  # fmt: skip
    out = tmp_path / "run"
    before = FAIL.format(name=name, part=part, number=number)
    ended = plait.run(*small, *SAVES, "--dp", 2, "--out", out, "--save-method", method, before=before)
    assert ended.code == 3
    for word in ("SaveError", "step 4", "step-00000002 is kept", *words):
        assert word in ended.sentence, ended.sentence
    assert checkpoints(out) == ["latest", "step-00000002"]
    assert plait.run("train", "--resume", out, "--sample", 0).code == 0
    assert_the_same_end(out, straight)


def test_p103_two_ranks_whose_disks_fail_in_two_ways_say_one_thing(
    plait: Driver, small: Sequence[object], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first = FAIL.format(name="write", part="partial/rank-00000", number=5)
    second = FAIL.format(name="create", part="partial/rank-00001", number=28)
    ended = plait.run(*small, *SAVES, "--dp", 2, "--out", out, before=first + second)
    assert ended.code == 3
    assert ended.seconds < 30
    assert "rank 0: " in ended.sentence
    assert "input/output error" in ended.sentence
    assert "no checkpoint is there" in ended.sentence


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path
) -> None:
    """By its size before ranks start, by a bit when they read it; both keep their files, without the name."""
    out = tmp_path / "run"
    assert plait.run(*small, *SAVES, "--dp", 2, "--out", out, "--keep", 0, "--stop-after", 7).code == 0
    cut, flipped = (
        out / "checkpoints" / step / "rank-00001.safetensors" for step in ("step-00000007", "step-00000006")
    )
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 8
    flipped.write_bytes(data)
    ended = plait.run("train", "--resume", out, "--keep", 2, "--sample", 0)
    assert ended.code == 0, ended.err
    said = [line for line in ended.out.splitlines() if line.startswith("left out: ")]
    assert [str(cut) in said[0], str(flipped) in said[1], len(said)] == [True, True, 2]
    assert "CRC-32" in said[1]
    assert f"going on from {out / 'checkpoints' / 'step-00000004'}" in ended.out
    left = {"step-00000006.aside", "step-00000007.aside"}
    assert set(checkpoints(out)) == {*checkpoints(straight), *left}
    assert losses(out) == losses(straight)


def test_where_all_are_damaged_nothing_is_begun(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert plait.run(*small, *SAVES, "--dp", 2, "--out", out, "--stop-after", 2).code == 0
    file = out / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 8
    file.write_bytes(data)
    metrics = (out / "metrics.jsonl").read_bytes()
    ended = plait.run("train", "--resume", "auto", "--out", out)
    assert ended.code == 2
    assert str(file) in ended.err
    file.unlink()
    plait.run("train", "--resume", "auto", "--out", out).refused("holds no checkpoint that is whole", str(file))
    assert (out / "metrics.jsonl").read_bytes() == metrics


SLOW = """
import time
import plait.runtime.checkpoint.disk as disk
old = disk.sync
def slowly(fd, path):
    time.sleep({seconds} if ".partial/" in str(path) else 0)
    return old(fd, path)
disk.sync = slowly
"""


def test_p075_the_last_checkpoint_is_whole_when_a_run_has_ended(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path
) -> None:
    """Also where writing takes longer than the training."""
    out = tmp_path / "run"
    ended = plait.run(*small, *SAVES, "--dp", 2, "--out", out, before=SLOW.format(seconds=0.4))
    assert (ended.code, ended.err) == (0, "")
    assert_the_same_end(out, straight)
    assert plait.run("checkpoint", "verify", out).code == 0


def test_p094_a_checkpoint_that_is_written_late_is_of_its_own_step(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path
) -> None:
    """Steps go on while it is written, and change none of it: its files are those of a run that waited."""
    out = tmp_path / "run"
    slow = ("--steps", 8, "--save-every", 3, "--keep", 0)
    ended = plait.run(*small, *slow, "--dp", 2, "--out", out, before=SLOW.format(seconds=0.7))
    assert ended.code == 0, ended.err
    lines = [line for line in ended.out.splitlines() if line.startswith("step ")]
    said = [number for number, line in enumerate(lines) if "step-00000003" in line]
    begun = next(number for number, line in enumerate(lines) if line.startswith("step 3/8  loss"))
    assert said[0] - begun > 1, "no step was taken while it was written"
    waited = tmp_path / "waited"
    assert plait.run(*small, *slow, "--dp", 2, "--out", waited, "--save-method", "sync").code == 0
    for step in ("step-00000003", "step-00000006", "step-00000008"):
        for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
            here, there = (run / "checkpoints" / step / name for run in (out, waited))
            assert here.read_bytes() == there.read_bytes(), (step, name)


def test_a_writer_holds_nothing_of_its_rank(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    """No socket and no segment: three files of its own, the standard ones, and that is all; it is gone with its rank."""
    out = tmp_path / "run"
    command = plait.start(
        *small, "--steps", 100000, "--save-every", 100000, "--dp", 2, "--out", out, "--local-transport", "torch"
    )
    command.stepping(out / "metrics.jsonl")
    children = {pid: parent_of(pid) for pid in command.processes()}
    writers = [pid for pid, parent in children.items() if children.get(parent) == command.pid]
    assert len(writers) == 2
    for pid in writers:
        links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
        assert len(links) == 6, links
        assert not any(link.startswith("socket:") for link in links)
    os.kill(children[writers[0]], signal.SIGKILL)
    assert command.ended().code == 3
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in writers))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
