"""A plain `nn.Sequential` as a model with blocks: its children are the blocks, whatever they are.

    child        0 Embedding   1 Block   2 Block   3 Linear        tokens [b, s] in, logits [b, s, V] out;
    gives        [b, s, 32]    [.., 32]  [.., 48]  [.., V]         between two children one tensor, of any width
    stage        0             0         1         1

It starts from the weights that the module was given with: a stage copies those of its children, so every layout starts
from the same bits. A child that stands in the list twice, or a parameter that two children have, is a tied weight; one
that wants no gradient is frozen. Widths are found by one forward on the meta device. Children see tokens and hidden
states only: rows are given as they are, and what a token may look at is the module's own affair. There is no tensor plan,
so no tp.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..design.errors import PlanError
from ..design.facts import ModelFacts, ParameterFact, Piece
from ..design.plan import Plan, stage_blocks
from ..design.rules import validate
from ..design.table import refuse_search
from .batch import Batch

FAMILY = "sequential"
ROWS = 2
"""Of the forward that finds the widths."""
STATISTICS = nn.modules.batchnorm._BatchNorm
DROPOUT = nn.modules.dropout._DropoutNd


@dataclass(frozen=True)
class SequentialModel:
    """A module as it was given, with its facts for one plan. A child is in `children` each time it stands in the list."""

    module: nn.Sequential
    facts: ModelFacts

    @property
    def children(self) -> list[nn.Module]:
        return list(self.module)


def read(module: nn.Sequential, plan: Plan, dtype: torch.dtype) -> SequentialModel:
    """The facts of a module under a plan; whatever does not fit is a `PlanError`."""
    if type(module).forward is not nn.Sequential.forward:
        raise PlanError(
            f"{type(module).__name__} has a forward of its own: give a plain nn.Sequential of its children."
        )
    children = list(module)
    if not children:
        raise PlanError("The nn.Sequential is empty: give it children, the last of which gives the logits.")
    _refuse_children(children)
    parameters = _parameters(children)
    widths, changing = _widths(children, plan.seq, dtype)
    facts = ModelFacts(
        family=FAMILY, blocks=len(children), hidden=widths[0], heads=0, kv_heads=0, vocabulary=widths[-1],
        positions=plan.seq, head="", parameters=tuple(parameters), widths=widths,
    )  # fmt: skip
    if plan.balance == "cost":
        raise PlanError("balance cost counts what a transformer's blocks compute, not a plain list's: use parameters.")
    refuse_search(plan, facts)
    validate(plan, facts)
    _refuse_stages(children, plan, facts, changing)
    return SequentialModel(module, facts)


def _refuse_children(children: list[nn.Module]) -> None:
    for number, child in enumerate(children):
        for module in child.modules():
            kind = type(module).__name__
            if isinstance(module, STATISTICS):
                raise PlanError(
                    f"Child {number} has a {kind}, whose statistics are those of a microbatch, so that layouts would "
                    "differ: use a LayerNorm."
                )
            share = module.p if isinstance(module, DROPOUT) else getattr(module, "dropout", 0)
            if isinstance(share, float) and share > 0:
                raise PlanError(
                    f"Child {number} has a {kind} that drops {share} in an order that depends on the layout: set it to 0."
                )
        for name, parameter in child.named_parameters():
            if parameter.device.type == "meta":
                raise PlanError(f"Child {number} has {name} on the meta device, without a weight to start from.")


def _parameters(children: list[nn.Module]) -> list[ParameterFact]:
    """In the order of a forward; one that is met again is tied to the module that had it first."""
    found: dict[int, ParameterFact] = {}
    for number, child in enumerate(children):
        for inner, module in child.named_modules(prefix=str(number)):
            for tensor, parameter in module.named_parameters(recurse=False):
                first = found.get(id(parameter))
                if first is not None:
                    found[id(parameter)] = replace(
                        first, tied=(*first.tied, (inner, None)), tied_blocks=(*first.tied_blocks, number)
                    )
                    continue
                shape = tuple(parameter.shape)
                found[id(parameter)] = ParameterFact(
                    module=inner, tensor=tensor, shape=shape, block=number, after_blocks=False, style=None, cut=None,
                    pieces=(Piece("", shape[0] if shape else 1),), reads=f"{inner} input", decays=len(shape) > 1,
                    kind="weight" if parameter.requires_grad else "frozen",
                )  # fmt: skip
    return list(found.values())


def _widths(children: list[nn.Module], seq: int, dtype: torch.dtype) -> tuple[tuple[int, ...], set[int]]:
    """What each child gives, in elements a token; and which children change what they are given."""
    found, changing = [], set()
    x = torch.zeros(ROWS, seq, dtype=torch.int64, device="meta")
    for number, child in enumerate(children):
        kind, version = type(child).__name__, x._version
        try:
            with torch.no_grad():
                y = without_memory(child, dtype)(x)
        except Exception as error:  # whatever a module says to a shape that it does not take
            said = " ".join(str(error).split())[:200]
            raise PlanError(
                f"Child {number} ({kind}) does not take what it is given, {list(x.shape)} of {x.dtype}: {said}"
            ) from None
        if not isinstance(y, Tensor) or y.dim() != 3 or y.shape[:2] != (ROWS, seq):
            gave = list(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise PlanError(
                f"Child {number} ({kind}) gives {gave} for {ROWS} rows of {seq} tokens; it must give one tensor "
                f"[{ROWS}, {seq}, width]."
            )
        if y.dtype != dtype:
            raise PlanError(
                f"Child {number} ({kind}) gives {y.dtype}, but compute is in {dtype}: leave the type as it is."
            )
        if x._version != version:
            changing.add(number)
        x = y
        found.append(y.shape[2])
    return tuple(found), changing


def _refuse_stages(children: list[nn.Module], plan: Plan, facts: ModelFacts, changing: set[int]) -> None:
    owned = {parameter.block for parameter in facts.parameters}
    for stage, (start, stop) in enumerate(stage_blocks(plan, facts)):
        if start in changing:
            raise PlanError(
                f"Child {start} ({type(children[start]).__name__}) changes its input in place, but it is the first of "
                f"stage {stage}, and the input is another stage's: set inplace False."
            )
        if start < stop and not owned & set(range(start, stop)):
            which = f"child {start}" if stop - start == 1 else f"children {start} to {stop - 1}"
            raise PlanError(
                f"Stage {stage} would be {which} of {facts.blocks}, without a parameter of its own: set pp {plan.pp - 1} "
                "or less, or join children in an nn.Sequential of their own."
            )


def without_memory(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with its parameters and buffers on the meta device, floating ones in `dtype`."""
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="meta"))
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, dtype=_kept(buffer, dtype), device="meta")
    return copy.deepcopy(module, memo)


