"""Numbers that must not depend on the layout, and cases that people met elsewhere (by id)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.design.plan import Plan
from plait.runtime.batch import IGNORE, Batch
from plait.runtime.comm.nursery import BadNumbersError
from plait.runtime.comm.world import World
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from plait.runtime.training.loop import train
from plait.runtime.training.optimizer import learning_rate
from tests.conftest import Models
from tests.nursery import Nursery

LAYOUTS: dict[str, dict[str, int]] = {
    "111": {}, "211": {"dp": 2}, "121": {"tp": 2}, "112": {"pp": 2}, "222": {"dp": 2, "tp": 2, "pp": 2},
}  # fmt: skip


def rows_of(batch: Batch, world: World) -> Batch:
    size = batch.rows // world.mesh.degree("dp")
    first = world.coordinate["dp"] * size
    return batch.slice(first, first + size)


def random_batch(plan: Plan, vocabulary: int = 96, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch.of(torch.randint(0, vocabulary, (plan.batch, plan.seq + 1), generator=generator))


def weights(model: str, layout: dict[str, int]) -> dict[str, str]:
    """sha256 of every full initial weight, put together from the ranks' slices."""
    plan = Plan(model=model, batch=8, seq=16, **layout)

    def main(world: World) -> Any:
        run = build(plan, world)
        return {name: weight.tolist() for name, weight in run.optimizer.weights.items()}

    ranks = launch(main, plan)
    from plait.design.sharding import shard
    from plait.runtime.hf.read import read

    found = {}
    for part in shard(read(model).facts, plan).parts:
        whole = torch.full(part.compute.shape, float("nan"))
        for rank, box in part.compute.holders(plan.mesh):
            whole[tuple(slice(a, b) for a, b in box)] = torch.tensor(ranks[rank][part.name])
        found[part.name] = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    return found


def test_p025_initial_weights_are_the_same_bits_in_every_layout(nursery: Nursery, tiny: Models) -> None:
    found = {name: nursery(weights, tiny(), layout) for name, layout in LAYOUTS.items()}
    assert all(hashes == found["111"] for hashes in found.values())
    assert len(found["111"]) == 39
    matrices = [value for key, value in found["111"].items() if "norm" not in key]
    assert len(set(matrices)) == len(matrices), "two modules were drawn alike"


def steps(model: str, changes: dict[str, Any], kind: str = "random", count: int = 3) -> list[Any]:
    """(loss, norm, lr, tokens) of some steps on every rank, in fp64."""
    plan = Plan(**{"model": model, "batch": 8, "seq": 16, "steps": count, **changes})

    def main(world: World) -> Any:
        run = build(plan, world, wide=plan.compute == "fp32")
        batch = make_batch(kind, plan)
        reports = [run.step(rows_of(batch, world)) for _ in range(count)]
        return [[r.loss, r.grad_norm, r.lr, r.tokens] for r in reports]

    return launch(main, plan)


def make_batch(kind: str, plan: Plan) -> Batch:
    batch = random_batch(plan)
    if kind == "random":
        return batch
    targets = batch.targets.clone()
    if kind == "10 and 100":  # two rows of 100 tokens
        targets[0, 10:] = IGNORE
    if kind == "third rank empty":
        share = plan.batch // 4
        targets[2 * share : 3 * share] = IGNORE
    if kind == "none":
        targets[:] = IGNORE
    return Batch(batch.tokens, targets, batch.positions, batch.document_ids, batch.sample_ids)


def close(found: list[Any], wanted: list[Any], bound: float = 1e-12) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=bound, abs=1e-14)


def test_p001_gradient_is_the_token_mean_whatever_the_cut(nursery: Nursery, tiny: Models) -> None:
    model = tiny(max_position_embeddings=128)
    shape = {"batch": 2, "seq": 100}
    one = nursery(steps, model, shape, "10 and 100")[0]
    assert one[0][3] == 110
    close(nursery(steps, model, {**shape, "microbatches": 2}, "10 and 100")[0], one)
    close(nursery(steps, model, {**shape, "dp": 2}, "10 and 100")[0], one)


