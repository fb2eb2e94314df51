"""No false alarm: the checker finds a hundred random right layouts right, wide and as shipped (tests/draws.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from plait.check.batches import KINDS, awkward_batches
from plait.check.places import Verdict
from plait.check.proof import prove
from plait.design.plan import Plan
from plait.design.schedule import RUNS, make
from plait.runtime.hf.read import read
from tests.conftest import Models
from tests.draws import ACTIVATIONS, ROPES, SEEDS, Draw, draw
from tests.nursery import Nursery


def proof(model_name: str, values: dict[str, Any], kinds: list[str]) -> list[Any]:
    plan = Plan(model=model_name, **values)
    model = read(plan.model)
    batches = partial(awkward_batches, plan, model.facts.vocabulary, min(plan.steps, len(kinds)), kinds)
    return [verdict.to_json() for verdict in prove(plan, model, batches)]


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.rest) if s % 5 else s for s in SEEDS])
def test_a_right_layout_is_found_right(nursery: Nursery, tiny: Models, seed: int) -> None:
    drawn = draw(seed)
    verdicts = nursery(proof, tiny(**drawn.config), drawn.plan, drawn.kinds)
    wide, shipped = (Verdict.from_json(verdict) for verdict in verdicts)
    for verdict in (wide, shipped):
        assert verdict.passed, (drawn, verdict.numerics, verdict.departures[:5], verdict.cause)
    assert (wide.steps, shipped.numerics) == (min(drawn.plan["steps"], len(drawn.kinds)), drawn.plan["compute"])
    # That no alarm is raised is no luck: fp64 stays far below its bound, and rounding well below what it may explain.
    assert max(row.used for row in wide.worst) < 0.2, (drawn, wide.worst)
    assert max(row.used for row in shipped.worst) < 0.8, (drawn, shipped.worst)


def heads(d: Draw) -> int:
    return int(d.config["num_attention_heads"])


def attention(d: Draw) -> str:
    groups = d.config["num_key_value_heads"]
    return "mqa" if groups == 1 and heads(d) > 1 else "mha" if groups == heads(d) else "gqa"


def odd(d: Draw, size: str) -> bool:
    """Nothing but tp divides it: each rank's share is odd."""
    return bool(d.config[size] // d.degree("tp") % 2)


def axes(d: Draw) -> list[str]:
    return [axis for axis in ("dp", "tp", "pp") if d.degree(axis) > 1]


def stages(d: Draw) -> int:
    """On each rank."""
    return Plan(**d.plan).stages_per_rank


def halves(d: Draw) -> bool:
    plan = Plan(**d.plan)
    return plan.split_backward or make(plan.schedule, plan.pp, plan.microbatches, plan.chunks).splits


SHARES: dict[str, tuple[int, Callable[[Draw], Any]]] = {
    "dp": (40, lambda d: d.degree("dp") > 1),
    "tp": (40, lambda d: d.degree("tp") > 1),
    "pp": (40, lambda d: d.degree("pp") > 1),
    "all three axes": (20, lambda d: len(axes(d)) == 3),
    "dp beyond 2": (8, lambda d: d.degree("dp") > 2),
    "tp beyond 2": (8, lambda d: d.degree("tp") > 2),
    "pp beyond 2": (8, lambda d: d.degree("pp") > 2),
    "one rank": (3, lambda d: not axes(d)),
    "one rank without targets": (15, lambda d: "empty rank" in d.kinds and d.degree("dp") > 1),
    "grouped heads over tp": (10, lambda d: attention(d) == "gqa" and d.degree("tp") > 1),
    "a KV head for each head over tp": (10, lambda d: attention(d) == "mha" and d.degree("tp") > 1),
    "heads wider or narrower than hidden": (25, lambda d: d.config["head_dim"] * heads(d) != d.config["hidden_size"]),
    "biases over tp": (20, lambda d: (d.config["attention_bias"] or d.config["mlp_bias"]) and d.degree("tp") > 1),
    "blocks that do not divide": (10, lambda d: d.config["num_hidden_layers"] % d.degree("pp")),
    "sizes that only tp divides": (
        10,
        lambda d: odd(d, "vocab_size") and odd(d, "intermediate_size") and "tp" in axes(d),
    ),
    "rows that do not divide by the microbatches": (
        10,
        lambda d: d.plan["batch"] // d.degree("dp") % d.plan["microbatches"],
    ),
    "stages dealt by hand": (20, lambda d: "," in d.plan["balance"]),
    "stages dealt by parameters or cost": (
        10,
        lambda d: d.degree("pp") > 1 and d.plan["balance"] in ("parameters", "cost"),
    ),
    "fewer microbatches than stages": (8, lambda d: d.plan["microbatches"] < d.degree("pp")),
    "more microbatches than stages": (15, lambda d: d.plan["microbatches"] > d.degree("pp") > 1),
    "several stages on a rank over pp": (10, lambda d: stages(d) > 1 and d.degree("pp") > 1),
    "three stages and more on a rank": (3, lambda d: stages(d) > 2),
    "backwards in two halves": (20, halves),
    "backwards in two halves over tp": (8, lambda d: halves(d) and d.degree("tp") > 1),
    "backwards in two halves over pp": (8, lambda d: halves(d) and d.degree("pp") > 1),
    "rows of one token": (5, lambda d: d.plan["seq"] == 1),
    "rows of odd length": (15, lambda d: d.plan["seq"] % 2 and d.plan["seq"] > 1),
    "a padding token": (25, lambda d: d.config["pad_token_id"] is not None),
    "a bucket a tensor over dp": (
        3,
        lambda d: d.plan["bucket_mb"] < 0.001 and d.degree("dp") > 1 and not d.plan.get("zero"),
    ),
    "ZeRO": (30, lambda d: d.plan.get("zero")),
    "ZeRO over tp and pp": (8, lambda d: d.plan.get("zero") and len(axes(d)) == 3),
    "ZeRO with backwards in two halves": (5, lambda d: d.plan.get("zero") and halves(d)),
    "sums in a type of their own": (8, lambda d: Plan(**d.plan).reduces != Plan(**d.plan).accumulates),
    "gradients kept in bf16": (5, lambda d: Plan(**d.plan).accumulates == "bf16"),
    "ZeRO in replicas": (2, lambda d: d.plan.get("replicas", 1) > 1),
    "ZeRO-3 that gathers each time in a pipeline": (
        2,
        lambda d: d.plan.get("zero") == 3 and d.degree("pp") > 1 and not Plan(**d.plan).keeps_gathered,
    ),
}
"""What at least so many of a hundred draws are."""
EACH: dict[str, tuple[int, Iterable[Any], Callable[[Draw], Any]]] = {
    "zero": (8, (0, 1, 2, 3), lambda d: d.plan.get("zero", 0)),
    "schedule": (3, RUNS, lambda d: d.plan["schedule"]),
    "stages on a rank": (10, (1, 2), lambda d: stages(d)),
    "split_backward": (10, (True, False), lambda d: d.plan["split_backward"]),
    "compute": (15, ("fp32", "bf16", "fp16"), lambda d: d.plan["compute"]),
    "lr_schedule": (10, ("cosine", "linear", "constant"), lambda d: d.plan["lr_schedule"]),
    "warmup": (10, (0, 1, 3), lambda d: d.plan["warmup"]),
    "clip": (10, (0.0, 0.01, 1.0, 100.0), lambda d: d.plan["clip"]),
    "weight_decay": (10, (0.0, 0.1), lambda d: d.plan["weight_decay"]),
    "beta1": (20, (0.0, 0.9), lambda d: d.plan["beta1"]),
    "first batch": (5, set(KINDS) - {"nothing"}, lambda d: d.kinds[0]),
    "last batch": (5, KINDS, lambda d: d.kinds[-1]),
    "rope": (8, [rope["rope_type"] for rope in ROPES], lambda d: d.config["rope_parameters"]["rope_type"]),
    "hidden_act": (5, ACTIVATIONS, lambda d: d.config["hidden_act"]),
    "rms_norm_eps": (10, (1e-6, 1e-5, 1e-2), lambda d: d.config["rms_norm_eps"]),
    "attention": (8, ("mha", "gqa", "mqa"), attention),
    "attention_bias": (25, (True, False), lambda d: d.config["attention_bias"]),
    "mlp_bias": (25, (True, False), lambda d: d.config["mlp_bias"]),
}
"""Of what each value comes at least so many times."""


@pytest.fixture(scope="module")
def drawn() -> list[Draw]:
    return [draw(seed) for seed in SEEDS]


@pytest.mark.parametrize("sort", SHARES)
def test_the_draws_hold_enough_of(drawn: list[Draw], sort: str) -> None:
    least, is_one = SHARES[sort]
    assert len(drawn) == 100
    assert sum(bool(is_one(d)) for d in drawn) >= least


@pytest.mark.parametrize("field", EACH)
def test_the_draws_hold_each(drawn: list[Draw], field: str) -> None:
    least, values, of = EACH[field]
    counts = Counter(of(d) for d in drawn)
    assert all(counts[value] >= least for value in values), counts
