"""peak.py's numbers with sequence parallelism, where branches read whole rows that are there for them alone.

    own tokens -> gathered -> joined      in  ->  q k v, attention, o  ->  partial sum -> pieces, space -> own tokens
       h/t           h          h                   as without sp              h           h       h         h/t

What a stage goes through is walked tensor by tensor, forward from nothing and backward from all that it keeps: each is
added when an operation makes it and dropped when the last one that reads it is done. The fullest moments are

    forward          2 h joined and partial, 2 h pieces and their space, h/t the own tokens of their sum
    backward, MLP    the joined gradient, those on both sides of the gate; or the gradient of what was joined, its pieces,
                     their space, and the rows that are gathered again for the gradients of weights meanwhile
    halves           the rows that are gathered again; of what linear layers gave, gradients of whole rows wait for them

Rows that do not divide travel padded: t times the longest own part, and a copy of what is shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..facts import ModelFacts, ParameterFact
from ..per_token import Here, block_bytes, blocks_of, deferred, in_attention, kept, matrices, without_recomputation
from ..plan import Plan, shape_after, tokens_at
from ..precision import ELEMENT, WIDE
from .peak import SUMS, Rise, inside


class Level:
    """Bytes that are there, and the most there were."""

    def __init__(self) -> None:
        self.live = self.most = 0

    def add(self, *sizes: int) -> None:
        self.live += sum(sizes)
        self.most = max(self.most, self.live)

    def drop(self, *sizes: int) -> None:
        self.live -= sum(sizes)


@dataclass(frozen=True)
class Sizes:
    """Bytes of hidden states: of `whole` rows, of the `own` tokens; of what `travels` in a gather or a scatter, of one
    rank's `share` of it, and of the copy that is `padded`. `wide` is the own tokens' in fp32, `scales` their norm's. One
    row that divides is `in_order` as it travels."""

    item: int
    whole: int
    own: int
    travels: int
    share: int
    padded: int
    wide: int
    scales: int
    in_order: bool

    @property
    def pieces(self) -> int:
        """What is made of whole rows before they travel."""
        return 0 if self.in_order else self.travels

    @property
    def narrow(self) -> bool:
        return self.item < WIDE

    def gather(self, level: Level) -> None:
        level.add(self.padded, self.pieces)
        level.add(self.whole)
        level.drop(self.padded, self.pieces)

    def scatter(self, level: Level, partial: int) -> None:
        """Of a partial sum that nobody reads afterwards; leaves the own tokens."""
        level.add(self.pieces, self.share, self.travels)
        level.drop(self.pieces, self.travels, partial)

    def normed(self, level: Level) -> None:
        """What a norm keeps; in fp32 its input is there."""
        level.add(self.wide * self.narrow + 2 * self.own + self.scales)


@dataclass(frozen=True)
class Inside:
    """Of one block: bytes that its attention and its MLP keep, of queries, keys and values, of what the last matrix of
    the MLP reads, of the largest gradient of a matrix of each; and how many tensors a gate doubles."""

    attention: int
    heads: int
    queries: int
    mlp: int
    wide: int
    gated: bool
    largest: int
    largest_of_attention: int


def rise(here: Here, stage: int, tokens: int, *, splits: bool) -> Rise:
    plan, facts = here.plan, here.facts
    item, tp = ELEMENT[plan.compute], here.sharding.mesh.index(here.rank, "tp")
    used = [facts.by_name[held.name] for held in here.sharding.on_stage(stage)]
    sizes = _sizes(plan, facts, tp, tokens)
    most = max((here.elements(fact) for fact in used), default=0) * item
    of_blocks = max((here.elements(fact) for fact in used if fact.block is not None), default=0) * item
    given = math.prod(shape_after(plan, facts, stage, rows=tokens // plan.seq, seq=plan.seq, tp=tp))
    again = sizes.padded + sizes.pieces + sizes.whole if of_blocks else 0
    return Rise(
        kept=round(kept(here, stage) * tokens),
        deferred=round(deferred(here, stage) * tokens) if splits else 0,
        forward=_forward(here, used, stage, tokens, sizes),
        backward=_backward(here, used, stage, tokens, sizes, splits=splits),
        weights=max(again, *((most, sizes.whole + of_blocks) if sizes.narrow else (0,))),
        message=given * item if stage < plan.loss_stage else 0,
        apart=not used or (sizes.narrow and not (plan.recompute == "full" and plan.recomputes(used[0].block))),
    )


def _sizes(plan: Plan, facts: ModelFacts, tp: int, tokens: int) -> Sizes:
    all_of_them, rows = tokens_at(plan, facts, plan.seq), tokens // plan.seq
    own, longest, item = all_of_them[tp], max(all_of_them), ELEMENT[plan.compute]
    share = facts.hidden * item * rows * longest
    return Sizes(
        item=item, whole=facts.hidden * item * tokens, own=facts.hidden * item * rows * own,
        travels=share * plan.tp, share=share, padded=share if own < longest else 0,
        wide=facts.hidden * WIDE * rows * own, scales=WIDE * rows * own,
        in_order=rows == 1 and plan.seq % plan.tp == 0,
    )  # fmt: skip


def _of_block(here: Here, ours: list[ParameterFact], tokens: int) -> Inside:
    item, plain = ELEMENT[here.plan.compute], without_recomputation(here)
    weights = [fact for fact in ours if fact.tensor == "weight"]
    attending = [fact for fact in weights if in_attention(fact)]
    rest = [fact for fact in weights if not in_attention(fact)]
    wide, gated, _ = inside(here, ours)
    made = [fact for fact in attending if len(fact.shape) == 2 and fact.cut == 0]
    queries = [here.elements(fact) // fact.shape[1] for fact in made]
    return Inside(
        attention=(matrices(plain, attending) * item + WIDE * here.heads) * tokens,
        heads=sum(queries) * item * tokens,
        queries=max(queries, default=0) * item * tokens,
        mlp=matrices(plain, rest) * item * tokens,
        wide=wide * item * tokens,
        gated=gated,
        largest=max((here.elements(fact) for fact in rest), default=0) * item,
        largest_of_attention=max((here.elements(fact) for fact in attending), default=0) * item,
    )


def _forward(here: Here, used: list[ParameterFact], stage: int, tokens: int, sizes: Sizes) -> int:
    plan, facts = here.plan, here.facts
    level, held = Level(), round(kept(here, stage) * tokens)
    blocks = [(block, ours) for block, ours in blocks_of(used) if block is not None]
    if blocks:
        level.add(2 * (facts.hidden // facts.heads) * sizes.item * tokens)  # cosines and sines
    if stage == 0:
        level.add(sizes.whole + 9 * tokens)  # the embedding's, there until the last block is done
        level.add(sizes.own)
    elif not sizes.narrow:
        level.add(sizes.own)
    for number, (block, ours) in enumerate(blocks):
        received = sizes.narrow and number == 0 and stage > 0  # and counted as a message
        full = plan.recompute == "full" and plan.recomputes(block)
        one = _of_block(here, ours, tokens)
        if full:
            _without_graph(level, one, sizes)
            level.drop(sizes.own * (block == 0))  # it keeps whole rows
        else:
            _through(level, one, sizes, keeps_attention=not plan.recomputes(block))
            level.drop(sizes.own * (sizes.narrow and not received))
    most = level.most
    if stage == plan.stages - 1 and blocks:
        sizes.gather(level)
        row = sizes.whole // sizes.item * (WIDE * sizes.narrow + 2 * sizes.item)
        level.drop(sizes.own)
        level.add(row)
        most = level.most
    if stage == plan.loss_stage:
        row = here.rows
        logits = row * sizes.item if used else 0
        most = max(most, held + (logits + (row * WIDE if sizes.narrow else 0) + SUMS) * tokens)
    return max(0, most - held)


def _through(level: Level, one: Inside, sizes: Sizes, *, keeps_attention: bool) -> None:
    """A block forward: from its input, which stays, to what it gives."""
    sizes.normed(level)
    sizes.gather(level)
    level.add(one.attention)
    level.add(sizes.whole)
    sizes.scatter(level, sizes.whole)
    level.drop(sizes.whole, 0 if keeps_attention else one.attention)
    level.add(sizes.own)
    level.drop(sizes.share)
    sizes.normed(level)
    sizes.gather(level)
    level.add(one.mlp)
    level.add(sizes.whole)
    sizes.scatter(level, sizes.whole)
    level.drop(sizes.whole)
    level.add(sizes.own)
    level.drop(sizes.share, sizes.own * sizes.narrow)  # the sum after attention; in fp32 a norm keeps it


def _without_graph(level: Level, one: Inside, sizes: Sizes) -> None:
    """The same where nothing is kept: of each branch what its last matrix reads and what that was made of."""
    level.add(sizes.own)  # normed
    sizes.gather(level)
    level.add(one.attention)
    level.add(sizes.whole)
    sizes.scatter(level, sizes.whole)
    level.drop(sizes.whole, one.attention, sizes.own, sizes.share)
    level.add(sizes.own, sizes.own)  # the sum after attention; normed
    sizes.gather(level)
    level.add((1 + 2 * one.gated) * one.wide)
    level.drop(2 * one.gated * one.wide)
    level.add(sizes.whole)
    sizes.scatter(level, sizes.whole)
    level.drop(sizes.whole, one.wide)
    level.add(sizes.own)
    level.drop(sizes.share, sizes.own, sizes.own)


def _backward(
    here: Here, used: list[ParameterFact], stage: int, tokens: int, sizes: Sizes, *, splits: bool
) -> int:  # fmt: skip
    plan, level = here.plan, Level()
    arrived = stage < plan.stages - 1  # the gradient of what it gave is whoever's calls
    gradient = sizes.own
    if stage == plan.loss_stage or not arrived:
        _of_the_end(level, here, stage, tokens, sizes, splits=splits)
        gradient = sizes.whole
    plain = without_recomputation(here)
    for block, ours in reversed(blocks_of(used)):
        if block is None:
            continue
        one, before = _of_block(here, ours, tokens), level.live
        held = round(block_bytes(here, ours, reached=True) * tokens)
        full, stays = plan.recompute == "full" and plan.recomputes(block), arrived
        last = gradient == sizes.whole
        if full:
            stays = True
            again = round(block_bytes(plain, ours, reached=True) * tokens)
            again -= 0 if sizes.narrow or block == 0 else held
            level.add(again)
            level.add(sizes.own * sizes.narrow, 2 * sizes.whole)
            sizes.scatter(level, 2 * sizes.whole)
            level.drop(sizes.own * sizes.narrow, sizes.share)
            level.add(sizes.whole if last else sizes.own)
        _mlp_back(level, one, sizes, splits=splits)
        _norm_back(level, sizes, sizes.share, 0 if stays else gradient)
        replays = plan.recompute == "attention" and plan.recomputes(block)
        if replays:
            _replay_attention(level, one, sizes)
        _attention_back(level, one, sizes, splits=splits)
        level.drop(sizes.share * replays)
        _norm_back(level, sizes, sizes.share, sizes.own)
        owed = round(deferred(here, stage, ours) * tokens) if splits else 0
        level.live = before - held + owed + sizes.own - (0 if arrived else gradient)
        arrived, gradient = False, sizes.own
    if stage == 0:
        sizes.gather(level)
        looked_up = [fact for fact in used if fact.block is None and not fact.after_blocks and len(fact.shape) == 2]
        level.drop(sizes.own)
        level.add(sizes.whole)
        level.drop(sizes.whole)
        level.add(max((here.elements(fact) for fact in looked_up), default=0) * sizes.item)
    return level.most


def _of_the_end(level: Level, here: Here, stage: int, tokens: int, sizes: Sizes, *, splits: bool) -> None:
    """The loss, the head and the norm before it, of whole rows."""
    plan, facts = here.plan, here.facts
    row, whole = here.rows * tokens, sizes.whole
    if stage == plan.loss_stage and sizes.narrow:
        level.add(row * sizes.item)
        level.drop(row * WIDE)  # what the gradient of the logits was made of
    if stage < plan.stages - 1 or facts.head_weight.block is not None:
        return
    level.add(whole, whole)  # and its sum over tp
    weight = 0 if splits or not sizes.narrow else here.elements(facts.head_weight) * sizes.item
    level.add(weight)
    level.drop(weight, whole)
    if stage == plan.loss_stage:
        level.drop(18 * tokens + (0 if splits else row * sizes.item))
    wide = facts.hidden * WIDE * tokens
    # What the head read is there until the next forward.
    ended = Sizes(sizes.item, whole, whole, 0, whole, 0, wide, WIDE * tokens, in_order=True)
    _norm_back(level, ended, whole, 0)


def _mlp_back(level: Level, one: Inside, sizes: Sizes, *, splits: bool) -> None:
    """The gradient of what the MLP gave is there and stays; leaves that of its own tokens."""
    sizes.gather(level)
    _last_matrix(level, one.wide, one.largest, sizes, splits=splits, reads=one.wide)
    level.add((1 + one.gated) * one.wide)
    level.drop(one.wide, (1 + one.gated) * one.wide)
    level.add(sizes.whole)
    if one.gated:
        level.add(one.wide)
        level.drop(one.wide, one.wide)
        level.add(sizes.whole, sizes.whole)
        level.drop(sizes.whole, sizes.whole)
    _scatter_gradient(level, sizes, one.largest, (1 + one.gated) * one.wide, splits=splits)


def _attention_back(level: Level, one: Inside, sizes: Sizes, *, splits: bool) -> None:
    sizes.gather(level)
    _last_matrix(level, one.queries, one.largest_of_attention, sizes, splits=splits, reads=0)
    level.add(one.heads)
    level.drop(one.queries, one.attention - one.queries * splits)
    level.add(2 * one.queries)  # turned back
    level.drop(2 * one.queries)
    level.add(sizes.whole, sizes.whole, sizes.whole)
    level.drop(sizes.whole, sizes.whole)
    _scatter_gradient(level, sizes, one.largest_of_attention, one.heads, splits=splits)


def _last_matrix(level: Level, wide: int, weight: int, sizes: Sizes, *, splits: bool, reads: int) -> None:
    """Where backward is split its gradient waits, with what it read."""
    level.add(0 if splits else weight, wide)
    if not splits:
        level.drop(weight, sizes.whole, reads)


def _scatter_gradient(level: Level, sizes: Sizes, weight: int, gradients: int, *, splits: bool) -> None:
    """Of what was joined; meanwhile rows are gathered again, and the gradients of weights made."""
    level.add(sizes.pieces, sizes.share, sizes.travels)
    if splits:
        level.drop(sizes.travels)
    else:
        level.add(sizes.padded, sizes.pieces or sizes.whole)
        level.drop(sizes.travels)
        level.add(sizes.whole * (not sizes.in_order))
        level.drop(sizes.padded, sizes.pieces)
        level.add(weight * sizes.narrow)
        level.drop(weight * sizes.narrow, sizes.whole, gradients, sizes.own)
    level.drop(sizes.pieces, sizes.whole)


def _norm_back(level: Level, sizes: Sizes, arrived: int, beside: int) -> None:
    """`arrived` is the gradient of what the norm gave, `beside` that of what went past it, added to its input's."""
    wide, own = sizes.wide, sizes.own
    level.add(own, own)
    level.drop(own, arrived, own)
    if sizes.narrow:
        level.add(wide)
        level.drop(own)
    level.add(wide, wide)
    level.drop(wide, wide)
    if not sizes.narrow:
        level.add(wide * (beside > 0))
        level.drop(wide * (beside > 0), beside)
    level.add(4 * wide)
    level.drop(3 * wide, wide, sizes.scales)
    level.add(wide)
    level.drop(wide, wide)
    if sizes.narrow:
        level.add(own)
        level.drop(wide)
        level.add(own * (beside > 0))
        level.drop(own * (beside > 0), beside)


def _replay_attention(level: Level, one: Inside, sizes: Sizes) -> None:
    sizes.gather(level)
    level.add(one.attention)
    level.add(sizes.whole)
    sizes.scatter(level, sizes.whole)
    level.drop(sizes.whole)
