"""Rounds: every contestant is alive at once, and in each round each gets one turn, in an order of that round's own.

    round 0   C A D B      one turn = `steps` steps; the others are parked
    round 1   B D A C
    ...                    then rounds of the rivals alone whose ratio is not yet known well enough

What slows the machine for a while slows whoever is on in that while; over the rounds it meets everyone. Where the memory
of a process lies makes it some hundredths faster or slower for as long as it lives: after every HEAT rounds the
contestants are forked anew.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .contestants.contestant import Contestant
from .contestants.field import ONE, Rivals
from .measure import Estimate, busy_seconds, private_bytes, ratio
from .parked import Lost, Parked
from .work import Work

HEAT = 3
TOLERANCE = 1e-4
"""How far a first loss may lie from that of one process."""

Say = Callable[[str], None]


def order(names: Sequence[str], round_number: int, seed: int = 0) -> list[str]:
    """Who comes when in a round; depends on nothing but these."""
    shuffled = sorted(names)
    random.Random(f"{seed}/{round_number}").shuffle(shuffled)
    return shuffled


@dataclass
class Record:
    """What is known of one contestant. It is compared with others as long as `trouble` is empty."""

    contestant: Contestant
    trouble: str = ""
    losses: list[float] = field(default_factory=list)
    """Of its first steps."""
    step_seconds: list[float] = field(default_factory=list)
    """One a round, as the two below."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor time of a step, all ranks together."""
    times: list[dict[str, float]] = field(default_factory=list)
    """Seconds of the kinds of computation by stage, for contestants that can tell."""
    others: list[float | None] = field(default_factory=list)
    """The share of the machine that others used during the turn."""
    memory: list[int] = field(default_factory=list)
    """Bytes by rank: the peak of private memory at the work `mem`, less what the rank began with."""


def mean_losses(answers: list[dict[str, Any]]) -> list[float]:
    """The loss of each step from what the ranks say of theirs: ranks have equally many tokens, or none and no loss."""
    by_step = zip(*(answer["losses"] for answer in answers), strict=True)
    said = [[loss for loss in step if loss is not None] for step in by_step]
    return [sum(losses) / len(losses) for losses in said]


def gap(record: Record, reference: Record) -> float:
    """The largest distance of the first losses from one process's, over the steps in which they must be equal."""
    pairs = list(zip(record.losses, reference.losses, strict=False))[: record.contestant.proven]
    return max(abs(mine - true) for mine, true in pairs)


