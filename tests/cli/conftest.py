"""`plait`: the command; `small`: arguments of a run that takes a second or less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cli.commands import Driver


@pytest.fixture(scope="session")
def plait(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(tmp_path_factory.mktemp("home"))
    yield driver
    driver.close()


@pytest.fixture(autouse=True)
def _nothing_runs_on(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "plait" in request.fixturenames:
        request.getfixturevalue("plait").sweep()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {n}: the quick brown fox jumps over the lazy dog\n" for n in range(200)))
    return file


@pytest.fixture(scope="session")
def small(text: Path) -> Sequence[object]:
    return ("train", "llama-tiny", "--data", text, "--tokenizer", "bytes", "--seq", 32, "--batch", 4, "--steps", 3,
            "--sample", 0)  # fmt: skip
