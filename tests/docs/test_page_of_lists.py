"""The example of docs/sequential.md runs as it stands, on a small text in the place of the standard library."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.docs.test_pages import DOCS, what_the_program_prints


def test_the_list_of_modules_trains(tmp_path: Path) -> None:
    losses = ast.literal_eval(what_the_program_prints(DOCS / "sequential.md", tmp_path))
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
