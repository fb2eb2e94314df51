"""A real model, SmolLM2-135M (9 heads, 3 KV heads, 30 blocks, tied), laid out: its loss on a text, fine-tuning and a
sample are those of transformers' own class in one process."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from plait.check.batches import awkward_batches
from plait.check.proof import prove
from plait.check.rounding import disturb
from plait.design.plan import Plan
from plait.runtime.comm.nursery import launch
from plait.runtime.comm.world import World
from plait.runtime.data.batches import Batches, global_batches
from plait.runtime.data.tokens import Corpus, TokenizerFile, prepare
from plait.runtime.hf.read import read
from plait.runtime.training.assemble import build
from plait.runtime.training.optimizer import learning_rate
from plait.runtime.training.sample import sample
from tests.nursery import Nursery
from tests.runtime.test_export import exported, live, reloaded, tensors, trained
from tests.smollm2 import shortened

pytestmark = [pytest.mark.weights, pytest.mark.timeout(900)]

TEXT = """The capital of France is Paris. It lies on the river Seine, and more than two million people live in it. Every
year many visitors come to see its museums, its bridges and the tower that Gustave Eiffel built for the World's Fair of
1889. The capital of Italy is Rome, which is older by far: two thousand years ago it was the largest city in the world,
and much of what was built then still stands. The capital of Portugal is Lisbon. It lies where the river Tagus meets the
sea, and from its harbour ships set out that were the first to sail around Africa.
"""
LAYOUTS = {"pp 2 x tp 3": {"pp": 2, "tp": 3}, "pp 3": {"pp": 3}, "tp 2, sp": {"tp": 2, "sp": True}}
STEPS = 5
SAMPLED = 12


def plan_of(folder: str, text: str, **changes: Any) -> Plan:
    values = {"model": folder, "data": text, "batch": 2, "seq": 48, "microbatches": 2, "steps": STEPS, "lr": 2e-5}
    return Plan(**{**values, **changes})


def corpus_of(plan: Plan) -> Corpus:
    folder = Path(plan.model)
    own = TokenizerFile(folder / "tokenizer.json", learnt=True)
    return prepare(plan, json.loads((folder / "config.json").read_text())["vocab_size"], own=own,
                   cache=Path(plan.data).parent / "cache")  # fmt: skip


# --- what runs in the nursery


def laid_out(folder: str, text: str, changes: dict[str, Any], steps: int, sampled: int) -> dict[str, Any]:
    """Some steps of a layout: losses and norms, and of every rank its seconds and its peak memory in MiB."""
    plan = plan_of(folder, text, **changes)
    model = read(folder)

    def rank(meeting: Any) -> Any:
        corpus = corpus_of(plan)
        batches = Batches(corpus, plan, meeting.rank)
        with World(meeting, plan.mesh) as world:
            begin = time.perf_counter()
            run = build(plan, world, model=model)
            loaded = time.perf_counter() - begin
            reports = [run.step(next(batches)) for _ in range(steps)]
            said = ""
            if sampled:
                prompt = corpus.tokenizer.encode("The capital of France is")
                said = corpus.tokenizer.decode(sample(run, prompt, sampled, temperature=0))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return {
            "loss": [report.loss for report in reports], "norm": [report.grad_norm for report in reports],
            "said": said, "seconds": [round(loaded, 1), *(round(report.seconds, 1) for report in reports)], "peak": peak,
        }  # fmt: skip

    answers = launch(rank, plan.world)
    assert all(answer["loss"] == answers[0]["loss"] for answer in answers)
    return {**answers[0], "peak": [answer["peak"] for answer in answers]}


def loss_of(model: Any, rows: Any) -> torch.Tensor:
    """The sum over the targets, by transformers' class and torch's own loss, in fp64 from the logits on: in fp32 torch's
    sum over 49,152 entries alone is off by 2e-6. No mask: one document, with padding after it."""
    logits = model(input_ids=rows.tokens, position_ids=rows.positions, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).double(), rows.targets.flatten(), ignore_index=-100, reduction="sum")


def one_process(folder: str, text: str) -> dict[str, list[float]]:
    """The same steps by transformers' own loading and class, and a plain loop."""
    plan = plan_of(folder, text)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    decayed = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(plan.beta1, plan.beta2),
    )
    losses, norms = [], []
    for step, batch in enumerate(global_batches(corpus_of(plan), plan, STEPS)):
        optimizer.zero_grad()
        loss = loss_of(model, batch) / batch.weight
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step, plan.steps)
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"loss": losses, "norm": norms}


