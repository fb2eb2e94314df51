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

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...design.sharding import Sharding
from ..batch import Batch
from .after_head import AfterHead, after_head
from .attention import PLAIT, Sight, told_apart
from .dropout import Dropping, begins, drops
from .given import give_masks, give_own_heads
from .initial import fill, find_tied, start, take
from .read import Model, build_on_meta, find_blocks
from .tensor_plan import tensor_plan


class _Left(Exception):
    """Carries the hidden state out of a forward that must not go on."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _StandIn(nn.Module):
    """In the place of a block of another stage, with the plain attributes that models read off their blocks, and giving
    `tuples` where these do."""

    def __init__(self, original: nn.Module, tuples: bool) -> None:
        super().__init__()
        self.training, self._tuples = original.training, tuples
        for key, value in vars(original).items():
            if not key.startswith("_") and isinstance(value, int | float | str | bool):
                setattr(self, key, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, None) if self._tuples else hidden_states


class _Enter(_StandIn):
    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        received, self.received = self.received, None
        assert received is not None
        return super().forward(received)


class _Leave(_StandIn):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise _Left(hidden_states)


def _leave(hidden_states: Tensor) -> Tensor:
    """In the place of the head's forward where the loss multiplies by its weight."""
    raise _Left(hidden_states)


class _NoEmbedding(nn.Module):
    """Tokens [b, s] -> zeros [b, s, hidden], without memory. Some tables of positions are given more."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden, self.dtype = hidden, dtype

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        zero = torch.zeros((), dtype=self.dtype, device=tokens.device)
        return zero.expand(*tokens.shape, self.hidden)


class _Absent(nn.Module):
    """In the place of a module that this stage never reaches, or whose output `enter` throws away."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def transposed(module: nn.Module) -> bool | None:
    """Whether a linear layer holds its weight as [in, out]; None where the module is no linear layer as its class has
    it."""
    if "forward" in vars(module):
        return None
    return {nn.Linear: False, Conv1D: True}.get(type(module))


