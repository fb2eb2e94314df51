"""A vocabulary with more rows than the model's files have: the old rows stay, the new ones are the same everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from plait.check.batches import awkward_batches
from plait.check.proof import prove
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.runtime.hf.read import read
from plait.runtime.hf.whole import WholeModel
from tests.nursery import Nursery
from tests.runtime import test_export, test_weights

OLD, NEW = 96, 99
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("tied", [False, True])
def test_p071_old_rows_stay_and_new_ones_are_alike_on_all_ranks(tied: bool, tmp_path: Path) -> None:
    own = test_weights.instance("llama", tie_word_embeddings=tied)
    model = read(str(test_weights.save(own, tmp_path)), vocabulary=NEW)
    assert (model.facts.vocabulary, model.config.vocab_size) == (NEW, NEW)
    whole = dict(WholeModel(model, 1, torch.float32).module.named_parameters())
    for name in ENDS[: 2 - tied]:
        assert whole[name].shape == (NEW, 32)
        assert torch.equal(whole[name][:OLD], own.state_dict()[name])
        assert whole[name][OLD:].abs().sum(1).gt(0).all()
    for layout in ({"tp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}):
        for name, rank, tensor, boxes, _ in test_weights.held(model, {**layout, "seed": 1}):
            (box,) = boxes
            assert torch.equal(tensor, whole[name][tuple(slice(*side) for side in box)]), (name, layout, rank)


@pytest.mark.parametrize("new", [NEW, 2 * OLD, 4 * OLD])
def test_new_rows_are_not_rounded_to_what_the_files_hold(new: int, tmp_path: Path) -> None:
    """A rank that has new rows alone knows nothing of the files' type."""
    test_weights.save(test_weights.instance("llama").bfloat16(), tmp_path)
    model = read(str(tmp_path), vocabulary=new)
    whole = dict(WholeModel(model, 1, torch.float32).module.named_parameters())
    for name, rank, tensor, boxes, _ in test_weights.held(model, {"tp": 4, "seed": 1}):
        (box,) = boxes
        assert torch.equal(tensor, whole[name][tuple(slice(*side) for side in box)]), (name, rank)
    rows = whole[ENDS[0]][OLD:]
    assert not torch.equal(rows, rows.bfloat16().float())


def test_files_of_fewer_rows_than_their_config_says_are_refused(tmp_path: Path) -> None:
    test_weights.save(test_weights.instance("llama"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": OLD + 1}))
    with pytest.raises(PlanError, match="of different models"):
        read(str(tmp_path), vocabulary=NEW)


def verdicts(folder: str, layout: dict[str, Any]) -> list[Any]:
    plan = Plan(model=folder, vocabulary=NEW, steps=2, seq=12, batch=4, microbatches=2, **layout)
    model = read(folder, vocabulary=NEW)
    found = prove(plan, model, lambda: awkward_batches(plan, NEW, 2))
    return [[one.numerics, one.passed, one.steps] for one in found]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 3}, {"dp": 2, "tp": 2, "zero": 1}], ids=str)
def test_p071_under_zero_it_trains_as_one_process(
    nursery: Nursery, tmp_path: Path, layout: dict[str, Any], tied: bool
) -> None:  # fmt: skip
    test_weights.save(test_weights.instance("llama", tie_word_embeddings=tied), tmp_path)
    assert nursery(verdicts, str(tmp_path), layout) == [["wide", True, 2], ["fp32", True, 1]]


@pytest.mark.parametrize("tied", [False, True])
def test_p071_what_is_exported_has_the_new_size(nursery: Nursery, tmp_path: Path, tied: bool) -> None:
    """And what no token is of moves by the decay of weights alone: saved before any step, it is as it was."""
    own = test_weights.instance("llama", tie_word_embeddings=tied)
    model = str(test_weights.save(own, tmp_path / "model"))
    (tmp_path / "run").mkdir()
    nursery(test_export.trained, model, {"vocabulary": NEW, "dp": 2, "zero": 3}, str(tmp_path / "run"), 0)
    nursery(test_export.exported, str(tmp_path / "run"), str(tmp_path / "out"), "fp32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.config.vocab_size == NEW
    for name in ENDS[: 2 - tied]:
        assert torch.equal(loaded.state_dict()[name][:OLD], own.state_dict()[name])
    assert load_file(tmp_path / "out" / "model.safetensors")[ENDS[0]].shape == (NEW, 32)


def test_fewer_rows_are_refused(tmp_path: Path) -> None:
    test_weights.save(test_weights.instance("llama"), tmp_path)
    said = f"vocabulary 95 takes rows away from the 96 of {tmp_path}: set 96 or more, or 0."
    with pytest.raises(PlanError, match=f"^{re.escape(said)}$"):
        read(str(tmp_path), vocabulary=95)
