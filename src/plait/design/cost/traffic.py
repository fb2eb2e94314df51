"""The bytes that a step moves, per rank, axis and reason: what the ledger of a run must show, to the byte.

Symbols: b rows of a microbatch (their mean: m b are the rows of a dp rank), s tokens of a row, h hidden size, m
microbatches, e bytes of an element of compute.

    tp   each block        forward 2 sums, backward 2 sums, of b s h e each, m times
                           (more, and as wide as their layers, where a plan gathers, or has experts or latent attention)
         recomputed blocks their forward's sums once more
         embedding, head   one sum forward, one backward, of b s h e
         loss              two sums of b s (the maximum), 2 b s (sum of exponentials, target's logit; with label
                           smoothing the mean of all logits besides), in fp32; in chunks as many calls more, and not
                           a byte
    pp   each boundary     b s h e forward and as much backward, m times (b s V / t e before a loss that is elsewhere)
    dp   each stage        its gradients, once a step, in the type of their sums (what works on heads: over dp.tp)
         with a master     logits, gradients to the first rank; rows, gradients of logits, weights from it
         with ZeRO         each unit's gradients scattered in sums, its weights gathered (unit.py), the padding counted
    pp   a tied weight     its gradient, as it is kept, to the stage that owns it, the new weight back, once a step
    all  the count of target tokens, then the loss with the squared gradient norm
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from ..facts import ModelFacts, ParameterFact
from ..per_token import in_attention
from ..plan import Plan, shape_after, stage_blocks, tokens_at
from ..precision import ELEMENT, WIDE
from ..records import WORLD, Traffic
from ..schedule import Schedule
from ..sharding import Sharding, buckets, needed, shard
from ..styles import style
from ..table import table
from ..unit import gathers

ROUTING = "routing weights' gradient"


def traffic(plan: Plan, facts: ModelFacts, *, wide: bool = False) -> list[Traffic]:
    """One row per (rank, axis, why, operation) for one step; `wide` counts fp64 throughout, as the checker runs."""
    compute = 8 if wide else ELEMENT[plan.compute]
    loss = 8 if wide else WIDE
    accumulate, reduce = (8, 8) if wide else (ELEMENT[plan.accumulates], ELEMENT[plan.reduces])
    sharding = shard(facts, plan)
    schedule = table(plan, facts) if sharding.zero == 3 else None
    rows: list[Traffic] = []
    for rank in range(plan.world):
        rows += _tensor(plan, facts, sharding, rank, compute, loss)
        rows += _pipeline(plan, facts, rank, compute)
        if plan.dp_method == "master":
            rows += _through_the_first(plan, facts, sharding, rank, compute, accumulate, loss)
        else:
            rows += _data(plan, sharding, schedule, rank, compute, accumulate, reduce)
        if plan.world > 1:
            rows.append(Traffic(rank, WORLD, "target tokens", "all_reduce", plan.world, 1, 8))
            rows.append(Traffic(rank, WORLD, "loss and gradient norm", "all_reduce", plan.world, 1, 16))
    return rows


def _tensor(plan: Plan, facts: ModelFacts, sharding: Sharding, rank: int, compute: int, loss: int) -> Iterator[Traffic]:
    if plan.tp == 1:
        return
    place = plan.mesh.coordinate(rank)["pp"]
    # All of a step's, over its microbatches.
    tokens = sum(plan.microbatch_rows) * plan.seq
    if sharding.sp:
        yield from _sequence(plan, facts, sharding, rank, compute)
    widths: dict[tuple[str, str], list[int]] = defaultdict(list)
    # A stage reads its inputs and writes its outputs by itself, also where another is on the same rank.
    for stage in sharding.stages_at(place):
        for call, width in _of_modules(plan, facts, sharding, stage):
            widths[call].append(width)
    for (why, operation), found in widths.items():
        item = loss if why == ROUTING else compute
        yield Traffic(rank, "tp", why, operation, plan.tp, plan.microbatches * len(found), tokens * sum(found) * item)
    yield from _copies(plan, sharding, rank, compute)
    if plan.placement[-1] == place and facts.head_weight.cut is not None:
        calls = sum(len(plan.tokens_at_once(rows * plan.seq)) for rows in plan.microbatch_rows)
        for why, numbers in (("loss: maximum", tokens), ("loss: sums", (2 + (plan.label_smoothing > 0)) * tokens)):
            yield Traffic(rank, "tp", why, "all_reduce", plan.tp, calls, numbers * loss)


def _of_modules(
    plan: Plan, facts: ModelFacts, sharding: Sharding, stage: int
) -> Iterator[tuple[tuple[str, str], int]]:  # fmt: skip
    """What each module of a stage moves for a microbatch, as (why, operation), and how wide it is."""
    read: set[tuple[str, bool]] = set()
    for module, fact, reads, reached in _modules(facts, sharding, stage):
        name = facts.styles[module]
        if name is None:
            continue
        row = style(name, module)
        again = _recomputed(plan, fact)
        times = 1 + (reached and again)
        branch = sharding.sp and fact.block is not None  # whose sums and inputs _sequence counts
        if row.leave == "sum" and not branch:
            yield from ((("row-parallel output", "all_reduce"), fact.width_across) for _ in range(times))
        if row.leave == "gather" and module != facts.head:  # whose output the loss reads cut
            yield from ((("column-parallel output", "all_gather"), _gathered(sharding, fact)) for _ in range(times))
        if not reached:
            continue
        # q, k and v read one input: its gradient is summed once. Attention that runs again reads it by itself.
        once = (reads, again and plan.recompute == "attention")
        if row.enter == "copy" and once not in read and not branch:
            read.add(once)
            yield ("column-parallel input gradient", "all_reduce"), fact.width_across
        if row.enter == "slice":
            yield ("row-parallel input gradient", "all_gather"), _gathered(sharding, fact)
        if row.leave == "turned":
            yield ("shared keys' gradient", "all_reduce"), facts.shared_keys
        if row.cuts == "both":
            yield (ROUTING, "all_reduce"), facts.experts_per_token


def _gathered(sharding: Sharding, fact: ParameterFact) -> int:
    """How wide the slices are together that are gathered of what a parameter cuts: each as wide as the widest."""
    sizes = sharding.slices(fact.name)
    return max(sizes) * len(sizes)


def _sequence(plan: Plan, facts: ModelFacts, sharding: Sharding, rank: int, compute: int) -> Iterator[Traffic]:
    """With sp, of each branch of a block: its input gathered and its output scattered in the sum, forward; backward the
    same the other way round, and what the branch read gathered once more for the gradients of its weights. On the first
    stage the gradient of what comes before the blocks is gathered, on the last what comes out of them."""
    calls: dict[tuple[str, str], int] = defaultdict(int)

    def count(why: str, operation: str, times: int) -> None:
        calls[why, operation] += times

    def early(name: str) -> bool:
        return bool(sharding.parameter(name).summed_early(plan.mesh, rank)[1])

    for stage in sharding.stages_at(plan.mesh.index(rank, "pp")):
        if stage >= plan.stages:
            continue
        start, stop = stage_blocks(plan, facts)[stage]
        for block in range(start, stop):
            reached = sharding.reaches(stage, block)
            for branch in facts.branches[block]:
                inside = [fact for fact in facts.parameters if fact.branch == branch]
                times = 1 + (reached and any(_recomputed(plan, fact) for fact in inside))
                count("own tokens to whole rows", "all_gather", times)
                count("partial sums to own tokens", "reduce_scatter", times)
                count("gradient of partial sums", "all_gather", reached)
                count("gradient of whole rows", "reduce_scatter", reached)
                by_columns = [f for f in inside if f.style is not None and style(f.style, f.module).cuts == "out"]
                # Of a fused tensor with copies autograd keeps all that it read.
                learns = any(
                    plan.trains(fact) and fact.tensor == "weight" and not early(fact.name) for fact in by_columns
                )
                count("whole rows for weight gradients", "all_gather", reached and learns)
        if stage == 0:
            count("gradient of own tokens", "all_gather", sharding.reaches(0, 0))
        if stage == plan.stages - 1:
            again = plan.recompute == "full" and plan.recomputes(facts.blocks - 1)
            again = again and sharding.reaches(stage, facts.blocks - 1)
            count("own tokens out of the blocks", "all_gather", 1 + again)
    longest = max(tokens_at(plan, facts, plan.seq)) * plan.tp
    payload = sum(plan.microbatch_rows) * longest * facts.hidden * compute
    for (why, operation), times in calls.items():
        if times:
            yield Traffic(rank, "tp", why, operation, plan.tp, times * plan.microbatches, times * payload)


def _copies(plan: Plan, sharding: Sharding, rank: int, compute: int) -> Iterator[Traffic]:
    """Gradients of keys and values in fused tensors, of which several ranks have copies."""
    calls: dict[tuple[str, ...], list[int]] = {}
    for one in sharding.trained_at(plan.mesh.index(rank, "pp")):
        axes, spans = one.summed_early(plan.mesh, rank)
        if spans:
            long = sum(stop - start for start, stop in one.spans(plan.mesh, rank))
            shared = sum(stop - start for start, stop in spans)
            calls.setdefault(axes, []).append(one.elements(plan.mesh, rank) // long * shared * compute)
    for axes, payloads in calls.items():
        m, why = plan.microbatches, "gradient of shared keys and values"
        ranks = plan.mesh.degree(*axes)
        yield Traffic(rank, ".".join(axes), why, "all_reduce", ranks, m * len(payloads), m * sum(payloads))


def _pipeline(plan: Plan, facts: ModelFacts, rank: int, compute: int) -> Iterator[Traffic]:
    """A message for each boundary of two stages that are not on one rank, and each microbatch."""
    place, tp, placement = plan.mesh.index(rank, "pp"), plan.mesh.index(rank, "tp"), plan.placement
    sizes = plan.microbatch_rows
    ahead = [stage for stage, (here, there) in enumerate(pairwise(placement)) if here == place != there]
    behind = [stage for stage, (here, there) in enumerate(pairwise(placement)) if there == place != here]
    for boundaries, send, receive in ((ahead, "activation", "gradient"), (behind, "gradient", "activation")):
        if boundaries:
            calls = plan.microbatches * len(boundaries)
            shapes = (shape_after(plan, facts, b, rows=rows, seq=plan.seq, tp=tp) for b in boundaries for rows in sizes)
            payload = sum(map(math.prod, shapes)) * compute
            yield Traffic(rank, "pp", send, "send", plan.pp, calls, payload)
            yield Traffic(rank, "pp", receive, "receive", plan.pp, calls, payload)


def _through_the_first(
    plan: Plan, facts: ModelFacts, sharding: Sharding, rank: int, compute: int, accumulate: int, loss: int
) -> Iterator[Traffic]:  # fmt: skip
    """What the first of the dp ranks and another say to each other; the first as often as there are others."""
    trained = sharding.trained_at(0)
    elements = sum(one.elements(plan.mesh, rank) for one in trained)
    calls = len(list(buckets(trained, plan.mesh, rank, plan.bucket_bytes, accumulate)))
    rows, m = plan.batch // plan.dp, plan.microbatches
    logits = rows * plan.seq * facts.vocabulary * compute
    times, first = (plan.dp - 1, True) if rank == 0 else (1, False)
    for why, from_first, count, payload in (
        ("batch", True, 5, rows * (4 * plan.seq + 1) * 8), ("outputs", False, m, logits), ("losses", True, m, m * loss),
        ("output gradients", True, m, logits), ("gradients", False, calls, elements * accumulate),
        ("weights", True, 1, elements * compute),
    ):  # fmt: skip
        operation = "send" if from_first == first else "receive"
        yield Traffic(rank, "dp", why, operation, plan.dp, times * count, times * payload)


def _recomputed(plan: Plan, fact: ParameterFact) -> bool:
    """Whether the module of a parameter goes forward again in backward."""
    return plan.recompute != "none" and plan.recomputes(fact.block) and (plan.recompute == "full" or in_attention(fact))


def _modules(facts: ModelFacts, sharding: Sharding, stage: int) -> Iterator[tuple[str, ParameterFact, str, bool]]:
    """Every module of a stage that has parameters, once, with its first, the name of what it reads, and whether that has
    a gradient; a tied weight on either end."""
    seen: set[str] = set()
    for parameter in sharding.on_stage(stage):
        fact = facts.by_name[parameter.name]
        for place, module in parameter.first.uses:
            if place != stage or module in seen:
                continue
            seen.add(module)
            reached = sharding.reaches(stage, fact.block)
            if module == facts.head:  # after the last norm
                others = (one for one in sharding.parameters if one.first.trains and one.name != parameter.name)
                reached = stage > 0 or any(module not in (use for _, use in one.first.uses) for one in others)
            yield module, fact, fact.reads if module == fact.module else module, reached


def _data(
    plan: Plan, sharding: Sharding, schedule: Schedule | None, rank: int, compute: int, accumulate: int, reduce: int
) -> Iterator[Traffic]:  # fmt: skip
    """Gradients summed over whatever cuts the work; then, of a tied weight, over the stages that use it."""
    mesh, place = plan.mesh, plan.mesh.coordinate(rank)
    parameters = sharding.trained_at(place["pp"])
    if sharding.zero:
        yield from _shares(plan, sharding, schedule, rank, compute, reduce)
    calls: dict[tuple[str, ...], list[int]] = {}
    for bucket in buckets(parameters, mesh, rank, plan.bucket_bytes, reduce) if not sharding.zero else ():
        calls.setdefault(bucket[0].summed_over, []).append(sum(p.elements(mesh, rank) for p in bucket) * reduce)
    for axes, payloads in calls.items():
        ranks = mesh.degree(*axes)
        if ranks > 1:
            yield Traffic(rank, ".".join(axes), "gradients", "all_reduce", ranks, len(payloads), sum(payloads))
    tied: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for parameter in parameters:
        others = set(parameter.first.places) - {parameter.first.owner}
        if not others:
            continue
        owns = place["pp"] == parameter.first.owner
        start, stop = sharding.stretch(parameter.name, "grad", rank) or (0, parameter.elements(mesh, rank))
        count, elements = len(others) if owns else 1, stop - start
        if not elements:  # a share may be empty
            continue
        for why, receives, size in (("tied gradient", owns, accumulate), ("tied weight", not owns, compute)):
            tied[why, "receive" if receives else "send"].append((count, count * elements * size))
    for (why, operation), counts in tied.items():
        yield Traffic(rank, "pp", why, operation, plan.pp, sum(c for c, _ in counts), sum(b for _, b in counts))


def _shares(
    plan: Plan, sharding: Sharding, schedule: Schedule | None, rank: int, compute: int, item: int
) -> Iterator[Traffic]:  # fmt: skip
    """What ZeRO moves: the sums of gradients, each rank's share to it; the updated shares to everyone, or with ZeRO-3
    those of every unit that a forward or backward of `schedule` needs and has not got."""
    units = sharding.trained_units(rank)
    axis, shares = ("dp" if plan.replicas == 1 else "shard"), plan.mesh.degree("shard")
    each = plan.microbatches if plan.reduces_each_microbatch else 1
    scattered = each * item * sum(unit.padded for unit in units)
    if units:
        yield Traffic(rank, axis, "gradients", "reduce_scatter", shares, each * len(units), scattered)
    for rest in dict.fromkeys(unit.rest for unit in units if unit.rest):
        summed = [unit.share for unit in units if unit.rest == rest]
        ranks = plan.mesh.degree(*rest)
        yield Traffic(rank, ".".join(rest), "gradients", "all_reduce", ranks, len(summed), item * sum(summed))
    moved = list(units)  # what is frozen is whole where no weights are cut
    if schedule is not None:
        row = schedule.rows[plan.mesh.coordinate(rank)["pp"]]
        moved = gathers(needed(sharding, rank, row), kept=plan.keeps_gathered)
    gathered = compute * sum(unit.padded for unit in moved)
    if moved:
        yield Traffic(rank, axis, "weights", "all_gather", shares, len(moved), gathered)
