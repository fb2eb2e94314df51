"""Initial weights that do not depend on the layout: drawn, or read from files, module by module, and sliced.

A draw comes from blake2b(seed, name of the module) on the CPU, by the model's own rule, so every layout starts from the
same bits, and no more than one module is ever whole. Real weights are read in slices; only what the model computes and
does not learn (rotary tables) is made by its rule then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from ...design.mesh import Mesh
from ...design.part import Parameter
from .weights import Reader, Weights

Tensors = Callable[[str, nn.Module], Iterator[tuple[str, Any]]]
"""The whole tensors of one module, parameters then buffers, by their names in it: as tensors, or as what reads a slice
when it is sliced as a tensor is."""


@dataclass(frozen=True)
class Tied:
    """A tensor that is another module's: whose, and by which name."""

    owner: str
    module: nn.Module
    tensor: str


def find_tied(model: Any) -> dict[str, Tied]:
    """The further names of tied parameters, and whose they are."""
    first: dict[int, Tied] = {}
    found = {}
    for name, module in model.named_modules():
        for tensor, parameter in module.named_parameters(recurse=False):
            owner = first.setdefault(id(parameter), Tied(name, module, tensor))
            if owner.module is not module:
                found[f"{name}.{tensor}"] = owner
    return found


def fill(
    model: Any, tied: Mapping[str, Tied], tensors: Tensors, keep: Callable[[str, Any], Tensor], device: torch.device,
    kept: dict[str, nn.Parameter],
) -> None:  # fmt: skip
    """Gives every module of a model on the meta device its tensors; of each parameter stays what `keep(name, whole)`
    makes, which must be a copy. A tied parameter stays one, and is its owner's, also where the owner is elsewhere. What
    `kept` has is taken from there, and what is made goes there."""

    def parameter(name: str, whole: Any) -> nn.Parameter:
        if name not in kept:
            kept[name] = nn.Parameter(keep(name, whole))
            kept[name]._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' initialisers leave it so
        return kept[name]

    for name, module in list(model.named_modules()):
        for tensor, whole in list(tensors(name, module)):
            full = f"{name}.{tensor}"
            if not isinstance(getattr(module, tensor), nn.Parameter):
                setattr(module, tensor, whole.to(device))
            elif full not in tied:
                setattr(module, tensor, parameter(full, whole))
            else:
                owner = tied[full]
                if f"{owner.owner}.{owner.tensor}" not in kept:
                    whole = dict(tensors(owner.owner, owner.module))[owner.tensor]
                    owner.module.to("meta")  # it may stand in no tree, and must not keep what was drawn
                setattr(module, tensor, parameter(f"{owner.owner}.{owner.tensor}", whole))


def start(model: Any, weights: Weights | None, seed: int) -> Tensors:
    """Where a model on the meta device starts from: `weights`, or what is drawn from `seed`."""
    if weights is None:
        return lambda name, module: draw(model, name, module, seed)
    reader = Reader(weights, model)
    return lambda name, module: _read(reader, model, name, module, seed)


def _read(reader: Reader, model: Any, name: str, module: nn.Module, seed: int) -> Iterator[tuple[str, Any]]:
    def drawn(key: str) -> Tensor:
        alone = copy.deepcopy(module)  # which is on the meta device, and stays there
        return dict(draw(model, name, alone, seed))[key]

    for key, parameter in module.named_parameters(recurse=False):
        # A tied one is asked for by its owner's name.
        yield key, reader.get(f"{name}.{key}", parameter, partial(drawn, key))
    for key, buffer in draw(model, name, module, 0, parameters=False):
        yield key, reader.get(f"{name}.{key}", buffer, partial(drawn, key))[...].to(buffer.dtype, copy=True)


def take(parameter: Parameter, whole: Any, mesh: Mesh, rank: int) -> Tensor:
    """What `rank` holds of a whole parameter: the slices of its parts, side by side. Nothing else of it is asked for."""
    boxes = parameter.boxes(mesh, rank)
    slices = [whole[tuple(slice(start, stop) for start, stop in box)] for box in boxes]
    return slices[0] if len(slices) == 1 else torch.cat(slices, parameter.first.dim)


def draw(
    model: Any, name: str, module: nn.Module, seed: int, *, parameters: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """The whole initial tensors of one module by itself (parameters fp32, then buffers), drawn on the CPU by the model's
    own rule from blake2b(seed, name). Without `parameters` those stay on the meta device, and buffers alone are given."""
    drawn = dict(module.named_parameters(recurse=False)) if parameters else {}
    buffers = dict(module.named_buffers(recurse=False))
    if not drawn and not buffers:
        return
    for key, parameter in drawn.items():
        setattr(module, key, nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device="cpu")))
    for key, buffer in buffers.items():
        setattr(module, key, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))
    number = int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(number)
    try:
        with torch.no_grad():
            model._init_weights(module)
            # Some classes draw what is inside a module from outside of it (GPT-2 its residual projections). What is drawn
            # already bears a mark, by which transformers' own initialisers leave it as it is.
            model._init_weights(model.get_submodule(name.rpartition(".")[0]))
    finally:
        torch.default_generator.set_state(state)
    for key in [*drawn, *buffers]:
        yield key, getattr(module, key).detach()