class StageModel:
    """What a stage computes on `rank`: `forward(batch, received)` gives the hidden state for the next stage, or
    logits; where the forward `stops` at its head, what the head would read. `attention` is the plan's: plait's, or the
    model's own. `own` says which of so many tokens of a row blocks have between their branches: (start, stop, of), or
    None for all."""

    def __init__(
        self, model: Model, sharding: Sharding, rank: int, stage: int, dtype: torch.dtype, *, seed: int,
        attention: str = PLAIT, stops: bool = False,
        own: Callable[[int], tuple[int, int, int] | None] = lambda seq: None,
    ) -> None:  # fmt: skip
        self.module = build_on_meta(model.config, attention=attention)
        self._weights, self._own = model.weights, own
        self.dtype = dtype
        self.step = 0
        """Of the run: what dropout is keyed by, beside the samples."""
        self._tied = find_tied(self.module)
        _localise(self.module, model, sharding, rank)
        plan = tensor_plan(self.module, model.config)
        self._sight = Sight() if attention == PLAIT else give_masks(self.module, plan)
        if attention == PLAIT and self._sight is not None:
            self._sight.attach(self.module)
        self._dropping = Dropping(seed) if drops(self.module) else None
        parameters = sharding.on_stage(stage)
        self.at_hand: Batch | None = None
        blocks_name, blocks = find_blocks(self.module)
        owned = sorted({p.first.block for p in parameters if p.first.block is not None})
        first, last = owned[0], owned[-1]
        self._enter: _Enter | None = None
        for index, block in enumerate(blocks):
            if index == first - 1:
                blocks[index] = self._enter = _Enter(block, plan.tuples)
            elif index == last + 1:
                blocks[index] = _Leave(block, plan.tuples)
            elif index not in owned:
                blocks[index] = _StandIn(block, plan.tuples)
        used = {module for p in parameters for place, module in p.first.uses if place == stage}
        for name, module in list(self.module.named_modules()):
            if name in used or name.startswith(f"{blocks_name}.") or not list(module.parameters(recurse=False)):
                continue
            stub = _NoEmbedding(model.facts.hidden, dtype) if isinstance(module, nn.Embedding) else _Absent()
            parent, _, child = name.rpartition(".")
            setattr(self.module.get_submodule(parent), child, stub)
        self.after_head = AfterHead()
        """What the model makes of the head's output, where the forward stops there."""
        if stops:
            whole = build_on_meta(model.config, attention=attention).to(dtype)
            self.after_head = after_head(whole, find_blocks(whole)[1], tuples=plan.tuples)
            self.module.get_submodule(model.facts.head).forward = _leave
        self.blocks: dict[int, nn.Module] = {index: blocks[index] for index in owned}
        """Those of this stage, by their numbers in the model."""
        if self._dropping is not None:
            for index in owned:
                blocks[index].register_forward_pre_hook(begins(self._dropping, index))

    def parameters(self) -> dict[str, nn.Parameter]:
        """By the names of the whole model; a tied weight has one, wherever it is used."""
        names = {name: f"{tied.owner}.{tied.tensor}" for name, tied in self._tied.items()}
        return {names.get(name, name): p for name, p in self.module.named_parameters()}

    def materialise(
        self, sharding: Sharding, rank: int, seed: int, device: torch.device, kept: dict[str, nn.Parameter],
        home: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Reads or draws the initial weights and keeps this rank's slices, module by module: no more than one module is
        ever whole. A draw depends on the seed and the module's name alone, so every layout starts from the same bits.
        `kept` is shared by the stages of a rank: a weight that two of them use is one. `home(name, slice)` says where a
        slice lives; None: where it is."""

        def keep(name: str, whole: Any) -> Tensor:
            mine = take(sharding.parameter(name), whole, sharding.mesh, rank)
            mine = mine.to(device, self.dtype, copy=home is None).contiguous()
            return mine if home is None else home(name, mine)

        fill(self.module, self._tied, start(self.module, self._weights, seed), keep, device, kept)

    def forward(self, batch: Batch, received: Tensor | None) -> Tensor:
        """Tokens [b, s] (and the hidden state [b, s, hidden] of the stage before) -> hidden state or logits."""
        self.at_hand = batch
        if self._enter is not None:
            self._enter.received = received
        if self._sight is not None:
            self._sight.look_at(batch)
        positions = batch.positions if self._sight is not None else told_apart(batch)
        try:
            with self._drops(batch):
                output = self.module(input_ids=batch.tokens, position_ids=positions, use_cache=False)
        except _Left as left:
            return left.hidden
        logits: Tensor = output.logits
        return logits

    def attention(self, block: int) -> nn.Module:
        """The attention of a block."""
        return next(m for m in self.blocks[block].children() if type(m).__name__.endswith("Attention"))

    def mark(self) -> object:
        """Where in the microbatch at hand the forward is, for whoever wants to go on from there."""
        return None if self._dropping is None else self._dropping.mark

    @contextmanager
    def again(self, batch: Batch, mark: Any) -> Iterator[None]:
        """While it is entered, modules see `batch` as they saw it at `mark`."""
        if self._sight is not None:
            self._sight.look_at(batch)
        at_hand, self.at_hand = self.at_hand, batch
        with self._drops(batch):
            if self._dropping is not None:
                self._dropping.resume(mark)
            yield
        self.at_hand = at_hand

    def _drops(self, batch: Batch) -> AbstractContextManager[object]:
        """Dropout of this microbatch, where the model has any and is in training."""
        if self._dropping is None:
            return nullcontext()
        # Samples and evaluation take no gradients, and drop nothing.
        self.module.train(torch.is_grad_enabled())
        self._dropping.at(self.step, batch.sample_ids, self._own(batch.tokens.shape[1]))
        return self._dropping


def _localise(module: Any, model: Model, sharding: Sharding, rank: int) -> None:
    """Tells the attention instances that count their heads how many are here (the config is everybody's and stays)."""
    if sharding.mesh.degree("tp") == 1:
        return
    plan = tensor_plan(module, model.config)
    heads, groups = sharding.heads
    (start, stop), (first, last) = sharding.own_heads(rank)
    for name, found in module.named_modules():
        if (hasattr(found, "plait_sight") or hasattr(found, "scaling")) and plan.cuts_heads(name, found):
            found.plait_heads = (start, stop, heads)
            if hasattr(found, "num_key_value_groups"):
                found.num_key_value_groups = (stop - start) // (last - first)
        if arguments := plan.heads_of(name):
            give_own_heads(found, arguments, (start, stop, heads))
        local = plan.local_to(name)
        if any(attribute.startswith("config.") for attribute in local):
            found.config = copy.copy(found.config)
        for attribute in local:
            holder = found.config if attribute.startswith("config.") else found
            counted = attribute.removeprefix("config.")
            here, whole = (last - first, groups) if "key_value" in counted or "kv" in counted else (stop - start, heads)
            setattr(holder, counted, getattr(holder, counted) * here // whole)
