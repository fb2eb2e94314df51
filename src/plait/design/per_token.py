"""What one token costs on each stage, by the model's shapes: operations, and bytes that are kept for backward.

Operations of a token in rows of s tokens, over all tp ranks; E elements of what it is multiplied by, attention a wide:

    forward                     2 E + 2 a (s + 1)
    backward of the input       2 E + 4 a (s + 1)      attention has no weights: all its backward is of the input
    backward of the weights     2 E
    head, in chunks             all three in the backward of the input

The sum is what balance.py makes even; parted as in Qi et al., "Zero Bubble Pipeline Parallelism", 2023, table 1.

Bytes: every tensor that some backward needs, once; h hidden, a heads of D, t tp, e bytes of an element:

    norm        h (4 + 2 e) + 4        its fp32 input, the normalised and the scaled output, 1 / root mean square
    attention   (q + k + v + out) e / t + 4 a / t    outputs of q and k (rotated) and v, of attention, log-sum-exp
    gated MLP   4 f e / t              outputs of gate, up, the activation, and their product
    plain MLP   2 f e / t              the output before the activation and after it
    stage       2 D e                  cosines and sines of the positions
    embedding   9 where t > 1          the tokens' places among the own rows, and the mask of those that are elsewhere
    sp          norm, recomputed       of the own tokens; what column-parallel layers read is among them
    recomputed  h e                    the block's input, and nothing else (of attention: nothing but what norms keep)
    frozen      less: what a norm multiplies by its weight, what linear layers alone read; all where no gradient comes
    head, loss  4 V / t + 18           fp32 exponentials, their sum, the target and its two masks; 4 more with a
                                       z-loss, the sum's logarithm; where the loss is
                0                      in chunks: logits are made in backward (`at_work` while one chunk is)

Where backward is split, what the linear layers read and the gradients of what they gave (`deferred`) live on until the
backward of the weights. After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 4, with the log-sum-exp of flash attention in the place of its scores, and counted tensor by tensor as
transformers' llama keeps them: on a CPU, where every row is one document, the count is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby

from . import balance
from .facts import ModelFacts, ParameterFact
from .plan import Plan, stage_blocks, tokens_at, width_after
from .precision import ELEMENT, WIDE
from .sharding import Sharding
from .styles import STYLES


def operations(plan: Plan, facts: ModelFacts, sharding: Sharding, stage: int) -> tuple[int, int, int]:
    """(forward, backward of the input, backward of the weights) of one token on `stage`."""
    start, stop = stage_blocks(plan, facts)[stage]
    each_block = balance.products(facts)
    products, trained = 2 * sum(each_block[start:stop]), 2 * sum(balance.products(facts, plan.trains)[start:stop])
    each = 2 * balance.attention_width(facts) * (plan.seq + 1)
    attention = each * (stop - start)
    # Backward of the input runs a recomputed forward again; the head is not in it.
    head = 2 * facts.head_weight.elements if stop == facts.blocks else 0
    reached = [block for block in range(start, stop) if sharding.reaches(stage, block)]
    back = 2 * sum(each_block[block] for block in reached) + 2 * each * len(reached)
    # In chunks the head's three products are all made when backward begins.
    moved = head if plan.chunks_loss else 0
    learnt = moved * plan.trains(facts.head_weight)
    again = 0
    for block in reached:
        if plan.recomputes(block):
            inside = [fact for fact in facts.parameters if fact.block == block and in_attention(fact)]
            again += each
            if plan.recompute == "attention":
                again += 2 * sum(fact.elements for fact in inside if len(fact.shape) == 2)
            else:
                again += 2 * each_block[block] - (head if block == facts.blocks - 1 else 0)
    return products - moved + attention, back + moved + learnt + again, trained - learnt


@dataclass(frozen=True)
class Here:
    """A rank, and what it has of each tensor that tp cuts."""

    plan: Plan
    facts: ModelFacts
    sharding: Sharding
    rank: int

    def at(self, stage: int) -> Here:
        """The rank beside this one in the pipeline that has a stage."""
        mesh = self.sharding.mesh
        return replace(self, rank=mesh.rank(**{**mesh.coordinate(self.rank), "pp": self.sharding.placement[stage]}))

    def shape(self, fact: ParameterFact) -> tuple[int, ...]:
        return self.sharding.parameter(fact.name).local_shape(self.sharding.mesh, self.rank)

    def elements(self, fact: ParameterFact) -> int:
        return math.prod(self.shape(fact))

    def pieces(self, fact: ParameterFact) -> list[int]:
        """How long each piece of the dim is that tp cuts."""
        return [stop - start for start, stop in self.sharding.parameter(fact.name).spans(self.sharding.mesh, self.rank)]

    @property
    def own(self) -> float:
        """Which share of the tokens this rank has between the branches of blocks; a whole number where it has all."""
        if not self.sharding.sp:
            return 1
        own = tokens_at(self.plan, self.facts, self.plan.seq)[self.sharding.mesh.index(self.rank, "tp")]
        return own / self.plan.seq

    @property
    def heads(self) -> int:
        """Query heads."""
        start, stop = self.sharding.own_heads(self.rank)[0]
        return stop - start

    @property
    def rows(self) -> int:
        """Of the vocabulary, at the head."""
        return width_after(self.plan, self.facts, self.plan.stages - 1, tp=self.sharding.mesh.index(self.rank, "tp"))

    def gives(self, stage: int) -> int:
        """Elements a token of what a stage gives to the next."""
        return width_after(self.plan, self.facts, stage, tp=self.sharding.mesh.index(self.rank, "tp"))


def kept(here: Here, stage: int) -> float:
    """Bytes that one token leaves for backward on a rank of `stage`."""
    plan, facts, sharding = here.plan, here.facts, here.sharding
    item = ELEMENT[plan.compute]
    used = [facts.by_name[held.name] for held in sharding.on_stage(stage)]
    # The loss may be a stage without blocks, and backward need not come to any.
    turned = any(fact.block is not None and sharding.reaches(stage, fact.block) for fact in used)
    token: float = 2 * (facts.hidden // facts.heads) * item * turned
    token += sum(block_bytes(here, ours, reached=sharding.reaches(stage, b)) for b, ours in blocks_of(used))
    return token + _of_loss(here, stage)


def _of_loss(here: Here, stage: int) -> int:
    if stage != here.plan.loss_stage or here.plan.chunks_loss:
        return 0
    return WIDE * here.rows + 18 + WIDE * (here.plan.z_loss > 0)


def at_work(here: Here, stage: int) -> int:
    """Bytes of one token of a chunk of the loss while its logits are there: in fp32, and in another type of compute."""
    plan = here.plan
    if stage != plan.loss_stage or not plan.chunks_loss:
        return 0
    return (WIDE + ELEMENT[plan.compute] * (plan.compute != "fp32")) * here.rows


def replayed(here: Here, stage: int, *, splits: bool) -> float:
    """The most bytes a token by which a backward of `stage` goes beyond what it began with: with recomputation the inside
    of a block comes back when what was kept behind it is gone; where backward `splits`, what is owed may be more than
    what is gone."""
    plan, facts, sharding = here.plan, here.facts, here.sharding
    if plan.recompute == "none" and not splits:
        return 0
    item = ELEMENT[plan.compute]
    used = [facts.by_name[held.name] for held in sharding.on_stage(stage)]
    most: float = 0
    since: float = -_of_loss(here, stage)
    plain = without_recomputation(here)

    def owed_first(ours: list[ParameterFact]) -> int:
        """What the last matrix gave is whole rows, whose gradient it owes while all that is before it is kept."""
        last = [fact for fact in ours if fact.tensor == "weight" and len(fact.shape) == 2][-1:]
        return facts.hidden * item * (splits and any(map(plan.trains, last)))

    for block, ours in reversed(blocks_of(used)):
        reached = sharding.reaches(stage, block)
        held = block_bytes(here, ours, reached=reached)
        if not reached:
            continue
        if block is not None and (splits or plan.recomputes(block)):
            whole = block_bytes(plain, ours, reached=True)
            again = whole - held
            if plan.recompute == "full" and plan.recomputes(block):
                # In fp32 the norm's input is the block's, which is kept; with sp the first block takes a part of it.
                again = whole - (held if item == WIDE and (block or not sharding.sp) else 0)
                most = max(most, since + again + owed_first(ours))
            elif splits:
                most = max(most, since + owed_first(ours))
            attending = [fact for fact in ours if in_attention(fact)]
            rest = [fact for fact in ours if not in_attention(fact)]
            # By then the norm before attention is all that is left besides.
            first = (facts.hidden * (WIDE + 2 * item) + WIDE) * here.own
            gone = whole - matrices(plain, attending) * item - WIDE * here.heads - first
            owed = (deferred(here, stage, rest) if splits else 0) + owed_first(attending)
            most = max(most, since + again - gone + owed)
        since -= held
        if splits:
            since += deferred(here, stage, ours)
    return most


def blocks_of(used: list[ParameterFact]) -> list[tuple[int | None, list[ParameterFact]]]:
    return [(block, list(ours)) for block, ours in groupby(used, lambda fact: fact.block)]


def without_recomputation(here: Here) -> Here:
    return replace(here, plan=here.plan.model_copy(update={"recompute": "none", "recompute_every": 1}))


def block_bytes(here: Here, ours: list[ParameterFact], *, reached: bool) -> float:
    """What a block leaves, or what comes before or after the blocks; `reached` says whether its input has a gradient."""
    plan, facts = here.plan, here.facts
    item, block = ELEMENT[plan.compute], ours[0].block
    if block is None:
        return _of_an_end(plan, facts, ours, reached=reached)
    if not reached:
        return 0
    if plan.recompute == "full" and plan.recomputes(block):
        return facts.hidden * item * (here.own if block else 1)  # the first one reads whole rows
    weights = [fact for fact in ours if fact.tensor == "weight"]
    norms = [fact for fact in weights if len(fact.shape) == 1]
    token = len(norms) * (facts.hidden * (WIDE + 2 * item) + WIDE)
    scores = WIDE * here.heads
    if plan.recomputes(block):
        scores, weights = 0, [fact for fact in weights if not in_attention(fact)]
    # What nothing but the gradient of a frozen weight would read.
    unread = sum(not plan.trains(fact) for fact in norms)
    by_columns = [fact for fact in weights if _cut_by_columns(fact)]
    unread += len({fact.reads for fact in by_columns} - {fact.reads for fact in by_columns if plan.trains(fact)})
    return (token - unread * facts.hidden * item) * here.own + matrices(here, weights) * item + scores


def _of_an_end(plan: Plan, facts: ModelFacts, ours: list[ParameterFact], *, reached: bool) -> int:
    """What is before the blocks leaves, or after them."""
    item = ELEMENT[plan.compute]
    weights = [fact for fact in ours if fact.tensor == "weight"]
    trained = [fact for fact in weights if plan.trains(fact)]
    token = 9 * (plan.tp > 1) * sum(fact.style == "embedding_rowwise" for fact in trained)
    norms = [fact for fact in weights if len(fact.shape) == 1]
    if norms:  # one before the head, whose input it makes
        reads = plan.trains(facts.head_weight) or plan.chunks_loss
        token += len(norms) * (facts.hidden * WIDE + WIDE) * reached
        token += facts.hidden * item * (sum(fact in norms for fact in trained) + reads)
    return token


def _cut_by_columns(fact: ParameterFact) -> bool:
    return fact.cut is not None and len(fact.shape) == 2 and fact.style in STYLES and STYLES[fact.style].cuts == "out"


def _multiply(facts: ModelFacts, block: int) -> list[ParameterFact]:
    """The matrices of a block, in order."""
    return [f for f in facts.parameters if f.block == block and f.tensor == "weight" and len(f.shape) == 2]


def in_attention(fact: ParameterFact) -> bool:
    """Whether a parameter is inside its block's attention."""
    return any("attn" in name or "attention" in name for name in fact.module.split(".")[:-1])


