"""Every part through a step: where it is used, which slice each rank computes with, keeps and updates, and over which
axes its gradient is summed.

The unit is the part, not the parameter: a parameter is an ordered list of parts that are cut each by itself.

    whole model -(pp: stage and place)-> uses -(tp: the style's cut)-> compute -(ZeRO's row)-> stored, grad, state

    c_attn.weight [h, 3h]      q | k | v          three parts of one parameter
    on tp rank 0               q0 | k0 | v0       a rank holds the slices of all of them, side by side, in one tensor
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from .facts import ModelFacts, ParameterFact, Piece
from .layout import Cut, Layout, elements
from .mesh import Mesh, factors, rest_of
from .part import Parameter, Part
from .plan import Plan, cuts_rows, stage_blocks
from .records import Holding
from .schedule import BACKWARDS, Action, Kind
from .styles import style
from .unit import AFTER, BEFORE, Unit

Quantity = Literal["grad", "state", "stored"]
ZERO: dict[int, frozenset[Quantity]] = {
    0: frozenset(),
    1: frozenset({"grad", "state"}),
    2: frozenset({"grad", "state"}),
    3: frozenset({"grad", "state", "stored"}),
}
"""What each stage of ZeRO cuts over dp: the sum of the gradient that a rank gets, what it updates, and with ZeRO-3 the
weights too. ZeRO-2 differs from ZeRO-1 in what it keeps before the sum: no more gradients than are on their way to it."""


@dataclass(frozen=True)
class Sharding:
    """All parameters of a model over the mesh of a plan; `placement` says where each stage is on the pp axis, `zero`
    which stage of ZeRO cuts over dp what its ranks would hold copies of, `heads` how many query and KV heads it has,
    `sp` whether tp ranks have tokens of their own between the branches of blocks."""

    mesh: Mesh
    placement: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    zero: int = 0
    heads: tuple[int, int] = (0, 0)
    sp: bool = False

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for parameter in self.parameters for part in parameter.parts)

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def _by_module(self) -> dict[str, Parameter]:
        # The weight, where a module has several: what its output is cut by.
        found: dict[str, Parameter] = {}
        for parameter in self.parameters:
            for _, module in parameter.first.uses:
                found.setdefault(module, parameter)
        return found

    def own_heads(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(start, stop) of the query heads and of the KV heads that `rank` computes with."""
        heads, groups = self.heads
        queries, keys = Piece("", heads, heads // groups, grain=1), Piece("", groups, 1, grain=1)
        tp = self.mesh.degree("tp")
        boxes = (Layout((piece.length,), cuts(piece, 0, tp)).box(self.mesh, rank) for piece in (queries, keys))
        own = [box[0] for box in boxes if box is not None]
        return own[0], own[1]

    def on_stage(self, stage: int) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if any(use[0] == stage for use in p.first.uses))

    def stages_at(self, place: int) -> tuple[int, ...]:
        """The stages at a place of the pp axis."""
        return tuple(stage for stage, where in enumerate(self.placement) if where == place)

    def at(self, place: int) -> tuple[Parameter, ...]:
        """What a place on the pp axis holds: the parameters of its stages, each once."""
        return tuple(p for p in self.parameters if place in p.first.places)

    def trained_at(self, place: int) -> tuple[Parameter, ...]:
        """Those of them that are trained."""
        return tuple(p for p in self.at(place) if p.first.trains)

    @cached_property
    def _units(self) -> dict[int, tuple[Unit, ...]]:
        return {}

    def units(self, rank: int) -> tuple[Unit, ...]:
        """The units of a rank in the order in which backward finishes them: the last stage first, and in it what is used
        last; one that several stages use with the first of them. What is frozen is in units where weights are cut."""
        if rank not in self._units:
            found = _units(self, rank)
            self._units[rank] = tuple(unit for unit in found if unit.trains or "stored" in ZERO[self.zero])
        return self._units[rank]

    def trained_units(self, rank: int) -> tuple[Unit, ...]:
        """Those of them that have gradients."""
        return tuple(unit for unit in self.units(rank) if unit.trains)

    def unit_of(self, name: str, rank: int) -> Unit:
        return next(unit for unit in self.units(rank) if name in unit.spans)

    @cached_property
    def _ends(self) -> float:
        """The block of the first stage at whose input backward ends: -1 where something before the blocks trains."""
        first = next((n for n, one in enumerate(self.parameters) if one.first.block is not None), 0)
        trained = [(n, one.first) for n, one in enumerate(self.parameters) if one.first.trains]
        blocks = (math.inf if part.block is None else part.block for n, part in trained if n >= first)
        return -1 if any(n < first for n, _ in trained) else min(blocks, default=math.inf)

    def reaches(self, stage: int, block: int | None) -> bool:
        """Whether the gradient of what comes before a block (None: before what is after the blocks) is computed. It is on
        every stage but the first, which sends it on; there backward ends at the first block that trains anything."""
        return stage > 0 or (self._ends < math.inf if block is None else self._ends <= block)

    def stretch(self, name: str, quantity: Quantity, rank: int) -> tuple[int, int] | None:
        """Which elements of its slice of a parameter `rank` has of a quantity: (start, stop), or None for all of them.
        What is frozen is cut where weights are."""
        cuts = ZERO[self.zero]
        if not (quantity in cuts if self.parameter(name).first.trains else "stored" in cuts):
            return None
        return self.unit_of(name, rank).stretch(name, self.mesh.index(rank, "shard"))

    def counted(self, name: str, rank: int) -> list[tuple[int, int]]:
        """The stretches of a parameter's gradient on `rank` that count in the norm, flat, in what it has of the sum: each
        element of the model counts on one rank."""
        parameter, mesh = self.parameter(name), self.mesh
        if not parameter.first.trains:
            return []
        # Ranks that share count what they have, and of copies of a share the first.
        first = rank
        if self.zero:
            if mesh.index(rank, "replica"):
                return []
            first = mesh.rank(**{**mesh.coordinate(rank), "dp": 0})
        shape = parameter.local_shape(mesh, rank)
        if not any(part.grad.holds(mesh, rank) for part in parameter.parts):
            return []
        counts = [part.grad.is_first_copy(mesh, first) for part in parameter.parts]
        lengths = [stop - start for start, stop in parameter.spans(mesh, rank)] if shape else [1]
        found = _runs(shape, parameter.first.dim, lengths, counts)
        start, stop = self.stretch(name, "grad", rank) or (0, parameter.elements(mesh, rank))
        cut = [(max(begin, start) - start, min(end, stop) - start) for begin, end in found]
        return [(begin, end) for begin, end in cut if begin < end]

    @cached_property
    def _parts_by_name(self) -> dict[str, Part]:
        return {part.name: part for part in self.parts}

    def part(self, name: str) -> Part:
        return self._parts_by_name[name]

    def parameter(self, name: str) -> Parameter:
        return self._by_name[name]

    def slices(self, name: str) -> tuple[int, ...]:
        """How long the slice of a parameter is at each place of tp, along the dim that is cut."""
        parameter = self.parameter(name)
        ranks = (self.mesh.rank(pp=parameter.first.owner, tp=place) for place in range(self.mesh.degree("tp")))
        return tuple(sum(stop - start for start, stop in parameter.spans(self.mesh, rank)) for rank in ranks)

    def has_copies(self, module: str) -> bool:
        """Whether several places of tp make the same of a module, keys or values, and each uses it in its own way."""
        weight = self.of_module(module)
        if weight is None:
            return False
        if weight.first.region == "heads" and not weight.first.compute.cut_axes:  # norms of heads
            return self.mesh.degree("tp") > self.heads[1]
        return any(part.compute.cut_axes and part.is_copied for part in weight.parts)

    def of_module(self, module: str) -> Parameter | None:
        """The first parameter that `module` uses: its weight."""
        return self._by_module.get(module)


