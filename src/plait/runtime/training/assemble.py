"""Puts a run together, in order. hf and parallel do not know each other; this page introduces them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ...design.errors import PlanError
from ...design.part import Parameter
from ...design.plan import Plan, shape_after, stage_blocks
from ...design.rules import validate
from ...design.schedule import FORWARD_ONLY, Schedule, check, lower
from ...design.sharding import Sharding, buckets, shard
from ...design.table import settled, table
from .. import sequential
from ..comm.collectives import Handle
from ..comm.world import World
from ..hf.read import Model, read
from ..hf.stage_model import StageModel
from ..parallel import frozen, loss, tensor
from ..parallel.clock import Clock
from ..parallel.data import Buckets
from ..parallel.gathering import Gathering
from ..parallel.master import Master
from ..parallel.pipeline import Pipeline
from ..parallel.recompute import Recompute
from ..parallel.sequence import Tokens
from ..parallel.split_backward import WeightGradients
from ..parallel.stage import Stage
from ..parallel.tied import TiedWeights
from ..parallel.zero import Shares
from ..sequential import SequentialModel, SequentialStage
from . import layers
from .optimizer import Optimizer
from .step import Body, Run, Trained

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Types = tuple[torch.dtype, torch.dtype, torch.dtype]
"""Of compute, of the gradients, and of their sums over ranks."""


def build(
    plan: Plan, world: World, *, model: Model | nn.Sequential | None = None, wide: bool = False, steps: int | None = None
) -> Run:  # fmt: skip
    """The run of `plan` on this rank of `world`. `model` stands in the place of the plan's: a plain nn.Sequential is its
    own model and starts from its own weights, the same on every rank. `wide` computes and accumulates in fp64 whatever
    the plan says; `steps` is the run's length when the data decides it (the plan counts epochs)."""
    # What the model is made of, and whether the plan fits it: refused here, before anything is built.
    trained = model_of(plan, model, wide=wide)
    plan = settled(plan, trained.facts)
    if plan.epochs and steps is None:
        raise PlanError(f"The plan counts epochs ({plan.epochs}): pass build(..., steps=batches.steps_total) as well.")
    types = _types(plan, wide=wide)
    dtype = types[0]

    # Who holds what, and who does what when; the table is proven before it is used.
    sharding = shard(trained.facts, plan)
    place = world.coordinate["pp"]
    numbers = sharding.stages_at(place)
    trained_here = sharding.trained_at(place)
    computed = table(plan, trained.facts)
    # The two of a pair run one after the other here, so that what the first gives is sent before the second begins.
    schedule = lower(replace(computed, pairs=()), reduce=True)
    check(schedule)

    # The modules of each stage here, without memory; then each module gets its slices, where weights live: where they
    # are, or with ZeRO in units, of which dp ranks have shares, whole for as long as they are at work.
    soon = WeightGradients()
    shared = tensor.SharedInput(world.group("tp"), soon.pay)
    bodies, owed, parts, cut = _bodies(plan, trained, sharding, world, shared, soon, dtype, splits=computed.splits)
    gathering, shares = _shares(plan, sharding, world, types, parts, splits=computed.splits)
    kept: dict[str, nn.Parameter] = {}
    for body in bodies.values():
        home = None if shares is None else shares.home
        if isinstance(body, StageModel):
            body.materialise(sharding, world.rank, plan.seed, world.device, kept, home)
        else:
            body.materialise(world.device, kept, home)
    parameters = {name: parameter for body in bodies.values() for name, parameter in body.parameters().items()}

    # What is frozen wants no gradient, and where all that comes before is, backward ends.
    frozen.freeze(parameter for name, parameter in parameters.items() if not sharding.parameter(name).first.trains)
    for number, body in bodies.items():
        first = next((block for block in sorted(body.blocks) if sharding.reaches(number, block)), None)
        if first is not None:
            frozen.begin(body.blocks[first])

    # What backward computes again: around whatever was put into the modules before.
    recomputing = _recompute(plan, bodies)

    # plait owns the loss: it reads the head's cut logits, also where they are sent to a stage that has nothing else, or
    # makes them itself, some at a time.
    owned_loss = _loss(plan, trained, sharding, world, bodies, shared) if plan.loss_stage in numbers else None
    master = None
    if plan.dp_method == "master":
        master = Master(
            world.group("dp"), rows=plan.batch // plan.dp, seq=plan.seq, microbatches=plan.microbatches,
            weights=[parameters[one.name] for one in trained_here], device=world.device,
            loss=partial(loss.cross_entropy, group=world.alone, start=0, terms=_terms(plan, trained)),
        )  # fmt: skip
    stages = {
        number: Stage(
            bodies[number].forward if number in bodies else loss.only,
            (master or owned_loss) if number == plan.loss_stage else None,
            owed.get(number),
        )
        for number in numbers
    }  # fmt: skip

    # Where gradients go: to buckets, which are summed over dp while backward goes on, or to their units.
    sink: Buckets | Shares
    if shares is None:
        sink = _buckets(plan, trained_here, world, parameters, types, parts, None if master is None else master.sum)
    else:
        sink = shares
        shares.adopt(parameters)
        if gathering is not None:
            _gather_for(gathering, shares, sharding, world, bodies)
    chunked = [owned_loss] if isinstance(owned_loss, loss.ChunkedLoss) else []
    by_hand: list[WeightGradients | loss.ChunkedLoss] = [soon, *owed.values(), *chunked]
    for gradients in by_hand:
        gradients.adopt(sink.open, sink.ready)
    if chunked and gathering is not None:
        unit = sharding.unit_of(trained.facts.head_weight.name, world.rank)
        chunked[0].need = partial(gathering.need, unit)

    # A tied weight has one owner; the optimizer updates what this rank owns; the pipeline carries out the table.
    tied = TiedWeights(sharding.parameters, world.group("pp"), sink.gradients, sink.weights)
    updates = master is None or master.is_here
    owned = tuple(one for one in trained_here if one.first.owner == place and updates)
    optimizer = Optimizer(plan, owned, sink.weights, sink.gradients)
    clock = Clock(world.device)

    def pipeline(table: Schedule, clock: Clock) -> Pipeline:
        return Pipeline(
            table, stages, world.group("pp"), shape=_shapes(plan, trained, world),
            dtype=dtype, device=world.device, clock=clock, sink=sink,
        )  # fmt: skip

    return Run(
        plan=plan, world=world, model=trained, sharding=sharding, sink=sink, optimizer=optimizer, tied=tied, clock=clock,
        bodies=bodies, parameters=parameters, stages=stages, pipeline=pipeline(schedule, clock),
        forward=pipeline(_forwards(plan, 1), Clock(world.device)),
        evaluation=pipeline(_forwards(plan, plan.microbatches), Clock(world.device)), forget=[shared, *cut.values()],
        gathering=gathering, recomputing=recomputing, chunked=chunked[0] if chunked else None, master=master,
        steps=steps,
    )  # fmt: skip


