"""What a check takes of the machine, on paper: the memory of all its processes at the fullest moment, and its files.

In bytes per element of the model, in fp64:

    reference    48   weights as computed and as updated, gradients, clipped gradients, AdamW's two moments
                 96   the record of a step, and of the one before: gradient, clipped gradient, moments, weight, published
                 16   gradients before they are added up, the slack of the weights
    ranks        32   of what they hold: weights, gradients, moments, twice their bill (design/cost/memory.py)
                 48   the record of a step
    files         8   the initial weights
                 56   each step: its record, and the slack

As shipped the same in fp32, of one step, with what disturbed runs need beside it: less memory, and more files. To these
come what modules give and get back: `outputs` a step in records and files, and in each process the activations of its
bill, twice; and the copies of the largest tensor that a rank makes to compare it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..design.cost.memory import memory
from ..design.facts import ModelFacts
from ..design.plan import Plan

MOST_INSIDE = 1 << 28
"""Bytes of one step's tensors above which only blocks are recorded, and not every module inside them; and of its
microbatches' gradients above which those are not kept."""
WIDE = 8
STATE, RECORD, ADDED = 6 * WIDE, 6 * WIDE, 2 * WIDE
COMPARED = 5
"""Copies of a tensor while it is compared."""
PROCESS = 1 << 27
"""Of its own a fork that has imported torch."""


@dataclass(frozen=True)
class Bill:
    """Bytes: of the reference and of all ranks in memory, and of the files that they leave in the temporary folder."""

    reference: int
    ranks: int
    files: int

    @property
    def memory(self) -> int:
        return self.reference + self.ranks


def bill(plan: Plan, facts: ModelFacts, steps: int, *, shipped: bool = True) -> Bill:
    """What `steps` steps of the wide pass take, and with `shipped` the pass after it."""
    once = Plan(model=plan.model, seq=plan.seq, batch=plan.microbatch_rows[0])
    layout = plan.model_copy(update={"compute": "fp32", "accumulate": "auto", "reduce": "auto"})
    recorded = outputs(plan, facts)
    reference = facts.elements * (STATE + 2 * RECORD + ADDED) + 2 * recorded + 2 * memory(once, facts)[0].activations
    ranks = 0
    for rank in memory(layout, facts):
        held = rank.weights // 4
        largest = max(fact.elements for fact in facts.parameters)
        ranks += 2 * rank.total + RECORD * held + COMPARED * WIDE * min(largest, held) + PROCESS
    files = facts.elements * (WIDE + steps * (RECORD + WIDE)) + steps * recorded
    if shipped:
        files += (facts.elements * (2 * WIDE + RECORD) + recorded) // 2
    return Bill(reference + 2 * PROCESS, ranks + plan.tp * recorded, files)


def outputs(plan: Plan, facts: ModelFacts) -> int:
    """Bytes of what is recorded of a step forward and backward: inputs and outputs of blocks, outputs of modules, what
    linear layers read, and the gradient of each; and the gradients of each microbatch, where that is little."""
    width = 2 * facts.blocks * facts.hidden + 2 * facts.hidden + facts.vocabulary
    if looks_inside(plan, facts):
        weights = [fact.shape for fact in facts.parameters if fact.block is not None and fact.tensor == "weight"]
        # A matrix is as wide as what it gives and what it reads, whichever is its first dim.
        width += facts.hidden + sum(sum(shape) if len(shape) == 2 else shape[0] for shape in weights)
    apart = each_microbatch(plan, facts.elements)
    return plan.batch * plan.seq * 2 * WIDE * width + (apart if apart <= MOST_INSIDE else 0)


def each_microbatch(plan: Plan, elements: int) -> int:
    """Bytes of the gradients of every microbatch of a step."""
    return elements * WIDE * plan.dp * plan.microbatches


def looks_inside(plan: Plan, facts: ModelFacts) -> bool:
    """Whether the modules inside the blocks are compared, or the blocks only: a matter of memory."""
    widths = sum(fact.shape[0] for fact in facts.parameters if len(fact.shape) > 1)
    return plan.batch * plan.seq * WIDE * 2 * widths <= MOST_INSIDE
