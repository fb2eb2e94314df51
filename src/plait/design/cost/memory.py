"""The bytes that each rank holds in training, and what it keeps for backward at the fullest moment of a step.

    weights          elements of the slices that compute uses, e bytes each (fp32 4, bf16 2)
    master weights   bf16 only: the optimizer's fp32 weights, 4 bytes an element
    gradients        fp32 buckets, 4 bytes an element
    state            AdamW's two moments, 8 bytes an element, and a counter of 4 bytes a tensor

With ZeRO on d dp ranks a unit of u elements, padded to d equal shares, has

    weights          u, with ZeRO-3 u / d
    gradients        u; where they leave each microbatch u / d, and two units whole
    state, masters   the rank's own stretches, together not more than u / d
    units            ZeRO-3: the slots of whole units (design/unit.py); pieces of gradients: two of the largest unit

What is frozen is weights and nothing else, whole with ZeRO-1 and -2, with ZeRO-3 in units of its own.

These equal what a run holds, to the byte. Activations are what each token leaves behind (`per_token.kept`), times the
tokens of each microbatch, added up as the schedule has them alive on the rank. Where backward is split, `deferred` lives
on until the backward of the weights, and the gradient that a stage gets (`arriving`) is kept while all its activations
still are. Left out: the masks of packed documents, tensors on their way between stages, what a kernel needs while it
runs, a bf16 gradient before it is added to its bucket, what an allocator rounds up, and the process itself (interpreter,
libraries, CUDA's context).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..facts import ModelFacts
from ..per_token import ELEMENT, WIDE, arriving, deferred, kept, replayed
from ..plan import Plan
from ..records import MemoryBill
from ..schedule import Schedule, peak
from ..sharding import Sharding, shard
from ..table import table
from ..unit import IN_FLIGHT, Unit, slot_sizes
from .traffic import GRADIENT_ELEMENT

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
    trained = sum(one.elements(sharding.mesh, rank) for one in held if one.first.trains)
    owned = [one for one in held if one.first.owner == place and one.first.trains]
    state = sum(one.elements(sharding.mesh, rank) for one in owned)
    stages = sharding.stages_at(place) if facts.heads else ()
    forward = {stage: kept(plan, facts, sharding, stage) for stage in stages}
    later = {stage: deferred(plan, facts, sharding, stage) for stage in stages}
    again = {stage: replayed(plan, facts, sharding, stage, splits=schedule.splits) for stage in stages}
    tokens = [rows * plan.seq for rows in plan.microbatch_rows]
    # The loss of a microbatch is multiplied by one fp32 number.
    # What the modules of a plain list keep is not known on paper.
    activations = 0 if not stages else peak(
        schedule, place, forward=lambda stage, m: forward[stage] * tokens[m] + WIDE * (stage == plan.loss_stage),
        deferred=lambda stage, m: later[stage] * tokens[m],
        # By the time that a block is computed again the loss's number is gone.
        arriving=lambda stage, m: max(
            arriving(plan, facts, stage) * tokens[m] if schedule.splits else 0,
            again[stage] * tokens[m] - WIDE * (stage == plan.loss_stage),
        ),
    )  # fmt: skip
    weights, gradients, units = used * item, trained * GRADIENT_ELEMENT, 0
    if sharding.zero:
        weights, gradients, units = _units(plan, sharding.units(rank), item)
        weights += (used - trained) * item if sharding.zero < 3 else 0
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
    trained = [unit for unit in units if unit.trains]
    largest = max((unit.padded for unit in trained), default=0)
    pieces = min(IN_FLIGHT, len(trained)) * largest * GRADIENT_ELEMENT
    gradients = whole = sum(unit.padded for unit in trained)
    if plan.reduces_each_microbatch:
        gradients = sum(unit.share for unit in trained) + sum(slot_sizes(trained, kept=False).values())
    if plan.zero < 3:
        return whole * item, gradients * GRADIENT_ELEMENT, pieces
    slots = sum(slot_sizes(units, kept=plan.keeps_gathered).values())
    return sum(unit.share for unit in units) * item, gradients * GRADIENT_ELEMENT, pieces + slots * item
