"""A plain nn.Sequential over ranks computes what a plain loop in one process does, from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.design.cost.memory import memory
from plait.design.cost.traffic import traffic
from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.design.schedule import RUNS, method
from plait.design.sharding import shard
from plait.runtime import sequential
from plait.runtime.batch import IGNORE, Batch
from plait.runtime.comm.world import World
from plait.runtime.training import measure
from plait.runtime.training.assemble import build
from plait.runtime.training.evaluate import evaluate
from plait.runtime.training.launch import launch
from plait.runtime.training.optimizer import learning_rate
from plait.runtime.training.sample import sample
from plait.runtime.training.watch import Watch
from tests.nursery import Nursery
from tests.runtime.test_numbers import random_batch, rows_of

VOCABULARY, STEPS, SEQ = 96, 3, 16


class Mix(nn.Module):
    """A token and the mean of those before it, through a linear layer of another width; with a buffer."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, out)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        return F.gelu(self.into(self.norm(x + self.scale * mean)))


class Logits(nn.Module):
    """Logits from a weight that an embedding has too."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.bias = embedding.weight, nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Scale(nn.Module):
    """So many numbers, or one."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Sometimes(nn.Module):
    """A row goes through one of two layers: a microbatch may have none for one of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.these, self.others = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        found = x.clone()
        for layer, rows in ((self.these, x[:, 0, 0] > 0), (self.others, x[:, 0, 0] <= 0)) if not x.is_meta else ():
            if rows.any():
                found[rows] = layer(x[rows])
        return found


def made(kind: str) -> nn.Sequential:
    """The same module on every rank."""
    torch.manual_seed(3)
    if kind == "small":
        # Fewer elements than ranks, in a unit of their own and beside others; shared; sizes that divide by nothing.
        scale = Scale()
        return nn.Sequential(
            nn.Embedding(VOCABULARY, 5), scale, nn.Sequential(nn.Linear(5, 7), Scale()), Scale(1, 1, 1), scale,
            nn.Linear(7, 7, bias=False), nn.Sequential(nn.LayerNorm(7), nn.Linear(7, VOCABULARY)),
        )  # fmt: skip
    if kind == "sometimes":
        return nn.Sequential(
            nn.Embedding(VOCABULARY, 6), Sometimes(6), Mix(6, 6), Sometimes(6), nn.Linear(6, VOCABULARY)
        )  # fmt: skip
    embedding = nn.Embedding(VOCABULARY, 24)
    if kind == "frozen":
        net = nn.Sequential(embedding, Mix(24, 24), nn.Linear(24, 24), Mix(24, 24), Scale(), Logits(embedding))
        for frozen in (net[1].norm.weight, net[2].weight, net[3].into.weight, net[3].into.bias, net[4].by):
            frozen.requires_grad_(False)
        return net
    if kind == "frozen, tied":
        net = nn.Sequential(embedding, Mix(24, 24), nn.Linear(24, 24), Logits(embedding))
        embedding.weight.requires_grad_(False)
        net[1].requires_grad_(False)
        return net
    if kind == "widths":
        return nn.Sequential(
            embedding, Mix(24, 40), Mix(40, 16), nn.Linear(16, 24), nn.Sequential(nn.ReLU(), nn.Linear(24, 32)),
            Mix(32, 24), nn.LayerNorm(24), nn.Linear(24, VOCABULARY),
        )  # fmt: skip
    twice = nn.Linear(24, 24)
    if kind == "twice":
        # One child three times, so that with several stages more than two of them use it.
        return nn.Sequential(
            embedding, Mix(24, 24), twice, Mix(24, 24), twice, Mix(24, 24), twice, nn.Sequential(nn.LayerNorm(24),
            nn.Linear(24, VOCABULARY)),
        )  # fmt: skip
    return nn.Sequential(
        embedding, Mix(24, 24), twice, Mix(24, 24), twice, Mix(24, 24), nn.Linear(24, 24, bias=False), Logits(embedding)
    )


def targets_of(plan: Plan, seed: int) -> Batch:
    """Random rows, one of them with few targets."""
    batch = random_batch(plan, VOCABULARY, seed)
    targets = batch.targets.clone()
    targets[0, 3:] = IGNORE
    return Batch(batch.tokens, targets, batch.positions, batch.document_ids, batch.sample_ids)


def one_process(kind: str, plan: Plan) -> dict[str, Any]:
    """torch's own loss, clip and AdamW."""
    net = made(kind).double()
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": plan.weight_decay},
        {"params": [p for p in net.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(plan.beta1, plan.beta2), eps=1e-8)
    reports = []
    for step in range(STEPS):
        batch = targets_of(plan, step)
        loss = F.cross_entropy(net(batch.tokens).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), plan.clip)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(plan, step, plan.steps)
        adamw.step()
        adamw.zero_grad()
        reports.append([float(loss.detach()), float(norm)])
    with torch.no_grad():
        batch = targets_of(plan, 9)
        held = F.cross_entropy(net(batch.tokens).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        tokens = [1, 2, 3]
        for _ in range(4):
            tokens.append(int(net(torch.tensor([tokens]))[0, -1].argmax()))
    weights = {name: p.tolist() for name, p in net.named_parameters()}
    return {"reports": reports, "weights": weights, "held": float(held), "sample": tokens[3:]}


def plan_of(changes: dict[str, Any]) -> Plan:
    return Plan(**{"batch": 8, "seq": SEQ, "steps": STEPS, "lr": 1e-2, **changes})


def trained(kind: str, changes: dict[str, Any]) -> Any:
    """What every rank of a layout has after some steps, in fp64; its ledger against the prediction."""
    plan = plan_of(changes)

    def main(world: World) -> Any:
        net = made(kind)
        run = build(plan, world, model=net, wide=True)
        reports = []
        for step in range(STEPS):
            world.ledger.clear()
            report = run.step(rows_of(targets_of(plan, step), world))
            reports.append([report.loss, report.grad_norm])
        predicted = [row for row in traffic(plan, run.model.facts, wide=True) if row.payload]
        moved = measure.traffic(world, predicted)
        assert {str(row) for row in moved} == {str(row) for row in predicted}
        held = evaluate(run, [rows_of(targets_of(plan, 9), world)])
        weights = {name: p.tolist() for name, p in run.parameters.items()} if plan.zero < 3 else {}
        return {
            "reports": reports, "weights": weights, "held": held.loss, "sample": sample(run, [1, 2, 3], 4, temperature=0)
        }  # fmt: skip

    return launch(main, plan, model=made(kind))


def assert_equal(nursery: Nursery, kind: str, changes: dict[str, Any]) -> None:
    ranks, one = nursery(trained, kind, changes), one_process(kind, plan_of(changes))
    for rank in ranks:
        assert rank["sample"] == one["sample"]
        assert rank["held"] == pytest.approx(one["held"], rel=1e-12)
        for mine, theirs in zip(rank["reports"], one["reports"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)
        for name, values in rank["weights"].items():
            mine, theirs = torch.tensor(values).double(), torch.tensor(one["weights"][name]).double()
            assert (mine - theirs).abs().max() <= 1e-9 * theirs.abs().max() + 1e-14, name
    found = {name for rank in ranks for name in rank["weights"]}
    assert found == set(one["weights"]) or Plan(**changes).zero == 3


@pytest.mark.parametrize("schedule", [name for name in RUNS if not method(name).searched])
def test_every_schedule_over_pp_and_dp(nursery: Nursery, schedule: str) -> None:
    microbatches = min(4, method(schedule).microbatches[1])
    assert_equal(nursery, "widths", {"pp": 2, "dp": 2, "schedule": schedule, "microbatches": microbatches})


@pytest.mark.parametrize(
    "layout",
    [{}, {"dp": 2}, {"pp": 4, "microbatches": 2}, {"pp": 8, "microbatches": 8}, {"pp": 3, "balance": "4,3,1"},
     {"pp": 3, "microbatches": 3, "loss_at": "first"}, {"pp": 2, "split_backward": True, "balance": "parameters"}],
    ids=str,
)  # fmt: skip
def test_layouts(nursery: Nursery, layout: dict[str, Any]) -> None:
    assert_equal(nursery, "widths", layout)


@pytest.mark.parametrize("kind", ["twice", "tied"])
@pytest.mark.parametrize(
    "layout",
    [{}, {"pp": 2, "dp": 2, "microbatches": 2}, {"pp": 4, "microbatches": 2}, {"pp": 2, "schedule": "interleaved"},
     {"pp": 4, "schedule": "zb-h1", "microbatches": 4}, {"pp": 2, "schedule": "interleaved", "split_backward": True}],
    ids=str,
)  # fmt: skip
def test_shared_children_are_tied_weights(nursery: Nursery, kind: str, layout: dict[str, Any]) -> None:
    assert_equal(nursery, kind, layout)


@pytest.mark.parametrize("kind", ["twice", "tied", "widths"])
@pytest.mark.parametrize("zero", [0, 3])
def test_shared_children_that_are_computed_again(nursery: Nursery, kind: str, zero: int) -> None:
    """Each has a backward of its own, and the sum over dp waits for all of them."""
    assert_equal(nursery, kind, {"dp": 2, "microbatches": 2, "recompute": "full", "zero": zero})


@pytest.mark.parametrize("kind", ["frozen", "frozen, tied"])
@pytest.mark.parametrize(
    "layout",
    [{}, {"dp": 2, "microbatches": 2}, {"pp": 3, "microbatches": 2}, {"pp": 2, "schedule": "zb-h1", "microbatches": 2},
     {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2, "microbatches": 2}, {"dp": 2, "zero": 3, "pp": 2, "microbatches": 2},
     {"dp": 2, "zero": 3, "recompute": "full"}],
    ids=str,
)  # fmt: skip
def test_what_wants_no_gradient_is_frozen(nursery: Nursery, kind: str, layout: dict[str, Any]) -> None:
    assert_equal(nursery, kind, layout)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 3, "microbatches": 2}, {"dp": 4}, {"dp": 2, "pp": 2}], ids=str)
