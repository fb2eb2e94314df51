"""tp and sp at sizes that nothing divides, over a covering set of models and layouts: equal to one process."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
import torch

from plait.check.batches import awkward_batches
from plait.check.places import Verdict
from plait.check.proof import prove
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.runtime.batch import Batch
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from plait.runtime.training.replicas import digest
from tests.nursery import Nursery
from tests.runtime.test_numbers import random_batch, rows_of
from tests.runtime.test_zero import covering, some

MODELS: dict[str, dict[str, Any]] = {
    # 9 heads in 3 groups, as SmolLM2 has; columns and vocabulary odd.
    "llama": {"hidden_size": 36, "intermediate_size": 35, "num_attention_heads": 9, "num_key_value_heads": 3},
    # One KV head for all, apart and fused; norms of heads; two experts a token.
    "qwen3": {"hidden_size": 36, "intermediate_size": 37, "num_attention_heads": 6, "num_key_value_heads": 1,
              "head_dim": 8},
    "phi3": {"hidden_size": 48, "intermediate_size": 35, "num_attention_heads": 6, "num_key_value_heads": 2,
             "pad_token_id": 0},
    "mixtral": {"hidden_size": 35, "intermediate_size": 33, "num_attention_heads": 5, "num_key_value_heads": 5,
                "head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 30, "n_head": 5, "n_layer": 4, "n_inner": 61, "n_positions": 64},
}  # fmt: skip
AXES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS), "tp": (2, 3, 4, 6), "sp": (False, True), "pp": (1, 2), "zero": (0, 1, 3),
    "schedule": ("1f1b", "zb-h1"), "recompute": ("none", "full"),
}  # fmt: skip


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A directory with a config.json for each."""
    plain = {"num_hidden_layers": 4, "vocab_size": 97, "max_position_embeddings": 64, "tie_word_embeddings": False}
    found = {}
    for model, sizes in MODELS.items():
        place = tmp_path_factory.mktemp(model)
        (place / "config.json").write_text(json.dumps({"model_type": model} | plain | sizes))
        found[model] = str(place)
    return found


def plan_of(row: dict[str, Any], model: str, **more: Any) -> Plan:
    dp = 2 if row["zero"] else 1
    rest = {name: value for name, value in row.items() if name != "model"}
    return Plan(model=model, dp=dp, batch=dp * 5, microbatches=2, seq=13, steps=2, clip=0.5, **rest, **more)


LEGAL = {"llama": (2, 3, 6), "qwen3": (2, 3, 4, 6), "phi3": (2, 4, 6), "mixtral": (2, 3, 4), "gpt2": (2, 3, 4)}


def possible(row: dict[str, Any], ranks: int) -> bool:
    world = row["tp"] * row["pp"] * (2 if row["zero"] else 1)
    return world <= ranks and row["tp"] in LEGAL[row["model"]] and (row["pp"] > 1 or row["schedule"] == "1f1b")


ROWS = covering(AXES, 8, possible)


def test_the_set_covers_every_pair() -> None:
    every = {(one, other) for row in ROWS for one, other in combinations(row.items(), 2)}
    assert (("model", "llama"), ("tp", 6)) in every
    assert (("sp", True), ("zero", 3)) in every
    assert len(ROWS) < 40


def test_the_legal_degrees(folders: dict[str, str]) -> None:
    for model, path in folders.items():
        facts = read(path).facts
        for tp in (2, 3, 4, 6):
            try:
                validate(Plan(model=path, tp=tp, seq=13), facts)
            except PlanError:
                assert tp not in LEGAL[model]
            else:
                assert tp in LEGAL[model]


def check(row: dict[str, Any], path: str) -> list[Any]:
    plan, found = plan_of(row, path), read(path)
    verdicts = prove(plan, found, lambda: awkward_batches(plan, found.facts.vocabulary, 2))
    return [verdict.to_json() for verdict in verdicts]


@pytest.mark.parametrize("row", some(ROWS, 3), ids=lambda row: "-".join(map(str, row.values())))
def test_p043_p045_equal_to_one_process(nursery: Nursery, folders: dict[str, str], row: dict[str, Any]) -> None:
    for values in nursery(check, row, folders[row["model"]]):
        verdict = Verdict.from_json(values)
        assert verdict.passed, (verdict.first, verdict.cause)
        assert verdict.numerics != "wide" or verdict.largest.relative < 1e-10


def copies_after(steps: int, values: dict[str, Any]) -> list[Any]:
    """What every rank holds whole after some steps, as a digest each; and the norms of the steps."""
    plan = Plan(**values)
    facts = read(plan.model).facts

    def main(world: World) -> Any:
        run = build(plan, world)
        norms = []
        for step in range(steps):
            batch: Batch = random_batch(plan, facts.vocabulary, step)
            norms.append(run.step(rows_of(batch, world)).grad_norm)
        mesh = run.sharding.mesh
        held = {
            f"{one.name} {one.boxes(mesh, world.rank)}": digest(run.parameters[one.name]) for one in run.sharding.at(0)
        }
        return held, norms

    return launch(main, plan)


@pytest.mark.parametrize(("model", "tp", "sp"), [("llama-tiny", 4, True), ("qwen3", 3, True), ("gpt2", 4, False)])
def test_p017_copies_stay_the_same_bits(
    nursery: Nursery, folders: dict[str, str], model: str, tp: int, sp: bool
) -> None:
    """Norms, biases, and keys that several ranks have, for 50 steps."""
    values = {"model": folders.get(model, model), "tp": tp, "sp": sp, "batch": 3, "seq": 13, "steps": 50, "lr": 3e-3}
    ranks = nursery(copies_after, 50, values)
    seen: dict[str, set[Any]] = {}
    for held, norms in ranks:
        assert norms == ranks[0][1]
        for name, bits in held.items():
            seen.setdefault(name, set()).add(bits)
    assert sum(all(name in held for held, _ in ranks) for name in seen) > 8
    assert all(len(bits) == 1 for bits in seen.values()), [name for name, bits in seen.items() if len(bits) > 1]
    assert not torch.tensor(ranks[0][1]).isnan().any()
