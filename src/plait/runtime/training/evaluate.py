"""The loss on held-out text, from the training stages: forward passes over their own weights, with no gather and no copy.

    pass 0   rows 0 1 2 3      dp 0: 0 1   dp 1: 2 3        sum and weight of the targets are added up on the device,
    pass 1   rows 4 - - -      dp 0: 4 -   dp 1: - -        and over all ranks once, at the end

A row of padding has weight 0, so each row counts once whatever the layout; and as every rank makes every pass, none waits
for one that has run out of rows. Nothing is dropped, nothing is learnt, and the step's ledger does not see it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..batch import Batch
from ..comm.collectives import all_reduce
from ..comm.nursery import BadNumbersError
from .step import Run


@dataclass(frozen=True)
class Evaluation:
    """`loss` is the mean over the set's `tokens` target tokens, after `step` steps."""

    step: int
    loss: float
    tokens: int
    seconds: float


@torch.no_grad()
def evaluate(run: Run, batches: Iterable[Batch]) -> Evaluation:
    """The mean loss over all rows of `batches`, this rank's share of them; the same on every rank (all must call, with
    equally many batches of batch / dp rows). A `BadNumbersError` on all ranks when it is not finite."""
    begin = time.perf_counter()
    plan, world, pipeline = run.plan, run.world, run.evaluation_pipeline
    place = world.coordinate
    one = torch.ones((), dtype=torch.float64, device=world.device)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    with world.ledger.aside():
        for batch in batches:
            pipeline.clock.start()
            share = pipeline.run([part.to(world.device) for part in batch.split(plan.microbatches)], one)
            total[0] += share * run.owns_loss
            total[1] += batch.weight.to(world.device) * (place["pp"] == place["tp"] == 0)
        run.forget()
        all_reduce(total, world.everyone, why="evaluation")
    summed, tokens = total.tolist()
    loss = summed / max(1.0, tokens)
    if not math.isfinite(loss):
        raise BadNumbersError(f"the held-out loss after step {run.done} is {loss}: lower lr ({plan.lr}).")
    return Evaluation(run.done, loss, int(tokens), time.perf_counter() - begin)
