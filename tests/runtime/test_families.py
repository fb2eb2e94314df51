"""Every family that plait has proven, unmodified, over a covering set of layouts: equal to one process.

The covering set: every pair of values of two of the axes occurs in some layout (naive takes one microbatch only, and a
world has at most 8 ranks). With --all-layouts every family goes through all of it, and through the schedules that came
later; when all have passed the table in docs/methods/check.md is written anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from plait.check.batches import awkward_batches
from plait.check.places import Verdict
from plait.check.proof import prove
from plait.design.plan import Plan
from plait.design.sharding import shard
from plait.runtime.hf.read import FAMILIES, presets, read
from tests.docs.conftest import load
from tests.nursery import Nursery

COVERING: list[dict[str, Any]] = [
    {"dp": 1, "tp": 4, "pp": 2, "schedule": "1f1b", "microbatches": 2, "compute": "fp32", "local_transport": "shared"},
    {"dp": 2, "tp": 1, "pp": 1, "schedule": "gpipe", "microbatches": 1, "compute": "bf16", "local_transport": "shared"},
    {"dp": 1, "tp": 2, "pp": 4, "schedule": "naive", "microbatches": 1, "compute": "bf16", "local_transport": "shared"},
    {"dp": 2, "tp": 2, "pp": 2, "schedule": "gpipe", "microbatches": 4, "compute": "fp32", "local_transport": "shared"},
    {"dp": 2, "tp": 1, "pp": 4, "schedule": "1f1b", "microbatches": 4, "compute": "bf16", "local_transport": "shared"},
    {"dp": 2, "tp": 4, "pp": 1, "schedule": "naive", "microbatches": 1, "compute": "fp32", "local_transport": "shared"},
    {"dp": 2, "tp": 2, "pp": 1, "schedule": "1f1b", "microbatches": 2, "compute": "bf16", "local_transport": "torch"},
    {"dp": 1, "tp": 4, "pp": 1, "schedule": "gpipe", "microbatches": 4, "compute": "bf16", "local_transport": "torch"},
    {"dp": 1, "tp": 1, "pp": 2, "schedule": "naive", "microbatches": 1, "compute": "fp32", "local_transport": "torch"},
    {"dp": 1, "tp": 1, "pp": 4, "schedule": "gpipe", "microbatches": 2, "compute": "fp32", "local_transport": "torch"},
    {"dp": 2, "tp": 2, "pp": 2, "schedule": "1f1b", "microbatches": 1, "compute": "bf16", "local_transport": "torch"},
    {"dp": 2, "tp": 2, "pp": 2, "schedule": "1f1b", "microbatches": 4, "compute": "fp32", "local_transport": "torch"},
]  # fmt: skip
LATER: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2, "pp": 2, "schedule": "interleaved", "microbatches": 4, "compute": "bf16"},
    {"dp": 1, "tp": 2, "pp": 4, "schedule": "zb-h1", "microbatches": 4, "compute": "fp32"},
    {"dp": 2, "tp": 2, "pp": 2, "schedule": "dualpipe-v", "microbatches": 4, "compute": "bf16"},
]  # fmt: skip
"""Beyond the covering set: several stages a rank, and gradients of weights that come late."""
LAYOUTS = COVERING + LATER
VALUES: dict[str, tuple[Any, ...]] = {
    "dp": (1, 2), "tp": (1, 2, 4), "pp": (1, 2, 4), "schedule": ("naive", "gpipe", "1f1b"), "microbatches": (1, 2, 4),
    "compute": ("fp32", "bf16"), "local_transport": ("shared", "torch"),
}  # fmt: skip
PRESETS = [name for name in presets() if name.endswith("-tiny")]
STEPS = 2
PAGE = Path(__file__).parents[2] / "docs" / "methods" / "check.md"
Shares = dict[tuple[str, str], list[float]]
"""By preset and layout: the largest share of its bound that any place takes up, wide and as shipped."""


def called(layout: dict[str, Any]) -> str:
    return "-".join(map(str, layout.values()))


def table(shares: Shares) -> str:
    """Every preset in every layout: two shares in percent a cell."""
    letters = dict(zip("abcdefghijklmno", LAYOUTS, strict=True))
    lines = [f"On {date.today()}, over", ""]
    for letter, layout in letters.items():
        lines.append(f"- {letter}: {', '.join(f'{key} {value}' for key, value in layout.items())}")
    lines += ["", f"| preset | {' | '.join(letters)} |", f"| --- |{' --- |' * len(letters)}"]
    for model in PRESETS:
        cells = [shares[model, called(layout)] for layout in letters.values()]
        lines.append(
            f"| {model} | {' | '.join(' / '.join(f'{100 * share:.2g}' for share in cell) for cell in cells)} |"
        )
    return "\n".join(lines)


@pytest.fixture(scope="module")
def shares() -> Iterator[Shares]:
    """Filled by the cases; the page is written when it is full."""
    found: Shares = {}
    yield found
    if len(found) == len(PRESETS) * len(LAYOUTS):
        page = load("faults").put(PAGE.read_text(encoding="utf-8"), "families", table(found))
        PAGE.write_text(page, encoding="utf-8")


def possible(layout: dict[str, Any]) -> bool:
    ranks = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
    return ranks <= 8 and (layout.get("schedule") != "naive" or layout.get("microbatches", 1) == 1)


def test_the_set_covers_every_pair() -> None:
    assert len(COVERING) == 12
    for one, other in itertools.combinations(VALUES, 2):
        for a, b in itertools.product(VALUES[one], VALUES[other]):
            if possible({one: a, other: b}):
                assert any(layout[one] == a and layout[other] == b for layout in COVERING), (one, a, other, b)


def test_every_family_has_a_preset() -> None:
    assert {read(name).facts.family for name in PRESETS} == set(FAMILIES)


def check(model: str, layout: dict[str, Any]) -> list[Any]:
    """The verdicts on a preset in one layout: wide, and as shipped."""
    plan = Plan(model=model, steps=STEPS, seq=20, batch=4 * layout["dp"] * layout["microbatches"], **layout)
    found = read(model)
    verdicts = prove(plan, found, lambda: awkward_batches(plan, found.facts.vocabulary, STEPS))
    return [verdict.to_json() for verdict in verdicts]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every preset in a fifth of the layouts, each layout with some preset; with --all-layouts in all of them."""
    if "layout" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-layouts")
        cases = [
            pytest.param(model, layout, id=f"{model}-{called(layout)}")
            for i, model in enumerate(PRESETS)
            for j, layout in enumerate(LAYOUTS)
            if everything or (i + j) % 5 == 0
        ]
        metafunc.parametrize(("model", "layout"), cases)


