"""What happens when a run goes wrong: the exit code, one sentence that names the cause, and no process left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.commands import PATIENCE_S, Command, Driver, until
from tests.cli.ports import listening, nobody_listens

SOON_S = 15
SEEN_S, SAID_S = 3, 5
LONG = ("--steps", 100_000)


def planted(condition: str, action: str) -> str:
    """Code that makes `action` happen at the start of a step when `condition` holds; `run` is the rank's run."""
    return f"""
from plait.runtime.training import step
taken = step.Run.step
def planted(run, *given, **named):
    if {condition}:
        {action}
    return taken(run, *given, **named)
step.Run.step = planted
"""


def started(plait: Driver, small: Sequence[object], out: Path, *more: object, **how: object) -> Command:
    command = plait.start(*small, *more, *LONG, "--out", out, **how)  # type: ignore[arg-type]
    command.stepping(out / "metrics.jsonl")
    return command


def gone(command: Command) -> None:
    begun = time.monotonic()
    until(lambda: not command.processes())
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("rank", [0, 2])
def test_p110_a_rank_that_is_killed_ends_the_run_and_is_named(
    plait: Driver, small: Sequence[object], tmp_path: Path, number: signal.Signals, rank: int
) -> None:
    command = started(plait, small, tmp_path / "run", "--dp", 2, "--pp", 2)
    victim = command.ranks(4)[rank]
    ports = listening(command.processes())
    begun = time.monotonic()
    os.kill(victim, number)
    ended = command.ended()
    assert time.monotonic() - begun < SEEN_S + SAID_S
    assert ended.code == 3
    assert ended.sentence.startswith(f"Rank {rank} was ended by signal {int(number)} ({number.name})")
    # It may have gone before it came to a call, between coming and waiting, or while it waited.
    dead = rf"rank {rank}: dead; (never came; last |last (waited in|finished): )"
    assert any(re.match(dead, line) for line in ended.ranks), ended.err
    where = rf"(for ranks? .*\b{rank}\b.* in .*\.py:\d+|in .*\.py:\d+, to which all have come), step \d+$"
    assert any(re.match(rf"ranks? .*: waiting {where}", line) for line in ended.ranks), ended.err
    assert not command.processes()
    nobody_listens(ports)


@pytest.mark.parametrize("transport", ["shared", "torch"])
def test_p110_ranks_do_not_outlive_a_parent_that_is_killed(
    plait: Driver, small: Sequence[object], tmp_path: Path, transport: str
) -> None:
    command = started(plait, small, tmp_path / "run", "--dp", 2, "--pp", 2, "--local-transport", transport)
    ports = listening(command.processes())
    assert bool(ports) == (transport == "torch"), "shared memory opens none"
    os.kill(command.pid, signal.SIGKILL)
    assert command.ended().code == 128 + signal.SIGKILL
    gone(command)
    nobody_listens(ports)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_to_the_command_ends_all_ranks(
    plait: Driver, small: Sequence[object], tmp_path: Path, number: signal.Signals, code: int, to_all: bool
) -> None:
    """A terminal sends Ctrl-C to the parent and every rank alike; `kill` to the parent alone."""
    command = started(plait, small, tmp_path / "run", "--dp", 2)
    (os.killpg if to_all else os.kill)(command.pid, number)
    ended = command.ended()
    assert ended.code == code, ended.err
    assert ended.sentence == f"ended by {number.name}; all ranks are ended."
    assert not command.processes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", ["text", "world"])