def _layout(parameter: ParameterFact, piece: Piece, places: tuple[int, ...], tp: int) -> Layout:
    shape = list(parameter.shape)
    if parameter.cut is None:
        return Layout(tuple(shape), places=places)
    shape[parameter.cut] = piece.length
    return Layout(tuple(shape), cuts(piece, parameter.cut, tp), places)


def cuts(piece: Piece, dim: int, tp: int) -> tuple[Cut, ...]:
    """How tp cuts a piece of a dim. Where there are fewer KV heads than ranks, each is on several neighbours, and these
    have its query heads between them."""
    if tp == 1:
        return ()
    if piece.quanta >= tp or piece.grain is None:
        return (Cut(dim, ("tp",), piece.quantum),)
    heads, queries = factors("tp", tp // piece.quanta)
    shared = Cut(dim, (heads,), piece.quantum)
    return (shared,) if piece.grain == piece.quantum else (shared, Cut(dim, (queries,), piece.grain))


def _uses(parameter: ParameterFact, stages: Sequence[int], last: int) -> tuple[tuple[int, str], ...]:
    """What comes before the blocks is on the first stage, what comes after on the last; so is a tied head where its block
    is not named. `stages` are those of the blocks."""
    if parameter.block is not None:
        stage = stages[parameter.block]
    else:
        stage = last if parameter.after_blocks else 0
    further = [stages[block] for block in parameter.tied_blocks] or [last] * len(parameter.tied)
    return (
        (stage, parameter.module),
        *((used, module) for used, (module, _) in zip(further, parameter.tied, strict=True)),
    )


def _on_own_tokens(fact: ParameterFact, facts: ModelFacts) -> bool:
    """Whether a parameter is used, with sp, where a rank has its own tokens only: in a block beside attention and MLP, or
    as what is added to the sum that comes out of them."""
    if fact.block is None or fact.cut is not None:
        return False
    return fact.branch not in facts.branches[fact.block] or (
        fact.style is not None and style(fact.style, fact.module).cuts == "in"
    )


def shard(facts: ModelFacts, plan: Plan) -> Sharding:
    """Lays `facts` over the plan's mesh."""
    parameters = []
    placement, sp = plan.placement, cuts_rows(plan, facts)
    stages = [stage for stage, (start, stop) in enumerate(stage_blocks(plan, facts)) for _ in range(start, stop)]
    for fact in facts.parameters:
        uses = _uses(fact, stages, plan.stages - 1)
        places = tuple(placement[stage] for stage, _ in uses)
        region = "full" if fact.style is None or plan.tp == 1 else style(fact.style, fact.module).region
        if plan.tp > 1 and sp and _on_own_tokens(fact, facts):
            region = "tokens"
        parts, start = [], 0
        for piece in fact.pieces:
            layout = _layout(fact, piece, tuple(dict.fromkeys(places)), plan.tp)
            part = Part(
                name=f"{fact.name}[{piece.name}]" if len(fact.pieces) > 1 else fact.name,
                parameter=fact.name,
                dim=fact.cut or 0,
                start=start,
                uses=uses,
                places=places,
                # Of a KV head that several ranks have, each has the gradient of its own queries.
                region="heads" if layout.cut_axes and rest_of("tp", layout.cut_axes) else region,
                decays=fact.decays,
                block=fact.block,
                compute=layout,
                kind="weight" if plan.trains(fact) else "frozen",
                looked_up=fact.looked_up,
            )
            parts.append(part)
            start += piece.length
        parameters.append(Parameter(fact.name, tuple(parts)))
    zero = plan.zero if plan.dp > 1 else 0
    return Sharding(plan.mesh, placement, tuple(parameters), zero, (facts.heads, facts.kv_heads), sp)


def _runs(
    shape: tuple[int, ...], dim: int, lengths: Sequence[int], counts: Sequence[bool]
) -> list[tuple[int, int]]:  # fmt: skip
    """The flat stretches of the parts that count; parts of `lengths` stand side by side in dim `dim` of a tensor."""
    if all(counts) or not any(counts):
        return [(0, math.prod(shape))] if any(counts) else []
    inner = math.prod(shape[dim + 1 :])
    row, found = shape[dim] * inner, []
    for outer in range(math.prod(shape[:dim])):
        start = outer * row
        for length, does in zip(lengths, counts, strict=True):
            if does:
                found.append((start, start + length * inner))
            start += length * inner
    return found


def _units(sharding: Sharding, rank: int) -> list[Unit]:
    mesh = sharding.mesh
    place = mesh.coordinate(rank)["pp"]
    blocks = [number for number, one in enumerate(sharding.parameters) if one.first.block is not None]
    groups: dict[tuple[int, str, tuple[str, ...]], list[int]] = {}
    for number, one in enumerate(sharding.parameters):
        if place not in one.first.places:
            continue
        if len(one.first.uses) > 1:
            name = one.name
        elif one.first.block is not None:
            name = f"block {one.first.block}"
        else:
            name = BEFORE if not blocks or number < blocks[0] else AFTER
        groups.setdefault((one.first.stages_at(place)[0], name, one.summed_over), []).append(number)
    found = []
    for (stage, name, axes), numbers in groups.items():
        held = [sharding.parameters[number] for number in numbers]
        found.append(
            Unit(
                name, stage, held[0].first.block, tuple(one.name for one in held),
                tuple(one.elements(mesh, rank) for one in held), mesh.degree("shard"),
                rest=(*(["replica"] if axes and mesh.replicas > 1 else []), *(axis for axis in axes if axis != "dp")),
                in_backward=_in_backward(sharding, stage, name, numbers), alone=len(held[0].first.uses) > 1,
                trains=bool(axes),
            )
        )  # fmt: skip
    found.reverse()
    return sorted(found, key=lambda unit: -unit.stage)


def _in_backward(sharding: Sharding, stage: int, place: str, numbers: Sequence[int]) -> bool:
    """Whether backward reads any of the parameters of these numbers, which stand at one place of a stage."""
    held = [sharding.parameters[number].first for number in numbers]
    if place == BEFORE:
        return sharding.reaches(stage, -1) and not all(part.decays and part.looked_up for part in held)
    if place == AFTER:
        before = sharding.parameters[: numbers[-1] + 1]
        return sharding.reaches(stage, None) or any(one.first.trains for one in before)
    return len(held[0].uses) > 1 or sharding.reaches(stage, held[0].block)


def needed(sharding: Sharding, rank: int, row: Iterable[Action]) -> Iterator[Unit]:
    """The units whose weights a step needs on `rank`, whose row of the schedule is `row`: forwards from the first to the
    last of their stage, backwards from the last to the first that they read."""
    place = sharding.mesh.coordinate(rank)["pp"]
    of_stage: dict[int, list[Unit]] = {}
    for unit in reversed(sharding.units(rank)):
        for stage in sharding.parameter(unit.names[0]).first.stages_at(place):
            of_stage.setdefault(stage, []).append(unit)
    for action in row:
        used = of_stage.get(action.stage, [])
        if action.kind is Kind.FORWARD:
            yield from used
        elif action.kind in BACKWARDS:
            yield from (unit for unit in reversed(used) if unit.in_backward)


def buckets(
    parameters: tuple[Parameter, ...], mesh: Mesh, rank: int, limit: int, item: int
) -> list[tuple[Parameter, ...]]:
    """The parameters of one rank in the order in which backward finishes them (the last stage first, and in it what is
    used last; a tied one with the first stage that uses it here), in buckets of at most `limit` bytes (`item` bytes an
    element) that are of one stage and summed over the same axes. One open bucket for each set of axes; they leave in the
    order in which they were filled. What comes before the blocks (the embedding) shares a bucket with none of them: its
    sum begins when nothing is left to hide it, so it should have nothing else to move."""
    place = mesh.coordinate(rank).get("pp", 0)
    by_stage: dict[int, list[Parameter]] = {}
    for parameter in parameters:
        by_stage.setdefault(parameter.first.stages_at(place)[0], []).append(parameter)
    return [
        bucket
        for stage in sorted(by_stage, reverse=True)
        for bucket in _filled(reversed(by_stage[stage]), mesh, rank, limit, item)
    ]


def _filled(
    parameters: Iterable[Parameter], mesh: Mesh, rank: int, limit: int, item: int
) -> list[tuple[Parameter, ...]]:
    found: list[tuple[Parameter, ...]] = []
    open_: dict[tuple[str, ...], list[Parameter]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    for parameter in parameters:
        axes, count = parameter.summed_over, parameter.elements(mesh, rank) * item
        current = open_.setdefault(axes, [])
        last = current and current[-1].first.block is not None and parameter.first.block is None
        if current and (last or sizes[axes] + count > limit):
            found.append(tuple(current))
            current = open_[axes] = []
        sizes[axes] = count + (sizes[axes] if current else 0)
        current.append(parameter)
    return [*found, *(tuple(current) for current in open_.values() if current)]


def holdings(sharding: Sharding, item: int = 4) -> list[Holding]:
    """Which slice of which part each rank computes with, `item` bytes an element."""
    rows = []
    for part in sharding.parts:
        holders = list(part.compute.holders(sharding.mesh))
        copies = Counter(box for _, box in holders)
        for rank, box in holders:
            rows.append(Holding(rank, part.name, part.block, box, elements(box) * item, copies[box]))
    return sorted(rows, key=lambda row: row.rank)
