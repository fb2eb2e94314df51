"""Every family that plait has proven, unmodified, over a covering set of layouts: equal to one process.

The covering set: every pair of values of two of the axes occurs in some layout (naive takes one microbatch only, and a
world has at most 8 ranks). With --all-layouts every family goes through all of it, and through the schedules that came
later; when all have passed the tables in docs/methods/check.md are written anew. Families that add no mechanism to those
with a preset are small configs of tests/families.py, and go through one layout otherwise.
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
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.design.sharding import shard
from plait.runtime.hf.families import FAMILIES, ON_OWN_TOKENS
from plait.runtime.hf.read import presets, read
from tests.docs.conftest import load
from tests.families import OTHERS, write
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
OWN = ("bloom", "falcon", "gpt_neo", "mpt")
"""Families whose class computes attention itself."""
FOR_OTHERS: list[dict[str, Any]] = [
    {"dp": 1, "tp": 2, "pp": 1, "schedule": "1f1b", "microbatches": 2, "compute": "fp32"},
    {"dp": 1, "tp": 2, "pp": 2, "schedule": "1f1b", "microbatches": 2, "compute": "bf16"},
    {"dp": 2, "tp": 2, "pp": 1, "schedule": "1f1b", "microbatches": 2, "compute": "fp32", "zero": 3, "recompute": "full"},
    {"dp": 1, "tp": 4, "pp": 1, "schedule": "gpipe", "microbatches": 4, "compute": "bf16", "loss_chunks": 3},
    {"dp": 1, "tp": 1, "pp": 4, "schedule": "zb-h1", "microbatches": 4, "compute": "fp32"},
]  # fmt: skip
"""What families without a preset are checked in."""
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


def others_table(shares: Shares) -> str:
    """Every other family: how many layouts it was checked in, and the largest two shares in percent."""
    lines = ["| family | layouts | wide | as shipped |", "| --- | --- | --- | --- |"]
    for model in sorted(OTHERS):
        found = [pair for (name, _), pair in shares.items() if name == model]
        wide, shipped = (f"{100 * max(each):.2g}" for each in zip(*found, strict=True))
        lines.append(f"| {model} | {len(found)} | {wide} | {shipped} |")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def shares() -> Iterator[Shares]:
    """Filled by the cases; the page is written when it is full."""
    found: Shares = {}
    yield found
    if len(found) == len(EVERY_CASE):
        put, page = load("faults").put, PAGE.read_text(encoding="utf-8")
        page = put(put(page, "families", table(found)), "other families", others_table(found))
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


def test_every_family_is_checked() -> None:
    with_preset = {read(name).facts.family for name in PRESETS}
    others = {name.partition(",")[0] for name in OTHERS}
    assert with_preset | others == set(FAMILIES)


EVERY_CASE = [(model, layout) for model in PRESETS for layout in LAYOUTS]
EVERY_CASE += [(model, layout) for model in OTHERS for layout in FOR_OTHERS]


def check(model: str, layout: dict[str, Any], folder: str = "", shipped: bool = True) -> list[Any]:
    """The verdicts on a model in one layout: wide, and as shipped."""
    name = write(Path(folder), model) if model in OTHERS else model
    found = read(name)
    attention = "own" if found.facts.family in OWN else "plait"
    if found.facts.whole_logits:
        layout = layout | {"loss_chunks": 1}
    plan = Plan(
        model=name, steps=STEPS, seq=20, batch=4 * layout["dp"] * layout["microbatches"], attention=attention, **layout
    )
    validate(plan, found.facts)
    verdicts = prove(plan, found, lambda: awkward_batches(plan, found.facts.vocabulary, STEPS), shipped=shipped)
    return [verdict.to_json() for verdict in verdicts]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every preset in an eighth of the layouts, each layout with some preset; with --all-layouts all models in all."""
    if "layout" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-layouts")
        some = [
            (model, layout) for i, model in enumerate(PRESETS) for j, layout in enumerate(LAYOUTS) if (i + j) % 8 == 0
        ]
        cases = EVERY_CASE if everything else some
        metafunc.parametrize(
            ("model", "layout"), [pytest.param(*case, id=f"{case[0]}-{called(case[1])}") for case in cases]
        )


@pytest.mark.parametrize("other", list(OTHERS)[::3])
def test_equal_to_one_process_wide(nursery: Nursery, tmp_path: Path, other: str) -> None:
    """A third of the families without a preset, on two ranks, where their styles matter."""
    [verdict] = [Verdict.from_json(values) for values in nursery(check, other, FOR_OTHERS[0], str(tmp_path), False)]
    assert verdict.passed, (verdict.first, verdict.cause)
    assert verdict.largest.relative < 1e-10


SP = {"dp": 1, "tp": 2, "pp": 2, "schedule": "1f1b", "microbatches": 2, "compute": "fp32", "sp": True}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[pytest.mark.rest] * (number % 6 > 0))
        for number, model in enumerate(OTHERS)
        if model.partition(",")[0] in ON_OWN_TOKENS
    ],
)
def test_own_tokens_between_branches(nursery: Nursery, tmp_path: Path, model: str) -> None:
    """A sixth of the families without a preset that have sequence parallelism."""
    for values in nursery(check, model, SP, str(tmp_path)):
        verdict = Verdict.from_json(values)
        assert verdict.passed, (verdict.first, verdict.cause)


def test_others_keep_whole_rows(tmp_path: Path) -> None:
    facts = read(write(tmp_path, "olmo3")).facts
    with pytest.raises(
        PlanError, match=r"sp deals the tokens .* blocks of olmo3 are not proven with it: set sp false\."
    ):
        validate(Plan(tp=2, sp=True, seq=20), facts)
    # Nor is tp 2 advised, which would be refused next.
    with pytest.raises(PlanError, match=r"not proven with it: set sp false\."):
        validate(Plan(sp=True, seq=20), facts)


def test_equal_to_one_process(
    nursery: Nursery, shares: Shares, tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    verdicts = [Verdict.from_json(values) for values in nursery(check, model, layout, str(tmp_path))]
    assert verdicts[0].numerics == "wide"
    # In bf16 rounding decides which expert a token goes to.
    assert verdicts[-1].numerics in (layout["compute"], "fp32")
    for verdict in verdicts:
        assert verdict.passed, (verdict.first, verdict.cause)
    # Noise of fp64, far below the bound: an error that the bound would let through does not hide.
    assert verdicts[0].largest.relative < 1e-10
    shares[model, called(layout)] = [max(worst.used for worst in verdict.worst) for verdict in verdicts]


TIED = ["bloom-tiny", "gemma2-tiny", "gemma3-tiny", "gpt2-tiny", "qwen3-tiny"]


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