def deferred(here: Here, stage: int, ours: list[ParameterFact] | None = None) -> float:
    """Bytes that one token keeps on each rank of `stage` between the backward of the input and that of the weights: what
    every linear layer read, once, and the gradients of what each gave; of `ours`, or all of the stage."""
    plan, facts, sharding = here.plan, here.facts, here.sharding
    names = {held.name for held in (sharding.on_stage(stage) if ours is None else ours)}
    token: float = 0
    read: set[str] = set()
    for held in sharding.on_stage(stage):
        if held.name not in names:
            continue
        fact = facts.by_name[held.name]
        used = [module for place, module in held.first.uses if place == stage]
        # An embedding looks up: only blocks and the head multiply. What is frozen is owed nothing.
        multiplies = fact.tensor == "weight" and len(fact.shape) == 2 and (fact.block is not None or facts.head in used)
        if not multiplies or not plan.trains(fact) or held.summed_early(sharding.mesh, here.rank)[1]:
            continue
        if plan.chunks_loss and facts.head in used:  # its weight's gradient is made with the logits, chunk by chunk
            continue
        cuts = STYLES[fact.style].cuts if fact.style in STYLES and fact.cut is not None else "none"
        transposed = fact.cut is not None and fact.cut == {"out": 1, "in": 0}.get(cuts)
        out, into = reversed(here.shape(fact)) if transposed else here.shape(fact)
        # q, k and v read one tensor, gate and up another; what is cut by columns reads one of its own.
        reads = fact.reads if fact.module in used and cuts == "out" else fact.name
        token += out
        if reads not in read:
            read.add(reads)
            # What whole rows were made of, in blocks.
            token += into * (here.own if cuts == "out" and fact.block is not None else 1)
    return token * ELEMENT[plan.compute]


