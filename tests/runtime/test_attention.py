"""plait's attention and the models' own: the same sight in packed rows and windows, in every family and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.check.batches import awkward_batches
from plait.check.places import Verdict
from plait.check.proof import prove
from plait.check.wide import wide
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.design.sharding import shard
from plait.runtime.batch import Batch
from plait.runtime.hf.families import FAMILIES
from plait.runtime.hf.read import read
from plait.runtime.hf.stage_model import StageModel
from plait.runtime.hf.whole import WholeModel
from tests.families import CONFIGS, OTHERS, WINDOW, write
from tests.nursery import Nursery

EVERY = sorted({**CONFIGS, **OTHERS})
CPU = torch.device("cpu")
LENGTHS = (5, 11)
"""Documents of one row; the second is longer than the window."""


def test_every_family_has_a_small_model() -> None:
    assert {name.partition(",")[0] for name in EVERY} == set(FAMILIES)


class Model:
    """One model by both attentions, wide."""

    def __init__(self, folder: str, attention: str) -> None:
        plan = Plan(model=folder, attention=attention)
        model = read(folder)
        with wide():
            sharding = shard(model.facts, plan)
            self._stage = StageModel(model, sharding, 0, 0, torch.float64, seed=plan.seed, attention=attention)
            self._stage.materialise(sharding, 0, plan.seed, CPU, {})

    def __call__(self, batch: Batch) -> Tensor:
        with wide(), torch.no_grad():
            return self._stage.forward(batch, None)


def documents(lengths: tuple[int, ...], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 96, (length,), generator=generator) for length in lengths]


def packed(parts: list[Tensor], padding: int = 0) -> Batch:
    """One row of some documents, and padding after them."""
    tokens = torch.cat(parts).unsqueeze(0)
    length = tokens.shape[1]
    batch = Batch(
        tokens=tokens,
        targets=tokens,
        positions=torch.cat([torch.arange(len(part)) for part in parts]).unsqueeze(0),
        document_ids=torch.cat([torch.full((len(part),), n) for n, part in enumerate(parts)]).unsqueeze(0),
        sample_ids=torch.arange(1),
    )
    if not padding:
        return batch
    fill = {"tokens": 0, "targets": -100, "positions": 0, "document_ids": -1}
    wider = {key: torch.nn.functional.pad(getattr(batch, key), (0, padding), value=v) for key, v in fill.items()}
    assert wider["tokens"].shape == (1, length + padding)
    return Batch(**wider, sample_ids=batch.sample_ids)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("attention", ["plait", "own"])
@pytest.mark.parametrize("family", EVERY)
def test_p038_packed_documents_do_not_see_each_other(tmp_path: Path, family: str, attention: str) -> None:
    """Documents of 5 and 11 tokens in a row of 16: each one's logits are those it has alone, and the second's bits do not
    move when the first changes. (With experts they may by a rounding: how many tokens an expert multiplies at once
    depends on both documents, and with it the order of a product's sums.)"""
    folder = write(tmp_path, family)
    if f"attention {attention}" in dict(read(folder).facts.cannot):
        pytest.skip("computes its attention itself")
    model = Model(folder, attention)
    first, second = documents(LENGTHS)
    together = model(packed([first, second]))[0]
    for part, alone in ((together[:5], first), (together[5:], second)):
        assert apart(part, model(packed([alone]))[0]) <= 1e-12
    moved = model(packed([(first + 1) % 96, second]))[0]
    if read(folder).facts.experts_per_token:
        assert apart(moved[5:], together[5:]) <= 1e-12
    else:
        assert torch.equal(moved[5:], together[5:])
    assert not torch.equal(moved[:5], together[:5])


@pytest.mark.parametrize("family", EVERY)
def test_own_and_plait_see_the_same(tmp_path: Path, family: str) -> None:
    """Packed rows with padding, and rows of one document; windows shorter than both. The masks of the model's own are
    transformers' work, from the positions alone."""
    folder = write(tmp_path, family)
    if "attention plait" in dict(read(folder).facts.cannot):
        pytest.skip("computes its attention itself")
    plait, own = Model(folder, "plait"), Model(folder, "own")
    for batch in (packed(documents((1, 2, 9, 4)), padding=3), packed(documents((20,))), packed(documents((3,)), 5)):
        assert apart(plait(batch), own(batch)) <= 1e-12


@pytest.mark.parametrize("family", [name for name in EVERY if "sliding_window" in {**CONFIGS, **OTHERS}[name]])
def test_windows_are_seen_at_all(tmp_path: Path, family: str) -> None:
    narrow, broad = Model(write(tmp_path, family), "plait"), Model(write(tmp_path, family, sliding_window=64), "plait")
    batch = packed(documents((20,)))
    one, other = narrow(batch)[0], broad(batch)[0]
    # To here the window holds the whole past; from here on it does not.
    assert apart(one[:WINDOW], other[:WINDOW]) <= 1e-12
    assert apart(one[WINDOW:], other[WINDOW:]) > 1e-6


def test_documents_that_positions_do_not_tell_apart_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama")
    batch = packed(documents(LENGTHS))
    running = Batch(batch.tokens, batch.targets, torch.arange(16).unsqueeze(0), batch.document_ids, batch.sample_ids)
    assert not running.restarts
    assert running.to(CPU).restarts is False
    assert Model(folder, "plait")(running).isfinite().all()
    with pytest.raises(ValueError, match="documents by their positions"):
        Model(folder, "own")(running)
    with pytest.raises(ValueError, match="documents by their positions"):
        WholeModel(read(folder), 7, torch.float32).forward(running)


@pytest.mark.parametrize("name", ["attention_dropout", "attn_pdrop"])
def test_own_attention_with_dropout_is_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, "gpt2" if name == "attn_pdrop" else "mistral", **{name: 0.1})
    facts = read(folder).facts
    assert facts.attention_dropout == 0.1
    validate(Plan(model=folder, seq=16), facts)
    with pytest.raises(PlanError, match=r"\(attention_dropout 0.1\).* set attention plait"):
        validate(Plan(model=folder, seq=16, attention="own"), facts)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-pp2": {"tp": 2, "pp": 2, "microbatches": 2},
    "dp2-pp2": {"dp": 2, "pp": 2, "schedule": "gpipe", "microbatches": 2},
}


def proof(folder: str, layout: dict[str, Any], attention: str) -> Any:
    model = read(folder)
    rows = 4 * layout.get("dp", 1) * layout["microbatches"]
    plan = Plan(model=folder, steps=2, seq=20, batch=rows, attention=attention, **layout)
    draw = lambda: awkward_batches(plan, model.facts.vocabulary, 2)  # noqa: E731
    return prove(plan, model, draw, shipped=False)[0].to_json()


@pytest.mark.parametrize(
    ("attention", "layout"), [("plait", "tp2-pp2"), ("own", "tp2-pp2"), ("own", "dp2-pp2")], ids=lambda word: word
)
@pytest.mark.parametrize("family", CONFIGS)
def test_both_equal_one_process(nursery: Nursery, tmp_path: Path, family: str, attention: str, layout: str) -> None:
    verdict = Verdict.from_json(nursery(proof, write(tmp_path, family), LAYOUTS[layout], attention))
    assert verdict.passed, (verdict.first, verdict.cause)
    assert verdict.largest.relative < 1e-10
