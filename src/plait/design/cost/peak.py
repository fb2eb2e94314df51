"""The most bytes of a step that come on top of what a rank holds: what is kept for backward, and what is at work.

    actions of a rank      .. F ..........  B  ...........  F ..
    kept for backward      ▁▃▅▇▇▇▇▇▇▇▇▇▇▇▇▆▄▂▁
    at work                   ^ logits     ^ gradients inside a block, one gradient of a matrix

A rank's row of the schedule is walked with its messages, and each action has the most by which it goes beyond what is
kept before or after it. h hidden, f the inside of an MLP, V vocabulary, t tp, e bytes of an element, n tokens:

    forward with loss      (e V/t + 16) n         logits beside their exponentials; in bf16 + 4 V/t n for fp32
    forward without        2 h e n                the sum with the residual
    forward, recomputed    (3 f/t + 2 h) e n      the inside of the MLP, of which nothing stays
    backward, head         h e n + V h e/t        gradients of what it read and of its weight
    backward, block        2 f/t e n              of both sides of a gate; of the last matrix and what it read
    backward, embedding    V h e/t                the gradient of its weight
    message                h e n                  receives posted ahead, and what was sent until SENT more are

Where backward is split no gradient of a matrix is made in its first half, and what the last matrix read stays. Counted as
transformers' llama computes: within 5 % of what a dispatch mode sees (runtime/training/storages.py), mostly within 0.1 %.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..facts import ParameterFact
from ..per_token import Here, block_bytes, blocks_of, deferred, in_attention, kept, without_recomputation
from ..precision import ELEMENT, WIDE
from ..schedule import AHEAD, BACKWARDS, SENT, Action, Kind, Schedule
from ..styles import STYLES

SUMS = 16
"""Bytes a token of what the loss makes of a row of logits and does not keep."""
NORM = 5
"""Tensors in fp32, h a token, in the backward of a norm."""


@dataclass(frozen=True)
class Rise:
    """Bytes of one microbatch on one stage: kept from forward to backward, kept between the halves of a backward, and the
    most by which each action goes beyond them. `message` is what the stage gives to the next; `apart` says that what it
    received is there besides what it keeps."""

    kept: int
    deferred: int
    forward: int
    backward: int
    weights: int
    message: int
    apart: bool


def rise(here: Here, stage: int, tokens: int, *, splits: bool) -> Rise:
    plan, facts = here.plan, here.facts
    item = ELEMENT[plan.compute]
    used = [facts.by_name[held.name] for held in here.sharding.on_stage(stage)]
    most = max((here.elements(fact) for fact in used), default=0)
    return Rise(
        kept=round(kept(here, stage) * tokens),
        deferred=round(deferred(here, stage) * tokens) if splits else 0,
        forward=_forward(here, used, stage, tokens),
        backward=_backward(here, used, stage, tokens, splits=splits),
        weights=most * item if item < WIDE else 0,  # in fp32 products are added where they belong
        message=here.gives(stage) * item * tokens if stage < plan.loss_stage else 0,
        # In fp32 it is what the first norm keeps.
        apart=not used or (item < WIDE and not (plan.recompute == "full" and plan.recomputes(used[0].block))),
    )


def _forward(here: Here, used: list[ParameterFact], stage: int, tokens: int) -> int:
    plan, facts = here.plan, here.facts
    item, hidden = ELEMENT[plan.compute], facts.hidden * ELEMENT[plan.compute]
    if stage == plan.loss_stage:
        row = here.rows
        logits = row * item if used else 0  # a stage that has nothing but the loss got them as a message
        return (logits + (row * WIDE if item < WIDE else 0) + SUMS) * tokens
    most, later = 2 * hidden, 0
    for block, ours in reversed(blocks_of(used)):
        if plan.recompute == "full" and plan.recomputes(block):
            most = max(most, 3 * inside(here, ours)[0] * item + 2 * hidden - later)
        later += int(block_bytes(here, ours, reached=True))
    return most * tokens


def _backward(here: Here, used: list[ParameterFact], stage: int, tokens: int, *, splits: bool) -> int:
    """Walks the blocks from the last to the first; `since` is what the backward is above what it began with."""
    plan, facts = here.plan, here.facts
    item, hidden = ELEMENT[plan.compute], facts.hidden * ELEMENT[plan.compute] * tokens
    since = most = 0

    def gradient(fact: ParameterFact) -> int:
        return here.elements(fact) * item

    row = here.rows * tokens
    if stage == plan.loss_stage and item < WIDE:
        most = row * item
        since = row * (item - WIDE)  # the gradient of the logits in the place of their exponentials
    if stage == plan.stages - 1:
        most = max(most, since + hidden + (0 if splits else gradient(facts.head_weight)))
        since = hidden - (WIDE * row + 18 * tokens) * (stage == plan.loss_stage)
    plain = without_recomputation(here)
    for block, ours in reversed(blocks_of(used)):
        held = int(block_bytes(here, ours, reached=True)) * tokens
        if block is None:
            looked_up = [fact for fact in ours if stage == 0 and not fact.after_blocks and len(fact.shape) == 2]
            most = max([most, *(since + gradient(fact) for fact in looked_up)])
        else:
            wide, gated, widest = inside(here, ours)
            both = wide * item * tokens
            # Where backward is split what down read is owed to its weight, and the gradients before the gate to theirs.
            work = max(both + (0 if splits else widest * item), both * (1 + gated + splits))
            work = max(work, NORM * WIDE * facts.hidden * tokens - both * (1 if splits else 2 + 2 * gated))
            if plan.recompute == "full" and plan.recomputes(block):
                # What the block gave is there again; in fp32 what its norm reads is what was kept.
                work += int(block_bytes(plain, ours, reached=True)) * tokens - (held if item == WIDE else 0) + hidden
            most = max(most, since + work)
        since -= held
        if splits:
            since += int(deferred(here, stage, ours)) * tokens
    return most


def inside(here: Here, ours: list[ParameterFact]) -> tuple[int, bool, int]:
    """Of a block: elements a token of what the MLP's last matrix reads, whether a gate multiplies there, and elements of
    the largest matrix."""
    matrices = [fact for fact in ours if len(fact.shape) == 2 and fact.style in STYLES and fact.cut is not None]
    rest = [fact for fact in matrices if not in_attention(fact)]
    wide = max((here.shape(fact)[fact.cut or 0] for fact in rest if STYLES[fact.style or ""].cuts == "in"), default=0)
    out = sum(here.shape(fact)[fact.cut or 0] for fact in rest if STYLES[fact.style or ""].cuts == "out")
    largest = max((here.elements(fact) for fact in matrices), default=0)
    return wide, out == 2 * wide > 0, largest


def most(schedule: Schedule, place: int, rises: Callable[[int, int], Rise]) -> int:
    """Walks the row of a place on the pp axis, with its messages; `rises(stage, microbatch)`."""
    walk = _Walk(schedule, place, rises)
    for action in schedule.rows[place]:
        walk.take(action)
    return walk.most


class _Walk:
    def __init__(self, schedule: Schedule, place: int, rises: Callable[[int, int], Rise]) -> None:
        self.schedule, self.rises = schedule, rises
        self.most = self.live = 0
        self._there: dict[tuple[str, int, int], int] = {}
        self._sent: deque[tuple[str, int, int]] = deque()
        receives = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)
        self._receives = [action for action in schedule.rows[place] if action.kind in receives]
        self._posted = self._called = 0
        self._post(AHEAD)

    def _put(self, what: str, stage: int, microbatch: int, size: int) -> None:
        self._there[what, stage, microbatch] = size
        self.live += size
        self.most = max(self.most, self.live)

    def _drop(self, what: str, stage: int, microbatch: int) -> None:
        self.live -= self._there.pop((what, stage, microbatch), 0)

    def _post(self, many: int) -> None:
        for action in self._receives[self._posted : many]:
            stage, m = action.stage, action.microbatch
            before = self.schedule.before(stage)
            if action.kind is Kind.RECEIVE_ACTIVATION and before is not None:
                self._put("read", stage, m, self.rises(before, m).message)
            else:
                self._put("gradient", stage, m, self.rises(stage, m).message)
            self._posted += 1

    def take(self, action: Action) -> None:
        stage, m, kind = action.stage, action.microbatch, action.kind
        if kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT):
            self._called += 1
            self._post(self._called + AHEAD)
        elif kind is Kind.FORWARD:
            self._forward(stage, m)
        elif kind in BACKWARDS:
            self._backward(stage, m, whole=kind is Kind.BACKWARD)
        elif kind is Kind.BACKWARD_WEIGHT:
            self.most = max(self.most, self.live + self.rises(stage, m).weights)
            self._drop("deferred", stage, m)
        elif kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            what = "given" if kind is Kind.SEND_ACTIVATION else "gradient"
            boundary = stage if kind is Kind.SEND_ACTIVATION else self.schedule.before(stage)
            assert boundary is not None
            self._sent.append((what, boundary, m))
            while len(self._sent) > SENT:
                self._drop(*self._sent.popleft())

    def _forward(self, stage: int, m: int) -> None:
        before, after, cost = self.schedule.before(stage), self.schedule.after(stage), self.rises(stage, m)
        if before is not None and not self.schedule.sends(before, stage):
            self._drop("given", before, m)
            if cost.apart:
                self._put("read", stage, m, self.rises(before, m).message)
        elif not cost.apart:
            self._drop("read", stage, m)
        self._put("kept", stage, m, cost.kept)
        self.most = max(self.most, self.live + cost.forward)
        if after is not None:
            self._put("given", stage, m, cost.message)

    def _backward(self, stage: int, m: int, *, whole: bool) -> None:
        before, cost = self.schedule.before(stage), self.rises(stage, m)
        self.most = max(self.most, self.live + cost.backward)
        for what in ("kept", "gradient", "read"):
            self._drop(what, stage, m)
        if cost.deferred:
            self._put("deferred", stage, m, cost.deferred)
            if whole:
                self.most = max(self.most, self.live + cost.weights)
                self._drop("deferred", stage, m)
        if before is not None:
            self._put("gradient", before, m, self.rises(before, m).message)