def test_p034_parameters_of_fewer_elements_than_ranks(nursery: Nursery, zero: int, layout: dict[str, Any]) -> None:
    """Some ranks have nothing of them, and some nothing of a whole unit."""
    plan = plan_of({"zero": zero, "batch": 12, **layout})
    sharding = shard(sequential.read(made("small"), plan, torch.float32).facts, plan)
    units = [unit for rank in range(plan.world) for unit in sharding.units(rank)]
    assert any(unit.elements < plan.dp for unit in units)
    stretches = [unit.stretch(unit.names[0], plan.dp - 1) for unit in units]
    assert any(start == stop for start, stop in stretches)
    assert_equal(nursery, "small", {"zero": zero, "batch": 12, **layout})


@pytest.mark.parametrize(
    "layout", [{"dp": 4}, {"dp": 2, "microbatches": 4}, {"dp": 2, "pp": 2, "microbatches": 2}], ids=str
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_p066_layers_that_some_microbatches_and_ranks_do_not_use(
    nursery: Nursery, zero: int, layout: dict[str, Any]
) -> None:
    if zero:
        layout = layout | {"zero": zero}
    assert_equal(nursery, "sometimes", layout)


def held(changes: dict[str, Any]) -> Any:
    plan = plan_of(changes)

    def main(world: World) -> Any:
        run = build(plan, world, model=made("tied"))
        watch = Watch(run)
        for batch in watch.over([rows_of(random_batch(plan, VOCABULARY), world)]):
            run.step(batch)
        return [bill.held for bill in measure.memory(run, watch)]

    return launch(main, plan, model=made("tied"))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_memory_that_is_held_is_as_predicted(nursery: Nursery, compute: str) -> None:
    layout = {"pp": 2, "dp": 2, "microbatches": 2, "compute": compute}
    plan = plan_of(layout)
    facts = sequential.read(made("tied"), plan, torch.float32).facts
    assert nursery(held, layout)[0] == [list(bill.held) for bill in memory(plan, facts)]


class Wrong(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def net(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(VOCABULARY, 24), *middle, nn.Linear(24, VOCABULARY))


REFUSED: list[tuple[nn.Sequential, dict[str, Any], str]] = [
    (net(), {"tp": 2}, "tp 2 cuts by a model's tensor plan, and a sequential model has none: set tp 1"),
    (net(), {"pp": 3}, "pp 3 stages need a block each, but the model has 2 blocks: set pp 2 or less"),
    (nn.Sequential(), {}, "nn.Sequential is empty"),
    (Wrong(nn.Embedding(4, 4)), {}, "Wrong has a forward of its own"),
    (net(nn.GELU()), {"pp": 3}, "Stage 1 would be child 1 of 3, without a parameter of its own: set pp 2 or less"),
    (net(nn.Linear(20, 24)), {}, r"Child 1 \(Linear\) does not take what it is given, \[2, 16, 24\] of torch.float32"),
    (net(Pair()), {}, r"Child 1 \(Pair\) gives a tuple for 2 rows of 16 tokens"),
    (nn.Sequential(nn.Embedding(9, 4), nn.Flatten()), {}, r"Child 1 \(Flatten\) gives \[2, 64\]"),
    (net(nn.BatchNorm1d(16)), {}, "Child 1 has a BatchNorm1d, whose statistics"),
    (net(nn.Dropout(0.1)), {}, "Child 1 has a Dropout that drops 0.1"),
    (net(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(24, 24))), {"pp": 3},
     r"Child 1 \(Sequential\) changes its input in place, but it is the first of stage 1"),
    (net().requires_grad_(False), {}, "The model leaves none of its 3 parameters to train"),
    (net(), {"freeze": "1.wait"}, "none of the 3 parameters of this model is called so. Did you mean '1.weight'?"),
    (net().to("meta"), {}, "Child 0 has weight on the meta device"),
    (net(), {"balance": "cost"}, "balance cost counts"),
    (net(), {"schedule": "auto"}, "schedule auto is searched for with what a transformer's blocks compute"),
    (net(), {"pp": 2, "balance": "2,1"}, "balance 2,1 deals 3 blocks, but the model has 2"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "changes", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_fit_is_refused(module: nn.Sequential, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        launch(lambda world: None, plan_of(changes), model=module)