def _shapes(plan: Plan, model: Trained, world: World) -> Callable[[int, int, int], Sequence[int]]:
    """Of what a stage gives to the next, for a microbatch of so many rows of so many tokens."""
    tp = world.coordinate["tp"]
    return lambda stage, rows, seq: shape_after(plan, model.facts, stage, rows=rows, seq=seq, tp=tp)


def _gather_for(
    gathering: Gathering, shares: Shares, sharding: Sharding, world: World, bodies: Mapping[int, Body]
) -> None:  # fmt: skip
    """Has every unit gathered when one of its modules runs: the block, or those that have its parameters."""
    place = world.coordinate["pp"]
    gathering.passed = shares.passed
    for unit, share in shares.stored:
        modules: list[nn.Module] = []
        for number in sharding.parameter(unit.names[0]).first.stages_at(place):
            # A stage may use a weight of a block that is another's.
            if unit.block in bodies[number].blocks:
                modules.append(bodies[number].blocks[unit.block])
                continue
            here = dict(bodies[number].module.named_modules())
            uses = [use for name in unit.names for use in sharding.parameter(name).first.uses]
            names = dict.fromkeys(module for stage, module in uses if stage == number)
            modules += [here[name] for name in names if name in here]
        gathering.attach(unit, share, modules)


def _types(plan: Plan, *, wide: bool) -> Types:
    if wide:
        return torch.float64, torch.float64, torch.float64
    return TYPES[plan.compute], TYPES[plan.accumulates], TYPES[plan.reduces]


def model_of(plan: Plan, model: Model | nn.Sequential | None, *, wide: bool = False) -> Trained:
    """The model that is trained, which the plan fits: the one given, or the plan's."""
    if isinstance(model, nn.Sequential):
        return sequential.read(model, plan, torch.float64 if wide else TYPES[plan.compute])
    model = model or read(plan.model, vocabulary=plan.vocabulary)
    validate(plan, model.facts)
    return model


def _body(plan: Plan, model: Trained, sharding: Sharding, world: World, stage: int, dtype: torch.dtype) -> Body:
    """The modules of a stage, without memory."""
    if isinstance(model, SequentialModel):
        return SequentialStage(model, *stage_blocks(plan, model.facts)[stage], dtype)
    return StageModel(
        model, sharding, world.rank, stage, dtype, seed=plan.seed, attention=plan.attention,
        stops=plan.chunks_loss and stage == plan.loss_stage,
        own=partial(layers.own_span, plan, model.facts, world.coordinate["tp"]),
    )  # fmt: skip


