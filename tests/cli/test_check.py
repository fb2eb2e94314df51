"""`plait check --plant`: the faults by name, and a check that must find the one that is in its ranks."""

from __future__ import annotations

import pytest

from plait.check.faults import FAULTS
from tests.cli.commands import Driver


def test_the_list_has_a_line_a_fault(plait: Driver) -> None:
    ended = plait.run("check", "--plant", "list", env={"COLUMNS": "40"})
    assert (ended.code, ended.err) == (0, "")
    lines = [line.split("  ", 1) for line in ended.out.splitlines()]
    assert {name: meaning.strip() for name, meaning in lines} == {f.name: f.meaning for f in FAULTS.values()}


@pytest.mark.parametrize(
    "name", ["slice-shifted", "samples-of-another-rank", "microbatch-dropped", "lr-one-step-ahead"]
)  # fmt: skip
def test_a_planted_fault_ends_with_1_and_its_place(plait: Driver, name: str) -> None:
    """One of each kind: module, batch item, schedule, optimizer."""
    fault = FAULTS[name]
    ended = plait.run("check", "llama-tiny", "--seq", 16, "--plant", name)
    assert (ended.code, ended.err) == (1, "")
    assert f"planted: {name}" in ended.out
    first, likely, verdict = ended.out.splitlines()[-3:]
    assert first.startswith(f"first departure ({fault.kind}): ")
    assert fault.at in first
    assert likely.startswith("likely: ")
    assert fault.says in likely
    assert "DIFFERS from one process" in verdict


def test_a_name_that_is_no_fault_is_refused(plait: Driver) -> None:
    ended = plait.run("check", "llama-tiny", "--plant", "no-sum-db")
    ended.refused("no fault 'no-sum-db'", "Did you mean 'no-sum-dp'?", "--plant list")
