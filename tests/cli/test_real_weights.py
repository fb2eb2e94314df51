"""`plait train DIR` with weights in it trains those, says so, and refuses what it cannot read before any rank starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.commands import Driver
from tests.runtime.test_own_tokenizer import tokenizer
from tests.runtime.test_weights import instance, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(instance("llama", vocab_size=320, tie_word_embeddings=True), tmp_path_factory.mktemp("model"))
    tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def flags(text: Path) -> Sequence[object]:
    return ("--data", text, "--seq", 16, "--batch", 4, "--steps", 2, "--lr", 1e-4, "--sample", 4)


def test_real_weights_are_trained(plait: Driver, folder: Path, flags: Sequence[object], tmp_path: Path) -> None:
    layout = ("--pp", 2, "--tp", 2, "--prove", 1, "--out", tmp_path / "run")
    layout += ("--eval-every", 1, "--eval-data", flags[1], "--attention", "own")
    ended = plait.run("train", folder, *flags, *layout)
    assert ended.code == 0, (ended.out, ended.err)
    assert "M parameters of model.safetensors in fp32, 2 blocks) over 4 ranks" in ended.out
    assert "(the model's own tokenizer)" in ended.out
    assert "held-out loss" in ended.out
    assert (tmp_path / "run" / "run.json").is_file()
    assert "proof: equal to one process in the same 1 step" in ended.out


def test_a_check_takes_them_when_it_takes_the_whole_model(plait: Driver, folder: Path) -> None:
    ended = plait.run("check", folder, "--full", "--tp", 2, "--seq", 12)
    assert ended.code == 0, (ended.out, ended.err)
    assert "as it is: 0.0 M parameters of model.safetensors in fp32" in ended.out


def test_damaged_weights_are_refused_before_anything_runs(
    plait: Driver, flags: Sequence[object], tmp_path: Path
) -> None:
    folder = save(instance("llama"), tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    plait.run("train", folder, *flags, "--tp", 2).refused("is damaged or cut short")
    plait.run("check", folder, "--full").refused("is damaged or cut short")
    assert plait.run("check", folder, "--tp", 2, "--seq", 12).code == 0  # its twin reads no weights


def test_weights_without_a_tokenizer_are_refused(plait: Driver, flags: Sequence[object], tmp_path: Path) -> None:
    folder = save(instance("llama"), tmp_path / "model")
    plait.run("train", folder, *flags).refused("has no tokenizer.json, and its weights have learnt one")