@pytest.mark.parametrize("layout", [{"dp": 4}, {"dp": 4, "pp": 2}], ids=str)
def test_p005_a_rank_without_targets(nursery: Nursery, tiny: Models, layout: dict[str, int]) -> None:
    one = nursery(steps, tiny(), {"microbatches": 4}, "third rank empty")[0]
    assert one[0][3] == 96
    for rank in nursery(steps, tiny(), layout, "third rank empty"):
        close(rank, one)


def test_a_batch_without_any_target_is_finite(nursery: Nursery, tiny: Models) -> None:
    for loss, norm, _, tokens in nursery(steps, tiny(), {"dp": 2}, "none")[0]:
        assert (loss, norm, tokens) == (0, 0, 0)


def test_p009_norm_does_not_depend_on_tp(nursery: Nursery, tiny: Models) -> None:
    model = tiny(attention_bias=True, mlp_bias=True, num_key_value_heads=4)
    one = nursery(steps, model, {}, "random", 1)[0][0]
    for tp in (2, 4):
        for rank in nursery(steps, model, {"tp": tp}, "random", 1):
            close(rank[0], one)


def test_p003_norm_does_not_depend_on_accumulation(nursery: Nursery, tiny: Models) -> None:
    found = [nursery(steps, tiny(), {"dp": 2, "microbatches": m}, "random", 1)[0][0][1] for m in (1, 2, 4)]
    assert found == pytest.approx([found[0]] * 3, rel=1e-9)


def test_all_ranks_report_the_same_bits(nursery: Nursery, tiny: Models) -> None:
    ranks = nursery(steps, tiny(), {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2})
    assert all(rank == ranks[0] for rank in ranks)


def test_p040_the_learning_rate_depends_on_nothing_but_the_step(nursery: Nursery, tiny: Models) -> None:
    plan = Plan(model=tiny(), steps=20, warmup=4, lr=1e-3)
    expected = [learning_rate(plan, step, 20) for step in range(20)]
    assert expected[3] == 1e-3
    assert expected[0] == pytest.approx(2.5e-4, rel=1e-15)
    assert expected[-1] == pytest.approx(1e-4, rel=1e-12)
    assert expected[4:] == sorted(expected[4:], reverse=True)
    for dp, m in ((1, 2), (2, 1), (4, 2)):
        ranks = nursery(steps, tiny(), {"dp": dp, "microbatches": m, "warmup": 4, "seq": 2}, "random", 20)
        assert all([step[2] for step in rank] == expected for rank in ranks)


def replicas(model: str, compute: str) -> list[Any]:
    """Hashes of what each rank holds after 20 steps, by part, with the ranks that should hold the same."""
    plan = Plan(model=model, dp=2, tp=2, pp=2, microbatches=2, batch=8, seq=16, steps=20, compute=compute, lr=1e-2)

    def main(world: World) -> Any:
        run = build(plan, world)
        for step in range(20):
            run.step(rows_of(random_batch(plan, seed=step), world))
        held = {}
        for name, weight in run.optimizer.weights.items():
            first, second = run.optimizer.moments(name)
            bits = b"".join(t.detach().numpy().tobytes() for t in (weight, first, second))
            held[f"{run.sharding.parameter(name).boxes(plan.mesh, world.rank)} {name}"] = hashlib.sha256(
                bits
            ).hexdigest()
        return held

    return launch(main, plan)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_p017_copies_stay_bitwise_equal(nursery: Nursery, tiny: Models, compute: str) -> None:
    seen: dict[str, str] = {}
    copies = 0
    for rank in nursery(replicas, tiny(), compute):
        for slice_name, bits in rank.items():
            copies += slice_name in seen
            assert seen.setdefault(slice_name, bits) == bits, slice_name
    assert copies > 39