def arriving(here: Here, stage: int) -> float:
    """Bytes a token of the gradient of what `stage` gave: where backward is split, its last linear layer keeps it. The
    stage with the loss gets none: it makes that of the logits in the place of its exponentials."""
    plan, facts = here.plan, here.facts
    if stage == plan.loss_stage:
        return 0
    last = (
        [facts.head_weight] if stage == plan.stages - 1 else _multiply(facts, stage_blocks(plan, facts)[stage][1] - 1)
    )
    if not plan.trains(last[-1]):
        return 0
    return (here.rows if stage == plan.stages - 1 else facts.hidden) * ELEMENT[plan.compute]


def matrices(here: Here, weights: list[ParameterFact]) -> int:
    """Elements a token that the matrices of one block leave behind: the outputs of those cut by rows, the inputs of those
    cut by columns; and where a gate multiplies, its activation's output."""
    found = 0
    outputs: dict[str, list[int]] = {}
    for fact in weights:
        if fact.cut is None or len(fact.shape) != 2 or fact.style not in STYLES:
            continue
        # Attention keeps what its way out reads; what that of the MLP reads is its weight's gradient's alone.
        if STYLES[fact.style].cuts == "out" or in_attention(fact) or here.plan.trains(fact):
            found += here.shape(fact)[fact.cut]
        if STYLES[fact.style].cuts == "out":
            # Gate and up, apart or in one tensor.
            fused = here.pieces(fact) if len(fact.pieces) == 2 else [here.shape(fact)[fact.cut]]
            outputs.setdefault(fact.reads, []).extend(fused)
    return found + sum(sizes[0] for sizes in outputs.values() if len(sizes) == 2 and sizes[0] == sizes[1])