def _kept(buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if buffer.is_floating_point() else buffer.dtype


class SequentialStage:
    """The children from `start` to before `stop`: `forward(batch, received)` gives the next stage's input, or logits."""

    def __init__(self, model: SequentialModel, start: int, stop: int, dtype: torch.dtype) -> None:
        self._given = {str(number): model.children[number] for number in range(start, stop)}
        # One copy each time that a child stands in the list: what they share is its parameters.
        self.module = nn.ModuleDict({name: without_memory(child, dtype) for name, child in self._given.items()})
        self._owners = {
            f"{module}.{parameter.tensor}": parameter.name
            for parameter in model.facts.parameters
            for module in (parameter.module, *(tied for tied, _ in parameter.tied))
        }
        self.dtype = dtype
        self.at_hand: Batch | None = None
        self.step = 0
        """Of the run; nothing here is drawn by it."""

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """Its children, by their places in the list."""
        return {int(name): child for name, child in self.module.items()}

    def mark(self) -> object:
        """Nothing here depends on where a forward is."""
        return None

    def again(self, batch: Batch, mark: object) -> AbstractContextManager[object]:
        """Children see their input and nothing else."""
        return nullcontext()

    def parameters(self) -> dict[str, nn.Parameter]:
        """By the names of the whole list; a tied weight has one, wherever it is used."""
        return {self._owners.get(name, name): p for name, p in self.module.named_parameters()}

    def materialise(
        self, device: torch.device, kept: dict[str, nn.Parameter], home: Callable[[str, Tensor], Tensor] | None = None
    ) -> None:
        """Copies the weights that the module was given with. `kept` is shared by the stages of a rank; `home(name,
        whole)` says where a weight lives."""
        for child, given in self._given.items():
            for name, source in given.named_modules(prefix=child):
                target = self.module.get_submodule(name)
                for tensor, whole in source.named_parameters(recurse=False):
                    owner = self._owners[f"{name}.{tensor}"]
                    if owner not in kept:
                        mine = whole.detach().to(device, self.dtype, copy=home is None).contiguous()
                        kept[owner] = nn.Parameter(mine if home is None else home(owner, mine))
                    setattr(target, tensor, kept[owner])
                for tensor, buffer in source.named_buffers(recurse=False):
                    setattr(target, tensor, buffer.detach().to(device, _kept(buffer, self.dtype), copy=True))

    def forward(self, batch: Batch, received: Tensor | None) -> Tensor:
        self.at_hand = batch
        x = batch.tokens if received is None else received
        for child in self.module.values():
            x = child(x)
        return x.contiguous()
