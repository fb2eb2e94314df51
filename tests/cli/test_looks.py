"""`plait train` with evaluations and samples: what is printed, what is written, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import Driver


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(20):
        (folder / f"{number}.txt").write_text(
            f"Text {number} says that {number} and {number} make {2 * number}.\n" * 20
        )
    return folder


FLAGS = ("llama-tiny", "--tokenizer", "bytes", "--seq", 32, "--batch", 4, "--steps", 3)


def test_evaluations_and_samples_are_written_and_printed(plait: Driver, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    looks = (
        "--eval-every",
        2,
        "--eval-share",
        0.1,
        "--sample-every",
        2,
        "--sample",
        3,
        "--prompt",
        "Te",
        "--prompt",
        "",
    )
    command = ("train", *FLAGS, "--data", texts, "--dp", 2, "--pp", 2, *looks, "--packing", "sorted", "--out", out)
    ended = plait.run(*command)
    assert (ended.code, ended.err) == (0, ""), ended.err
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    # Before the first step, every second, and after the last.
    assert [(line["step"], "eval_loss" in line) for line in lines] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (3, True)
    ]  # fmt: skip
    held = [line for line in lines if "eval_loss" in line]
    assert all(list(line) == ["step", "eval_loss", "eval_tokens", "eval_seconds"] for line in held)
    assert len({line["eval_tokens"] for line in held}) == 1
    assert held[-1]["eval_loss"] < held[0]["eval_loss"]
    assert re.findall(r"^step (\d)/3  held-out loss ", ended.out, re.MULTILINE) == ["0", "2", "3"]
    assert re.search(r"^held out: \d+ documents?, [\d,]+ tokens$", ended.out, re.MULTILINE)
    assert re.search(r"^held-out loss [\d.]+ after step 3 \([\d.]+ before the first\)", ended.out, re.MULTILINE)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in samples] == [(2, "Te"), (2, ""), (3, "Te"), (3, "")]
    assert all(list(line) == ["step", "prompt", "text"] for line in samples)
    # Nothing of it counts as the last step's traffic.
    assert "not predicted" not in ended.out
    assert plait.run(*command, "--overwrite").code == 0
    assert [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()] == samples


def test_a_text_of_its_own(plait: Driver, texts: Path, tmp_path: Path) -> None:
    mine = texts / "3.txt"
    more = ("--data", texts, "--eval-every", 5, "--eval-data", mine, "--sample", 0, "--out", tmp_path / "run")
    ended = plait.run("train", *FLAGS, *more)
    assert (ended.code, ended.err) == (0, ""), ended.err
    assert f"held out: 1 document, {len(mine.read_bytes()) + 1} tokens, {mine}; 1 of them are in the" in ended.out
    assert re.findall(r"^step (\d)/3  held-out loss ", ended.out, re.MULTILINE) == ["0", "3"]


def test_refusals(plait: Driver, texts: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    for flags, words in (
        (("--data", texts / "3.txt", "--eval-every", 1), "The data is 1 document, of which no share can be held out"),
        (("--data", texts, "--eval-data", texts), "eval_every 0 never reads it"),
        (("--data", texts, "--eval-every", 1, "--eval-data", texts / "none"), "There is no file or directory"),
        (("--data", texts, "--eval-share", 1), "eval_share"),
        (("--data", texts, "--prompt", "a", "--prompt", "\udcff"), "is not text in UTF-8"),
    ):
        plait.run("train", *FLAGS, *flags, *out).refused(words)
    assert not (tmp_path / "run").exists()
