"""The way into a world from Python: under a launcher its ranks, otherwise local ones, forked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ...design.errors import PlanError
from ...design.plan import Plan
from ..comm.nursery import launch as fork
from ..comm.world import Rendezvous, World
from ..data.batches import Batches
from ..data.tokens import Corpus, TokenizerFile, prepare
from ..sequential import SequentialModel
from .assemble import model_of
from .step import Trained


def launch(main: Callable[[World], Any], plan: Plan, *, model: nn.Sequential | None = None) -> list[Any]:
    """Runs `main(world)` on every rank of `plan` and returns what they returned (JSON values) by rank: of all local
    ranks, or under torchrun of this one. Call it before any computation in the process that forks. `model` is what
    `main` will build with, where it is not the plan's."""

    def on_rank(rendezvous: Rendezvous) -> Any:
        with World(rendezvous, plan.mesh) as world:
            return main(world)

    # Refused here, before any rank starts; and what is read here is imported once, for all that fork.
    model_of(plan, model)
    rendezvous = Rendezvous.from_environment()
    if rendezvous is None:
        return fork(
            on_rank, plan.world, hang_timeout=plan.hang_timeout, comm_check=plan.comm_check,
            local_transport=plan.local_transport,
        )  # fmt: skip
    if rendezvous.size != plan.world:
        raise PlanError(f"The plan has {plan.world} ranks ({plan.mesh}), but WORLD_SIZE is {rendezvous.size}.")
    return [on_rank(rendezvous.of(plan))]


def batches(plan: Plan, world: World, *, model: nn.Sequential | None = None) -> Batches:
    """This rank's rows of the plan's data, one batch a step. Tokenises the data once and keeps it in a cache. `model` is
    what reads them, where it is not the plan's."""
    return Batches(corpus(plan, model_of(plan, model)), plan, world.rank)


def corpus(plan: Plan, model: Trained) -> Corpus:
    """The plan's data in the tokens of the plan's tokenizer, which may be the model's own."""
    if isinstance(model, SequentialModel):
        return prepare(plan, model.facts.vocabulary)
    own = TokenizerFile(model.tokenizer, model.ends, learnt=model.weights is not None)
    return prepare(plan, model.facts.vocabulary, own=own)
