"""Random layouts that the plan accepts, for the checker to find right: a seed gives a model, a plan and its batches.

Drawn by rejection: values come from the ranges below without a thought for each other, the plan's own rules are asked,
and what they refuse is drawn again. What a later version accepts is drawn here too: a new field of the plan, or a new
value of one, gets its line in `_plan`, `_sizes` or `_manners`. Nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from random import Random
from typing import Any

from plait.check.batches import KINDS
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.design.schedule import RUNS, make
from tests.design.facts import llama

SEEDS = range(100)
MOST_RANKS = 8
MOST_HIDDEN, MOST_ROWS = 64, 24
POSITIONS = 24
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "tanh", "quick_gelu", "mish")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8},
)  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """`config` are changes to the tests' small model, `plan` values of a plan, `kinds` those of its batches, in turn."""

    config: dict[str, Any]
    plan: dict[str, Any]
    kinds: tuple[str, ...]

    def degree(self, axis: str) -> int:
        return int(self.plan[axis])


def draw(seed: int) -> Draw:
    random = Random(seed)
    while True:
        plan = _plan(random)
        sizes = _sizes(random, plan["tp"])
        if sizes["hidden_size"] <= MOST_HIDDEN and plan["batch"] <= MOST_ROWS and _accepted(plan, sizes):
            plan |= _pipeline(Random(-1001 - seed), plan, sizes)
            plan |= _uneven(Random(-1 - seed), plan, sizes["num_hidden_layers"])
            plan |= _shares(Random(-2001 - seed), plan, sizes)
            plan |= _loss_in_chunks(Random(-4001 - seed), plan)
            plan |= _types(Random(-3001 - seed), plan, sizes)
            # Only the first step is also run as shipped: one that trains nothing would show nothing there.
            first = random.choice([kind for kind in KINDS if kind != "nothing"])
            return Draw(
                sizes | _manners(random, sizes), plan, (first, *random.choices(list(KINDS), k=random.choice((1, 2))))
            )


def _uneven(random: Random, plan: dict[str, Any], blocks: int) -> dict[str, Any]:
    """Rows that do not divide by the microbatches, where few enough; stages that differ, half of them in any way."""
    more = random.randrange(plan["microbatches"]) * plan["dp"]
    more = more if plan["batch"] + more <= MOST_ROWS else 0
    stages = Plan(**plan).stages
    ends = [0, *sorted(random.sample(range(1, blocks), stages - 1)), blocks]
    by_hand = ",".join(str(stop - start) for start, stop in pairwise(ends))
    return {
        "batch": plan["batch"] + more,
        "balance": random.choice(("uniform", "parameters", "cost", by_hand, by_hand, by_hand)),
    }


def _accepted(plan: dict[str, Any], sizes: dict[str, Any]) -> bool:
    facts = llama(
        blocks=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        intermediate=sizes["intermediate_size"],
        vocabulary=sizes["vocab_size"],
        positions=sizes["max_position_embeddings"],
    )
    try:
        validate(Plan(**plan), facts)
    except PlanError:
        return False
    return True