def _bodies(
    plan: Plan, model: Trained, sharding: Sharding, world: World, shared: tensor.SharedInput,
    soon: WeightGradients, dtype: torch.dtype, *, splits: bool,
) -> tuple[dict[int, Body], dict[int, WeightGradients], Counter[str], dict[int, Tokens]]:  # fmt: skip
    """The stages of this rank, where tp has replaced forwards, and split backward what linear layers do for their
    weights; what those owe; in how many parts each gradient comes; and with sp how rows are cut. A weight that two stages
    of this rank use is one."""
    bodies: dict[int, Body] = {}
    cut: dict[int, Tokens] = {}
    owed: dict[int, WeightGradients] = {}
    parts: Counter[str] = Counter()
    for number in (number for number in sharding.stages_at(world.coordinate["pp"]) if number < plan.stages):
        body = bodies[number] = _body(plan, model, sharding, world, number, dtype)
        if splits:
            owed[number] = WeightGradients()
        if sharding.sp:
            cut[number] = Tokens(world.group("tp"), partial(layers.own_tokens, plan, model.facts, body), soon.pay)
        ways = layers.Ways(owed.get(number), cut.get(number), shared, soon)
        later = layers.replace_forwards(plan, model, body, sharding, world, number, ways)
        if sharding.sp:
            layers.cut_rows(cut[number], model, body, sharding)
            if number == 0:
                cut[number].begin(body.blocks[0])
            if number == plan.stages - 1:
                cut[number].end(body.blocks[model.facts.blocks - 1])
        parts += layers.parts(plan, sharding, number, body, later)
    return bodies, owed, parts, cut


def _shares(
    plan: Plan, sharding: Sharding, world: World, types: Types, parts: Counter[str], *, splits: bool
) -> tuple[Gathering | None, Shares | None]:  # fmt: skip
    """ZeRO's homes of weights and gradients."""
    if not sharding.zero:
        return None, None
    units = sharding.units(world.rank)
    group = world.group("dp" if plan.replicas == 1 else "shard")
    gathering = None
    if sharding.zero == 3:
        gathering = Gathering(units, group, types[0], world.device, kept=plan.keeps_gathered)
    rest = {unit.rest: world.group(*unit.rest) for unit in units if unit.rest}
    return gathering, Shares(
        units, group, rest, types, world.device, parts, splits=splits, each=plan.reduces_each_microbatch,
        whole=None if gathering is None else gathering.place,
    )  # fmt: skip


def _terms(plan: Plan, model: Trained) -> loss.Terms:
    return loss.Terms(plan.label_smoothing, plan.z_loss, model.facts.vocabulary)


def _loss(
    plan: Plan, model: Trained, sharding: Sharding, world: World, bodies: Mapping[int, Body], shared: tensor.SharedInput
) -> loss.WholeLoss | loss.ChunkedLoss:  # fmt: skip
    start, over = 0, world.alone
    if plan.tp > 1:
        head = sharding.parameter(model.facts.head_weight.name)
        start, over = layers.first_row(head, world), world.group("tp") if head.first.compute.cut_axes else world.alone
    body = bodies.get(plan.loss_stage)
    if not plan.chunks_loss or not isinstance(body, StageModel):
        return loss.WholeLoss(over, start, _terms(plan, model))
    return loss.ChunkedLoss(
        body.module.get_submodule(model.facts.head), over, start, at_once=plan.tokens_at_once,
        after=body.after_head if body.after_head.steps else None, enter=shared if over.size > 1 else _as_it_is,
        terms=_terms(plan, model),
    )  # fmt: skip


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def _recompute(plan: Plan, bodies: Mapping[int, Body]) -> dict[int, Recompute]:
    """By stage, where the plan recomputes anything."""
    found = {}
    for number, body in bodies.items() if plan.recompute != "none" else ():
        found[number] = Recompute(body)
        for block, module in body.blocks.items():
            if plan.recomputes(block):
                inside = plan.recompute == "attention" and isinstance(body, StageModel)
                found[number].wrap(body.attention(block) if inside else module)  # type: ignore[union-attr]
    return found


def _buckets(
    plan: Plan, held: tuple[Parameter, ...], world: World, parameters: Mapping[str, nn.Parameter],
    types: Types, parts: Counter[str], summed: Callable[[Tensor, int], Handle] | None,
) -> Buckets:  # fmt: skip
    _, accumulate, reduce = types
    grouped = buckets(held, plan.mesh, world.rank, plan.bucket_bytes, reduce.itemsize)
    groups = {one.summed_over: world.group(*one.summed_over) for one in held}
    of_stage = [bucket[0].first.stages_at(world.coordinate["pp"])[0] for bucket in grouped]
    return Buckets(grouped, of_stage, parameters, groups, accumulate, reduce, parts, summed)


def _forwards(plan: Plan, microbatches: int) -> Schedule:
    """Samples take one microbatch, evaluation as many as a step."""
    table = lower(FORWARD_ONLY(plan.placement, microbatches))
    check(table)
    return table
