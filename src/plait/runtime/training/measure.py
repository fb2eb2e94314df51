"""What a run measured of itself, gathered from its ranks in the records of the design wing."""

from __future__ import annotations

import resource
import sys

import torch

from ...design.records import MemoryBill, Span, StepTime, Timeline, Traffic
from ..comm.collectives import all_gather
from ..comm.world import World
from .step import Run
from .watch import Watch


def timeline(run: Run) -> Timeline:
    """The last step on the ranks of this rank's pipeline; each of them must ask."""
    schedule, group = run.pipeline.schedule, run.world.group("pp")
    times = torch.zeros(max(map(len, schedule.rows)), 2, dtype=torch.float64, device=run.world.device)
    for place, (_, start, end) in enumerate(run.clock.spans()):
        times[place] = torch.tensor((start, end))
    gathered = all_gather(times, group, why="timeline").tolist()
    spans = [
        Span(rank, action, *gathered[rank][place])
        for rank, row in enumerate(schedule.rows)
        for place, action in enumerate(row)
    ]
    return Timeline(schedule.ranks, tuple(spans))


def traffic(world: World, predicted: list[Traffic]) -> list[Traffic]:
    """What every rank has moved since its ledger was cleared, in rows like the predicted ones; what was not predicted is
    summed in a row of its own. Every rank must ask."""
    mine = {(row.axis, row.why, row.operation, row.ranks): row for row in world.ledger.rows(world.rank)}
    keys = list(dict.fromkeys((row.axis, row.why, row.operation, row.ranks) for row in predicted))
    counts = [(mine[key].calls, mine[key].payload) if key in mine else (0, 0) for key in keys]
    others = [row for key, row in mine.items() if key not in keys]
    counts.append((sum(row.calls for row in others), sum(row.payload for row in others)))
    gathered = all_gather(torch.tensor(counts, device=world.device), world.everyone, why="traffic").tolist()
    keys.append(("other", "not predicted", "send", world.mesh.size))
    return [
        Traffic(rank, *key, calls, payload)
        for rank, rows in enumerate(gathered)
        for key, (calls, payload) in zip(keys, rows, strict=True)
        if calls
    ]


def memory(run: Run, watch: Watch) -> list[MemoryBill]:
    """What every rank holds, counted tensor by tensor, and what its first step kept for backward. Every rank must ask."""
    master, state = run.optimizer.held
    units = run.sink.space + (run.gathering.bytes if run.gathering is not None else 0)
    held = [run.stored_bytes, master, run.sink.bytes, state, watch.kept, units, _process(run.world.device)]
    mine = torch.tensor(held, device=run.world.device)
    gathered = all_gather(mine, run.world.everyone, why="memory").tolist()
    return [MemoryBill(rank, *row) for rank, row in enumerate(gathered)]


def _process(device: torch.device) -> int:
    """The most bytes that torch's allocator gave out on a GPU, that this process had in memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def step_times(run: Run, watch: Watch) -> list[StepTime]:
    """Where the time of the last steps went, on every rank. Every rank must ask."""
    mine = torch.tensor([float(watch.steps), *watch.means], dtype=torch.float64, device=run.world.device)
    gathered = all_gather(mine, run.world.everyone, why="step times").tolist()
    return [StepTime(rank, int(steps), *shares) for rank, (steps, *shares) in enumerate(gathered)]
