"""The page of a run: it says what the records say, stands by itself, and lets nothing that it shows become markup."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from plait.design.errors import PlanError
from plait.design.records import Traffic, data_share
from plait.report import costs, page, record
from plait.report.curve import MOST_POINTS, Axis, binned, round_values, smoothed
from plait.report.markup import some
from plait.report.pipeline import stage_times
from plait.report.record import RunRecord, Sample
from tests.report import runs

VOID = {"meta", "input", "br"}
EVIL = "</pre></script><img src=x onerror=\"document.title='owned'\"><svg onload=alert(1)>&amp;\x1b[31m\x00\udcff"


class Reader(HTMLParser):
    """Counts elements, keeps attributes, and fails where an end tag does not close what is open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attributes

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def drawn(where: Path, made: RunRecord, **more: Any) -> str:
    folder = runs.folder(where, made, **more)
    page.draw(folder)
    return (folder / record.PAGE).read_text(encoding="utf-8")


LAYOUTS: list[dict[str, Any]] = [
    {}, {"dp": 2, "tp": 2, "pp": 2, "microbatches": 4},
    {"pp": 4, "microbatches": 8, "schedule": "gpipe", "compute": "bf16"},
    {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "interleaved"}, {"pp": 2, "microbatches": 4, "schedule": "zb-h1"},
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_record_comes_back_as_it_was(tmp_path: Path, layout: dict[str, Any]) -> None:
    made = runs.made(**layout)
    read, metrics, samples = record.read(runs.folder(tmp_path, made, steps=3, samples=[Sample(3, "a", "b")]))
    assert [metric.step for metric in metrics] == [1, 2, 3]
    assert samples == [Sample(3, "a", "b")]
    for name in ("plan", "facts", "schedule", "traffic_predicted", "memory_measured", "step_times", "versions"):
        assert getattr(read, name) == getattr(made, name), name
    for ours, theirs in zip(made.measured.spans, read.measured.spans, strict=True):
        assert (ours.rank, ours.action) == (theirs.rank, theirs.action)
        assert theirs.start == pytest.approx(ours.start, rel=1e-8)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_page_is_whole_and_needs_no_network(tmp_path: Path, layout: dict[str, Any]) -> None:
    text = drawn(tmp_path, runs.made(**layout), samples=[Sample(30, "def ", "main():\n    pass")])
    reader = Reader(text)
    assert reader.tags["section"] == 7
    assert reader.tags["script"] == 1
    assert not {"link", "img", "iframe", "object", "a"} & set(reader.tags)
    assert not re.search(r"https?:|@import|url\((?!#hatch\))", text.replace("http-equiv", ""))
    assert not {name for name, _ in reader.attributes if name in ("src", "href") or name.startswith("on")}
    # Each drawing has words for those who cannot see it, and its numbers beneath it.
    names = [value for name, value in reader.attributes if name == "aria-label"]
    assert all(names)
    assert reader.tags["details"] == reader.tags["table"] - (layout.get("pp", 1))
    assert "prefers-color-scheme: dark" in text


def test_the_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    first = drawn(tmp_path / "run", runs.made(pp=2, microbatches=4))
    other = tmp_path / "elsewhere.html"
    assert page.draw(tmp_path / "run", other) == [other, tmp_path / "run" / "trace.json"]
    assert other.read_text() == first


def test_what_a_run_says_is_never_markup(tmp_path: Path) -> None:
    made = runs.made(pp=2, microbatches=2)
    named = replace(
        made, plan=made.plan.model_copy(update={"model": EVIL}), data=EVIL, proof=EVIL, device=EVIL, began=EVIL
    )
    named = replace(named, versions={EVIL: EVIL})
    text = drawn(tmp_path, named, samples=[Sample(30, EVIL, EVIL)])
    reader = Reader(text)
    assert reader.tags["img"] == 0
    assert reader.tags["script"] == 1
    assert reader.tags["svg"] == Reader(drawn(tmp_path / "plain", made, samples=[Sample(30, "a", "b")])).tags["svg"]
    assert not any(name.startswith("on") for name, _ in reader.attributes)
    assert not {"\x1b", "\x00", "\udcff"} & set(text)
    assert "onerror" in "".join(reader.words), "it is shown, as words"


def test_the_policy_names_the_script_that_is_there(tmp_path: Path) -> None:
    import base64
    import hashlib

    text = drawn(tmp_path, runs.made())
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text


def test_the_slowest_stage_is_named_and_the_bubble_is_the_records(tmp_path: Path) -> None:
    made = runs.made(pp=4, microbatches=8)
    text = drawn(tmp_path, made)
    assert max(stage_times(made.measured), key=lambda one: one.seconds).stage == 1
    assert "The slowest stage is 1, on pp 1: 49.5 ms a microbatch" in text
    assert "The slowest rank" not in text
    assert f"measured: {1000 * made.measured.seconds:.3g} ms, bubble {100 * made.measured.bubble:.1f}%" in text
    for action in ("2F0", "0B7"):
        assert f"<title>{action}: " in text


def test_ranks_and_stages_are_told_apart(tmp_path: Path) -> None:
    made = runs.made(pp=2, microbatches=4, schedule="interleaved")
    times = stage_times(made.measured)
    assert [(one.stage, one.rank) for one in times] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert [one.seconds for one in times] == pytest.approx([0.033, 0.0495, 0.033, 0.033])
    text = drawn(tmp_path, made)
    assert "The slowest stage is 1, on pp 1: 49.5 ms a microbatch, forward and backward, 1.33 x the mean" in text
    assert "The slowest rank is pp 1: 82.5 ms on its stages 1, 3 together, 1.11 x the mean of the ranks." in text
    assert "<title>2F0: forward of microbatch 0, stage 2 on pp 0, " in text
    assert "<h3>pp 0: stages 0, 2</h3>" in text
    # Simulated and measured, 2 later stages, 4 microbatches, forward and backward.
    assert text.count('<rect class="shade"') == 2 * 2 * 4 * 2
    assert "shaded: a later stage of the rank" in text


def test_a_backward_in_two_halves_has_two_colours_and_a_legend_of_its_own(tmp_path: Path) -> None:
    made = runs.made(pp=2, microbatches=4, schedule="zb-h1")
    text = drawn(tmp_path, made)
    for kind, count in (("forward", 16), ("input", 16), ("weight", 16), ("backward", 0), ("shade", 0)):
        assert text.count(f'<rect class="{kind}"') == count, kind
        assert (f'<span class="swatch {kind}">' in text) == bool(count), kind
    assert "<title>0W3: backward of the weights of microbatch 3, stage 0 on pp 0, " in text
    assert "swatch reduce" not in text, "one replica sums nothing"
    assert "backward of the weights, ms" in text


def test_predicted_and_measured_that_differ_are_said_to(tmp_path: Path) -> None:
    made = runs.made(dp=2)
    assert "equal to the byte, on every rank" in drawn(tmp_path / "good", made)
    first, *rest = made.traffic_measured
    wrong = replace(made, traffic_measured=(replace(first, payload=first.payload + 4), *rest))
    assert "Predicted and measured DIFFER" in drawn(tmp_path / "bytes", wrong)
    one, *others = made.memory_measured
    wrong = replace(made, memory_measured=(replace(one, state=one.state + 4), *others))
    assert "Weights, gradients or state DIFFER" in drawn(tmp_path / "memory", wrong)
    assert "as predicted, to the byte, on every rank" in drawn(tmp_path / "good", made)


def test_a_run_that_waits_for_data_is_warned(tmp_path: Path) -> None:
    made = runs.made(dp=2)
    assert data_share(made.step_times) < 0.1
    assert 'role="alert"' not in drawn(tmp_path / "good", made)
    slow = replace(made, step_times=tuple(runs.times(rank, data=0.2) for rank in range(2)))
    assert "Waiting for data takes 53.2% of the time" in costs.warning(slow)
    assert 'role="alert"' in drawn(tmp_path / "slow", slow)


def test_shares_of_a_step_add_up() -> None:
    row = runs.times(0)
    assert row.seconds == pytest.approx(0.178)
    assert sum(row.shares.values()) == row.seconds


@pytest.mark.parametrize(("layout", "sentence"), [
    ({"pp": 16, "microbatches": 128, "batch": 256, "blocks": 16}, "16 of 16"),
    ({"pp": 32, "dp": 4, "tp": 2, "microbatches": 64, "batch": 256, "blocks": 32}, "16 of 32 pipeline ranks"),
])  # fmt: skip
def test_large_runs_give_small_pages(tmp_path: Path, layout: dict[str, Any], sentence: str) -> None:
    text = drawn(tmp_path, runs.made(**layout), steps=20_000)
    assert len(text) < 1_500_000
    assert "a column is 1/400 of the step" in text
    assert "50 of 20,000 steps" in text
    assert (sentence in text) == (layout["pp"] > 16)
    assert ("64 of 256 ranks, evenly chosen" in text) == (layout["pp"] > 16)


def test_a_run_of_one_step_and_numbers_without_value(tmp_path: Path) -> None:
    folder = runs.folder(tmp_path, runs.made(), steps=1)
    page.draw(folder)
    line = json.loads((folder / record.METRICS).read_text())
    broken = (
        json.dumps(line | {"step": 2, "loss": None}) + "\n" + json.dumps(line | {"step": 3, "loss": math.inf}) + "\n"
    )
    with (folder / record.METRICS).open("a") as lines:
        lines.write(broken)
    page.draw(folder)
    Reader((folder / record.PAGE).read_text())


# --- what is no run


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="There is no directory"):
        page.draw(tmp_path / "none")
    with pytest.raises(PlanError, match=r"holds no run\.json: plait train writes it"):
        page.draw(tmp_path)
    (tmp_path / record.METRICS).write_text("")
    with pytest.raises(PlanError, match="its run has not ended"):
        page.draw(tmp_path)


