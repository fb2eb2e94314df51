"""Puts a run together, in order. hf and parallel do not know each other; this page introduces them."""

from __future__ import annotations

import torch

from ...design.errors import PlanError
from ...design.plan import Plan, validate
from ...design.schedule import FORWARD_ONLY, Schedule, check, lower, make
from ...design.sharding import Parameter, Sharding, buckets, shard
from ...design.styles import style
from ..comm.world import Group, World
from ..hf.read import Model, read
from ..hf.stage_model import StageModel
from ..parallel import loss, tensor
from ..parallel.clock import Clock
from ..parallel.data import Buckets
from ..parallel.pipeline import Pipeline
from ..parallel.stage import Stage
from ..parallel.tied import TiedWeights
from .optimizer import Optimizer
from .step import Run

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(plan: Plan, world: World, *, model: Model | None = None, wide: bool = False, steps: int | None = None) -> Run:
    """The run of `plan` on this rank of `world`. `wide` computes and accumulates in fp64 whatever the plan says; `steps`
    is the run's length when the data decides it (the plan counts epochs)."""
    # What the model is made of, and whether the plan fits it: refused here, before anything is built.
    model = model or read(plan.model)
    validate(plan, model.facts)
    if plan.epochs and steps is None:
        raise PlanError(f"The plan counts epochs ({plan.epochs}): pass build(..., steps=batches.steps_total) as well.")
    dtype = torch.float64 if wide else COMPUTE[plan.compute]
    accumulate = torch.float64 if wide else torch.float32

    # Who holds what, and who does what when; the table is proven before it is used.
    sharding = shard(model.facts, plan)
    stage_index = world.coordinate["pp"]
    held = sharding.on_stage(stage_index)
    schedule = lower(make(plan.schedule, plan.pp, plan.microbatches), reduce=True)
    check(schedule)

    # The modules of this stage, without memory; then tp replaces forwards; then each module gets its slices.
    body = StageModel(model, sharding, world.rank, dtype, seed=plan.seed, attention=plan.attention)
    tp = world.group("tp")
    forget = _split_over_tp(model, body, sharding, world, tp)
    body.materialise(sharding, world.rank, plan.seed, world.device)
    parameters = body.parameters()

    # plait owns the loss: it reads the head's cut logits.
    last = stage_index == plan.pp - 1
    head = sharding.parameter(model.facts.head_weight.name)
    start = _first_row(head, world)
    over = tp if head.first.compute.cut_axes else world.alone
    stage = Stage(body.forward, (lambda x, y: loss.cross_entropy(x, y, over, start=start)) if last else None)

    # Gradients live in buckets, which are reduced while backward goes on.
    item = torch.empty((), dtype=accumulate).element_size()
    grouped = buckets(held, plan.mesh, world.rank, plan.bucket_bytes, item)
    groups = {one.first.summed_over: world.group(*one.first.summed_over) for one in held}
    sink = Buckets(grouped, parameters, groups, accumulate)

    # A tied weight has one owner; the optimizer updates what this rank owns; the pipeline carries out the table.
    tied = TiedWeights(held, world.group("pp"), sink.gradients, parameters)
    owned = tuple(one for one in held if one.first.owner == stage_index)
    optimizer = Optimizer(plan, owned, parameters, sink.gradients)
    clock = Clock(world.device)

    def pipeline(table: Schedule, clock: Clock) -> Pipeline:
        return Pipeline(
            table, stage, world.group("pp"), hidden=model.facts.hidden, dtype=dtype, device=world.device,
            clock=clock, sink=sink,
        )  # fmt: skip

    return Run(
        plan=plan, world=world, model=model, sharding=sharding, sink=sink, optimizer=optimizer, tied=tied, clock=clock,
        body=body, stage=stage, pipeline=pipeline(schedule, clock),
        forward=pipeline(_forwards(plan.pp, 1), Clock(world.device)),
        evaluation=pipeline(_forwards(plan.pp, plan.microbatches), Clock(world.device)), forget=forget, steps=steps,
    )  # fmt: skip


def _forwards(pp: int, microbatches: int) -> Schedule:
    """Samples take one microbatch, evaluation as many as a step."""
    table = lower(FORWARD_ONLY(pp, microbatches))
    check(table)
    return table


def _split_over_tp(
    model: Model, body: StageModel, sharding: Sharding, world: World, group: Group
) -> tensor.SharedInput:
    shared = tensor.SharedInput(group)
    if group.size == 1:
        return shared
    stage, done = world.coordinate["pp"], set[str]()
    for parameter in sharding.on_stage(stage):
        fact = model.facts.by_name[parameter.name]
        for place, name in parameter.first.uses:
            named = model.facts.styles[name]
            if place != stage or named is None or name in done:
                continue
            done.add(name)
            row = style(named, name)
            if row.enter == row.leave == "none":
                continue
            # The head's output stays cut: the loss reads it so.
            gather = name != model.facts.head
            # A Linear's output side is its first dim.
            transposed = len(fact.shape) == 2 and fact.cut == {"out": 1, "in": 0}.get(row.cuts)
            module = body.module.get_submodule(name)
            start = _first_row(parameter, world)
            tensor.split(module, row, group, shared, start=start, gather=gather, transposed=transposed)
    return shared


def _first_row(parameter: Parameter, world: World) -> int:
    spans = parameter.spans(world.mesh, world.rank)
    return spans[0][0] if spans else 0
