"""The places of a step at which a layout is held against one process, and what was found at them.

    0  initial weight                              every part, before the first step
    1  batch > input, output > loss                forward: what each microbatch reads and every module makes of it
       output gradient, input gradient             backward, per microbatch
       gradient > tokens, loss, norm > clip        every part, reduced; then what the step reports of itself
       clipped gradient > lr > moments > weight > published weight
       bytes                                       what each rank sent, against the prediction
    2  ...

The order is the one in which the reference came by them, so what departs first is nearest to the fault: nothing before it
departs. A microbatch is numbered over the whole step: dp rank x microbatches + its own number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ..design.layout import Box, Layout, balanced
from ..design.mesh import Mesh
from ..design.part import Parameter, Part
from ..design.sharding import Quantity, Sharding

BYTES = "bytes"
REPLICAS = "replicas"
PARTS = (
    "initial weight",
    "gradient",
    "clipped gradient",
    "first moment",
    "second moment",
    "weight",
    "published weight",
)
"""Quantities that exist once for every part, each rank holding its box."""
EXACT = ("batch", "tokens", BYTES)
"""Quantities that are whole numbers, compared as such."""
SMALL = 1e-5
"""Magnitudes below count as this one."""
WORDS = {
    "initial weight": "initial weights",
    "batch": "batches",
    "input": "block inputs",
    "output": "module outputs",
    "input gradient": "gradients of block inputs",
    "output gradient": "gradients of module outputs",
    "share": "losses of microbatches",
    "gradient": "gradients",
    "clipped gradient": "clipped gradients",
    "tokens": "target tokens",
    "loss": "loss",
    "norm": "gradient norm",
    "clip": "clip factor",
    "lr": "learning rate",
    "first moment": "first moments",
    "second moment": "second moments",
    "weight": "weights",
    "published weight": "published weights",
    REPLICAS: "replicas, bitwise",
    BYTES: "bytes sent",
}
"""Every quantity, in the order of a step, and its name in tables."""


@dataclass(frozen=True)
class Place:
    """Where in a run: `name` is a module, a part, a field of the batch or a reason to send; empty where there is one."""

    step: int
    quantity: str
    name: str = ""
    microbatch: int | None = None

    @property
    def key(self) -> str:
        """As a tensor's name in a file of one step."""
        return f"{self.quantity}|{'' if self.microbatch is None else self.microbatch}|{self.name}"

    @classmethod
    def of(cls, step: int, key: str) -> Place:
        quantity, microbatch, name = key.split("|", 2)
        return cls(step, quantity, name, int(microbatch) if microbatch else None)

    def __str__(self) -> str:
        what = {
            "batch": f"the batch's {self.name}",
            "share": "the microbatch's loss",
            "lr": "the learning rate",
            "clip": "the clip factor",
            "norm": "the gradient norm",
            "loss": "the loss",
            "tokens": "the count of target tokens",
            "gradient": f"the reduced gradient of {self.name}",
            REPLICAS: f"the copies of {self.name}",
            BYTES: f"the bytes sent for {self.name}",
        }.get(self.quantity, f"the {self.quantity} of {self.name}")
        when = "before the first step" if not self.step else f"step {self.step}"
        return f"{when}: {what}" if self.microbatch is None else f"{when}, microbatch {self.microbatch}: {what}"


def layout_of(part: Part, quantity: str) -> Layout:
    """The layout in which ranks hold `quantity` (one of PARTS) of `part`."""
    if quantity.endswith("gradient"):
        return part.grad
    if quantity.endswith("moment"):
        return part.state
    return part.compute if quantity == "published weight" else part.stored


def stretch_of(sharding: Sharding, name: str, quantity: str, rank: int) -> tuple[int, int] | None:
    """Which elements of its boxes of a parameter, flat, `rank` holds of `quantity`: None for all."""
    cut: Quantity = "state"
    if quantity == "published weight":
        cut = "stored"
    elif quantity.endswith("gradient"):
        cut = "grad"
    return sharding.stretch(name, cut, rank)


def boxes_of(parameter: Parameter, quantity: str, mesh: Mesh, rank: int) -> tuple[Box, ...]:
    """What `rank` holds of `quantity` of a parameter, part by part, in the parameter's indices; empty: nothing."""
    found = [(part, layout_of(part, quantity).box(mesh, rank)) for part in parameter.parts]
    return tuple(part.within(box) for part, box in found if box is not None)


Held = tuple[tuple[Box, ...], tuple[int, int] | None]


