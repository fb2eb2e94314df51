"""How many consecutive blocks each stage gets: the deal that makes the largest stage as small as it can be.

    blocks       1  1  1  1  1  1  1  1 + head 3        what each counts: one, its parameters, its cost
    uniform      1  1 | 1  1 | 1  1 | 1  4              largest stage 5
    cost         1  1  1 | 1  1 | 1  1 | 4              largest stage 4

A stage has at least one block, so what comes before the blocks counts with the first of them and what comes after with
the last. Of the deals that are equally good, the one whose stages are the most even (the least sum of squares); of those,
the one with more blocks on earlier stages. With several stages a rank, it is stages that are made even, not ranks. It is
the linear partition problem; Skiena, "The Algorithm Design Manual", 2008, section 8.5.

What a block costs, in FLOPs a token, forward and backward: 6 an element of every matrix (2 forward, 4 backward; of a
stack of experts only those that a token goes to) and 6 a (s + 1) for scores and mix of a causal row of s tokens, where
attention is a wide. The head costs 6 V h; an embedding looks up, and costs nothing, as norms do beside products. Sliding
windows are not known to the facts: their blocks count as if a token saw the whole row. After Chowdhery et al., "PaLM",
2022, appendix B.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate

from .errors import listed, nearest
from .facts import ModelFacts, ParameterFact
from .styles import STYLES

UNIFORM = "uniform"
WORDS = (UNIFORM, "parameters", "cost")
"""What can be made even over the stages: blocks, elements, FLOPs."""


def written(balance: str) -> tuple[int, ...] | None:
    """The blocks of every stage where they are written out ("5,6,6,5"), else None."""
    if not re.fullmatch(r" *\d{1,9} *(, *\d{1,9} *)*", balance):
        return None
    return tuple(map(int, balance.split(",")))


def refusal(balance: str, stages: int, blocks: int) -> str | None:
    """Why so many blocks cannot be dealt so."""
    sizes = written(balance)
    if sizes is None:
        if balance in WORDS:
            return None
        known = listed((*WORDS, "the blocks of every stage ('5,6,6,5')"))
        return f"There is no balance '{balance}'; use {known}.{nearest(balance, WORDS)}"
    numbers = f"{stages} numbers from 1 that add up to {blocks}" if stages > 1 else f"{blocks}"
    way = f"set balance uniform, or {numbers}."
    if len(sizes) != stages:
        named = f"{len(sizes)} stage{'' if len(sizes) == 1 else 's'}"
        return f"balance {balance} deals blocks to {named}, but there {'is' if stages == 1 else 'are'} {stages}: {way}"
    if 0 in sizes:
        return f"balance {balance} leaves stage {sizes.index(0)} without a block: {way}"
    if sum(sizes) != blocks:
        return f"balance {balance} deals {sum(sizes)} blocks, but the model has {blocks}: {way}"
    return None


def weights(facts: ModelFacts, what: str, seq: int) -> list[int]:
    """What every block counts, the first with what comes before it and the last with what comes after: 1 (uniform),
    elements (parameters; a tied weight where it is used), or FLOPs a token in rows of `seq` (cost)."""
    if what == UNIFORM:
        return [1] * facts.blocks
    if what == "cost":
        attention = (seq + 1) * attention_width(facts)
        return [6 * (elements + attention) for elements in products(facts)]
    found = [0] * facts.blocks
    for fact in facts.parameters:
        if fact.block is not None:
            for block in {fact.block, *fact.tied_blocks}:
                found[block] += fact.elements
        else:
            places = {-1 if fact.after_blocks else 0} | ({-1} if fact.tied else set())
            for place in places if facts.blocks > 1 else {0}:
                found[place] += fact.elements
    return found


def products(facts: ModelFacts, counts: Callable[[ParameterFact], bool] = lambda _: True) -> list[int]:
    """The elements that a token is multiplied by in every block, the head's with the last; of parameters that count."""
    found = [0] * facts.blocks
    for fact in facts.parameters:
        if fact.block is not None and counts(fact) and fact.tensor != "bias" and len(fact.shape) > 1:
            stack = len(fact.shape) > 2
            found[fact.block] += facts.experts_per_token * math.prod(fact.shape[1:]) if stack else fact.elements
    found[-1] += facts.head_weight.elements * counts(facts.head_weight)
    return found


def attention_width(facts: ModelFacts) -> int:
    """Heads x their width: what the way out of attention reads, cut by whole groups; hidden where no style says so."""
    for fact in facts.parameters:
        cuts = STYLES[fact.style].cuts if fact.style in STYLES else "none"
        if cuts == "in" and fact.cut is not None and fact.pieces[0].quantum > 1:
            return fact.shape[fact.cut]
    return facts.hidden


def dealt(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """How many blocks each of `stages` gets: at least one, and as the file's head says."""
    count, before = len(weights), [0, *accumulate(weights)]
    most = _least_largest(weights, stages)
    # From the last stage to the first: the least sum of squares of the blocks from `start` on, and where its first stage
    # ends. A later end wins a tie.
    least = {count: 0}
    ends: list[dict[int, int]] = []
    for left in range(1, stages + 1):
        found: dict[int, int] = {}
        end: dict[int, int] = {}
        for start in range(stages - left, count - left + 1):
            for stop in range(start + 1, count - left + 2):
                size = before[stop] - before[start]
                if size > most:
                    break
                if stop in least and least[stop] + size * size <= found.get(start, math.inf):
                    found[start], end[start] = least[stop] + size * size, stop
        least = found
        ends.append(end)
    sizes, start = [], 0
    for end in reversed(ends):
        sizes.append(end[start] - start)
        start = end[start]
    return tuple(sizes)


def _least_largest(weights: Sequence[int], stages: int) -> int:
    """The least that the largest stage can be: by bisection, as filling each stage up takes the fewest stages."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle, needed, size = (low + high) // 2, 1, 0
        for weight in weights:
            size += weight
            if size > middle:
                needed, size = needed + 1, weight
        low, high = (low, middle) if needed <= stages else (middle + 1, high)
    return low