def in_bf16(folder: str, text: str) -> dict[str, float]:
    """The loss of the first step's rows in bf16, and how far one rounding at every module's output moves it."""
    plan = plan_of(folder, text)
    batch = global_batches(corpus_of(plan), plan, 1)[0]
    losses = []
    with torch.no_grad():
        for disturbed in (None, 0, 1, 2):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
            if disturbed is not None:
                disturb(model, torch.bfloat16, disturbed, sums=torch.float32)
            losses.append(float(sum(loss_of(model, rows) for rows in batch.split(2)) / batch.weight))
    return {"loss": losses[0], "noise": max(abs(loss - losses[0]) for loss in losses[1:])}


def verdicts(folder: str, compute: str) -> list[Any]:
    plan = Plan(model=folder, seq=12, batch=4, microbatches=2, steps=STEPS, compute=compute, lr=2e-5, pp=2, tp=3)
    model = read(folder)
    found = prove(plan, model, lambda: awkward_batches(plan, model.facts.vocabulary, STEPS))
    return [[one.numerics, one.passed, one.steps, one.largest.relative] for one in found]


# --- tests


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "capitals.txt"
    file.write_text(TEXT)
    return str(file)


@pytest.fixture(scope="module")
def expected(nursery: Nursery, smollm2: Path, text: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = nursery(one_process, str(smollm2), text)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fine_tuning_equals_one_process(
    layout: str, nursery: Nursery, smollm2: Path, text: str, expected: dict[str, list[float]]
) -> None:
    """The first loss is that of the model as it came; then five steps, and what the model says after them."""
    sampled = SAMPLED if layout == "pp 3" else 0
    found = nursery(laid_out, str(smollm2), text, LAYOUTS[layout], STEPS, sampled)
    print(layout, found, expected)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    assert found["loss"][0] < 4  # random weights begin at ln 49152 = 10.8
    if sampled:
        assert " Paris" in found["said"]


def test_the_loss_in_bf16(nursery: Nursery, smollm2: Path, text: str) -> None:
    whole = nursery(in_bf16, str(smollm2), text)
    for name, layout in LAYOUTS.items():
        found = nursery(laid_out, str(smollm2), text, {**layout, "compute": "bf16"}, 1, 0)
        print(name, found, whole)
        # A pipeline changes no arithmetic; tp adds in another order.
        assert abs(found["loss"][0] - whole["loss"]) <= (1e-5 if name == "pp 3" else whole["noise"])


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_every_intermediate_of_real_weights(compute: str, nursery: Nursery, smollm2: Path, tmp_path: Path) -> None:
    """The check's own comparison, on the model's first blocks and first tokens: five steps wide, one as shipped."""
    short = shortened(smollm2, tmp_path / "short", blocks=2, vocabulary=768)
    found = nursery(verdicts, str(short), compute)
    print(found)
    assert [one[:3] for one in found] == [["wide", True, STEPS], [compute, True, 1]]


def test_an_export_of_the_trained_model(nursery: Nursery, smollm2: Path, tmp_path: Path) -> None:
    """transformers reads it and computes the loss that the run computes next; every weight has the ranks' bits."""
    layout = {"pp": 3, "batch": 6}
    (tmp_path / "run").mkdir()
    loss = nursery(trained, str(smollm2), layout, str(tmp_path / "run"), 2)
    nursery(exported, str(tmp_path / "run"), str(tmp_path / "export"), "fp32")
    assert nursery(reloaded, str(tmp_path / "export"), str(tmp_path / "again"), 2, layout) == pytest.approx(
        loss, rel=1e-5
    )
    here, wanted = tensors(tmp_path / "export"), live(str(smollm2), layout, tmp_path / "run")
    assert here.keys() == wanted.keys() == tensors(tmp_path / "again").keys()
    assert all(torch.equal(one, wanted[key]) for key, one in here.items())
