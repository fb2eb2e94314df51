"""A part of a parameter, and the parameter that it is of: where they are used, in which layout, whether they are trained,
and over which axes the gradient is summed. A parameter is an ordered list of parts that are cut each by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from .layout import Box, Layout, elements
from .mesh import Mesh, rest_of

REGION_AXES = {"full": ("dp",), "heads": ("dp", "tp"), "tokens": ("dp", "tp")}
"""Which axes cut the *work* of a module, by the region it works in. dp cuts the batch everywhere; a module that works
on a shard of the tokens or of the heads adds the axis that cuts those."""


@dataclass(frozen=True)
class Part:
    """A piece of one parameter: `start` is where it begins in the parameter's dim `dim`. `uses` are (stage, module)
    pairs, the owner's first, more than one for tied weights; `places` says where each use is on the pp axis; `compute` is
    the layout in which it is used; what is of the kind "frozen" is used and never updated."""

    name: str
    parameter: str
    dim: int
    start: int
    uses: tuple[tuple[int, str], ...]
    places: tuple[int, ...]
    region: str
    decays: bool
    block: int | None
    compute: Layout
    kind: Literal["weight", "frozen"] = "weight"
    looked_up: bool = True

    @property
    def trains(self) -> bool:
        """Whether it has a gradient, a state and an update."""
        return self.kind == "weight"

    @property
    def is_copied(self) -> bool:
        """Whether several places of tp have the same slice of it."""
        return rest_of("tp", self.compute.cut_axes) is not None

    @property
    def owner(self) -> int:
        """The place on the pp axis that counts it, keeps its state and updates it."""
        return self.places[0]

    def stages_at(self, place: int) -> tuple[int, ...]:
        """The stages that use it at a place of the pp axis, each once, ascending."""
        here = {stage for (stage, _), where in zip(self.uses, self.places, strict=True) if where == place}
        return tuple(sorted(here))

    @property
    def summed_over(self) -> tuple[str, ...]:
        """The axes over which its gradient is summed: those that cut the work where it is used and do not cut it.
        What is frozen has no gradient: none."""
        if not self.trains:
            return ()
        left = (rest_of(axis, self.compute.cut_axes) for axis in REGION_AXES[self.region])
        return tuple(axis for axis in left if axis is not None)

    # What a rank keeps, sums and updates, if its place is the owner's. ZeRO cuts it further, over the dp ranks that would
    # hold copies: see Sharding.stretch.
    @property
    def stored(self) -> Layout:
        return self._owned

    @property
    def grad(self) -> Layout:
        return self._owned

    @property
    def state(self) -> Layout:
        return self._owned

    @cached_property
    def _owned(self) -> Layout:
        return replace(self.compute, places=(self.owner,))

    def within(self, box: Box) -> Box:
        """A box of this part in the indices of its parameter."""
        start, stop = box[self.dim] if box else (0, 0)
        return tuple(
            (start + self.start, stop + self.start) if dim == self.dim else side for dim, side in enumerate(box)
        )


@dataclass(frozen=True)
class Parameter:
    """The parts of one parameter, in order. What a rank holds of them stands side by side in one tensor."""

    name: str
    parts: tuple[Part, ...]

    @property
    def first(self) -> Part:
        """Where they are used, whether they train and whether they decay is the same for all parts."""
        return self.parts[0]

    @property
    def summed_over(self) -> tuple[str, ...]:
        """The axes over which the gradients of all parts are summed, once a step."""
        return tuple(axis for axis in self.first.summed_over if all(axis in part.summed_over for part in self.parts))

    def summed_early(self, mesh: Mesh, rank: int) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
        """Some parts of a fused tensor may be summed over more: keys and values of which several ranks have copies,
        beside queries of their own. That is done in each backward. The axes, and where the parts stand in what `rank`
        holds."""
        if len(self.parts) == 1:
            return (), ()
        axes: tuple[str, ...] = ()
        found, start = [], 0
        for part, (first, last) in zip(self.parts, self.spans(mesh, rank), strict=True):
            more = tuple(axis for axis in part.summed_over if axis not in self.summed_over)
            if more:
                axes = more
                found.append((start, start + last - first))
            start += last - first
        return axes, tuple(found)

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's."""
        dim = self.first.dim
        whole = list(self.first.compute.shape)
        if whole:
            whole[dim] = sum(part.compute.shape[dim] for part in self.parts)
        return tuple(whole)

    def boxes(self, mesh: Mesh, rank: int) -> tuple[Box, ...]:
        """What `rank` computes with, part by part, in the parameter's indices; empty where it holds none."""
        found = [(part, part.compute.box(mesh, rank)) for part in self.parts]
        return tuple(part.within(box) for part, box in found if box is not None)

    def spans(self, mesh: Mesh, rank: int) -> tuple[tuple[int, int], ...]:
        """The same along the dim of the parts: (start, stop) in the whole parameter."""
        return tuple(box[self.first.dim] for box in self.boxes(mesh, rank))

    def elements(self, mesh: Mesh, rank: int) -> int:
        return sum(elements(box) for box in self.boxes(mesh, rank))

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Of the tensor that `rank` computes with."""
        shape = list(self.shape)
        if shape:
            shape[self.first.dim] = sum(stop - start for start, stop in self.spans(mesh, rank))
        return tuple(shape)
