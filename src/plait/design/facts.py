"""What a model is made of: its parameters in order, its blocks, its sizes. Filled by runtime/hf/read.py, read by all.

Facts say nothing about ranks: what each rank holds is design/sharding.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ParameterFact:
    """One parameter of the whole model.

    `module` is the module that owns it, `tensor` its name there ("weight"), `block` the index of the decoder block it
    belongs to, or None with `after_blocks` saying on which end it is used. `style` names the module's row in
    design/styles.py (None: every rank holds it whole), `quantum` the number of elements of the cut dim that must stay
    together (one attention group), `reads` its module's input (modules that read one and the same tensor, as q, k and v
    do, share the name), `decays` whether weight decay applies (matrices: yes; norms and biases: no).
    """

    module: str
    tensor: str
    shape: tuple[int, ...]
    block: int | None
    after_blocks: bool
    style: str | None
    quantum: int
    reads: str
    decays: bool

    @property
    def name(self) -> str:
        return f"{self.module}.{self.tensor}"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelFacts:
    """One model: its sizes and its parameters, in the order in which a forward uses them. `head` names the module that
    gives the logits."""

    family: str
    blocks: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int
    head: str
    parameters: tuple[ParameterFact, ...]

    @property
    def elements(self) -> int:
        return sum(p.elements for p in self.parameters)

    @cached_property
    def by_name(self) -> Mapping[str, ParameterFact]:
        return {parameter.name: parameter for parameter in self.parameters}