def test_a_signal_while_the_ranks_start(
    plait: Driver, small: Sequence[object], tmp_path: Path, number: signal.Signals, code: int, moment: str
) -> None:
    """While the text is tokenised, and while the ranks wait for each other; nothing is left of a run without a step."""
    mark = tmp_path / "mark"
    stop = f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); time.sleep(600)"
    before = {
        "text": f"import plait.runtime.training.launch as t\ndef stuck(*a, **k):\n    {stop}\nt.corpus = stuck",
        "world": f"import plait.runtime.comm.world as w\ndef stuck(*a, **k):\n    {stop}\nw.file_store = stuck",
    }[moment]
    command = plait.start(*small, "--dp", 2, "--out", tmp_path / "new" / "run", before=before)
    until(mark.exists, lambda: command.read("err"))
    os.kill(command.pid, number)
    ended = command.ended()
    assert ended.code == code
    assert not command.processes()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_torch_is_imported(
    plait: Driver, small: Sequence[object], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    argv = [sys.executable, "-m", "plait", *map(str, small), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        argv, env=plait.env, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # Tests that run in the background are started with SIGINT ignored, and what was ignored stays so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    maps = Path(f"/proc/{process.pid}/maps")
    until(lambda: "libtorch_cpu" in maps.read_text())
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, err
    assert err == f"plait: ended by {number.name}.\n"
    assert not (tmp_path / "run").exists()


def test_a_rank_that_raises_is_named_and_the_others_do_not_drown_it(
    plait: Driver, small: Sequence[object], tmp_path: Path
) -> None:
    before = planted("run.world.rank == 2 and run.done == 1", "raise KeyError('the first error')")
    command = plait.start(*small, "--dp", 2, "--pp", 2, "--out", tmp_path / "run", before=before)
    ended = command.ended()
    assert (ended.code, ended.sentence) == (3, "Rank 2 failed: KeyError: 'the first error'")
    assert not command.processes()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_the_first_of_two_errors_is_kept(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    action = "import time; time.sleep(0.4 * (run.world.rank != 1)); raise ValueError(f'from {run.world.rank}')"
    before = planted("run.done == 1", action)
    ended = plait.run(*small, "--dp", 2, "--out", tmp_path / "run", before=before)
    assert (ended.code, ended.sentence) == (3, "Rank 1 failed: ValueError: from 1")


def test_a_rank_that_leaves_without_a_word(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    before = planted("run.world.rank == 1 and run.done == 1", "import os; os._exit(0)")
    ended = plait.run(*small, "--dp", 2, "--out", tmp_path / "run", before=before)
    assert (ended.code, ended.sentence) == (3, "Rank 1 ended with code 0 and without a result.")


def test_a_process_that_a_rank_started_does_not_hold_up_the_end(
    plait: Driver, small: Sequence[object], tmp_path: Path
) -> None:
    """It holds the rank's pipe open, whose end therefore says nothing of the rank's."""
    action = "import os, time\n        if os.fork() == 0: time.sleep(20); os._exit(0)\n        os.kill(os.getpid(), 9)"
    before = planted("run.world.rank == 1 and run.done == 1", action)
    command = plait.start(*small, "--dp", 2, "--out", tmp_path / "run", before=before)
    ended = command.ended()
    for pid in command.processes():
        os.kill(pid, signal.SIGKILL)
    assert ended.code == 3
    assert "Rank 1 was ended by signal 9" in ended.sentence
    assert ended.seconds < SOON_S


def test_p032_numbers_that_go_bad(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    more = ("--dp", 2, "--lr", "1e30", "--clip", 0, "--steps", 20, "--out", tmp_path / "run")
    ended = plait.run(*small, *more)
    assert ended.code == 7, ended.err
    for words in ("step ", "loss ", "lower lr (1e+30)"):
        assert words in ended.sentence


def test_p032_fp16_that_overflows_on_and_on(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    more = ("--compute", "fp16", "--loss-scale", "1e30", "--max-skips", 3, "--steps", 20, "--out", tmp_path / "run")
    ended = plait.run(*small, *more, "--dp", 2)
    assert ended.code == 7, ended.err
    for words in ("step 3 is skipped in fp16, as 3 steps in a row overflowed", "that of lm_head.weight on ranks 0, 1"):
        assert words in ended.sentence
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["scale"], line["skipped"], line["grad_norm"]) for line in lines] == [(1e30, True, None)] * 3


@pytest.mark.parametrize("what", ["train", "schedule", "config"])
def test_a_reader_that_leaves_ends_the_command_quietly(
    plait: Driver, small: Sequence[object], tmp_path: Path, what: str
) -> None:
    """`plait ... | head -1`: here the reader leaves before the first line."""
    pipe, mark = tmp_path / "pipe", tmp_path / "mark"
    os.mkfifo(pipe)
    argv = {
        "train": (*small, "--dp", 2, "--out", tmp_path / "run", *LONG),
        "schedule": ("schedule", "1f1b"),
        "config": ("config", "show"),
    }[what]
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    before = f"import pathlib, time\nwhile not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.01)"
    command = plait.start(*argv, stdout=str(pipe), before=before)
    until(lambda: str(pipe) in _open_files(command.pid))
    os.close(reader)
    mark.touch()
    ended = command.ended()
    assert (ended.code, ended.err) == (141, "")
    assert not command.processes()


def _open_files(pid: int) -> str:
    try:
        return " ".join(os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_metrics(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").symlink_to("/dev/full")
    ended = plait.run(*small, "--dp", 2, "--out", out, "--overwrite")
    assert ended.code == 3
    assert ended.sentence.startswith("Rank 0 failed: ")
    assert "No space left on device" in ended.sentence


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output(plait: Driver) -> None:
    ended = plait.run("config", "show", stdout="/dev/full")
    assert ended.code not in (0, 120)
    assert "no space left on device" in ended.sentence.lower()