def losses(model: str, changes: dict[str, Any]) -> list[float]:
    plan = Plan(**{"model": model, "batch": 8, "seq": 16, "steps": 6, **changes})

    def main(world: World) -> Any:
        run = build(plan, world)
        return [run.step(rows_of(random_batch(plan, seed=step), world)).loss for step in range(6)]

    return launch(main, plan)[0]


@pytest.mark.parametrize(("compute", "bound"), [("fp32", 1e-5), ("bf16", 3e-3)])
def test_shipped_numerics_agree_over_layouts(nursery: Nursery, tiny: Models, compute: str, bound: float) -> None:
    one = nursery(losses, tiny(), {"compute": compute})
    for layout in ({"dp": 2}, {"tp": 2}, {"pp": 2, "microbatches": 4}, {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2}):
        assert nursery(losses, tiny(), {"compute": compute, **layout}) == pytest.approx(one, rel=bound)
    if compute == "bf16":
        full = nursery(losses, tiny(), {})
        assert one == pytest.approx(full, rel=1e-2)
        assert one != full, "bf16 was asked for and fp32 computed"


def test_p029_loss_of_bf16_logits_is_fp32() -> None:
    """At a loss near 36 a bf16 scalar moves in steps of 0.25."""
    from plait.design.mesh import Mesh
    from plait.runtime.comm.ledger import Ledger
    from plait.runtime.comm.world import Group
    from plait.runtime.parallel.loss import cross_entropy

    assert Mesh((("tp", 1),)).size == 1
    alone = Group("tp", (0,), 0, Ledger(), None)
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(50, 96, generator=generator) * 18).bfloat16()
    targets = logits.argmin(-1)
    found = cross_entropy(logits, targets, alone, start=0) / 50
    exact = torch.nn.functional.cross_entropy(logits.double(), targets)
    assert exact > 30
    assert abs(float(found) - float(exact)) <= 1e-4
    logits64 = logits.double().requires_grad_(True)
    mine = logits.double().requires_grad_(True)
    torch.nn.functional.cross_entropy(logits64, targets, reduction="sum").backward()
    cross_entropy(mine, targets, alone, start=0).backward()
    assert torch.allclose(mine.grad, logits64.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(24000, 512), (512, 24000), (3, 64, 20000)])
def test_the_norm_of_a_large_tensor_is_exact(shape: tuple[int, ...]) -> None:
    """fp32 that is added up as it comes is 4e-4 off here, and the clip factor with it."""
    from plait.runtime.training.gradients import rows_of, squared_norm

    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    flat = gradient.view(-1)
    rows = rows_of([flat[5:], flat[:3], flat[:5]])
    assert len(rows) == 2  # all of it in whole rows, and three elements again
    found = squared_norm(rows, torch.device("cpu"))
    exact = gradient.double().square().sum() + flat[:3].double().square().sum()
    assert float(found) == pytest.approx(float(exact), rel=1e-6)


def test_metrics_are_json_lines(tmp_path: Path) -> None:
    from plait.runtime.training.loop import Metrics
    from plait.runtime.training.step import Report

    Metrics(tmp_path / "metrics.jsonl").write(Report(1, 2.5, 0.5, 1e-3, 100, 0.5))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens": 100, "tokens_per_s": 200.0}


def seeded_by_rank(model: str) -> list[str]:
    """What a run says whose ranks draw their weights from different seeds."""
    plan = Plan(model=model, dp=2, batch=4, seq=8, steps=1)

    def main(world: World) -> Any:
        run = build(plan.model_copy(update={"seed": world.rank}), world)
        try:
            train(run, [rows_of(random_batch(plan), world)], lambda report: None)
        except BadNumbersError as error:
            return f"{run.done} steps: {error}"
        return "trained"

    return launch(main, plan)


def test_p036_replicas_that_begin_apart_are_refused_by_name(nursery: Nursery, tiny: Models) -> None:
    for rank, said in enumerate(nursery(seeded_by_rank, tiny())):
        assert said.startswith("0 steps: model.embed_tokens.weight is not the same on ranks 0 and 1")
        assert f"seed {rank} here" in said