def change(folder: Path, way: tuple[Any, ...], value: Any) -> None:
    file = folder / record.NAME
    values = json.loads(file.read_text())
    place = values
    for key in way[:-1]:
        place = place[key]
    if value is None:
        del place[way[-1]]
    else:
        place[way[-1]] = value
    file.write_text(json.dumps(values))


DAMAGE: list[tuple[tuple[Any, ...], Any, str]] = [
    (("format",), 99, "not the record of a run in format 1"),
    (("plan",), [], "plan must be an object"),
    (("plan", "dp"), "two", "dp cannot be 'two'"),
    (("facts",), None, "facts is missing"),
    (("entropy",), "much", "entropy must be a number"),
    (("measured", "spans", "columns"), ["rank"], "measured.spans.columns must be rank, action, start, end"),
    (("measured", "spans", "rows", 0), [0], "measured.spans.rows[0] must have 4 values"),
    (("measured", "spans", "rows", 0, 1), "0X0", "measured.spans.rows[0] action must be an action, like 2F0"),
    (("traffic_predicted",), 5, "traffic_predicted must be a list"),
    (("schedule", "rows", 0, 0), 7, "schedule.rows[0][0] must be an action"),
    (("measured", "spans", "rows", 0, 0), 9, "does not describe"),
    (("memory_measured",), [], "does not describe"),
]  # fmt: skip


