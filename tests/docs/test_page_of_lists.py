"""The example of docs/sequential.md runs as it stands, on a small text in the place of the standard library."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.docs.test_pages import DOCS, blocks, run


def test_the_list_of_modules_trains(tmp_path: Path) -> None:
    (block,) = blocks(DOCS / "sequential.md", "python")
    words = tmp_path / "text.txt"
    words.write_text("".join(f"the {n}th line says that {n} x {n} is {n * n}.\n" for n in range(2000)))
    assert 'data="stdlib"' in block
    (tmp_path / "lists.py").write_text(block.replace('data="stdlib"', f"data={str(words)!r}"))
    done = run(["lists.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    losses = ast.literal_eval(done.stdout)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
