"""The table of a plan: who computes which microbatch when."""

from __future__ import annotations

from .balance import WORDS
from .errors import PlanError
from .facts import ModelFacts
from .per_token import Here, deferred, kept, operations
from .plan import Plan
from .schedule import (
    Schedule,
    Times,
    in_halves,
    make,
    method,
    peak,
    search,
    several_stages_each,
    shorter,
    with_loss_on_first,
)
from .sharding import shard


def settled(plan: Plan, facts: ModelFacts) -> Plan:
    """The plan of a run. Where the schedule is searched for and one with several stages on a rank is shorter than what is
    found, within the same limit, it is the plan with that one; else the plan itself. Pure, as all here."""
    if not method(plan.schedule).searched or plan.balance not in WORDS:
        return plan
    refuse_search(plan, facts)
    times = estimate(plan, facts)
    best, table_, limit = plan, searched(plan, times), memory_limit(plan, times)
    for name, chunks in several_stages_each(plan.pp, plan.microbatches):
        other = plan.model_copy(update={"schedule": name, "chunks": chunks, "schedule_limit": 1.0})
        if other.stages > facts.blocks:
            continue
        made, costs = make(name, plan.pp, plan.microbatches, chunks), estimate(other, facts)
        if shorter(table_, times, made, costs, limit):
            best, table_, times = other, made, costs
    return best


def table(plan: Plan, facts: ModelFacts) -> Schedule:
    """Computation only. Pure: every rank makes the same one."""
    if method(plan.schedule).searched:
        refuse_search(plan, facts)
        found = searched(plan, estimate(plan, facts))
    else:
        found = make(plan.schedule, plan.pp, plan.microbatches, plan.chunks)
    found = in_halves(found) if plan.split_backward else found
    return with_loss_on_first(found) if plan.loss_at == "first" else found


def searched(plan: Plan, times: Times) -> Schedule:
    """The shortest that is found where no rank keeps more than the plan's limit."""
    limit = memory_limit(plan, times)
    most, least = limit / plan.schedule_limit, max(times.activation)
    if limit < least:
        enough = -int(-1000 * least // most) / 1000  # upwards
        raise PlanError(
            f"schedule_limit {plan.schedule_limit:g} of the {most / 1e6:,.3f} MB that 1f1b's fullest rank keeps is less "
            f"than the {least / 1e6:,.3f} MB of one microbatch: set schedule_limit {enough:g} or more."
        )
    return search(plan.pp, plan.microbatches, times, limit)


def refuse_search(plan: Plan, facts: ModelFacts) -> None:
    """Raises a `PlanError` where the schedule is searched for and the model is a plain list."""
    if not facts.heads and method(plan.schedule).searched:
        raise PlanError(
            f"schedule {plan.schedule} is searched for with what a transformer's blocks compute, not a plain list's: use "
            "zb-h1 or 1f1b."
        )


def memory_limit(plan: Plan, times: Times) -> float:
    """Bytes of activations that a rank may keep: the plan's multiple of what 1f1b's fullest rank keeps."""
    plain = make("1f1b", plan.pp, plan.microbatches)
    return plan.schedule_limit * max(
        peak(plain, rank, forward=lambda stage, _: times.activation[stage], deferred=lambda stage, _: 0)
        for rank in range(plan.pp)
    )


def estimate(plan: Plan, facts: ModelFacts) -> Times:
    """What the largest microbatch costs on each stage, in operations and bytes. What is sent takes no time here: how much
    it takes is the machine's, and a plan knows none."""
    sharding, stages = shard(facts, plan), range(plan.stages)
    tokens = plan.microbatch_rows[0] * plan.seq
    # The first place of tp has as much as any.
    seats = [Here(plan, facts, sharding, sharding.mesh.rank(pp=sharding.placement[stage])) for stage in stages]
    forward, backward, weight = zip(*(operations(plan, facts, sharding, stage) for stage in stages), strict=True)
    return Times(
        tuple(tokens * count for count in forward),
        tuple(tokens * count for count in backward),
        tuple(tokens * count for count in weight),
        tuple(tokens * kept(seats[stage], stage) for stage in stages),
        tuple(tokens * deferred(seats[stage], stage) for stage in stages),
    )
