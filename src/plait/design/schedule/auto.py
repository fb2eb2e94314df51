"""auto: the shortest table that is found for the times of its stages, within a limit of memory.

    passes of greedy.py with many settings  +  the other tables of one stage a rank
        -> those in which no rank keeps more than the limit -> the shortest, played with the times

Where all ranks end a step together (a norm over all gradients, say), a step lasts from the first start to the last end:
the first forward's way to the last stage is lost, and more memory than 1f1b's hardly helps. `rolling` counts the longest
span of one rank instead, for ranks that go on with the next step as soon as they are done; twice 1f1b's memory then
leaves next to no bubble. Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3 (ZB-1p and ZB-2p). The search
stops at a table that no other can beat (`least_seconds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, product

from ..errors import PlanError
from .action import Action, Kind, Schedule
from .check import peak
from .greedy import TINY, Knobs, Pass, Times
from .play import play

PATIENCES = (1, 2, 4, 10, 0, 8, 3, 6, 9)
"""In 24ths of a microbatch's time on the slowest stage."""
FILLS = ((0.75, True), (0.75, False), (1.0, False))
SHARES = (0.0, 0.25)
MOST_ACTIONS = 1 << 20
"""Written by all passes together, some ten seconds of them: fewer settings are tried on a table of more than 25,000."""


def search(
    ranks: int,
    microbatches: int,
    times: Times,
    limit: float,
    *,
    candidates: Sequence[Schedule] = (),
    rolling: bool = False,
) -> Schedule:
    """The shortest of the `candidates` that fit and of what the search finds; of two that are as short the first. Stage s
    is on rank s. Pure: with the same arguments the same table, on every rank."""
    least = max(times.activation)
    if limit * (1 + TINY) < least:
        full = times.activation.index(least)
        raise PlanError(
            f"A limit of {limit:.6g} is less than the {least:.6g} that one microbatch leaves on stage {full} of {ranks}: "
            f"set a limit of {least:.6g} or more, or smaller microbatches."
        )
    found = [(seconds(table, times, rolling=rolling), table) for table in candidates if fits(table, times, limit)]
    best = min(found, key=lambda entry: entry[0], default=None)
    bound = least_seconds(microbatches, times, limit, rolling=rolling) * (1 + TINY)
    if best is None or best[0] > bound:
        for done, splits in _passes(microbatches, times, limit):
            ends = zip(done.starts, done.ends, strict=True)
            length = max(end - start if rolling else end for start, end in ends)
            if best is None or length < best[0] * (1 - TINY):
                best = (length, _table(done, microbatches, splits=splits))
            if best[0] <= bound:
                break
    assert best is not None
    return replace(best[1], name="auto")


def _passes(microbatches: int, times: Times, limit: float) -> Iterator[tuple[Pass, bool]]:
    """Passes, and whether backward is split in them. Whole ones where splitting keeps more than it frees."""
    stages = list(zip(times.activation, times.deferred, strict=True))
    ways = [(times, True)] if all(deferred <= limit * (1 + TINY) for _, deferred in stages) else []
    if any(deferred > activation for activation, deferred in stages):
        ways.append((times.whole, False))
    written = 0
    for patience, share, (fill, eager), (given, splits) in product(PATIENCES, SHARES, FILLS, ways):
        yield Pass(microbatches, given, limit, Knobs(patience / 24 * times.cycle, share, fill, eager)), splits
        written += 3 * len(stages) * microbatches
        if written > MOST_ACTIONS:
            return


def _table(done: Pass, microbatches: int, *, splits: bool) -> Schedule:
    def row(stage: int) -> tuple[Action, ...]:
        if splits:
            return tuple(Action(kind, stage, microbatch) for kind, microbatch in done.rows[stage])
        whole = {Kind.FORWARD: Kind.FORWARD, Kind.BACKWARD_INPUT: Kind.BACKWARD}
        return tuple(Action(whole[kind], stage, m) for kind, m in done.rows[stage] if kind in whole)

    return Schedule("auto", microbatches, tuple(row(stage) for stage in range(len(done.rows))))


def seconds(table: Schedule, times: Times, *, rolling: bool = False) -> float:
    """How long a table takes: from the first start to the last end, or the longest span of one rank."""
    played = play(table, times.seconds, latency=times.communication)
    spans = [(played[row[0]][0], played[row[-1]][1]) for row in table.rows]
    return max(end - start if rolling else end for start, end in spans)


def fits(table: Schedule, times: Times, limit: float) -> bool:
    """Whether no rank keeps more than `limit`."""

    def kept(stage: int, microbatch: int) -> float:
        return times.activation[stage]

    def later(stage: int, microbatch: int) -> float:
        return times.deferred[stage]

    peaks = (peak(table, rank, forward=kept, deferred=later) for rank in range(table.ranks))
    return max(peaks) <= limit * (1 + TINY)


def least_seconds(microbatches: int, times: Times, limit: float, *, rolling: bool = False) -> float:
    """What no table of one stage a rank is shorter than.

    A stage computes every microbatch, and can do nothing but forwards, as many as fit, until its first gradient comes:

        forwards from here to the last stage, backwards back to here - the forwards that fit

    And it waits for each later stage, which has a forward and a backward of every microbatch to do between the first
    one's way there and the last one's way back. Before all that, it waits for its first microbatch.
    """
    count, late, m = len(times.forward), times.communication, microbatches
    most = 0.0
    arrival, chain = 0.0, 0.0  # of the first gradient after the first forward's start; through a later stage and back
    starts = [0.0, *accumulate(forward + late for forward in times.forward)]
    for stage in reversed(range(count)):
        forward, backward, weight = times.forward[stage], times.input[stage], times.weight[stage]
        hops = 2 * late if stage + 1 < count else 0.0
        arrival += forward + hops
        held = times.activation[stage]
        fit = min(m, int(limit * (1 + TINY) / held)) if held > 0 else m
        idle = max(0.0, arrival - fit * forward)
        arrival += backward
        through = chain + forward + backward + hops if stage + 1 < count else 0.0
        chain = max(m * (forward + backward), through)
        span = max(m * times.work(stage) + idle, chain + weight)
        most = max(most, span if rolling else starts[stage] + span)
    return most
