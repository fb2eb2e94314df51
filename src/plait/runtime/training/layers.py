"""What is put into the modules of one stage: layers cut over tp, weight gradients put off, rows cut to own tokens.
Modules keep their classes and parameters; the forwards of their instances are replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from ...design.facts import ModelFacts
from ...design.part import Parameter
from ...design.plan import Plan, cuts_rows, tokens_at
from ...design.sharding import Sharding
from ...design.styles import Style, style
from ..comm.world import World
from ..hf.stage_model import transposed
from ..parallel import tensor
from ..parallel.sequence import Tokens
from ..parallel.split_backward import WeightGradients
from ..sequential import SequentialStage
from .step import Body, Trained


@dataclass(frozen=True)
class Ways:
    """How a stage's layers are carried out: what they owe where backward is split, with sp how rows are cut, what
    column-parallel layers share, and what those owe no longer than the sum of their input's gradient takes."""

    owed: WeightGradients | None
    tokens: Tokens | None
    shared: tensor.SharedInput
    soon: WeightGradients

    def around(self, row: Style, *, in_block: bool) -> tuple[tensor.Change, tensor.Change | None]:
        """What a layer does to what it copies in, and to partial sums (None: they are summed)."""
        if self.tokens is None or not in_block:
            return self.shared, None
        return tensor.as_it_is, tensor.as_it_is if row.cuts == "both" else self.tokens.scatter

    def multiply(self, owed: WeightGradients | None) -> tensor.Multiply:
        """By what a layer multiplies that owes its weight's gradient so; None: autograd has it."""
        if owed is None:
            return tensor.product

        def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
            if owed is self.soon and not x.requires_grad:  # nothing will be summed
                return tensor.product(x, weight, bias, transposed=transposed)
            rows = None if self.tokens is None else self.tokens.rows_of(x)
            return owed.linear(x, weight, bias, transposed=transposed, rows=rows)

        return multiply


def replace_forwards(
    plan: Plan, model: Trained, body: Body, sharding: Sharding, world: World, stage: int, ways: Ways
) -> set[str]:
    """Splits the layers of a stage over tp, and puts off the weight gradients of linear layers where backward is split:
    the names of the modules whose gradients do not come by autograd."""
    done, later, group = set[str](), set[str](), world.group("tp")
    for parameter in sharding.on_stage(stage):
        for place, name in parameter.first.uses:
            if place != stage or name in done:
                continue
            done.add(name)
            if plan.chunks_loss and name == model.facts.head:  # the loss multiplies by its weight
                later.add(name)
                continue
            module = body.module.get_submodule(name)
            named = model.facts.styles[name]
            row = style(named, name) if named is not None and group.size > 1 else None
            is_transposed = transposed(module)
            axes, spans = parameter.summed_early(world.mesh, world.rank)
            puts_off, owes = is_transposed is not None and not spans, None
            if ways.owed is not None and puts_off:
                owes = ways.owed
                owes.put_off(module, transposed=bool(is_transposed))
            elif row is not None and row.enter == "copy" and puts_off:
                owes = ways.soon
            if owes is not None:
                later.add(name)
            if row is not None and (row.enter, row.leave) != ("none", "none"):
                enter, add = ways.around(row, in_block=parameter.first.block is not None)
                tensor.split(
                    module, row, group, enter=enter, add=add, start=first_row(parameter, world),
                    # The head's output stays cut: the loss reads it so.
                    sizes=None if name == model.facts.head else sharding.slices(parameter.name),
                    transposed=bool(is_transposed), multiply=ways.multiply(owes),
                    copies=partial(
                        tensor.sum_copies, group=world.group(*axes), spans=spans, transposed=bool(is_transposed)
                    ) if spans else None, turned=model.facts.shared_keys,
                )  # fmt: skip
    return later


def parts(plan: Plan, sharding: Sharding, stage: int, body: Body, later: set[str]) -> Counter[str]:
    """In how many parts each parameter's gradient comes from a microbatch of the stage: by autograd, and from the modules
    where it does not. A block that is computed again has a backward of its own."""
    again: dict[nn.Module, int] = {}
    for block, module in body.blocks.items():
        reads_tokens = isinstance(body, SequentialStage) and block == 0
        if plan.recompute == "full" and plan.recomputes(block) and sharding.reaches(stage, block) and not reads_tokens:
            again |= dict.fromkeys(module.modules(), block)
    found = Counter[str]()
    for parameter in sharding.on_stage(stage):
        names = (name for place, name in parameter.first.uses if place == stage)
        ways = {"later" if name in later else again.get(body.module.get_submodule(name)) for name in names}
        found[parameter.name] = len(ways)
    return found


def cut_rows(tokens: Tokens, model: Trained, body: Body, sharding: Sharding) -> None:
    """Has attention and MLP of every block read whole rows, and give own tokens."""
    facts = model.facts
    for block in body.blocks:
        for branch in facts.branches[block]:
            inside = [fact for fact in facts.parameters if fact.branch == branch]
            styles = [style(fact.style, fact.module) for fact in inside if fact.style is not None]
            tokens.branch(body.module.get_submodule(branch), scatters=any(row.cuts == "both" for row in styles))
            # What every rank does the same with there: a router.
            alike = {f.module for f in inside if all(p.region == "full" for p in sharding.parameter(f.name).parts)}
            for name in alike - {fact.module for fact in inside if fact.cut is not None or fact.style is not None}:
                tokens.once(body.module.get_submodule(name))


def own_tokens(plan: Plan, facts: ModelFacts, body: Body) -> Sequence[int]:
    assert body.at_hand is not None
    return tokens_at(plan, facts, body.at_hand.tokens.shape[1])


def own_span(plan: Plan, facts: ModelFacts, place: int, seq: int) -> tuple[int, int, int] | None:
    """Which of so many tokens of a row a place of tp has between the branches of blocks, if not all."""
    sizes = tokens_at(plan, facts, seq)
    start = sum(sizes[:place])
    return (start, start + sizes[place], seq) if cuts_rows(plan, facts) else None


def first_row(parameter: Parameter, world: World) -> int:
    """Where the rows of this tp rank begin: the same at every place of the pp axis."""
    holder = world.mesh.rank(**{**world.coordinate, "pp": parameter.first.owner})
    return parameter.spans(world.mesh, holder)[0][0]
