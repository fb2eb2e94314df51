"""What a contestant is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from ..work import BASE, Work

Step = Callable[[], float | None]
"""One optimizer step; this rank's mean loss before it, or None where the rank has none."""
Split = Callable[[], dict[str, float]]
"""One step; the seconds of its kinds of work on this rank."""


class Seat(Protocol):
    """A rank's place at the bench."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def begin(self) -> None:
        """What this process has now is what it did not build: for libraries that only its own ranks import."""
        ...

    def serve(self, step: Step, split: Split | None = None, times: Split | None = None) -> None:
        """Takes the contestant's step whenever the bench asks; returns at the end of the bench. `times` says how long
        the actions of the last step took, and is asked after each turn."""
        ...

    def at(self, rank: int, meet: Callable[[], object], shared: Callable[[], int]) -> Seat:
        """The seat of a rank that the contestant has forked itself: `meet` returns when all ranks have come to it,
        `shared` gives the bytes of its memory that others map, too."""
        ...


Race = Callable[[Work, Seat], None]
"""Builds, serves, closes."""


@dataclass(frozen=True)
class Course:
    """Contestants that are alive together and compared with each other, at one work."""

    name: str
    group: str
    """The courses of one group are run and written together."""
    work: Work = BASE
    longer: int = 1
    """How many times the steps of a turn are taken: for steps that are short."""
    weighed: int = 2
    """The most ranks of contestants whose memory is measured."""


DATA = Course("data parallel", "layouts")


@dataclass(frozen=True)
class Contestant:
    name: str
    """What options and files call it."""
    label: str
    ranks: int
    race: Race
    threads: int = 1
    launches: bool = False
    """Whether `race` is called once, and forks its ranks itself, and not once in each of the ranks."""
    proven: int = 3
    """How many of its first losses must be those of one process."""
    profiled: bool = False
    """Whether --profile looks at it."""
    course: Course = DATA
    """Where it takes part."""
    needs: str = ""
    """A package without which it is left out."""

    @property
    def absent(self) -> str:
        """Why it cannot take part; empty where it can."""
        return f"no package {self.needs} is installed" if self.needs and find_spec(self.needs) is None else ""