def held_of(sharding: Sharding, name: str, quantity: str, rank: int) -> Held:
    """What `rank` holds of `quantity` of a parameter: the boxes of its parts, and which stretch of them. Ranks with the
    same have copies."""
    boxes = boxes_of(sharding.parameter(name), quantity, sharding.mesh, rank)
    return boxes, stretch_of(sharding, name, quantity, rank) if boxes else None


def slices_of(whole: Any, held: Held, parameter: Parameter) -> Tensor:
    """The same of a whole parameter, as a rank has it."""
    boxes, stretch = held
    return beside([whole[tuple(slice(*side) for side in box)] for box in boxes], parameter, stretch)


def beside(slices: Sequence[Tensor], parameter: Parameter, stretch: tuple[int, int] | None = None) -> Tensor:
    """The slices of the parts as a rank holds them: side by side in one tensor, of which ZeRO leaves it a stretch."""
    whole = slices[0] if len(slices) == 1 else torch.cat(tuple(slices), parameter.first.dim)
    return whole if stretch is None else whole.flatten()[slice(*stretch)]


def output_of(module: str, shape: Sequence[int], whole: Any, sharding: Sharding, rank: int) -> Tensor:
    """The slice that `rank` should have of a module's output (or of its gradient), where it holds one of `shape`: all of
    `whole`, or what its slice of the weight makes, or what belongs to its own heads or tokens."""
    full, weight = list(whole.get_shape() if hasattr(whole, "get_shape") else whole.shape), sharding.of_module(module)
    differ = [dim for dim, (mine, all_) in enumerate(zip(shape, full, strict=False)) if mine != all_]
    if sharding.sp and differ == [1] and len(shape) == len(full) == 3:  # the rank's own tokens
        own: Tensor = whole[:, slice(*balanced(full[1], sharding.mesh.degree("tp"), sharding.mesh.index(rank, "tp")))]
        return own
    if len(shape) != len(full) or len(differ) != 1 or weight is None:
        found: Tensor = whole[...] if hasattr(whole, "get_shape") else whole
        return found
    dim = differ[0]
    spans: Sequence[tuple[int, int]] = weight.spans(sharding.mesh, rank)
    if weight.first.region == "heads" and not weight.first.compute.cut_axes:
        queries, keys = sharding.own_heads(rank)
        spans = [queries if full[dim] == sharding.heads[0] else keys]
    before = (slice(None),) * dim
    return torch.cat([whole[(*before, slice(*span))] for span in spans], dim)


@dataclass(frozen=True)
class Found:
    """What one rank found at one place: the largest difference, and how many times the reference its tensor is (the
    least-squares factor; None where the reference is zero). Infinite: it is missing, of another shape or type, or not
    finite."""

    deviation: float
    ratio: float | None = None
    digest: int = 0


@dataclass(frozen=True)
class Departure:
    """A place that departs: on which ranks, and how far on the worst of them."""

    place: Place
    ranks: tuple[int, ...]
    deviation: float
    scale: float
    bound: float
    ratio: float | None

    @property
    def relative(self) -> float:
        """Of the largest magnitude, or of SMALL where that is smaller: what is zero but for rounding has no scale."""
        return self.deviation / max(self.scale, SMALL) if self.scale else self.deviation

    @property
    def used(self) -> float:
        return self.deviation / self.bound if self.bound else self.deviation


@dataclass(frozen=True)
class Worst:
    """The places of one quantity: how many were compared, the largest deviation among them relative to the reference and
    the place where it is, the largest share of its bound that any of them takes up, and how many go beyond."""

    quantity: str
    places: int
    relative: float
    at: str
    used: float
    departing: int


@dataclass(frozen=True)
class Verdict:
    """What the checker says of one pass. `numerics` is "wide", or the compute type that was run as shipped; `steps` were
    compared. Without a departure the layout computes what one process does; otherwise `cause` says what the first one
    looks like, and `kind` where to look: module, batch item, schedule, optimizer, report, communication or copies."""

    numerics: str
    steps: int
    worst: tuple[Worst, ...]
    departures: tuple[Departure, ...]
    cause: str = ""
    kind: str = ""

    @property
    def passed(self) -> bool:
        return not self.departures

    @property
    def first(self) -> Departure:
        return self.departures[0]

    def relative(self, quantity: str) -> float:
        """The largest relative deviation of `quantity`."""
        return max((worst.relative for worst in self.worst if worst.quantity == quantity), default=0.0)

    @property
    def largest(self) -> Worst:
        """The quantity that deviates most."""
        return max(self.worst, key=lambda worst: worst.relative)

    def to_json(self) -> Any:
        return _VERDICT.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, values: Any) -> Verdict:
        return _VERDICT.validate_python(values)


_VERDICT = TypeAdapter(Verdict)
