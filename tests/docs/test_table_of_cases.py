"""The table of cases is the tests: every id in a test's name stands in its row, with the file that has the test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (P\d{3}) \| ([A-Z]) \| (.+) \| (.+) \|$", flags=re.MULTILINE)


def rows() -> dict[str, str]:
    """The last cell of every row, by id."""
    found = ROW.findall((ROOT / "docs" / "cases.md").read_text(encoding="utf-8"))
    assert len({case for case, *_ in found}) == len(found)
    return {case: here for case, _, _, here in found}


def named_in_tests() -> dict[str, set[str]]:
    """The files whose tests have an id in their names, by id."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE):
            for case in re.findall(r"(?<=_)p\d{3}(?=_|$)", name):
                found.setdefault(case.upper(), set()).add(file.relative_to(ROOT).as_posix())
    return found


def test_every_row_names_its_tests_and_every_test_has_its_row() -> None:
    table = {case: set(re.findall(r"`(tests/\S+\.py)`", here)) for case, here in rows().items()}
    assert {case: files for case, files in table.items() if files} == named_in_tests()


def test_a_row_without_a_test_says_what_it_waits_for() -> None:
    assert len(rows()) == 78
    for case, here in rows().items():
        assert "`tests/" in here or "later: " in here, case
