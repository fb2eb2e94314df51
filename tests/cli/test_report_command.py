"""`plait report`: the page of a run again, from its folder; and what a run leaves there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from plait.report import record
from tests.cli.commands import Driver


@pytest.fixture(scope="module")
def run(plait: Driver, small: Sequence[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over four local ranks, with a sample."""
    out = tmp_path_factory.mktemp("runs") / "run"
    more = ("--tp", 2, "--pp", 2, "--microbatches", 2, "--sample", 5, "--prompt", "line ")
    ended = plait.run(*small, *more, "--out", out)
    assert (ended.code, ended.err) == (0, ""), ended.err
    return out


def test_a_run_leaves_its_record(run: Path) -> None:
    found, metrics, samples = record.read(run)
    assert found.plan.world == 4
    assert [metric.step for metric in metrics] == [1, 2, 3]
    assert [bill.held for bill in found.memory_measured] == [bill.held for bill in found.memory_predicted]
    assert found.traffic_measured
    assert set(found.versions) == {"plait", "torch", "transformers", "python"}
    assert found.device.startswith("cpu")
    assert [str(span.action) for span in found.measured.rows[0]] == [str(action) for action in found.schedule.rows[0]]
    assert found.measured.seconds > 0
    assert [(sample.step, sample.prompt) for sample in samples] == [(3, "line ")]
    for row in found.step_times:
        assert row.steps == 1
        assert min(row.compute, row.communication, row.bubble) > 0


def test_report_draws_the_same_again(plait: Driver, run: Path, tmp_path: Path) -> None:
    page, trace = ((run / name).read_bytes() for name in (record.PAGE, record.TRACE))
    for name in (record.PAGE, record.TRACE):
        (run / name).unlink()
    ended = plait.run("report", run)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == [f"written: {run / name}" for name in (record.PAGE, record.TRACE)]
    assert (run / record.PAGE).read_bytes() == page
    assert (run / record.TRACE).read_bytes() == trace
    ended = plait.run("report", "run", "-o", tmp_path / "a b.html", cwd=run.parent)
    assert ended.code == 0
    assert (tmp_path / "a b.html").read_bytes() == page


def test_report_needs_no_torch(run: Path) -> None:
    code = (
        "import sys\nsys.argv = ['plait', 'report', sys.argv[1]]\nfrom plait.cli import app\n"
        "assert app._run() == 0\nassert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bad_input_is_one_sentence(plait: Driver, run: Path, tmp_path: Path) -> None:
    plait.run("report", tmp_path / "none").refused("There is no directory", "none")
    plait.run("report", tmp_path).refused("holds no run.json")
    plait.run("report", run, "-o", tmp_path / "no" / "r.html").refused("r.html cannot be written", "no such file")
    plait.run("report", run, "-o", tmp_path).refused("cannot be written")
    for text, words in (
        ("", "is damaged"),
        ("{}", "not the record of a run"),
        ("[]", "not the record"),
        ("\x00", "damaged"),
    ):
        (tmp_path / "run.json").write_text(text)
        plait.run("report", tmp_path).refused("run.json", words)
    values = json.loads((run / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(values | {"step_times": {"columns": ["rank"], "rows": []}}))
    plait.run("report", tmp_path).refused("is damaged: step_times.columns must be rank, steps, data")
    missing = plait.run("report")
    assert (missing.code, missing.out) == (2, "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_record_that_may_not_be_read(plait: Driver, run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "run.json").chmod(0)
    plait.run("report", tmp_path).refused("cannot be read: permission denied")


def test_an_earlier_run_s_pictures_go_with_its_metrics(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    """A run that ends in its middle leaves no page of the run before it."""
    out = tmp_path / "run"
    assert plait.run(*small, "--out", out).code == 0
    before = (
        "from plait.runtime.training import measure\n"
        "def broken(*given): raise ValueError('broken')\n"
        "measure.memory = broken"
    )
    assert plait.run(*small, "--out", out, "--overwrite", before=before).code == 3
    assert [file.name for file in out.iterdir()] == ["metrics.jsonl"]
    plait.run("report", out).refused("holds no run.json; its run has not ended")


HIDDEN = "import plait.runtime.training.track as t\nt.find_spec = lambda name: None"


def test_tracking_without_the_package_is_refused(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    ended = plait.run(*small, "--track", "tensorboard", "--out", tmp_path / "run", before=HIDDEN)
    ended.refused("--track tensorboard needs the package", "pip install 'plait[tensorboard]'")
    assert not (tmp_path / "run").exists()
    plait.run(*small, "--track", "tensorbord").refused("--track cannot be 'tensorbord'", "Did you mean 'tensorboard'?")


def test_tensorboard_reads_what_is_tracked(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    ended = plait.run(*small, "--dp", 2, "--sample", 3, "--track", "tensorboard", "--out", out)
    assert (ended.code, ended.err) == (0, ""), ended.err
    events = accumulator.EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "grad_norm", "lr", "tokens", "tokens_per_s"):
        assert [event.value for event in events.Scalars(name)] == pytest.approx(
            [line[name] for line in lines], rel=1e-6
        )
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3]
    assert events.Tags()["tensors"] == ["sample/text_summary"]
