"""Runs the tests as two pytest processes side by side: those that start ranks from a nursery, and all others. Most of
them wait for processes, so two at a time end sooner, also on two cores.

    python tests/halves.py [options of pytest]

The first's output is shown as it comes, the second's after it; then what both counted, as pytest says it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HALVES = (("tests/runtime",), ("tests", "--ignore=tests/runtime"))
CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s.*$", re.MULTILINE)


def counted(output: str) -> Counter[str]:
    """Of pytest's closing line: how many passed, failed, were skipped."""
    lines = CLOSING.findall(output)
    return Counter({word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", lines[-1] if lines else "")})


def main(options: list[str]) -> int:
    began, total = time.perf_counter(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(HALVES))]
        runs = [_started([*half, *options], output) for half, output in zip(HALVES, outputs, strict=True)]
        try:
            for run, output in zip(runs, outputs, strict=True):
                _show(run, output)
                total += counted(output.read_text(encoding="utf-8", errors="replace"))
        finally:
            for run in runs:
                run.terminate()
                run.wait()
    total["warnings"] += total.pop("warning", 0)
    words = ", ".join(f"{number} {word}" for word, number in total.items() if number)
    print(f"{words or 'no tests ran'} in {time.perf_counter() - began:.2f}s")
    # 5: nothing was left to run, which is no failure where the other half has something.
    codes = [run.returncode for run in runs]
    return next((code for code in codes if code not in (0, 5)), 0 if 0 in codes else 5)


def _started(arguments: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "pytest", *arguments], stdout=file, stderr=subprocess.STDOUT)


def _show(run: subprocess.Popen[bytes], output: Path) -> None:
    """Prints what a process says, until it ends."""
    with output.open(encoding="utf-8", errors="replace") as file:
        while True:
            ended = run.poll() is not None
            print(file.read(), end="", flush=True)
            if ended:
                return
            time.sleep(0.2)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
