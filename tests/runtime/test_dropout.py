"""Dropout that is the same in every layout: what is drawn, how often, and that one process draws it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.check.batches import awkward_batches
from plait.check.places import Verdict
from plait.check.proof import prove
from plait.check.wide import wide
from plait.design.plan import Plan
from plait.design.sharding import shard
from plait.runtime.batch import Batch
from plait.runtime.comm.world import World
from plait.runtime.data.batches import own_rows
from plait.runtime.hf.dropout import Dropping, drops, keyed
from plait.runtime.hf.read import read
from plait.runtime.hf.stage_model import StageModel
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from tests.families import write
from tests.nursery import Nursery

GPT2 = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "m4": {"microbatches": 4},
    "dp2-m4": {"dp": 2, "microbatches": 4},
    "dp8": {"dp": 8},
    "tp2": {"tp": 2},
    "tp4-m2": {"tp": 4, "microbatches": 2},
    "pp4-m2": {"pp": 4, "microbatches": 2},
    "gpipe": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2, "schedule": "gpipe"},
}


def losses(folder: str, changes: dict[str, Any]) -> Any:
    """Loss and norm of three steps on every rank, wide."""
    plan = Plan(**{"model": folder, "batch": 8, "seq": 16, "steps": 3, **changes})

    def main(world: World) -> Any:
        with wide():
            run = build(plan, world, wide=True)
            mine = own_rows(plan, world.rank)
            reports = [
                run.step(one.slice(mine.start, mine.stop)) for one in awkward_batches(plan, 96, 3, ("mixed", "plain"))
            ]
        return [[report.loss, report.grad_norm] for report in reports]

    return launch(main, plan)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_p025_the_same_numbers_in_every_layout(nursery: Nursery, tmp_path: Path, layout: str) -> None:
    """GPT-2 with dropout 0.1 in its three places: the losses and norms of one rank in one microbatch."""
    folder = write(tmp_path, "gpt2", **GPT2)
    one = nursery(losses, folder, {})[0]
    for rank in nursery(losses, folder, LAYOUTS[layout]):
        for mine, theirs in zip(rank, one, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)


def test_it_drops_at_all(nursery: Nursery, tmp_path: Path) -> None:
    found = [nursery(losses, write(tmp_path, "gpt2", **drop), {"lr": 1e-12})[0] for drop in (GPT2, {})]
    assert all(abs(one[0] - other[0]) > 1e-6 for one, other in zip(*found, strict=True))


def proof(folder: str, layout: dict[str, Any]) -> Any:
    model = read(folder)
    rows = 4 * layout.get("dp", 1) * layout.get("microbatches", 1)
    plan = Plan(model=folder, steps=2, seq=20, batch=rows, **layout)
    draw = lambda: awkward_batches(plan, model.facts.vocabulary, 2)  # noqa: E731
    return prove(plan, model, draw, shipped=False)[0].to_json()


TP2_PP2 = {"tp": 2, "pp": 2, "microbatches": 2}
PROVEN: list[tuple[str, dict[str, float], dict[str, Any]]] = [
    ("gpt2", GPT2, TP2_PP2),
    ("gpt2", GPT2, {"dp": 2, "pp": 2, "schedule": "gpipe", "microbatches": 2}),
    ("gpt2", GPT2, {"dp": 2, "tp": 2}),
    *((name, {"attention_dropout": 0.1}, TP2_PP2) for name in ("gemma2", "llama", "mistral", "mixtral", "qwen3")),
    ("gemma3_text", {"attention_dropout": 0.1}, {"dp": 2, "tp": 2}),
    ("phi3", {"attention_dropout": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}, TP2_PP2),
    ("phi3", {"resid_pdrop": 0.2}, {"dp": 2, "microbatches": 2}),
]


@pytest.mark.parametrize(("family", "drop", "layout"), PROVEN, ids=str)
def test_equal_to_one_process(
    nursery: Nursery, tmp_path: Path, family: str, drop: dict[str, float], layout: dict[str, Any]
) -> None:
    """Every module's output, every gradient and every weight of two steps, packed rows and padding among them."""
    verdict = Verdict.from_json(nursery(proof, write(tmp_path, family, **drop), layout))
    assert verdict.passed, (verdict.first, verdict.cause)
    assert verdict.largest.relative < 1e-10


# --- what is drawn


def dropping(step: int = 0, samples: tuple[int, ...] = (3, 8), seed: int = 7) -> Dropping:
    made = Dropping(seed)
    made.at(step, torch.tensor(samples))
    return made