class Track:
    """The contestants of one work, alive; use as a context manager. The one process that all losses are held against
    comes first, whether it takes part in the rounds or not."""

    def __init__(self, contestants: Iterable[Contestant], work: Work, *, first: int, say: Say) -> None:
        self.records: dict[str, Record] = {}
        self._alive: dict[str, Parked] = {}
        self._work, self._first, self._say = work, first, say
        self._entering = sorted(contestants, key=lambda one: one.name != ONE)

    def __enter__(self) -> Track:
        try:
            for contestant in self._entering:
                self.enter(contestant)
        except BaseException:
            self._end(by_force=True)
            raise
        if self.pids:
            held = sum(private_bytes(pid) for pid in self.pids)
            self._say(f"{len(self.pids)} ranks are parked, {held / 2**30:.1f} GiB")
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._end(by_force=kind is not None)

    def _end(self, *, by_force: bool) -> None:
        for parked in self._alive.values():
            if by_force:  # some may be in the middle of a turn
                parked.kill()
            else:
                parked.close()
        self._alive.clear()

    def enter(self, contestant: Contestant) -> None:
        record = self.records.setdefault(contestant.name, Record(contestant))
        try:
            parked = Parked(contestant, self._work, first=self._first, others=self._alive.values())
        except Lost as lost:
            self._drop(record, str(lost))
            if contestant.name == ONE:  # nobody's losses could be told right from wrong
                raise
            return
        self._alive[contestant.name] = parked
        record.losses = mean_losses(parked.ready)
        distance = gap(record, self.records[ONE])
        self._say(f"{contestant.name}: losses {' '.join(f'{loss:.6f}' for loss in record.losses)}, off {distance:.1e}")
        if not distance <= TOLERANCE:
            self._drop(record, f"its first losses are off by {distance:.2g}, and the most is {TOLERANCE:g}")

    def _drop(self, record: Record, why: str) -> None:
        record.trouble = why
        self._say(f"{record.contestant.name} is out: {why}")
        parked = self._alive.pop(record.contestant.name, None)
        if parked:
            parked.close()

    @property
    def pids(self) -> list[int]:
        return [pid for parked in self._alive.values() for pid in parked.pids]

    def names(self) -> list[str]:
        return list(self._alive)

    def ready(self, name: str) -> list[dict[str, Any]]:
        """What the ranks of one contestant said when they had built and taken their first steps."""
        return self._alive[name].ready

    def ask(self, name: str, do: str, **values: Any) -> list[dict[str, Any]]:
        """What the ranks of one contestant say; nothing when it is out, or goes out by this."""
        if name not in self._alive:
            return []
        try:
            return self._alive[name].ask(do, **values)
        except Lost as lost:
            self._drop(self.records[name], str(lost))
            return []

    def turn(self, name: str, steps: int) -> None:
        """One turn of one contestant, noted in its record."""
        begin, busy = time.monotonic(), busy_seconds()
        answers = self.ask(name, "turn", steps=steps)
        if not answers:
            return
        seconds, cpu = answers[0]["seconds"], sum(answer["cpu"] for answer in answers)
        record = self.records[name]
        record.step_seconds.append(seconds / steps)
        record.cpu_seconds.append(cpu / steps)
        record.times.append({name: value for answer in answers for name, value in answer["times"].items()})
        after, others = busy_seconds(), None
        if busy is not None and after is not None:
            capacity = (time.monotonic() - begin) * (os.cpu_count() or 1)
            others = min(1.0, max(0.0, (after - busy - cpu) / capacity))
        record.others.append(others)

    def rounds(self, count: int, most: int, steps: int, rivals: Sequence[Rivals]) -> int:
        """`count` rounds of everyone, then up to `most` in all of those who are held to a bar and not yet known to +-5 %.
        Returns how many there were."""
        for number in range(count):
            if number and number % HEAT == 0:
                self._renew(self.names())
            self._round(number, self.names(), steps)
        number = count
        while number < most:
            loose = {
                name
                for one in rivals
                if one.bar is not None and (found := self.compare(one)) and not found.narrow
                for name in (one.ours, one.theirs)
            }
            if not loose:
                break
            if number % HEAT == 0:
                self._renew(sorted(loose))
            self._round(number, sorted(loose), steps)
            number += 1
        return number

    def _renew(self, names: Sequence[str]) -> None:
        """Ends the processes of some contestants and forks them again."""
        for name in names:
            self._alive.pop(name).close()
        for name in names:
            self.enter(self.records[name].contestant)

    def _round(self, number: int, names: Sequence[str], steps: int) -> None:
        for name in order(names, number):
            self.turn(name, steps)
        self._say(f"round {number + 1}: {len(names)} contestants")

    def compare(self, rivals: Rivals) -> Estimate | None:
        return compare(self.records, rivals)


def compare(records: dict[str, Record], rivals: Rivals) -> Estimate | None:
    """How many times the speed of theirs ours has; None unless both are in. Rounds that only one of them had, which are
    the last, are left out."""
    ours, theirs = records.get(rivals.ours), records.get(rivals.theirs)
    if not ours or not theirs or ours.trouble or theirs.trouble:
        return None
    rounds = min(len(ours.step_seconds), len(theirs.step_seconds))
    with suppress(ValueError):
        return ratio(
            [1 / seconds for seconds in ours.step_seconds[:rounds]],
            [1 / seconds for seconds in theirs.step_seconds[:rounds]],
        )
    return None
