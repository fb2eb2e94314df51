"""Every schedule computes what one process does, keeps alive what its table says, sends and keeps what is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from plait.design.cost.memory import memory
from plait.design.cost.traffic import traffic
from plait.design.plan import Plan
from plait.design.records import MemoryBill
from plait.design.schedule import RUNS, live_microbatches
from plait.design.table import settled, table
from plait.runtime.batch import Batch
from plait.runtime.comm.world import World
from plait.runtime.hf.read import read
from plait.runtime.parallel.data import Buckets
from plait.runtime.parallel.pipeline import Pipeline
from plait.runtime.training.assemble import build
from plait.runtime.training.launch import launch
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.test_layouts import assert_equal
from tests.runtime.test_memory_and_step_time import bills
from tests.runtime.test_numbers import random_batch, rows_of
from tests.runtime.test_traffic_and_time import ledger
from tests.schedules import both_ends, runs, splits

COUNTS = [(2, 1), (2, 3), (4, 2), (4, 6), (4, 8)]
"""(pp, microbatches): fewer than ranks, no multiple of them, more."""
SPLIT = [name for name in RUNS if splits(name)]
BOTH_ENDS = [name for name in RUNS if both_ends(name)]
OTHERS = sorted({*SPLIT, *BOTH_ENDS, "interleaved"})
"""With backwards in two halves, or several stages on a rank."""


def kinds(names: Sequence[str]) -> list[Any]:
    """One of each kind, and the rest."""
    return [name if name in ("1f1b", *KINDS) else pytest.param(name, marks=pytest.mark.rest) for name in names]


KINDS = ("interleaved", "zb-h1", "zb-v", "dualpipe-v", "auto")


def proven(nursery: Nursery, **changes: Any) -> None:
    """Equal to one process, with as many microbatches as the schedule takes of those that are asked for."""
    if not runs(**{key: changes[key] for key in ("schedule", "pp", "microbatches", "chunks") if key in changes}):
        changes = changes | {"microbatches": 1}
    rows = changes.pop("rows", 1)
    batch = rows * changes.get("dp", 1) * changes["microbatches"]
    assert_equal(nursery, batch=batch, **changes)


def counted() -> list[Any]:
    """Every schedule with every count; beside the rest, each with one of 2 ranks and one of 4, in turn."""
    found = []
    for number, schedule in enumerate(RUNS):
        chosen = {COUNTS[number % 2], COUNTS[2 + number % 3]}
        found += [pytest.param(schedule, *count, marks=() if count in chosen else pytest.mark.rest) for count in COUNTS]
    return found


@pytest.mark.parametrize(("schedule", "pp", "m"), counted())
def test_every_schedule_equals_one_process(nursery: Nursery, tiny: Models, schedule: str, pp: int, m: int) -> None:
    if schedule == "naive" and m > 2:
        pytest.skip("naive takes one microbatch")
    proven(nursery, model=tiny(num_hidden_layers=9), schedule=schedule, pp=pp, microbatches=m)


@pytest.mark.parametrize(
    "schedule", [*(pytest.param(s, marks=pytest.mark.rest) for s in ("interleaved", "zb-h1")), *BOTH_ENDS[:1]]
)
def test_eight_ranks(nursery: Nursery, tiny: Models, schedule: str) -> None:
    proven(nursery, model=tiny(num_hidden_layers=17), schedule=schedule, pp=8, microbatches=11)


@pytest.mark.parametrize(("pp", "chunks", "m"), [(1, 4, 3), (2, 3, 5), (2, 4, 4), (3, 3, 2)])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_more_stages_on_a_rank(nursery: Nursery, tiny: Models, pp: int, chunks: int, m: int, split: bool) -> None:
    model = tiny(num_hidden_layers=9)
    proven(nursery, model=model, schedule="interleaved", pp=pp, chunks=chunks, microbatches=m, split_backward=split)


@pytest.mark.parametrize("schedule", kinds(RUNS))
def test_with_tp_and_dp(nursery: Nursery, tiny: Models, schedule: str) -> None:
    """Biases everywhere, and buckets of a tensor each, so that their order over dp matters."""
    model = tiny(num_hidden_layers=5, attention_bias=True, mlp_bias=True)
    proven(nursery, model=model, schedule=schedule, pp=2, tp=2, dp=2, microbatches=3, rows=2, bucket_mb=0.001)


@pytest.mark.parametrize("schedule", kinds(OTHERS))
def test_as_shipped_in_bf16(nursery: Nursery, tiny: Models, schedule: str) -> None:
    """Gradients that are put off are added to fp32, as others are."""
    model = tiny(attention_bias=True)
    layout = {"pp": 2, "tp": 2, "microbatches": 3, "rows": 2}
    proven(nursery, shipped=True, model=model, schedule=schedule, compute="bf16", **layout)


@pytest.mark.parametrize("schedule", kinds(OTHERS))
@pytest.mark.parametrize("model", ["gemma3-tiny", "qwen3-tiny"])
def test_tied_weights(nursery: Nursery, model: str, schedule: str) -> None:
    """An embedding that the head uses too: on two ranks, or on one, which then has one storage and one gradient."""
    proven(nursery, model=model, schedule=schedule, pp=2, dp=2, microbatches=3)


@pytest.mark.parametrize("model", ["gpt2-tiny", "qwen3-tiny"])
def test_tied_weights_on_the_only_rank(nursery: Nursery, model: str) -> None:
    proven(nursery, model=model, schedule="interleaved", pp=1, chunks=4, microbatches=3, split_backward=True)


@pytest.mark.parametrize("schedule", RUNS)
def test_dropout_and_transposed_weights(nursery: Nursery, schedule: str) -> None:
    """GPT-2: dropout of 0.1 in three places, a fused projection, biases, a tied head; every weight lies [in, out]."""
    proven(nursery, model="gpt2-tiny", schedule=schedule, pp=2, tp=2, microbatches=3)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", *BOTH_ENDS[:1]])
def test_a_models_own_attention(nursery: Nursery, schedule: str) -> None:
    proven(nursery, model="llama-tiny", schedule=schedule, pp=2, microbatches=3, attention="own")


@pytest.mark.parametrize("model", ["mixtral-tiny", "phi3-tiny"])
def test_experts_and_fused_projections_in_two_halves(nursery: Nursery, model: str) -> None:
    """A stack of experts is no linear layer: its gradients come with the backward of the inputs."""
    proven(nursery, model=model, schedule="zb-h1", pp=2, tp=2, microbatches=3)


# --- what is alive, kept and sent


def alive(changes: dict[str, Any]) -> list[int]:
    """Of every pp rank, the most forwards in a step whose backward of the input had not come."""
    plan = Plan(**{"model": "llama-tiny", "seq": 8, **changes})
    facts = read(plan.model).facts

    def main(world: World) -> int:
        counts = [0]
        backward = Pipeline._backward_input

        def forward_of(stage: Any) -> Any:
            right = stage.forward

            def forward(batch: Batch, received: Any) -> Any:
                counts.append(counts[-1] + 1)
                return right(batch, received)

            return forward

        def backward_input(self: Pipeline, stage: int, m: int) -> None:
            backward(self, stage, m)
            counts.append(counts[-1] - 1)

        Pipeline._backward_input = backward_input  # type: ignore[method-assign]
        run = build(plan, world)
        for stage in run.stages.values():
            stage.forward = forward_of(stage)  # type: ignore[method-assign]
        run.step(rows_of(random_batch(plan, facts.vocabulary), world))
        assert counts[-1] == 0
        return max(counts)

    return launch(main, plan)


@pytest.mark.parametrize("pp", [pytest.param(2, marks=pytest.mark.rest), 4])
@pytest.mark.parametrize("schedule", RUNS)
def test_live_microbatches_are_those_of_the_table(nursery: Nursery, tiny: Models, schedule: str, pp: int) -> None:
    m = 6 if runs(schedule=schedule, pp=pp, microbatches=6) else 1
    changes = {"model": tiny(num_hidden_layers=8), "schedule": schedule, "pp": pp, "microbatches": m, "batch": m}
    facts = read(changes["model"]).facts
    made = table(settled(Plan(**changes), facts), facts)
    assert nursery(alive, changes) == [live_microbatches(made, rank) for rank in range(pp)]


KEPT = [
    *({"schedule": name, "pp": pp, "microbatches": 4} for name in RUNS for pp in (2, 4)),
    *({"schedule": name, "pp": 2, "tp": 2, "microbatches": 4, "compute": "bf16"} for name in SPLIT),
    {"schedule": "interleaved", "pp": 2, "chunks": 4, "microbatches": 4, "split_backward": True},
    {"schedule": "1f1b", "pp": 1, "microbatches": 4, "split_backward": True},
    {"schedule": "zb-h1", "pp": 2, "tp": 2, "microbatches": 3, "loss_at": "first"},
]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=pytest.mark.rest if one["pp"] == 4 else (), id=str(one)) for one in KEPT if runs(**one)],
)
def test_what_is_kept_for_backward_is_as_predicted(nursery: Nursery, tiny: Models, layout: dict[str, Any]) -> None:
    """To the byte, what the two halves of a backward keep between them included."""
    model = tiny(num_hidden_layers=8)
    facts = read(model).facts
    plan = settled(Plan(**{"model": model, "batch": 8, "seq": 16, "steps": 2, **layout}), facts)
    measured = [MemoryBill(*row) for row in nursery(bills, model, layout)[0]]
    expected = memory(plan, facts)
    assert [bill.activations for bill in measured] == [bill.activations for bill in expected]
    assert [bill.held for bill in measured] == [bill.held for bill in expected]


@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        *((name, "llama-tiny") for name in RUNS),
        *(pytest.param(name, "qwen3-tiny", marks=() if name in OTHERS else pytest.mark.rest) for name in RUNS),
    ],
)
def test_bytes_are_as_predicted(nursery: Nursery, schedule: str, model: str) -> None:
    m = 4 if runs(schedule=schedule, pp=2, microbatches=4) else 1
    changes = {"schedule": schedule, "pp": 2, "dp": 2, "microbatches": m}
    facts = read(model).facts
    plan = settled(Plan(**{"model": model, "batch": 8, "seq": 16, **changes}), facts)
    expected = sorted(
        (r.rank, r.axis, r.why, r.operation, r.ranks, r.calls, r.payload) for r in traffic(plan, facts) if r.payload
    )
    rows = sorted(tuple(row) for mine, _ in nursery(ledger, model, changes) for row in mine)
    assert rows == expected
    # By hand: a message for each boundary between two ranks and each microbatch; none for a tied weight that is on one.
    boundaries = sum(here != there for here, there in pairwise(plan.placement))
    sent = [row for row in rows if row[2] == "activation" and row[3] == "send"]
    assert sum(row[5] for row in sent) == plan.dp * boundaries * m
    assert sum(row[6] for row in sent) == plan.dp * boundaries * 8 // plan.dp * 16 * facts.hidden * 4
    exchanged = {row[2] for row in rows} & {"tied gradient", "tied weight"}
    assert bool(exchanged) == (model == "qwen3-tiny" and plan.placement[0] != plan.placement[-1])


def leaving(schedule: str) -> list[list[list[Any]]]:
    """By rank, in order: ["B", stage] for each backward, ["dp", stage] for each sum of its gradients that begins."""
    plan = Plan(model="llama-tiny", dp=2, pp=2, schedule=schedule, microbatches=4, batch=8, seq=16)

    def main(world: World) -> Any:
        run, seen = build(plan, world), list[list[Any]]()
        sink, pipeline = run.sink, run.pipeline
        assert isinstance(sink, Buckets)
        start, backward = sink._start, pipeline._backward_input

        def started() -> None:
            seen.append(["dp", sink._stages[len(sink._handles)]])
            start()

        def back(stage: int, m: int) -> None:
            seen.append(["B", stage])
            backward(stage, m)

        sink._start, pipeline._backward_input = started, back  # type: ignore[method-assign]
        run.step(rows_of(random_batch(plan, 512), world))
        return seen

    return launch(main, plan)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_stages_gradients_leave_when_its_last_backward_is_done(nursery: Nursery, schedule: str) -> None:
    """Under the cool-down: those of a rank's later stage while its earlier one has backwards to come; no earlier stage's
    before its last."""
    for rank, seen in enumerate(nursery(leaving, schedule)):
        stages = {stage for _, stage in seen}
        for stage in stages:
            first = seen.index(["dp", stage])
            last = len(seen) - 1 - seen[::-1].index(["B", stage])
            # Inside the last backward at the earliest, and before anything else is computed.
            assert last < first, (rank, stage, seen)
            assert all(kind == "dp" for kind, _ in seen[last + 1 : first]), (rank, stage, seen)
        if len(stages) == 2:
            assert seen.index(["dp", max(stages)]) < len(seen) - 1 - seen[::-1].index(["B", min(stages)])