@pytest.mark.parametrize(("way", "value", "sentence"), DAMAGE, ids=[sentence for *_, sentence in DAMAGE])
def test_a_damaged_record_is_refused_with_the_place(
    tmp_path: Path, way: tuple[Any, ...], value: Any, sentence: str
) -> None:
    folder = runs.folder(tmp_path, runs.made(dp=2), steps=2)
    change(folder, way, value)
    with pytest.raises(PlanError) as refused:
        page.draw(folder)
    assert sentence in str(refused.value)
    assert str(folder / record.NAME) in str(refused.value)
    assert not (folder / record.PAGE).exists()


def test_damaged_lines(tmp_path: Path) -> None:
    folder = runs.folder(tmp_path, runs.made(), steps=3)
    whole = (folder / record.METRICS).read_text()
    (folder / record.METRICS).write_text(whole + '{"step": 4, "lo')  # cut off while it was written
    assert len(record.read(folder)[1]) == 3
    for text, sentence in (
        (b"{\n", r"metrics\.jsonl, line 1 is damaged"),
        (b"", "holds no step"),
        (b"\xff\n", "is not text in UTF-8"),
        (b"3\n", "it must be an object"),
    ):
        (folder / record.METRICS).write_bytes(text)
        with pytest.raises(PlanError, match=sentence):
            record.read(folder)
    (folder / record.NAME).write_text("[" * 100_000)
    with pytest.raises(PlanError, match="is damaged: it is not JSON"):
        record.read(folder)


# --- numbers of the pictures


def test_round_values_and_scales() -> None:
    assert round_values(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert round_values(5.13, 6.3, 6) == pytest.approx([5.2, 5.4, 5.6, 5.8, 6.0, 6.2])
    assert round_values(3, 3) == [3]
    assert Axis(1, 100, log=True).place(10) == pytest.approx(0.5)
    assert Axis(0.5, 90, log=True).ticks == pytest.approx([0.5, 1, 2, 5, 10, 20, 50])
    assert Axis(2, 2).place(2) == 0.5


def test_smoothing_does_not_lag_and_bins_keep_extremes() -> None:
    line = [(step, 2.0 * step) for step in range(100)]
    assert smoothed(line, 9) == [(step, pytest.approx(value)) for step, value in line]
    many = [(step, float(step % 10)) for step in range(10 * MOST_POINTS)]
    bins = binned(many)
    assert len(bins) == MOST_POINTS
    assert {(low, high) for _, low, high in bins} == {(0.0, 9.0)}
    assert some(5, 10) == [0, 1, 2, 3, 4]
    assert some(1000, 3) == [0, 500, 999]


def test_bytes_of_one_rank(tmp_path: Path) -> None:
    made = runs.made()
    assert made.traffic_measured == ()
    assert "One rank sends nothing" in drawn(tmp_path, made)
    extra = replace(made, traffic_measured=(Traffic(0, "other", "not predicted", "send", 2, 1, 8),))
    assert "DIFFER" in drawn(tmp_path / "other", extra)
