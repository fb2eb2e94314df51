"""A run is killed while it saves or loads, rank by rank or all at once, or its disk fails; whoever goes on with it
ends with the very bits of a run that nothing happened to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.commands import Driver
from tests.cli.test_resume import SAVES, checkpoints, losses

KILL = """
import os, signal
import plait.runtime.checkpoint.disk as disk
old = disk.{name}
def killing(*given):
    result = old(*given)
    if any({part!r} in str(one) for one in given):
        os.kill({whom}, signal.SIGKILL)
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
ONE, ALL = "os.getpid()", "os.getppid()"
MOMENTS = {
    "a rank after its write": ("write", "step-00000004.partial/rank-00001", ONE),
    "a rank before it begins": ("create", "step-00000002.partial/rank-00001", ONE),
    "all when a file is synced": ("sync", "step-00000004.partial/rank-00000", ALL),
    "all with the index there": ("sync", "step-00000006.partial/index.json", ALL),
    "all when it has its name": ("rename", "checkpoints/step-00000006.partial", ALL),
    "all while an old one goes": ("unlink", "step-00000002.removed", ALL),
}


@pytest.fixture(scope="module")
def straight(plait: Driver, small: Sequence[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    assert plait.run(*small, *SAVES, "--dp", 2, "--out", out).code == 0
    return out


def assert_the_same_end(out: Path, straight: Path) -> None:
    assert checkpoints(out) == checkpoints(straight)
    assert losses(out) == losses(straight)
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", "index.json"):
        here, there = (run / "checkpoints" / "step-00000008" / name for run in (out, straight))
        assert here.read_bytes() == there.read_bytes(), name


@pytest.mark.parametrize(("name", "part", "whom"), MOMENTS.values(), ids=MOMENTS)
def test_a_killed_run_goes_on_to_the_same_end(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path, name: str, part: str, whom: str
) -> None:
    out = tmp_path / "run"
    before = KILL.format(name=name, part=part, whom=whom)
    ended = plait.run(*small, *SAVES, "--dp", 2, "--out", out, before=before)
    assert ended.code == (3 if whom == ONE else 137), ended.err
    ended = plait.run("train", "--resume", "auto", "--out", out, *small[1:], *SAVES, "--dp", 2)
    assert ended.code == 0, ended.err
    assert_the_same_end(out, straight)


def test_a_run_that_is_killed_while_it_loads_can_be_loaded(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert plait.run(*small, *SAVES, "--dp", 2, "--out", out, "--stop-after", 4).code == 0
    before = KILL.format(name="fill", part="", whom=ONE)
    assert plait.run("train", "--resume", out, before=before).code == 3
    assert plait.run("train", "--resume", out, "--sample", 0).code == 0
    assert_the_same_end(out, straight)


@pytest.mark.parametrize(
    ("number", "name", "part", "words"),
    [(28, "write", "step-00000004.partial/rank-00001", ("rank 1: ", "no space left on device")),
     (5, "sync", "step-00000004.partial/rank-00000", ("rank 0: ", "input/output error")),
     (30, "make_folder", "step-00000004", ("rank 0: ", "read-only file system")),
     (28, "write", "step-00000004.partial/index.json", ("rank 0: ", "no space left")),
     (5, "rename", "step-00000004.partial", ("rank 0: ", "input/output error"))],
    ids=str,
)  # fmt: skip
def test_a_disk_that_fails_ends_the_run_and_leaves_what_was_there(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path, number: int, name: str, part: str,
    words: Sequence[str],
) -> None:  # fmt: skip
    out = tmp_path / "run"
    before = FAIL.format(name=name, part=part, number=number)
    ended = plait.run(*small, *SAVES, "--dp", 2, "--out", out, before=before)
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
