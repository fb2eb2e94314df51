"""Label smoothing and the z-loss: over a cut vocabulary, whole and in chunks, equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from plait.check.batches import awkward_batches
from plait.check.places import Verdict
from plait.check.proof import prove
from plait.design.cost.traffic import traffic
from plait.design.plan import Plan
from plait.runtime.batch import IGNORE
from plait.runtime.comm.ledger import Ledger
from plait.runtime.comm.world import Group
from plait.runtime.hf.read import read
from plait.runtime.parallel.loss import Terms, cross_entropy
from tests.nursery import Nursery

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 3, "pp": 2, "label_smoothing": 0.1, "z_loss": 0.01},
    {"tp": 2, "loss_chunks": 3, "label_smoothing": 0.3, "z_loss": 1e-3, "compute": "bf16"},
    {"dp": 2, "pp": 2, "schedule": "zb-h1", "z_loss": 0.1, "loss_at": "first"},
    {"dp": 2, "dp_method": "master", "label_smoothing": 0.2},
]


def check(layout: dict[str, Any]) -> list[Any]:
    plan = Plan(model="llama-tiny", seq=13, batch=8, microbatches=2, steps=2, **layout)
    facts = read(plan.model)
    return [v.to_json() for v in prove(plan, facts, lambda: awkward_batches(plan, facts.facts.vocabulary, 2))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equal_to_one_process(nursery: Nursery, layout: dict[str, Any]) -> None:
    """Batches with ignored targets, and microbatches without any."""
    for values in nursery(check, layout):
        verdict = Verdict.from_json(values)
        assert verdict.passed, (verdict.first, verdict.cause)


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.5), (0.2, 0.0), (0.2, 0.5)])
def test_as_torch_and_the_formula_have_it(smoothing: float, z: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(5, 7, 11, generator=generator, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 11, (5, 7), generator=generator)
    targets[2], targets[:, 3] = IGNORE, IGNORE
    other = logits.detach().clone().requires_grad_()
    alone = Group("tp", (0,), 0, Ledger(), None)
    found = cross_entropy(logits, targets, alone, start=0, terms=Terms(smoothing, z, 11))
    found.backward()
    flat, goals = other.flatten(0, 1), targets.flatten()
    wanted = F.cross_entropy(flat, goals, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    wanted = wanted + z * (flat.exp().sum(-1).log().square() * (goals != IGNORE)).sum()
    wanted.backward()
    assert float(abs(found - wanted).detach()) < 1e-11
    assert float((logits.grad - other.grad).abs().max()) < 1e-13  # type: ignore[operator,union-attr]
    with torch.no_grad():  # evaluation is the cross entropy alone
        plain = cross_entropy(logits, targets, alone, start=0, terms=Terms(smoothing, z, 11))
    assert float(plain) == pytest.approx(float(F.cross_entropy(flat, goals, ignore_index=IGNORE, reduction="sum")))


def test_smoothing_sends_one_number_a_token_more() -> None:
    def sums(**changes: Any) -> int:
        plan = Plan(tp=2, batch=4, seq=8, **changes)
        rows = traffic(plan, read("llama-tiny").facts)
        return sum(row.payload for row in rows if row.why == "loss: sums" and row.rank == 0)

    assert sums(z_loss=0.1) == sums() == 2 * 32 * 4
    assert sums(label_smoothing=0.1) == 3 * 32 * 4
