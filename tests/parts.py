"""Runs the tests in parts, each a pytest process of its own, two side by side. Most tests wait for processes, so two at a
time end sooner, also on two cores.

    python tests/parts.py [options of pytest]

A part's output is shown when it has ended, that of the first one as it comes; then what all counted, as pytest says it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
AT_ONCE = 2
RUNTIME = 5
"""Parts of the tests that start ranks from a nursery."""
CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s.*$", re.MULTILINE)


def parts() -> list[list[str]]:
    """What each process is given: every test is in one of them."""
    files = sorted(str(file.relative_to(HERE.parent)) for file in (HERE / "runtime").glob("test_*.py"))
    rest = ["tests", "--ignore=tests/runtime", "--ignore=tests/cli"]
    return [*(files[part::RUNTIME] for part in range(RUNTIME)), rest, ["tests/cli"]]


def counted(output: str) -> Counter[str]:
    """Of pytest's closing line: how many passed, failed, were skipped."""
    lines = CLOSING.findall(output)
    return Counter({word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", lines[-1] if lines else "")})


@dataclass
class Part:
    """One of them under way."""

    process: subprocess.Popen[bytes]
    output: Path
    shown: int = 0

    def show(self) -> None:
        """Prints what it has said since it was last shown."""
        text = self.output.read_bytes()
        print(text[self.shown :].decode(errors="replace"), end="", flush=True)
        self.shown = len(text)


def main(options: list[str]) -> int:
    began, total, codes = time.perf_counter(), Counter[str](), list[int]()
    left, running = deque(parts()), list[Part]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while left or running:
                while left and len(running) < AT_ONCE:
                    running.append(_started([*left.popleft(), *options], Path(folder, str(len(left)))))
                running[0].show()
                for part in [part for part in running if part.process.poll() is not None]:
                    running.remove(part)
                    part.show()
                    codes.append(part.process.returncode)
                    total += counted(part.output.read_text(encoding="utf-8", errors="replace"))
                time.sleep(0.2)
        finally:
            for part in running:
                part.process.terminate()
                part.process.wait()
    total["warnings"] += total.pop("warning", 0)
    words = ", ".join(f"{number} {word}" for word, number in total.items() if number)
    print(f"{words or 'no tests ran'} in {time.perf_counter() - began:.2f}s")
    # 5: nothing was left to run, which is no failure where another part has something.
    return next((code for code in codes if code not in (0, 5)), 0 if 0 in codes else 5)


def _started(arguments: list[str], output: Path) -> Part:
    with output.open("wb") as file:
        command = [sys.executable, "-m", "pytest", *arguments]
        return Part(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=HERE.parent), output)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