def _pipeline(random: Random, plan: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Any schedule that degrees, microbatches and blocks allow, and any number of stages on a rank that it takes;
    backwards in two halves in a quarter of those that leave them whole. What few draws allow comes up more often."""

    def allowed(**values: Any) -> bool:
        return _accepted(plan | values, sizes)

    names = [name for name in RUNS if allowed(schedule=name)]
    name = random.choices(names, [2 if name in ("naive", "interleaved") else 1 for name in names])[0]
    fit = [chunks for chunks in range(1, 5) if allowed(schedule=name, chunks=chunks)]
    chosen = {"schedule": name, "chunks": random.choice(fit)}
    one = Plan(**plan | chosen)
    halves = random.random() < 0.25 and not make(one.schedule, one.pp, one.microbatches, one.chunks).splits
    return chosen | {"split_backward": halves}


def _shares(random: Random, plan: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Any stage of ZeRO where there are replicas, with all that it leaves open."""
    ways = product((1, 2, 3), range(1, plan["dp"]), ("auto", "yes", "no"), ("auto", "step", "microbatch"))
    names = ("zero", "replicas", "keep_gathered", "reduce_every")
    legal = [
        values
        for values in (dict(zip(names, way, strict=True)) for way in ways)
        if plan["dp"] % values["replicas"] == 0 and _accepted(plan | values, sizes)
    ]
    if not legal or random.random() < 0.3:
        return {}
    zero = random.choice((1, 2, 3))
    several = any(values["replicas"] > 1 for values in legal)  # few degrees have any
    return random.choice([v for v in legal if v["zero"] == zero and (v["replicas"] > 1) == several])


def _loss_in_chunks(random: Random, plan: dict[str, Any]) -> dict[str, Any]:
    """In some draws, up to one a token."""
    least = min(Plan(**plan).microbatch_rows) * plan["seq"]
    if least < 2 or plan.get("loss_at") == "first" or random.random() < 0.7:
        return {}
    return {"loss_chunks": min(least, random.choice((2, 3, random.randint(2, least))))}


def _types(random: Random, plan: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """In half of the draws any types that go together, of which fewer have gradients and sums of their own."""
    ways = product(("fp32", "bf16", "fp16"), ("auto", "bf16"), ("auto", "fp32", "bf16", "fp16"))
    legal = [
        values
        for values in (dict(zip(("compute", "accumulate", "reduce"), way, strict=True)) for way in ways)
        if _accepted(plan | values, sizes)
    ]
    return random.choice(legal) if random.random() < 0.5 else {}


def _degrees(random: Random) -> dict[str, int]:
    """All three axes in a quarter of the draws, two or one in the others; many ranks are rarer than few."""
    axes = random.choice((1, 1, 1, 2, 2, 2, 3, 3))
    legal = [
        degrees
        for degrees in product(range(1, MOST_RANKS + 1), repeat=3)
        if prod(degrees) <= MOST_RANKS and sum(degree > 1 for degree in degrees) in ((0, 1) if axes == 1 else (axes,))
    ]
    weights = [1 / prod(degrees) for degrees in legal]
    return dict(zip(("dp", "tp", "pp"), random.choices(legal, weights)[0], strict=True))


def _plan(random: Random) -> dict[str, Any]:
    degrees = _degrees(random)
    microbatches = random.choice((1, 1, 2, 3, 4, 6))
    steps = random.choice((2, 3, 3, 5))
    return {
        **degrees,
        "schedule": "naive" if random.choice((True, True, False, False, False)) else "1f1b",
        "microbatches": microbatches,
        "batch": degrees["dp"] * microbatches * random.choice((1, 1, 2, 3)),
        "seq": random.choice((1, 2, 5, 7, 11, 16, 24)),
        "steps": steps,
        "lr": random.choice((1e-4, 1e-3, 3e-2)),
        "lr_schedule": random.choice(("cosine", "linear", "constant")),
        "warmup": random.choice((0, 0, 1, 3)),
        "lr_floor": random.choice((0.0, 0.1, 1.0)),
        "weight_decay": random.choice((0.0, 0.1, 0.5)),
        "beta1": random.choice((0.0, 0.9)),
        "beta2": random.choice((0.5, 0.95, 0.999)),
        "clip": random.choice((0.0, 0.01, 1.0, 100.0)),
        "compute": random.choice(("fp32", "bf16")),
        "bucket_mb": random.choice((0.0001, 0.004, 0.02, 4.0)),
        "seed": random.randrange(1000),
    }


def _sizes(random: Random, tp: int) -> dict[str, Any]:
    """What tp cuts is a multiple of it, mostly an odd one, so that nothing else divides it."""
    groups = tp * random.choice((1, 1, 1, 2, 3))
    heads = groups * random.choice((1, 2, 3))
    width = random.choice((4, 6, 8, 10))
    return {
        "num_key_value_heads": groups,
        "num_attention_heads": heads,
        "head_dim": width,
        "hidden_size": heads * random.choice((width, 3, 5, 8)),
        "intermediate_size": tp * random.choice((3, 7, 11, 16)),
        "vocab_size": tp * random.choice((5, 13, 31, 32)),
        "num_hidden_layers": random.choice((1, 2, 3, 4, 5, 6, 7, 8)),
        "max_position_embeddings": random.choice((POSITIONS, 2 * POSITIONS)),
    }


def _manners(random: Random, sizes: dict[str, Any]) -> dict[str, Any]:
    """What changes the numbers and no shape. A padding token is a row of zeros, whose gradient every norm multiplies by
    1 / sqrt(eps): with a small one it overflows in one process too."""
    padding = random.choice((None, None, 0, sizes["vocab_size"] - 1))
    return {
        "attention_bias": random.random() < 0.4,
        "mlp_bias": random.random() < 0.4,
        "hidden_act": random.choice(ACTIVATIONS),
        "rms_norm_eps": random.choice((1e-6, 1e-5, 1e-2)) if padding is None else 1e-2,
        "rope_parameters": random.choice(ROPES) | {"rope_theta": random.choice((100.0, 10000.0))},
        "pad_token_id": padding,
        "initializer_range": random.choice((0.02, 0.2)),
    }