def test_equal_to_one_process(nursery: Nursery, shares: Shares, model: str, layout: dict[str, Any]) -> None:
    verdicts = [Verdict.from_json(values) for values in nursery(check, model, layout)]
    # In bf16 rounding decides which expert a token goes to.
    shipped = "fp32" if model == "mixtral-tiny" else layout["compute"]
    assert [verdict.numerics for verdict in verdicts] == ["wide", shipped]
    for verdict in verdicts:
        assert verdict.passed, (verdict.first, verdict.cause)
    # Noise of fp64, far below the bound: an error that the bound would let through does not hide.
    assert verdicts[0].largest.relative < 1e-10
    shares[model, called(layout)] = [max(worst.used for worst in verdict.worst) for verdict in verdicts]


TIED = ["gemma2-tiny", "gemma3-tiny", "gpt2-tiny", "qwen3-tiny"]


@pytest.mark.parametrize("model", TIED)
def test_a_tied_weight_is_one_weight(model: str) -> None:
    """Counted once, kept and updated by its owner, used on both ends, on one storage where both are on one rank."""
    facts = read(model).facts
    head = facts.head_weight
    assert head.tied
    assert sum(p.elements for p in facts.parameters if p.name == head.name) == head.elements
    for plan in (Plan(), Plan(pp=4, dp=2, batch=16), Plan(pp=2, tp=2)):
        sharding = shard(facts, plan)
        part = sharding.parameter(head.name).first
        last = plan.pp - 1
        assert [stage for stage, _ in part.uses] == [0, last]
        holders = {sharding.mesh.coordinate(rank)["pp"] for rank, _ in part.compute.holders(sharding.mesh)}
        assert holders == {0, last}
        counted = [rank for rank in range(sharding.mesh.size) if part.grad.is_first_copy(sharding.mesh, rank)]
        assert {sharding.mesh.coordinate(rank)["pp"] for rank in counted} == {0}
        assert len(counted) == plan.tp
