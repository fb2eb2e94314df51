"""The modules of one stage of an unmodified transformers model.

The whole model is built on the meta device; blocks of other stages are replaced by stand-ins that hold nothing, the list
keeping its length because models index it by position:

    stage 1 of 3, blocks 2-3 of 6:   [pass][enter] block2 block3 [leave][pass]
                                            |                      |
                  returns the received tensor                      raises _Left(hidden), ending the forward

The embedding of a later stage is a stub that returns zeros, so that whatever the model does to its embeddings happens to
numbers that `enter` throws away. Each stage gets the same tokens and positions: masks and rotary tables are computed by
the model's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from ...design.mesh import Mesh
from ...design.sharding import Sharding
from ..batch import Batch
from .read import Model, build_on_meta, find_blocks


class _Left(Exception):
    """Carries the hidden state out of a forward that must not go on."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _StandIn(nn.Module):
    """In the place of a block of another stage, with the plain attributes that models read off their blocks."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.training = original.training
        for key, value in vars(original).items():
            if not key.startswith("_") and isinstance(value, int | float | str | bool):
                setattr(self, key, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class _Enter(_StandIn):
    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        received, self.received = self.received, None
        assert received is not None
        return received


class _Leave(_StandIn):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise _Left(hidden_states)


class _NoEmbedding(nn.Module):
    """Tokens [b, s] -> zeros [b, s, hidden], without memory."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden, self.dtype = hidden, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=self.dtype, device=tokens.device)
        return zero.expand(*tokens.shape, self.hidden)


class _Absent(nn.Module):
    """In the place of a module that this stage never reaches."""


class StageModel:
    """What stage `stage` computes: `forward(batch, received)` gives the hidden state for the next stage, or logits."""

    def __init__(self, model: Model, sharding: Sharding, stage: int, dtype: torch.dtype) -> None:
        self.module = build_on_meta(model.config)
        self.dtype = dtype
        parts = sharding.on_stage(stage)
        blocks_name, blocks = find_blocks(self.module)
        owned = sorted({part.block for part in parts if part.block is not None})
        first, last = owned[0], owned[-1]
        self._enter: _Enter | None = None
        for index, block in enumerate(blocks):
            if index == first - 1:
                blocks[index] = self._enter = _Enter(block)
            elif index == last + 1:
                blocks[index] = _Leave(block)
            elif index not in owned:
                blocks[index] = _StandIn(block)
        used = {module for part in parts for use_stage, module in part.uses if use_stage == stage}
        embedding = self.module.get_input_embeddings()
        for name, module in list(self.module.named_modules()):
            if name in used or name.startswith(f"{blocks_name}.") or not list(module.parameters(recurse=False)):
                continue
            stub = _NoEmbedding(model.facts.hidden, dtype) if module is embedding else _Absent()
            parent, _, child = name.rpartition(".")
            setattr(self.module.get_submodule(parent), child, stub)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def materialise(self, sharding: Sharding, rank: int, seed: int, device: torch.device) -> None:
        """Draws the initial weights and keeps this rank's slices, module by module: no more than one module is ever
        whole. The draw depends on the seed and the module's name alone, so every layout starts from the same bits."""
        slices = _slices(sharding, rank)
        for name, module in self.module.named_modules():
            for tensor_name, whole in draw(self.module, name, module, seed):
                if isinstance(getattr(module, tensor_name), nn.Parameter):
                    mine = whole[slices[f"{name}.{tensor_name}"]].to(device, self.dtype, copy=True)
                    setattr(module, tensor_name, nn.Parameter(mine.contiguous()))
                else:
                    setattr(module, tensor_name, whole.to(device))

    def forward(self, batch: Batch, received: Tensor | None) -> Tensor:
        """Tokens [b, s] (and the hidden state [b, s, hidden] of the stage before) -> hidden state or logits."""
        if self._enter is not None:
            self._enter.received = received
        try:
            output = self.module(
                input_ids=batch.tokens,
                attention_mask=attention_mask(batch),
                position_ids=batch.positions,
                use_cache=False,
            )
        except _Left as left:
            return left.hidden
        logits: Tensor = output.logits
        return logits


def build_whole(model: Model, seed: int, dtype: torch.dtype) -> Any:
    """The whole unmodified model on the CPU, from the same initial weights as every layout's."""
    whole = build_on_meta(model.config)
    for name, module in whole.named_modules():
        for tensor_name, drawn in draw(whole, name, module, seed):
            is_parameter = isinstance(getattr(module, tensor_name), nn.Parameter)
            setattr(module, tensor_name, nn.Parameter(drawn.to(dtype)) if is_parameter else drawn)
    return whole


def draw(model: Any, name: str, module: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The whole initial tensors of one module by itself (parameters fp32, then buffers), drawn on the CPU by the model's
    own rule from blake2b(seed, name)."""
    parameters = dict(module.named_parameters(recurse=False))
    buffers = dict(module.named_buffers(recurse=False))
    if not parameters and not buffers:
        return
    for key, parameter in parameters.items():
        setattr(module, key, nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device="cpu")))
    for key, buffer in buffers.items():
        setattr(module, key, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))
    number = int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(number)
    try:
        with torch.no_grad():
            model._init_weights(module)
    finally:
        torch.default_generator.set_state(state)
    for key in [*parameters, *buffers]:
        yield key, getattr(module, key).detach()


def _slices(sharding: Sharding, rank: int) -> dict[str, tuple[slice, ...]]:
    mesh: Mesh = sharding.mesh
    found = {}
    for part in sharding.parts:
        box = part.compute.box(mesh, rank)
        if box is not None:
            found[part.name] = tuple(slice(start, stop) for start, stop in box)
    return found


def attention_mask(batch: Batch) -> Tensor | None:
    """None where plain causal attention is right; else [b, 1, s, s], true where a token may look: back, and inside its
    own document. Padding (-1) is a document of its own, so that no row of the mask is empty."""
    if batch.plain:
        return None
    documents = batch.document_ids
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril().unsqueeze(1)
