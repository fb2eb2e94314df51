"""The command, run for real, in a few milliseconds more than it takes (driver.py)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
PATIENCE_S = 60
"""How long a busy machine may take for what takes a second."""


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float

    @property
    def sentence(self) -> str:
        """What a refused or failed run says last: one line, which starts with 'plait: '. Above it stands nothing but
        where the ranks were."""
        *above, last = self.err.strip().splitlines()
        assert len(above) == len(self.ranks), self.err
        assert last.startswith("plait: "), self.err
        assert "Traceback" not in self.err
        return last.removeprefix("plait: ")

    @property
    def ranks(self) -> list[str]:
        """The lines that say where the ranks were: '  rank 0: ...', '  ranks 1 and 2: ...'."""
        return [line[2:] for line in self.err.splitlines() if line.startswith(("  rank ", "  ranks "))]

    def refused(self, *words: str) -> str:
        """Asserts that this was bad input, said in one sentence with these words, before anything ran."""
        assert self.code == 2, (self.code, self.err, self.out)
        assert not self.out, self.out
        assert not self.ranks, self.err
        for word in words:
            assert word in self.sentence, self.sentence
        return self.sentence


@dataclass
class Command:
    """One run under way, in a session of its own."""

    driver: Driver
    pid: int
    folder: Path
    begun: float = field(default_factory=time.monotonic)

    def read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def ended(self, timeout: float = PATIENCE_S) -> Ended:
        code = self.driver.ask({"wait": self.pid, "timeout": timeout})
        if code is None:
            left = self.processes()
            for pid in left:
                os.kill(pid, 9)
            self.driver.ask({"wait": self.pid, "timeout": PATIENCE_S})
            pytest.fail(f"still running after {timeout} s: {left}\n{self.read('out')}\n{self.read('err')}")
        return Ended(code, self.read("out"), self.read("err"), time.monotonic() - self.begun)

    def processes(self) -> list[int]:
        """Every living process of the run, the parent first: its session is nobody else's. One whose first thread has
        ended lives, and holds its ports, until its last thread has."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                values = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(values[3]) == self.pid and (values[0] not in "ZX" or _threads(stat.parent) > 1):
                found.append(int(stat.parent.name))
        # In the order in which they were forked: numbers begin anew when they have all been used.
        most = int(Path("/proc/sys/kernel/pid_max").read_text())
        return sorted(found, key=lambda pid: (pid - self.pid) % most)

    def ranks(self, count: int) -> list[int]:
        """The processes of the ranks by rank, once all `count` of them live."""
        until(lambda: len(self.processes()) == count + 1)
        return [pid for pid in self.processes() if pid != self.pid]

    def stepping(self, metrics: Path) -> None:
        """Returns when the run has taken a step."""
        until(lambda: metrics.exists() and metrics.stat().st_size > 0, lambda: self.read("err"))


def _threads(process: Path) -> int:
    try:
        return len(list((process / "task").iterdir()))
    except OSError:
        return 0


def until(true: Any, otherwise: Any = str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)


class Driver:
    def __init__(self, home: Path) -> None:
        self.home = home
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
        env |= {"HOME": str(home), "TRANSFORMERS_VERBOSITY": "error", "OPENBLAS_NUM_THREADS": "1"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env.pop("PLAIT_DEBUG", None)
        self.env = env
        self._count = 0
        self._started: list[Command] = []
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("driver.py"))],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self, *argv: object, cwd: Path | None = None, env: dict[str, str | None] | None = None, before: str = "",
        **files: str | None,
    ) -> Command:  # fmt: skip
        self._count += 1
        folder = self.home / f"command-{self._count}"
        folder.mkdir()
        places = {"stdin": os.devnull, "stdout": str(folder / "out"), "stderr": str(folder / "err"), **files}
        job = {"argv": [str(word) for word in argv], "cwd": str(cwd or folder), "env": env or {}, "before": before}
        command = Command(self, self.ask(job | places), folder)
        self._started.append(command)
        return command

    def run(self, *argv: object, timeout: float = PATIENCE_S, **how: Any) -> Ended:
        return self.start(*argv, **how).ended(timeout)

    def sweep(self) -> None:
        """Ends what a test that failed left running: it would take the others' time."""
        for command in self._started:
            for pid in command.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        self._started.clear()

    def close(self) -> None:
        self.sweep()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
