"""The bytes that each rank holds in training, and what it keeps for backward at the fullest moment of a step.

    weights          elements of the slices that compute uses, e bytes each (fp32 4, bf16 2)
    master weights   bf16 only: the optimizer's fp32 weights, 4 bytes an element
    gradients        fp32 buckets, 4 bytes an element
    state            AdamW's two moments, 8 bytes an element, and a counter of 4 bytes a tensor

These equal what a run holds, to the byte. Activations are counted by an inventory: every tensor that some backward needs,
once. Bytes per token of a microbatch, h hidden, a heads of D, t tp:

    norm        h (4 + 2 e) + 4        its fp32 input, the normalised and the scaled output, 1 / root mean square
    attention   (q + k + v + out) e / t + 4 a / t    outputs of q and k (rotated) and v, of attention, log-sum-exp
    gated MLP   4 f e / t              outputs of gate, up, the activation, and their product
    plain MLP   2 f e / t              the output before the activation and after it
    stage       2 D e                  cosines and sines of the positions
    embedding   9 where t > 1          the tokens' places among the own rows, and the mask of those that are elsewhere
    head, loss  4 V / t + 18           fp32 exponentials, their sum, the target and its two masks; last stage only

times the tokens of a microbatch, added up as the schedule has them alive on the rank. Where backward is split, what the
linear layers read and the gradients of what they gave (`deferred`) live on until the backward of the weights. After
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4, with the
log-sum-exp of flash attention in the place of its scores, and counted tensor by tensor as transformers' llama keeps
them: on a CPU, where every row is one document, the count is exact. Left out: the masks of packed documents, tensors on
their way between stages, what a kernel needs while it runs, a bf16 gradient before it is added to its bucket, what an
allocator rounds up, and the process itself (interpreter, libraries, CUDA's context).
"""

from __future__ import annotations

from itertools import groupby

from ..facts import ModelFacts, ParameterFact
from ..plan import Plan
from ..records import MemoryBill
from ..schedule import Schedule, peak
from ..sharding import Sharding, shard
from ..styles import STYLES
from .traffic import ELEMENT, GRADIENT_ELEMENT

WIDE = 4
"""Bytes of an element of master weights, of a moment, and of what a norm or the loss computes in fp32."""
COUNTER = 4
"""AdamW counts its updates in one fp32 number a tensor."""


def memory(plan: Plan, facts: ModelFacts) -> list[MemoryBill]:
    """One bill a rank."""
    sharding = shard(facts, plan)
    schedule = plan.table()
    return [_bill(plan, facts, sharding, schedule, rank) for rank in range(plan.world)]


def _bill(plan: Plan, facts: ModelFacts, sharding: Sharding, schedule: Schedule, rank: int) -> MemoryBill:
    place = sharding.mesh.coordinate(rank)["pp"]
    held = sharding.at(place)
    item = ELEMENT[plan.compute]
    # A tied weight is used on both ends, and so is its bucket; its owner alone keeps state and master weight.
    used = sum(one.elements(sharding.mesh, rank) for one in held)
    owned = [one for one in held if one.first.owner == place]
    state = sum(one.elements(sharding.mesh, rank) for one in owned)
    activations = peak(
        schedule, place, forward=lambda stage: kept(plan, facts, sharding, stage),
        deferred=lambda stage: deferred(plan, facts, sharding, stage),
    )  # fmt: skip
    return MemoryBill(
        rank=rank,
        weights=used * item,
        master_weights=state * WIDE if item < WIDE else 0,
        gradients=used * GRADIENT_ELEMENT,
        state=2 * state * WIDE + COUNTER * len(owned),
        activations=int(activations),
    )


def kept(plan: Plan, facts: ModelFacts, sharding: Sharding, stage: int) -> int:
    """Bytes that one microbatch leaves for backward on each rank of `stage`."""
    item, t = ELEMENT[plan.compute], plan.tp
    used = [facts.by_name[held.name] for held in sharding.on_stage(stage)]
    token = 2 * (facts.hidden // facts.heads) * item
    for block, ours in groupby(used, lambda fact: fact.block):
        weights = [fact for fact in ours if fact.tensor == "weight"]
        token += sum(facts.hidden * (WIDE + 2 * item) + WIDE for fact in weights if len(fact.shape) == 1)
        token += 9 * (t > 1) * sum(fact.style == "embedding_rowwise" for fact in weights)
        if block is not None:
            token += (_matrices(weights) * item + WIDE * facts.heads) // t
    last = stage == plan.stages - 1
    if last:
        token += WIDE * facts.vocabulary // t + 18
    # The loss of a microbatch is multiplied by one fp32 number.
    return token * plan.microbatch_rows * plan.seq + WIDE * last


def deferred(plan: Plan, facts: ModelFacts, sharding: Sharding, stage: int) -> int:
    """Bytes that one microbatch keeps on each rank of `stage` between the backward of its input and that of its weights:
    what every linear layer read, once, and the gradients of what each gave."""
    token = 0
    read: set[str] = set()
    for held in sharding.on_stage(stage):
        fact = facts.by_name[held.name]
        used = [module for place, module in held.first.uses if place == stage]
        # An embedding looks up: only blocks and the head multiply.
        if fact.tensor != "weight" or len(fact.shape) != 2 or (fact.block is None and facts.head not in used):
            continue
        cuts = STYLES[fact.style].cuts if fact.style in STYLES and fact.cut is not None else "none"
        transposed = fact.cut is not None and fact.cut == {"out": 1, "in": 0}.get(cuts)
        out, into = reversed(fact.shape) if transposed else fact.shape
        reads = fact.reads if fact.module in used else facts.head
        token += out // (plan.tp if cuts == "out" else 1)
        if reads not in read:
            read.add(reads)
            token += into // (plan.tp if cuts == "in" else 1)
    return token * plan.microbatch_rows * plan.seq * ELEMENT[plan.compute]


def _matrices(weights: list[ParameterFact]) -> int:
    """Elements a token that the matrices of one block leave behind: the outputs of those cut by rows, the inputs of those
    cut by columns; and where a gate multiplies, its activation's output."""
    found = 0
    outputs: dict[str, list[int]] = {}
    for fact in weights:
        if fact.cut is None or len(fact.shape) != 2 or fact.style not in STYLES:
            continue
        found += fact.shape[fact.cut]
        if STYLES[fact.style].cuts == "out":
            # Gate and up, apart or in one tensor.
            fused = [piece.length for piece in fact.pieces] if len(fact.pieces) == 2 else [fact.shape[fact.cut]]
            outputs.setdefault(fact.reads, []).extend(fused)
    return found + sum(sizes[0] for sizes in outputs.values() if len(sizes) == 2 and sizes[0] == sizes[1])
