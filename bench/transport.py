"""python -m bench.transport: what a sum costs over shared memory and over Gloo, in wall time and in processor time.

Ranks of one thread call `all_reduce` again and again, both transports in turns; each number is the median over the
turns of the mean call. Processor time is that of all threads of a rank.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from typing import Any

from . import environment

SIZES = (64, 1 << 16, 1 << 20, 1 << 21, 1 << 22, 24 << 20)
TRANSPORTS = ("shared", "torch")
TURNS = 5


def measured(ranks: int, transport: Any) -> list[tuple[float, float]]:
    """Milliseconds of one call by the clock and of one rank's processor, by size."""
    import torch

    from plait.design.mesh import Mesh
    from plait.runtime.comm.collectives import all_reduce, barrier
    from plait.runtime.comm.nursery import launch
    from plait.runtime.comm.world import Rendezvous, World

    def main(meeting: Rendezvous) -> list[tuple[float, float]]:
        found = []
        with World(meeting, Mesh((("pp", 1), ("dp", ranks), ("tp", 1))), device="cpu") as world:
            for size in SIZES:
                x, calls = torch.zeros(size // 4), max(10, min(300, (1 << 24) // size))
                for _ in range(3):
                    all_reduce(x, world.everyone, why="bench")
                barrier(world)
                began, used = time.perf_counter(), busy()
                for _ in range(calls):
                    all_reduce(x, world.everyone, why="bench")
                found.append(((time.perf_counter() - began) / calls * 1e3, (busy() - used) / calls * 1e3))
        return found

    return launch(main, ranks, local_transport=transport)[0]  # type: ignore[no-any-return]


def busy() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    rows = []
    for ranks in (2, 4):
        turns: dict[str, list[Any]] = {transport: [] for transport in TRANSPORTS}
        for _ in range(TURNS):
            for transport in TRANSPORTS:
                turns[transport].append(measured(ranks, transport))
        for place, size in enumerate(SIZES):
            row: dict[str, Any] = {"ranks": ranks, "bytes": size}
            for transport, found in turns.items():
                row[transport] = [statistics.median(turn[place][kind] for turn in found) for kind in (0, 1)]
            rows.append(row)
            wall, cpu = ([row[transport][kind] for transport in TRANSPORTS] for kind in (0, 1))
            print(
                f"| {ranks} | {size:,} | {wall[0]:.3f} / {cpu[0]:.3f} | {wall[1]:.3f} / {cpu[1]:.3f} "
                f"| {wall[1] / wall[0]:.1f} / {cpu[1] / cpu[0]:.1f} |",
                flush=True,
            )
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(rows, file)
    return 0


if __name__ == "__main__":
    environment.settle()
    raise SystemExit(main())
