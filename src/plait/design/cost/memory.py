"""The bytes that each rank holds in training, and what it keeps for backward at the fullest moment of a step.

    weights          elements of the slices that compute uses, e bytes each (fp32 4, bf16 and fp16 2)
    master weights   where compute is narrower: the optimizer's fp32 weights, 4 bytes an element
    gradients        buckets, a bytes an element (accumulate: fp32 4, bf16 2); where their sums over ranks are in another
                     type, r bytes an element more, which count as units
    state            AdamW's two moments, 8 bytes an element, and a counter of 4 bytes a tensor

With ZeRO on d dp ranks a unit of u elements, padded to d equal shares, has

    weights          u, with ZeRO-3 u / d
    gradients        u; where they leave each microbatch u / d, and two units whole
    state, masters   the rank's own stretches, together not more than u / d
    units            ZeRO-3: the slots of whole units (design/unit.py); pieces of gradients: two of the largest unit,
                     and two more in which they leave where their sums are in another type

What is frozen is weights and nothing else, whole with ZeRO-1 and -2, with ZeRO-3 in units of its own.

These equal what a run holds, to the byte; with the paper's types (`kept_of`) they are its table 1. Activations are what
each token leaves behind (`per_token.kept`), times the tokens of each microbatch, added up as the schedule has them alive
on the rank. Where backward is split, `deferred` lives on until the backward of the weights, and the gradient that a
stage gets (`arriving`) is kept while all its activations still are; so is, where the loss is in chunks, the chunk of
logits `at_work`. By how much the fullest moment of a step goes beyond that is peak.py's, with sequence parallelism
sequence.py's, which know no loss in chunks, no frozen weights, and no gradients in another type than fp32. Left out: the
masks of packed documents, the batch itself, what a kernel needs while it runs, what an allocator rounds up, and the
process (interpreter, libraries, CUDA's context).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..facts import ModelFacts
from ..per_token import Here, arriving, at_work, deferred, kept, replayed
from ..plan import Plan
from ..precision import ELEMENT, WIDE
from ..records import MemoryBill
from ..schedule import Schedule, lower
from ..schedule import peak as fullest
from ..sharding import Sharding, shard
from ..table import table
from ..unit import IN_FLIGHT, Unit, slot_sizes
from . import peak, sequence

COUNTER = 4
"""AdamW counts its updates in one fp32 number a tensor."""


def memory(plan: Plan, facts: ModelFacts) -> list[MemoryBill]:
    """One bill a rank."""
    sharding = shard(facts, plan)
    steps = _steps(plan, facts, sharding)
    return [_bill(plan, sharding, rank, *steps[_alike(sharding, rank)]) for rank in range(plan.world)]


def _alike(sharding: Sharding, rank: int) -> tuple[int, int]:
    """Ranks at one place of these axes compute the same, with tensors of the same shapes."""
    return sharding.mesh.index(rank, "pp"), sharding.mesh.index(rank, "tp")


def _steps(plan: Plan, facts: ModelFacts, sharding: Sharding) -> dict[tuple[int, int], tuple[int, int | None]]:
    """The most that a rank keeps for backward, and by how much the fullest moment of a step goes beyond it."""
    ranks = {_alike(sharding, rank): rank for rank in range(plan.world)}
    if not facts.heads:  # what the modules of a plain list keep is not known on paper
        return dict.fromkeys(ranks, (0, None))
    schedule = table(plan, facts)
    # As the pipeline carries it out.
    lowered = lower(replace(schedule, pairs=()))
    found: dict[tuple[int, int, float, tuple[tuple[int, ...], ...]], tuple[int, int | None]] = {}
    steps = {}
    for (place, tp), rank in ranks.items():
        here = Here(plan, facts, sharding, rank)
        # Places of tp with the same shapes, and with sp as many tokens, count once.
        held = tuple(here.shape(facts.by_name[one.name]) for one in sharding.at(place))
        shapes = place, here.rows, here.own, held
        if shapes not in found:
            found[shapes] = _step(here, schedule, lowered, place)
        steps[place, tp] = found[shapes]
    return steps


def _step(here: Here, schedule: Schedule, lowered: Schedule, place: int) -> tuple[int, int | None]:
    plan, sharding = here.plan, here.sharding
    tokens = [rows * plan.seq for rows in plan.microbatch_rows]

    @cache
    def rises(stage: int, m: int) -> peak.Rise:
        rise = sequence.rise if sharding.sp else peak.rise
        return rise(here.at(stage), stage, tokens[m], splits=schedule.splits)

    kept_ = _kept(here, schedule, place)
    plain = all(one.first.trains for one in sharding.parameters) and plan.dp_method == "ddp"
    if plan.chunks_loss or not plain or {plan.accumulates, plan.reduces} != {"fp32"}:
        return kept_, None
    tied = [one for one in sharding.at(place) if one.first.owner == place and len(set(one.first.places)) > 1]
    # The gradients of other stages' uses arrive when nothing else is there.
    arrived = max((one.elements(sharding.mesh, here.rank) for one in tied), default=0)
    most = max(peak.most(lowered, place, rises), arrived * ELEMENT[plan.accumulates])
    return kept_, max(0, most - kept_)


def _kept(here: Here, schedule: Schedule, place: int) -> int:
    plan, stages = here.plan, here.sharding.stages_at(place)
    forward = {stage: kept(here, stage) for stage in stages}
    later = {stage: deferred(here, stage) for stage in stages}
    again = {stage: replayed(here, stage, splits=schedule.splits) for stage in stages}
    tokens = [rows * plan.seq for rows in plan.microbatch_rows]
    # Whole, the loss of a microbatch is multiplied by one fp32 number. By the time that a block is computed again it is
    # gone, and so is the chunk at work where there are several.
    number = {stage: WIDE * (stage == plan.loss_stage and not plan.chunks_loss) for stage in stages}
    return round(fullest(
        schedule, place, forward=lambda stage, m: forward[stage] * tokens[m] + number[stage],
        deferred=lambda stage, m: later[stage] * tokens[m],
        arriving=lambda stage, m: max(
            arriving(here, stage) * tokens[m] if schedule.splits else 0,
            again[stage] * tokens[m] - number[stage],
            at_work(here, stage) * plan.tokens_at_once(tokens[m])[0],
        ),
    ))  # fmt: skip


def _bill(plan: Plan, sharding: Sharding, rank: int, activations: int, working: int | None) -> MemoryBill:
    place = sharding.mesh.coordinate(rank)["pp"]
    held = sharding.at(place)
    item, gradient = ELEMENT[plan.compute], ELEMENT[plan.accumulates]
    # A tied weight is used on both ends, and so is its bucket; its owner alone keeps state and master weight.
    used = sum(one.elements(sharding.mesh, rank) for one in held)
    trained = sum(one.elements(sharding.mesh, rank) for one in held if one.first.trains)
    # A master updates for all.
    updates = plan.dp_method == "ddp" or rank == 0
    owned = [one for one in held if one.first.owner == place and one.first.trains and updates]
    state = sum(one.elements(sharding.mesh, rank) for one in owned)
    weights, gradients = used * item, trained * gradient
    units = trained * ELEMENT[plan.reduces] if plan.reduces != plan.accumulates else 0
    if sharding.zero:
        ours, index = sharding.units(rank), sharding.mesh.index(rank, "shard")
        zero = plan.zero if plan.reduces_each_microbatch else min(plan.zero, 1)
        learn = [unit for unit in ours if unit.trains]
        weights = (kept_of(ours, plan.zero, index).weights + (used - trained) * (plan.zero < 3)) * item
        gradients = kept_of(learn, zero, index).gradients * gradient
        state = kept_of(learn, plan.zero, index, {one.name for one in owned}).state
        gradients += sum(slot_sizes(learn, kept=False).values()) * gradient * plan.reduces_each_microbatch
        units = _on_their_way(plan, ours, item)
    return MemoryBill(
        rank=rank,
        weights=weights,
        master_weights=state * WIDE if item < WIDE else 0,
        gradients=gradients,
        state=2 * state * WIDE + COUNTER * len(owned),
        activations=activations,
        units=units,
        working=working,
    )


@dataclass(frozen=True)
class Kept:
    """Elements that a rank keeps between steps: of the weights, of the gradients, of what the optimizer updates."""

    weights: int
    gradients: int
    state: int


def kept_of(units: Sequence[Unit], zero: int, index: int = 0, owned: Collection[str] | None = None) -> Kept:
    """What rank `index` of those that share `units` keeps of them with a stage of ZeRO, as the paper counts: whole units
    and shares with their padding, of the state the elements of `owned` parameters (None: all)."""
    whole, share = sum(unit.padded for unit in units), sum(unit.share for unit in units)
    stretches = [unit.stretch(name, index) for unit in units for name in unit.names if owned is None or name in owned]
    updated = sum(stop - start for start, stop in stretches)
    return Kept(share if zero >= 3 else whole, share if zero >= 2 else whole, updated if zero else whole)


def _on_their_way(plan: Plan, units: Sequence[Unit], item: int) -> int:
    """Bytes of what ZeRO moves units through: pieces of gradients, and with ZeRO-3 whole weights."""
    leaves, sizes = plan.reduces != plan.accumulates, [unit.padded for unit in units if unit.trains]
    pieces = min(IN_FLIGHT, len(sizes)) * max(sizes, default=0) * ELEMENT[plan.reduces] * (1 + leaves)
    slots = slot_sizes(units, kept=plan.keeps_gathered) if plan.zero >= 3 else {}
    return pieces + sum(slots.values()) * item
