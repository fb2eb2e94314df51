"""What a check takes of the machine, as its bill says: held against a check that is watched."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from plait.check.bill import bill
from plait.design.plan import Plan
from plait.runtime.hf.read import read
from tests.conftest import Models

SIZES = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 4096,
}  # fmt: skip


def processes(pid: int) -> list[int]:
    """A process and all that came of it."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(each for child in children for each in processes(child))]


def private(pid: int) -> int:
    """Its share of memory that no file stands for, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))


def watched(command: list[str], scratch: Path) -> tuple[int, int]:
    """The most memory of a command and all its processes, and the most bytes of files in its temporary folder."""
    running = subprocess.Popen(
        [sys.executable, "-m", "plait", *command], env={**os.environ, "TMPDIR": str(scratch)}, stdout=subprocess.DEVNULL
    )
    memory, files = 0, dict[str, int]()
    pause = threading.Event()
    while running.poll() is None:
        memory = max(memory, sum(private(pid) for pid in processes(running.pid)))
        # By their last names: a draft is seen under two for a moment.
        with contextlib.suppress(OSError):  # the folder goes with the check
            files |= {file.name: file.stat().st_size for file in scratch.glob("plait-check-*/*.safetensors")}
        pause.wait(0.05)
    assert running.returncode == 0
    return memory, sum(files.values())


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell")
@pytest.mark.parametrize("layout", [pytest.param({"pp": 2}, marks=pytest.mark.rest), {"dp": 2, "tp": 2}], ids=str)
def test_a_check_takes_what_its_bill_says(tiny: Models, tmp_path: Path, layout: dict[str, int]) -> None:
    """No more, and not much less, or checks that fit would be refused."""
    plan = Plan(model=tiny(**SIZES), steps=3, seq=32, batch=4, **layout)
    flags = [f"--{key}={value}" for key, value in {**layout, "seq": 32, "batch": 4}.items()]
    memory, files = watched(["check", plan.model, "--full", *flags], tmp_path)
    expected = bill(plan, read(plan.model).facts, plan.steps)
    assert 0.6 * expected.memory < memory <= expected.memory
    assert 0.9 * expected.files < files <= expected.files