def kept(made: Dropping, shape: tuple[int, ...] = (2, 40), p: float = 0.5) -> Tensor:
    return made.draw(torch.ones(shape), p) > 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_and_the_mean_that_is_kept(p: float) -> None:
    x = torch.ones(8, 500, 250)
    y = dropping(samples=tuple(range(8))).draw(x, p)
    count = x.numel()
    # Five standard deviations of a binomial share.
    bound = 5 * (p * (1 - p) / count) ** 0.5
    assert abs(float((y == 0).double().mean()) - p) < bound
    assert abs(float(y.double().mean()) - 1) < bound / (1 - p)
    assert torch.allclose(y[y > 0], torch.tensor(1 / (1 - p)))
    assert torch.equal(dropping().draw(x[:2], 0.0), x[:2])


def test_a_draw_belongs_to_seed_step_sample_block_and_call() -> None:
    first = kept(dropping())
    assert torch.equal(first, kept(dropping()))
    made = dropping()
    calls = [kept(made), kept(made)]
    made.block(0)
    calls.append(kept(made))
    made.block(1)
    calls += [kept(made), kept(dropping(step=1)), kept(dropping(seed=8)), kept(dropping(samples=(4, 9)))]
    rows = [tuple(row.tolist()) for call in calls for row in call]
    assert len(set(rows)) == len(rows)
    assert torch.equal(calls[0], first)
    # Each row by itself, wherever it stands.
    assert torch.equal(kept(dropping(samples=(8, 5, 3)), (3, 40))[[2, 0]], first)
    # A block that is computed again draws what it drew.
    made.block(0)
    assert torch.equal(kept(made), calls[2])


@pytest.mark.parametrize("tp", [2, 4])
def test_heads_of_a_rank_draw_what_the_whole_row_draws(tp: int) -> None:
    whole = kept(dropping(), (2, 8, 5, 5))
    for place in range(tp):
        start, stop = place * 8 // tp, (place + 1) * 8 // tp
        mine = dropping().draw(torch.ones(2, stop - start, 5, 5), 0.5, heads=(start, stop, 8)) > 0
        assert torch.equal(mine, whole[:, start:stop])


def test_every_way_to_drop_is_keyed_while_it_is_entered() -> None:
    x = torch.ones(2, 40)
    expected = dropping().draw(x, 0.5)
    for way in (nn.Dropout(0.5), lambda y: F.dropout(y, 0.5), lambda y: keyed(y, 0.5, heads=None)):
        with dropping():
            assert torch.equal(way(x), expected)
    with dropping():
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)
        with pytest.raises(NotImplementedError, match="choose attention plait"):
            F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)
    torch.manual_seed(1)
    alone = F.dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(keyed(x, 0.5, heads=None), alone)


@pytest.mark.parametrize(
    ("family", "drop", "does"),
    [("gpt2", {}, False), ("gpt2", GPT2, True), ("gpt2", {"attn_pdrop": 0.1}, True), ("llama", {}, False),
     ("llama", {"attention_dropout": 0.1}, True), ("phi3", {"resid_pdrop": 0.1}, True), ("mixtral", {}, False)],
    ids=str,
)  # fmt: skip
def test_models_without_dropout_pay_nothing(tmp_path: Path, family: str, drop: dict[str, float], does: bool) -> None:
    model = read(write(tmp_path, family, **drop))
    plan = Plan(model=model.name)
    stage = StageModel(model, shard(model.facts, plan), 0, 0, torch.float32, seed=7)
    assert drops(stage.module) is does


@pytest.mark.parametrize(
    ("family", "drop"), [("gpt2", GPT2), ("mistral", {"attention_dropout": 0.5}), ("phi3", {"resid_pdrop": 0.5})]
)
def test_nothing_is_dropped_without_gradients(tmp_path: Path, family: str, drop: dict[str, float]) -> None:
    """Evaluation and samples; and training goes on dropping after them."""
    found = []
    batch = Batch.of(torch.arange(34).view(2, 17))
    for changes in (drop, {}):
        model = read(write(tmp_path, family, **changes))
        sharding = shard(model.facts, Plan(model=model.name))
        stage = StageModel(model, sharding, 0, 0, torch.float64, seed=7)
        stage.materialise(sharding, 0, 7, torch.device("cpu"), {})
        trained = stage.forward(batch, None).detach()
        with torch.no_grad():
            found.append(stage.forward(batch, None))
        assert torch.equal(stage.forward(batch, None).detach(), trained)
        assert torch.equal(trained, found[-1]) is (changes == {})
    # One is made by plait's own softmax, the other by torch's fused attention.
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
