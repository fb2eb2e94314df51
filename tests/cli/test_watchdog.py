"""Local ranks whose calls do not meet: the run ends at once or at its limit, and says who waits where for whom."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.commands import Driver
from tests.cli.ports import attack, listening
from tests.cli.test_failures import SAID_S, planted, started

OTHERWISE = """
import plait.runtime.comm.differentiable as place
called = place.all_reduced
count = [0]
def otherwise(x, group, *, why, **how):
    count[0] += 1
    if group.index == 1 and count[0] == {call}:
        {action}
    return called(x, group, why=why, **how)
place.all_reduced = otherwise
"""
"""In its n-th sum inside a layer the second rank of each tp group does something else."""
PLACE = r"at [\w/<>.]+:\d+"


def last_sentence(err: str) -> str:
    """Gloo may say something of its own before it ends a process."""
    last = err.strip().splitlines()[-1]
    assert last.startswith("plait: ")
    return last.removeprefix("plait: ")


def test_a_rank_that_is_stopped(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    command = started(plait, small, tmp_path / "run", "--dp", 2, "--pp", 2, "--hang-timeout", 2)
    victim = command.ranks(4)[2]
    begun = time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    ended = command.ended()
    assert 2 < time.monotonic() - begun < 2 + SAID_S
    assert ended.code == 4, ended.err
    stopped = f"stopped: kill -CONT {victim} lets it go on"
    assert re.match(
        rf"Rank 2 never came \({stopped}\): rank \d has waited 2 s in .* {PLACE}; --hang-timeout is 2: raise it when the "
        rf"rank is only slow\.$",
        ended.sentence,
    ), ended.sentence
    assert any(re.match(rf"rank 2: {stopped}; (never came; )?last .*, step \d+$", line) for line in ended.ranks)
    assert any(re.match(rf"ranks? .*: waiting .*in .* {PLACE}.*, step \d+$", line) for line in ended.ranks)
    assert not command.processes()


def test_a_rank_that_never_comes(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    before = planted("run.world.rank == 1 and run.done == 1", "import time; time.sleep(600)")
    ended = plait.run(*small, "--dp", 2, "--hang-timeout", 1, "--out", tmp_path / "run", before=before)
    assert ended.code == 4, ended.err
    assert ended.sentence.startswith(
        "Rank 1 never came: rank 0 has waited 1 s in all_reduce int64 [] over world (target"
    )
    assert ended.ranks[0].startswith("rank 0: waiting for rank 1 in all_reduce int64 [] over world (target tokens) at ")
    assert ended.ranks[0].endswith(", step 2")
    assert ended.ranks[1] == "rank 1: never came; last finished: the numbers of the step, step 1"


@pytest.mark.parametrize(
    ("call", "action", "mine", "theirs"),
    [
        (
            3,
            "return x.clone()",
            "all_reduce float32 [4, 32, 64] over tp (row-parallel output)",
            "over tp (loss: maximum)",
        ),
        (5, "x = x.double()", "all_reduce float32 [4, 32, 64]", "all_reduce float64 [4, 32, 64]"),
        (5, "x = x[:, :5].contiguous()", "all_reduce float32 [4, 32, 64]", "all_reduce float32 [4, 5, 64]"),
    ],
    ids=["one left out", "another type", "another shape"],
)
def test_calls_that_do_not_go_together(
    plait: Driver, small: Sequence[object], tmp_path: Path, call: int, action: str, mine: str, theirs: str
) -> None:
    """Seen without a limit: the default one is ten minutes."""
    out = tmp_path / "run"
    command = plait.start(*small, "--tp", 2, "--no-sp", "--out", out, before=OTHERWISE.format(call=call, action=action))
    ended = command.ended()
    assert ended.code == 4, ended.err
    sentence = last_sentence(ended.err)
    assert re.match(r"The ranks' calls do not go together: as call \d+ of ranks 0 and 1, rank 0 called ", sentence)
    first, second = sentence.split(", but rank 1 called ")
    assert mine in first, sentence
    assert theirs in second, sentence
    assert re.search(PLACE, first)
    assert re.search(PLACE, second)
    assert not out.exists()  # no step was taken
    assert not command.processes()


@pytest.mark.parametrize("check", [(), ("--comm-check",)])
def test_calls_of_one_size_but_not_one_meaning(
    plait: Driver, small: Sequence[object], tmp_path: Path, check: Sequence[str]
) -> None:
    """A maximum that meets a sum goes through, with wrong numbers: found before the optimizer's step, or, when asked
    for, before the call."""
    before = OTHERWISE.format(call=5, action="how['op'] = 'max'")
    ended = plait.run(*small, "--tp", 2, "--no-sp", *check, "--out", tmp_path / "run", before=before)
    assert ended.code == 4, ended.err
    words = (
        r"as call 7 of ranks 0 and 1, rank 0 called all_reduce float32 .*, but rank 1 called all_reduce \(maximum\) "
    )
    assert re.search(words, ended.sentence)
    assert ended.sentence.endswith("No rank takes step 1.") == (not check)
    assert not (tmp_path / "run").exists()


def test_the_comm_check_of_a_good_run(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    layout = ("--pp", 2, "--tp", 2, "--no-sp", "--microbatches", 2, "--comm-check")
    ended = plait.run(*small, *layout, "--out", tmp_path / "run")
    assert (ended.code, ended.err) == (0, "")


FORWARD = "import plait.runtime.parallel.stage as s\nreal = s.Stage.forward"
PLACES = {
    "init": "import plait.runtime.hf.stage_model as s\nreal = s.StageModel.materialise\n"
    "s.StageModel.materialise = broken",
    "forward": f"{FORWARD}\ns.Stage.forward = broken",
    "backward": (
        "import plait.runtime.parallel.pipeline as s\nreal = lambda *given: given[-1]\nback = s.Pipeline._backward\n"
        "def backward(line, stage, m):\n"
        "    line._graphs[stage, m].node.register_prehook(broken)\n"
        "    back(line, stage, m)\n"
        "s.Pipeline._backward = backward\n"
    ),
    "optimizer": "import plait.runtime.training.optimizer as s\nreal = s.Optimizer.step\ns.Optimizer.step = broken",
}


@pytest.mark.parametrize("place", PLACES)
def test_p097_a_rank_that_runs_out_of_memory(
    plait: Driver, small: Sequence[object], tmp_path: Path, place: str
) -> None:
    """MemoryError on rank 2 of 4, at four places: all end in ten seconds, and rank 2 is named."""
    mark = tmp_path / "mark"
    broken = (
        "import pathlib\n"
        "import plait.runtime.comm.world as w\n"
        "joined = w.World.__init__\n"
        "ranks = []\n"
        "w.World.__init__ = lambda self, *a, **k: (joined(self, *a, **k), ranks.append(self.rank))[0]\n"
        "def broken(*given, **named):\n"
        "    if ranks == [2]:\n"
        f"        pathlib.Path({str(mark)!r}).touch()\n"
        f"        raise MemoryError('no more at {place}')\n"
        "    return real(*given, **named)\n"
    )
    command = plait.start(*small, "--dp", 4, "--out", tmp_path / "run", before=broken + PLACES[place])
    ended = command.ended()
    assert time.time() - mark.stat().st_mtime < 10
    assert (ended.code, ended.sentence) == (3, f"Rank 2 failed: MemoryError: no more at {place}")
    assert not command.processes()


def test_p102_who_has_not_joined_is_said(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    """One rank prepares for longer than the limit of a hang; the status line comes every second here."""
    before = (
        "import time\nimport plait.runtime.comm.children as c\nc.STATUS_S = 1.0\n"
        "import plait.runtime.comm.world as w\n"
        "joined = w.World.__init__\n"
        "w.World.__init__ = lambda self, at, *a: (time.sleep(3.5 * (at.rank == 1)), joined(self, at, *a))[1]\n"
    )
    ended = plait.run(*small, "--dp", 2, "--hang-timeout", 1, "--out", tmp_path / "run", before=before)
    assert ended.code == 0, ended.err
    lines = ended.err.splitlines()
    assert len(lines) >= 3
    assert lines[0] == "plait: rank 1 has not joined yet; the others have waited 1 s."


def test_p147_ports_take_nothing_from_strangers(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    layout = ("--dp", 2, "--tp", 2, "--no-sp", "--steps", 60, "--local-transport", "torch")
    command = plait.start(*small, *layout, "--out", out)
    command.stepping(out / "metrics.jsonl")
    ports = listening(command.processes())
    assert ports
    assert {address for address, _ in ports} == {"127.0.0.1"}
    attack(ports, tmp_path / "marker")
    assert len((out / "metrics.jsonl").read_text().splitlines()) < 60  # it was still under way
    ended = command.ended()
    assert (ended.code, ended.err) == (0, "")
    assert not (tmp_path / "marker").exists()
