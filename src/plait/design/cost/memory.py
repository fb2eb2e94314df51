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

These equal what a run holds, to the byte. Activations are what each token leaves behind (`per_token.kept`), times the
tokens of each microbatch, added up as the schedule has them alive on the rank. Where backward is split, `deferred` lives
on until the backward of the weights, and the gradient that a stage gets (`arriving`) is kept while all its activations
still are; so is, where the loss is in chunks, the chunk of logits `at_work`. Left out: the masks of packed documents,
tensors on their way between stages, what a kernel needs while it runs, a gradient of compute before it is added to its
bucket, the fp32 gradient of the one tensor that is updated where they are kept in less, what an allocator rounds up, and
the process itself (interpreter, libraries, CUDA's context).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..facts import ModelFacts
from ..per_token import arriving, at_work, deferred, kept, replayed
from ..plan import Plan
from ..precision import ELEMENT, WIDE
from ..records import MemoryBill
from ..schedule import Schedule, peak
from ..sharding import Sharding, shard
from ..table import table
from ..unit import IN_FLIGHT, Unit, slot_sizes

COUNTER = 4
"""AdamW counts its updates in one fp32 number a tensor."""


def memory(plan: Plan, facts: ModelFacts) -> list[MemoryBill]:
    """One bill a rank."""
    sharding = shard(facts, plan)
    schedule = table(plan, facts)
    return [_bill(plan, facts, sharding, schedule, rank) for rank in range(plan.world)]


def _bill(plan: Plan, facts: ModelFacts, sharding: Sharding, schedule: Schedule, rank: int) -> MemoryBill:
    place = sharding.mesh.coordinate(rank)["pp"]
    held = sharding.at(place)
    item = ELEMENT[plan.compute]
    # A tied weight is used on both ends, and so is its bucket; its owner alone keeps state and master weight.
    used = sum(one.elements(sharding.mesh, rank) for one in held)
    owned = [one for one in held if one.first.owner == place]
    state = sum(one.elements(sharding.mesh, rank) for one in owned)
    stages = sharding.stages_at(place) if facts.heads else ()
    forward = {stage: kept(plan, facts, sharding, stage) for stage in stages}
    later = {stage: deferred(plan, facts, sharding, stage) for stage in stages}
    again = {stage: replayed(plan, facts, sharding, stage, splits=schedule.splits) for stage in stages}
    tokens = [rows * plan.seq for rows in plan.microbatch_rows]
    # Whole, the loss of a microbatch is multiplied by one fp32 number. By the time that a block is computed again it is
    # gone, and so is the chunk at work where there are several.
    number = {stage: WIDE * (stage == plan.loss_stage and not plan.chunks_loss) for stage in stages}
    # What the modules of a plain list keep is not known on paper.
    activations = 0 if not stages else peak(
        schedule, place, forward=lambda stage, m: forward[stage] * tokens[m] + number[stage],
        deferred=lambda stage, m: later[stage] * tokens[m],
        arriving=lambda stage, m: max(
            arriving(plan, facts, stage) * tokens[m] if schedule.splits else 0,
            again[stage] * tokens[m] - number[stage],
            at_work(plan, facts, stage) * plan.tokens_at_once(tokens[m])[0],
        ),
    )  # fmt: skip
    weights, gradients, units = used * item, used * ELEMENT[plan.accumulates], 0
    if plan.reduces != plan.accumulates:
        units = used * ELEMENT[plan.reduces]
    if sharding.zero:
        weights, gradients, units = _units(plan, sharding.units(rank), item)
        stretches = [sharding.stretch(one.name, "state", rank) or (0, 0) for one in owned]
        state = sum(stop - start for start, stop in stretches)
    return MemoryBill(
        rank=rank,
        weights=weights,
        master_weights=state * WIDE if item < WIDE else 0,
        gradients=gradients,
        state=2 * state * WIDE + COUNTER * len(owned),
        activations=int(activations),
        units=units,
    )


def _units(plan: Plan, units: Sequence[Unit], item: int) -> tuple[int, int, int]:
    """Bytes of weights and gradients, and of what ZeRO moves units through."""
    whole, shares = sum(unit.padded for unit in units), sum(unit.share for unit in units)
    item_of_gradients, leaves = ELEMENT[plan.accumulates], plan.reduces != plan.accumulates
    pieces = min(IN_FLIGHT, len(units)) * max(unit.padded for unit in units) * ELEMENT[plan.reduces] * (1 + leaves)
    gradients = whole
    if plan.reduces_each_microbatch:
        gradients = shares + sum(slot_sizes(units, kept=False).values())
    if plan.zero < 3:
        return whole * item, gradients * item_of_gradients, pieces
    slots = sum(slot_sizes(units, kept=plan.keeps_gathered).values())
    return shares * item, gradients * item_of_gradients, pieces + slots * item
