"""plait's own: one plan, `plait.launch` and `plait.build`, as a user writes it; what the plan leaves open is plait's
default. `plait.launch` forks the ranks, so that they are what it makes of them, and its own process watches them.

Its split of a step reads the run's own clock, which is always on, and the moments that `Run.step` announces.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import plait
from plait.design.schedule import Kind
from plait.runtime.batch import IGNORE
from plait.runtime.comm.collectives import barrier
from plait.runtime.training.step import Moment, Run

from ..work import BETAS, LEARNING_RATE, SEED, WEIGHT_DECAY, Work, tokens
from .contestant import Race, Seat, Step

KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.SEND_ACTIVATION: "send",
    Kind.SEND_GRADIENT: "send",
    Kind.RECEIVE_ACTIVATION: "receive",
    Kind.RECEIVE_GRADIENT: "receive",
    Kind.WAIT_ACTIVATION: "wait",
    Kind.WAIT_GRADIENT: "wait",
    Kind.REDUCE: "reduce",
}
"""What the split calls the actions of a schedule."""


def laid_out(**degrees: Any) -> Race:
    """A run with these fields of a plan."""

    def race(work: Work, seat: Seat) -> None:
        plan = plan_of(work, degrees)

        def main(world: plait.World) -> None:
            run, batch = plait.build(plan, world), rows_of(plan, world, work)
            mine = seat.at(world.rank, lambda: barrier(world), lambda: world.shared_bytes)
            mine.serve(timed(run, batch), lambda: split(run, batch), lambda: times(run))

        plait.launch(main, plan)

    return race


def plan_of(work: Work, degrees: dict[str, Any]) -> plait.Plan:
    degrees = {"microbatches": work.microbatches if degrees.get("pp", 1) > 1 else 1} | degrees
    return plait.Plan(
        model=str(work.config_folder), batch=work.rows, seq=work.seq, seed=SEED, lr=LEARNING_RATE,
        lr_schedule="constant", weight_decay=WEIGHT_DECAY, beta1=BETAS[0], beta2=BETAS[1], clip=0.0, **degrees,
    )  # fmt: skip


def rows_of(plan: plait.Plan, world: plait.World, work: Work) -> plait.Batch:
    """This rank's rows; the last token of a row has no next one, and is no target."""
    whole = tokens(work)
    none = torch.full((work.rows, 1), IGNORE)
    batch = plait.Batch(
        tokens=whole,
        targets=torch.cat((whole[:, 1:], none), dim=1),
        positions=torch.arange(work.seq).expand(work.rows, work.seq).contiguous(),
        document_ids=torch.zeros_like(whole),
        sample_ids=torch.arange(work.rows),
    )
    return batch.split(plan.dp)[world.coordinate["dp"]]


def timed(run: Run, batch: plait.Batch) -> Step:
    return lambda: run.step(batch).loss


def times(run: Run) -> dict[str, float]:
    """The mean seconds of each kind of computation in the last step, by stage ('F0'), and on rank 0 what the step had
    besides the pipeline."""
    spans = run.clock.spans()
    found: dict[str, list[float]] = {}
    for action, start, stop in spans:
        if action.kind.lane == "compute":
            found.setdefault(f"{action.kind.letter}{action.stage}", []).append(stop - start)
    means = {name: sum(seconds) / len(seconds) for name, seconds in found.items()}
    if run.world.rank == 0:
        before, after = run.laps["counted"], run.laps["updated"]
        means["rest"] = (after - before) - (spans[-1][2] - spans[0][1])
    return means


def split(run: Run, batch: plait.Batch) -> dict[str, float]:
    """One step of `run`: the seconds of every kind of action, of what follows the pipeline, and of the rest."""
    moments: dict[Moment, float] = {}

    def at(moment: Moment) -> None:
        moments[moment] = time.perf_counter()

    begin = time.perf_counter()
    run.step(batch, at=at)
    end = time.perf_counter()
    spans = run.clock.spans()
    # The clock starts behind the count of target tokens, and its last action ends just before the first moment.
    parts = {"start": moments["reduced"] - begin - spans[-1][2]} | dict.fromkeys(KINDS.values(), 0.0)
    for action, start, stop in spans:
        parts[KINDS[action.kind]] += stop - start
    parts["norm and clip"] = moments["clipped"] - moments["reduced"]
    parts["optimizer"] = end - moments["clipped"]
    parts["host remainder"] = end - begin - sum(parts.values())
    return parts
