"""The parts of the bench that need no clock: statistics, order of turns, memory from smaps, tables; and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench import tables
from bench.command import chosen, options
from bench.contestants.contestant import Contestant
from bench.contestants.field import (
    COURSES,
    FIELD,
    GROUPS,
    ONE,
    RIVALS,
    SAME_STAGE,
    SCHEDULES,
    STAGES,
    Rivals,
    ceiling_of,
)
from bench.measure import Estimate, busy, median, private, private_bytes, ratio, spread
from bench.results import memory_verdict, verdict
from bench.rounds import Record, compare, gap, mean_losses, order

ROOT = Path(__file__).parents[2]


# --- statistics


def test_a_ratio_is_that_of_the_medians() -> None:
    found = ratio([3.0, 1.0, 2.0], [1.0, 4.0, 8.0])
    assert found.value == 2.0 / 4.0
    assert found.low <= found.value <= found.high


def test_the_interval_of_equal_rounds_is_a_point() -> None:
    assert ratio([6.0] * 9, [4.0] * 9) == Estimate(1.5, 1.5, 1.5)
    assert median([2.0] * 5) == Estimate(2.0, 2.0, 2.0)


def test_rounds_are_drawn_together() -> None:
    """A machine that slows down for both, by whatever factor, leaves no doubt about their ratio in a single round."""
    slow = [1.0, 0.2, 0.5, 0.9, 0.3, 1.0, 0.7, 0.4, 0.6]
    paired = ratio([120.0 * s for s in slow], [100.0 * s for s in slow])
    assert paired.value == pytest.approx(1.2)
    assert (paired.low, paired.high) == (pytest.approx(1.2), pytest.approx(1.2))
    apart = ratio([120.0 * s for s in slow], [100.0 * s for s in reversed(slow)])
    assert apart.high - apart.low > 0.3


def test_an_interval_is_the_same_every_time_and_narrows_with_rounds() -> None:
    few = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.2, 0.85, 1.0]
    assert median(few) == median(few)
    assert median(few * 10).half_width < median(few).half_width


def test_a_ratio_takes_the_same_rounds_of_both() -> None:
    with pytest.raises(ValueError, match="2 rounds against 1"):
        ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="at least one"):
        ratio([], [])


def test_the_spread() -> None:
    found = spread([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.least, found.low_quarter, found.middle, found.high_quarter, found.most) == (1, 2, 3, 4, 5)
    assert found.share == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("found", "bar", "said"),
    [
        (Estimate(1.01, 0.97, 1.05), 1.0, "met"),
        (Estimate(1.0, 0.951, 1.049), 1.0, "met"),
        (Estimate(0.99, 0.97, 1.01), 1.0, "not met"),
        (Estimate(1.2, 1.0, 1.25), 1.0, "open, known to 16.7 %"),
        (Estimate(0.5, 0.1, 0.9), None, ""),
    ],
)
def test_a_bar_is_met_when_the_ratio_reaches_it_and_is_known(found: Estimate, bar: float | None, said: str) -> None:
    assert verdict(found, bar) == said


def test_a_bar_of_memory() -> None:
    assert memory_verdict(1.0, 1.0) == "met"
    assert memory_verdict(1.01, 1.0) == "not met"
    assert memory_verdict(None, 1.0) == memory_verdict(0.5, None) == ""


# --- the system's files


def test_private_memory_of_smaps() -> None:
    numbers = (
        "Rss:     9000 kB\nPss:   5000 kB\nShared_Clean:  4000 kB\n"
        "Shared_Dirty:   700 kB\nPrivate_Clean:   40 kB\nPrivate_Dirty:  2000 kB\nPrivate_Hugetlb:   8 kB\nSwap:  1 kB\n"
    )
    segment = "7f00-7f10 rw-s 00000000 00:01 2051    /memfd:plait-segment (deleted)\n"
    smaps = f"55d0-7ffe rw-p 00000000 00:00 0    [heap]\n{numbers}{segment}{numbers}c0de-c0df ---p 0 0 0\n{numbers}"
    assert private(smaps.splitlines()) == 2 * 2048 * 1024
    assert private([]) == 0


def test_private_memory_of_a_process() -> None:
    there = Path("/proc/self/smaps").exists()
    assert (private_bytes() > 0) == there
    assert private_bytes(2**22 + 1) == 0


def test_ticks_of_the_machine_at_work() -> None:
    assert busy("cpu  100 20 30 4000 50 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n") == 100 + 20 + 30 + 8
    assert busy("cpu  100 20 30 4000\n") == 150


# --- rounds


def test_every_round_has_everyone_once_in_an_order_of_its_own() -> None:
    names = [one.name for one in FIELD]
    orders = [order(names, number) for number in range(9)]
    assert all(sorted(one) == sorted(names) for one in orders)
    assert len({tuple(one) for one in orders}) == 9
    assert orders == [order(list(reversed(names)), number) for number in range(9)]
    assert order(names, 0, seed=1) != orders[0]
    assert max(Counter(one[0] for one in orders).values()) <= 3


def test_losses_are_means_over_the_ranks_that_have_one() -> None:
    assert mean_losses([{"losses": [1.0, 2.0]}, {"losses": [3.0, 6.0]}]) == [2.0, 4.0]
    assert mean_losses([{"losses": [None]}, {"losses": [5.0]}]) == [5.0]


def record(name: str, seconds: list[float], *, proven: int = 3, **rest: Any) -> Record:
    nothing: Any = None
    return Record(Contestant(name, name, 2, nothing, proven=proven), step_seconds=seconds, **rest)


def test_the_gap_is_the_largest_of_the_losses_that_must_be_equal() -> None:
    reference = record(ONE, [], losses=[5.0, 4.0, 3.0])
    assert gap(record("a", [], losses=[5.0, 4.5, 3.25]), reference) == 0.5
    assert gap(record("a", [], losses=[5.125, 1.0, 1.0], proven=1), reference) == 0.125


def test_rounds_that_one_of_two_did_not_have_are_left_out() -> None:
    records = {"a": record("a", [0.5, 0.5, 9.0]), "b": record("b", [1.0, 1.0])}
    rivals = Rivals("a", "b")
    assert compare(records, rivals) == Estimate(2.0, 2.0, 2.0)
    records["b"].trouble = "gone"
    assert compare(records, rivals) is None


# --- the field and the options


def test_the_field_is_sound() -> None:
    field = {one.name: one for one in FIELD}
    assert len(field) == len(FIELD)
    assert all((one.ours in field) and (one.theirs in field) for one in RIVALS)
    assert all(field[one.ours].ranks == field[one.theirs].ranks for one in RIVALS)
    assert all(field[one.ours].course == field[one.theirs].course or one.theirs == ONE for one in RIVALS)
    held = {(one.ours, one.theirs) for one in RIVALS if one.bar == 1.0}
    assert {(f"plait-dp-{n}", f"torch-ddp-{n}") for n in (2, 4)} <= held
    assert {(f"plait-{name}-{n}", f"torch-{name}-{n}") for n in (2, 4) for name in SCHEDULES} <= held
    shared = {(one.ours, one.theirs) for one in RIVALS if one.bar in (1.0, 1.15) and one.memory_bar == 1.0}
    assert {
        (f"plait-{stage}-{n}", f"{peer}-{n}") for n in (2, 4) for stage in STAGES for peer in SAME_STAGE[stage]
    } == shared
    cut = {(one.ours, one.theirs): one.bar for one in RIVALS if one.ours[:8] in ("plait-tp", "plait-sp")}
    assert {bar for (_, theirs), bar in cut.items() if theirs.endswith("-2")} == {1.3}
    assert cut["plait-tp-4", "dtensor-4"] == 1.5
    assert {theirs for _, theirs in cut} == {
        f"{peer}-{n}" for n in (2, 4) for peer in ("dtensor", "dtensor-sp", "dtensor-loss", "dtensor-sp-loss", "auto")
    }
    assert len({course.name for course in COURSES}) == len(COURSES) == 9
    assert set(GROUPS) == {"layouts", "tensor", "zero"}


def test_a_ceiling_is_one_of_the_same_course() -> None:
    found = {one.name: ceiling_of(one) for one in FIELD}
    assert found["plait-dp-4"] == "ceiling-4"
    assert found["torch-1f1b-2"] == "ceiling-pp-2"
    assert found["plait-zero3-keep-4"] == found["ceiling-zero-4"] == "ceiling-zero-4"
    assert found["fsdp2-tiny-2"] is found[ONE] is None


def test_a_contestant_whose_package_is_missing_says_so() -> None:
    nothing: Any = None
    assert Contestant("a", "a", 2, nothing, needs="no_such_package").absent == "no package no_such_package is installed"
    assert Contestant("a", "a", 2, nothing, needs="torch").absent == Contestant("a", "a", 2, nothing).absent == ""


def test_the_one_process_always_takes_part() -> None:
    assert [one.name for one in chosen(["dp-2"])] == [ONE, "torch-ddp-2", "plait-dp-2"]
    assert len(chosen([])) == len(FIELD)
    assert [one.name for one in chosen(["tiny"], "zero")] == [ONE, "plait-tiny-1", "fsdp2-tiny-2", "plait-tiny-zero3-2"]
    assert {one.course.group for one in chosen([], "zero") if one.name != ONE} == {"zero"}
    with pytest.raises(SystemExit, match="nobody"):
        chosen(["nobody"])
    with pytest.raises(SystemExit, match="tiny"):
        chosen(["tiny"], "layouts")


def test_a_page_without_a_place_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("words")
    with pytest.raises(SystemExit):
        options(["--write", str(page), "--group", "zero"])
    assert "marks no place" in capsys.readouterr().err
    for group in GROUPS:
        assert options(["--write", str(ROOT / "docs" / "bench.md"), "--group", group]).rounds == 9
    with pytest.raises(SystemExit):
        options(["--write", str(ROOT / "docs" / "bench.md")])
    assert "one --group" in capsys.readouterr().err


# --- tables


def results() -> dict[str, Any]:
    speed = {"value": 2000.0, "low": 1900.0, "high": 2100.0}
    row = {
        "name": "plait-dp-2", "label": "plait dp", "ranks": 2, "trouble": "", "first_losses": [8.3626], "loss_gap": 9e-7,
        "tokens_per_s": speed, "of_ceiling": {"value": 0.9, "low": 0.88, "high": 0.91}, "step_seconds": [1.0, 1.0],
        "cpu_seconds": [1.9, 1.9], "others": [0.01], "memory_mb": [1542, 1570], "memory_trouble": "",
    }  # fmt: skip
    lost = row | {
        "name": "auto-tp-2", "label": 'transformers tp_plan="auto"', "trouble": "it needs accelerate", "first_losses": [],
        "loss_gap": None, "tokens_per_s": None, "of_ceiling": None, "step_seconds": [], "cpu_seconds": [],
        "memory_mb": [],
    }  # fmt: skip
    return {
        "date": "2026-01-31", "command": "python -m bench", "seconds": 600.0,
        "absent": [{"label": "DeepSpeed ZeRO-1, 2", "why": "no package deepspeed is installed"}],
        "turns": {"rounds": 9, "steps": 2},
        "machine": {
            "cores": 2, "processor": "P", "python": "3", "torch": "2", "transformers": "5", "plait": "0", "others": 0.02,
        },
        "courses": [{
        "name": "data and tensor parallel",
        "work": {"name": "base"},
        "contestants": [row, lost],
        "rivals": [{
            "memory": 0.9, "memory_bar": 1.0, "memory_verdict": "met",
            "ours": "plait-dp-2", "theirs": "plait-dp-2", "bar": 1.0, "verdict": "met",
            "ratio": {"value": 1.0, "low": 0.99, "high": 1.01},
        }],
        "ceilings": [],
        "predictions": [],
        "profile": [{
            "name": "plait-dp-2", "label": "plait dp, 2", "split": [{"forward": 0.25, "backward": 0.75}],
            "functions": [{"name": "<method 'a|b'>", "calls": 2.0, "own": 0.001, "with": 0.002}],
        }],
        }],
    }  # fmt: skip


def test_tables_have_what_was_found_and_leave_out_what_was_not() -> None:
    found = {table.title: table for table in tables.tables(results())}
    assert len(found) == 4
    assert all(len(row) == len(table.columns) for table in found.values() for row in table.rows)
    first = found["Data and tensor parallel: speed and memory"].rows[0]
    assert first[:7] == ("plait dp", "2", "2000", "1900 - 2100", "0.90", "0.88 - 0.91", "1.90")
    assert found["Data and tensor parallel: where a step goes, by plait's own clock"].rows == (
        ("plait dp, 2", "0", "1000", "25.0", "75.0"),
    )


@pytest.mark.parametrize("reader", [tables.plain, tables.markdown])
def test_every_reader_learns_when_how_and_who_is_out(reader: Any) -> None:
    text = reader(results())
    assert "2026-01-31, `python -m bench`" in text
    assert "9 rounds of 2 steps" in text
    assert "auto-tp-2 is not compared: it needs accelerate." in text
    assert "DeepSpeed ZeRO-1, 2 took no part: no package deepspeed is installed." in text
    assert "0.99" in text.replace("0.990", "0.99")


def test_writing_a_page_replaces_what_stands_at_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench a -->\nold\n<!-- end -->\nafter\n<!-- bench b -->\nstays\n<!-- end -->\n")
    tables.write(page, results(), "a")
    once = page.read_text()
    tables.write(page, results(), "a")
    assert page.read_text() == once
    assert once.startswith("before\n")
    assert once.endswith("after\n<!-- bench b -->\nstays\n<!-- end -->\n")
    assert "old" not in once
    assert "| `<method 'a/b'>` |" in once
    assert '| `transformers tp_plan="auto"` |' in once


# --- and all of it together


def test_a_quick_bench_runs(tmp_path: Path) -> None:
    words = ["--quick", "--profile", "--only", "torch-ddp-2", "plait-dp-2", "--json", str(tmp_path / "found.json")]
    done = subprocess.run([sys.executable, "-m", "bench", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    (course,) = found["courses"]
    rows = {row["name"]: row for row in course["contestants"]}
    assert set(rows) == {ONE, "torch-ddp-2", "plait-dp-2"}
    assert all(len(row["first_losses"]) == 3 and row["loss_gap"] <= 1e-4 for row in rows.values())
    assert all(len(row["step_seconds"]) == 2 for row in rows.values())
    assert [len(row["memory_mb"]) for row in rows.values()] == [1, 2, 2]
    assert [(one["ours"], one["theirs"]) for one in course["rivals"]] == [("plait-dp-2", "torch-ddp-2")]
    assert len(course["profile"][0]["split"]) == 2
    assert "plait dp" in done.stdout
