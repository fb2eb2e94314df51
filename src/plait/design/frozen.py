"""Which parameters are trained, by patterns of their names; the others are frozen: they are used
and never change.

    freeze       "model.embed_tokens.*, *norm*"     these are not trained
    train_only   "*.self_attn.*, lm_head.weight"    and nothing but these is, less what freeze names

A pattern is a whole name in which * stands for any characters, ? for one, [12] for one of some; several are separated by
commas. A tied weight goes by the name of its owner.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import groupby

from .errors import nearest
from .facts import ModelFacts, ParameterFact


def patterns(text: str) -> tuple[str, ...]:
    """'a.*, b' -> ('a.*', 'b')."""
    return tuple(pattern for pattern in (part.strip() for part in text.split(",")) if pattern)


def matches(text: str, name: str) -> bool:
    """Whether one of the patterns is the name's."""
    return any(fnmatchcase(name, pattern) for pattern in patterns(text))


def trains(freeze: str, train_only: str, fact: ParameterFact) -> bool:
    """Whether a parameter is trained."""
    name = fact.name
    return fact.kind == "weight" and (not train_only or matches(train_only, name)) and not matches(freeze, name)


def refusal(freeze: str, train_only: str, facts: ModelFacts) -> str | None:
    """Why nothing can be frozen so: a pattern that is no parameter's, or nothing that is left to train."""
    names = {fact.name: fact.name for fact in facts.parameters}
    tied = {f"{use}.{fact.tensor}": fact.name for fact in facts.parameters for use, _ in fact.tied}
    for field, text in (("freeze", freeze), ("train_only", train_only)):
        if text and not patterns(text):
            return (
                f"{field} {text!r} has no pattern in it: name parameters, 'model.embed_tokens.*' say, or leave it out."
            )
        for pattern in patterns(text):
            if any(fnmatchcase(name, pattern) for name in names):
                continue
            owner = next((owner for name, owner in tied.items() if fnmatchcase(name, pattern)), None)
            if owner is not None:
                return f"{field} names {pattern}, which is the weight {owner}, used twice: name it so."
            way = nearest(pattern, names) or " A pattern is a whole name, in which * stands for any characters."
            if any(fnmatchcase(name, f"{pattern}*") for name in names):
                way = f" Did you mean '{pattern}*'?"
            return f"{field} names {pattern}, but none of the {len(names)} parameters of this model is called so.{way}"
    if any(trains(freeze, train_only, fact) for fact in facts.parameters):
        return None
    what = " and ".join(f"{field} '{text}'" for field, text in (("freeze", freeze), ("train_only", train_only)) if text)
    way = "leave a pattern out" if what else "give it a parameter that wants a gradient"
    return f"{what or 'The model'} leaves none of its {len(names)} parameters to train: {way}."


def carried(freeze: str, train_only: str, facts: ModelFacts, small: ModelFacts) -> str:
    """The names that are frozen in a model of fewer blocks that stand for another's: of each what is frozen of the block
    that it stands for. Every run of blocks that are frozen alike keeps one or more, where there is room, and some block
    that trains anything is there if any is."""

    def inside(fact: ParameterFact) -> str:
        return fact.name.partition(f".{fact.block}.")[2] if fact.block is not None else fact.name

    frozen: dict[int | None, set[str]] = {block: set() for block in (None, *range(facts.blocks))}
    trained = set[int]()
    for fact in facts.parameters:
        if trains(freeze, train_only, fact):
            trained |= set() if fact.block is None else {fact.block}
        else:
            frozen[fact.block].add(inside(fact))
    stands_for = _chosen([frozenset(frozen[block]) for block in range(facts.blocks)], small.blocks)
    if trained and not trained & set(stands_for):
        stands_for[-1] = max(trained)
    places: list[int | None] = [None, *stands_for]
    of = [(fact, places[0 if fact.block is None else fact.block + 1]) for fact in small.parameters]
    return ",".join(fact.name for fact, block in of if inside(fact) in frozen[block])


def _chosen(kinds: list[frozenset[str]], count: int) -> list[int]:
    """`count` of as many blocks as there are kinds, in order: a block of every run, and more of longer ones."""
    runs = [list(run) for _, run in groupby(range(len(kinds)), kinds.__getitem__)]
    if len(runs) > count:
        return [number * len(kinds) // count for number in range(count)]
    lengths = [1] * len(runs)
    for _ in range(count - len(runs)):
        shortest = max(range(len(runs)), key=lambda number: len(runs[number]) / lengths[number])
        lengths[shortest] += 1
    return [run[0] for run, length in zip(runs, lengths, strict=True) for _ in range(length)]
