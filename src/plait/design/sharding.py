"""Every part through a step: where it is used, which slice each rank computes with, keeps and updates, and over which
axes its gradient is summed.

The unit is the part, not the parameter: a tensor is an ordered list of parts that may be cut and summed differently.
In the models of this version every tensor has one part.

    whole model -(pp: stage of the block)-> uses -(tp: the style's cut)-> compute -(ZeRO's row)-> stored, grad, state
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .facts import ModelFacts, ParameterFact
from .layout import Cut, Layout, elements
from .mesh import Mesh
from .plan import Plan, stage_of_block
from .records import Holding
from .styles import style

REGION_AXES = {"full": ("dp",)}
"""Which axes cut the *work* of a module, by the region it works in. dp cuts the batch everywhere; a module that works
on a shard of the tokens or of the heads adds the axis that cuts those."""


@dataclass(frozen=True)
class Part:
    """`uses` are (stage, module) pairs; `compute` is the layout in which it is used."""

    name: str
    uses: tuple[tuple[int, str], ...]
    region: str
    decays: bool
    block: int | None
    compute: Layout

    @property
    def summed_over(self) -> tuple[str, ...]:
        """The axes over which its gradient is summed: those that cut the work where it is used and do not cut it."""
        return tuple(axis for axis in REGION_AXES[self.region] if axis not in self.compute.cut_axes)

    # One row of the ZeRO table: without ZeRO a rank keeps, reduces and updates what it computes with. ZeRO-1, -2 and -3
    # add a cut to state, to grad and state, to all three.
    @property
    def stored(self) -> Layout:
        return self.compute

    @property
    def grad(self) -> Layout:
        return self.compute

    @property
    def state(self) -> Layout:
        return self.compute


@dataclass(frozen=True)
class Sharding:
    """All parts of a model over the mesh of a plan."""

    mesh: Mesh
    parts: tuple[Part, ...]

    def on_stage(self, stage: int) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if any(use[0] == stage for use in part.uses))

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)


def _compute_layout(parameter: ParameterFact, stage: int, tp: int) -> Layout:
    layout = Layout(parameter.shape, stages=(stage,))
    if tp == 1 or parameter.style is None:
        return layout
    dim = style(parameter.style, parameter.module).cut_dim(parameter.tensor)
    return layout if dim is None else layout.then(Cut(dim, ("tp",), parameter.quantum))


def shard(facts: ModelFacts, plan: Plan) -> Sharding:
    """Lays `facts` over the plan's mesh. What comes before the blocks is on the first stage, what comes after on the
    last."""
    parts = []
    for parameter in facts.parameters:
        if parameter.block is not None:
            stage = stage_of_block(plan, facts, parameter.block)
        else:
            stage = plan.pp - 1 if parameter.after_blocks else 0
        parts.append(
            Part(
                name=parameter.name,
                uses=((stage, parameter.module),),
                region="full",
                decays=parameter.decays,
                block=parameter.block,
                compute=_compute_layout(parameter, stage, plan.tp),
            )
        )
    return Sharding(plan.mesh, tuple(parts))


def buckets(parts: tuple[Part, ...], mesh: Mesh, rank: int, limit: int, item: int) -> list[tuple[Part, ...]]:
    """The parts of one rank in the order in which backward finishes them (last used first), in buckets of at most
    `limit` bytes (`item` bytes an element) that are summed over the same axes."""
    found: list[tuple[Part, ...]] = []
    current: list[Part] = []
    size = 0
    for part in reversed(parts):
        box = part.grad.box(mesh, rank)
        count = elements(box) * item if box is not None else 0
        if current and (size + count > limit or part.summed_over != current[-1].summed_over):
            found.append(tuple(current))
            current, size = [], 0
        current.append(part)
        size += count
    return [*found, tuple(current)] if current else found


def holdings(sharding: Sharding, item: int = 4) -> list[Holding]:
    """Which slice of which part each rank holds, `item` bytes an element."""
    rows = []
    for part in sharding.parts:
        holders = list(part.stored.holders(sharding.mesh))
        copies = Counter(box for _, box in holders)
        for rank, box in holders:
            rows.append(Holding(rank, part.name, part.block, box, elements(box) * item, copies[box]))
    return sorted(rows, key=lambda row: row.rank)
