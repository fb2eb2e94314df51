"""Runs the tests as two pytest processes side by side: those that start ranks from a nursery, and all others. Most of them
wait for processes, so two at a time end sooner, also on two cores.

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

HALVES = (("tests/runtime",), ("tests", "--ignore=tests/runtime"))
CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s.*$", re.MULTILINE)


def counted(output: str) -> Counter[str]:
    """Of pytest's closing line: how many passed, failed, were skipped."""
    lines = CLOSING.findall(output)
    return Counter({word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", lines[-1] if lines else "")})


def main(options: list[str]) -> int:
    began = time.perf_counter()
    files = [tempfile.TemporaryFile("w+") for _ in HALVES]
    runs = [
        subprocess.Popen([sys.executable, "-m", "pytest", *half, *options], stdout=file, stderr=subprocess.STDOUT)
        for half, file in zip(HALVES, files, strict=True)
    ]
    total = Counter[str]()
    try:
        for run, file in zip(runs, files, strict=True):
            at = 0
            while run.poll() is None or at < file.seek(0, 2):
                file.seek(at)
                print(file.read(), end="", flush=True)
                at = file.tell()
                time.sleep(0.2)
            file.seek(0)
            total += counted(file.read())
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


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
