"""What a model is made of: its parameters in order, its blocks, its sizes. Filled by runtime/hf/read.py, read by all.

Facts say nothing about ranks: what each rank holds is design/sharding.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Piece:
    """A stretch of the dim that tp cuts, cut by itself: q, k and v of a fused projection, gate and up of a fused MLP.

    `quantum` elements stay together where there are as many quanta as ranks: one attention group, a KV head with the
    query heads that read it. Where there are fewer, several ranks have one KV head between them, and `grain` elements are
    never parted: of queries one head, so that each rank has heads of its own; of keys and values the whole quantum, of
    which each rank has a copy. What is no heads has no `grain`."""

    name: str
    length: int
    quantum: int = 1
    grain: int | None = None

    @property
    def quanta(self) -> int:
        return self.length // self.quantum


@dataclass(frozen=True)
class ParameterFact:
    """One parameter of the whole model.

    `module` is the module that owns it, `tensor` its name there ("weight"), `block` the index of the decoder block it
    belongs to, or None with `after_blocks` saying on which end it is used. `style` names the module's row in
    design/styles.py (None: every rank holds it whole), `cut` the dim that tp cuts by it (None: none), and `pieces` what
    that dim is made of, in order (one piece without a name where the tensor is not fused). `reads` names the module's
    input (modules that read one and the same tensor, as q, k and v do, share the name), `decays` says whether weight
    decay applies (matrices: yes; norms and biases: no), `tied` names the further modules that use this very parameter,
    each with its style, and `tied_blocks` the block of each of those (none given: all after the blocks). `kind` is
    "frozen" where the model itself keeps it as it is; a plan may freeze others. `looked_up` is untrue of a matrix before
    the blocks that multiplies, and is no table.
    """

    module: str
    tensor: str
    shape: tuple[int, ...]
    block: int | None
    after_blocks: bool
    style: str | None
    cut: int | None
    pieces: tuple[Piece, ...]
    reads: str
    decays: bool
    tied: tuple[tuple[str, str | None], ...] = ()
    tied_blocks: tuple[int, ...] = ()
    kind: Literal["weight", "frozen"] = "weight"
    looked_up: bool = True

    @property
    def name(self) -> str:
        return f"{self.module}.{self.tensor}"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def branch(self) -> str:
        """The child of a block that it belongs to: the attention, the MLP, a norm. Empty outside of blocks."""
        if self.block is None:
            return ""
        prefix, _, inside = self.module.partition(f".{self.block}.")
        return f"{prefix}.{self.block}.{inside.partition('.')[0]}"

    @property
    def width_across(self) -> int:
        """Of a matrix (or a stack of them) that is cut: the size of its other side."""
        assert self.cut is not None
        return self.shape[(len(self.shape) - 1) + (len(self.shape) - 2) - self.cut]


@dataclass(frozen=True)
class ModelFacts:
    """One model: its sizes and its parameters, in the order in which a forward uses them. `widths` says how wide each
    block's output is (none given: `hidden`, and logits follow); `heads` is 0 where plait knows of none. `head` names the
    module that gives the logits, `whole_logits` what is done to them after it that takes more than each by itself (empty:
    nothing is), `experts_per_token` how many experts of a layer a token goes to (0: there are none), `attention_dropout`
    which share of its attention weights training drops, `whole_rows` why its blocks cannot have some tokens of a row each
    (empty: they can), `shared_keys` how many columns of the keys are one for all heads
    (DeepSeek's, turned by positions; 0: none are), `cannot` which choices of a plan do not go with the model ("tp" above
    1, "attention plait"), each with why and what else to set."""

    family: str
    blocks: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int
    head: str
    parameters: tuple[ParameterFact, ...]
    experts_per_token: int = 0
    attention_dropout: float = 0.0
    widths: tuple[int, ...] = ()
    whole_logits: str = ""
    whole_rows: str = ""
    shared_keys: int = 0
    cannot: tuple[tuple[str, str], ...] = ()

    @property
    def elements(self) -> int:
        return sum(p.elements for p in self.parameters)

    @cached_property
    def by_name(self) -> Mapping[str, ParameterFact]:
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def head_weight(self) -> ParameterFact:
        """The parameter that the head multiplies by: its own, or the embedding's where the two are tied."""
        return next(
            p for p in self.parameters if p.tensor == "weight" and self.head in (p.module, *(use[0] for use in p.tied))
        )

    @cached_property
    def block_of(self) -> Mapping[str, int | None]:
        """The block of every module that has parameters."""
        return {parameter.module: parameter.block for parameter in self.parameters} | {
            module: None for parameter in self.parameters for module, _ in parameter.tied
        }

    @cached_property
    def branches(self) -> Mapping[int, tuple[str, ...]]:
        """Of each block the children that tp cuts something of, in order: attention and MLP."""
        found: dict[int, dict[str, None]] = {}
        for parameter in self.parameters:
            if parameter.block is not None and parameter.cut is not None:
                found.setdefault(parameter.block, {})[parameter.branch] = None
        return {block: tuple(names) for block, names in found.items()}

    @cached_property
    def styles(self) -> Mapping[str, str | None]:
        """The style of every module that has parameters."""
        found = {parameter.module: parameter.style for parameter in self.parameters}
        return found | {module: style for parameter in self.parameters for module, style in parameter.tied}
