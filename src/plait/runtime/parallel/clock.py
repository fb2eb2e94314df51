"""When each action of a step began and ended: perf_counter on a CPU, CUDA events on a GPU. No host sync until read."""

from __future__ import annotations

import time
from typing import Any

import torch

from ...design.schedule import Action


class Clock:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._origin: float | torch.cuda.Event = 0.0
        self._marks: list[tuple[Action, Any, Any]] = []

    def now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """A step begins here; the marks of the last one are dropped."""
        self._marks.clear()
        self._origin = self.now()

    def mark(self, action: Action, since: Any) -> None:
        """`action` ran from `since` (what now() gave) until now."""
        self._marks.append((action, since, self.now()))

    def spans(self) -> list[tuple[Action, float, float]]:
        """(action, start, end) in seconds from the start of the step."""
        if self._cuda:
            torch.cuda.synchronize()
        return [(action, self.at(begin), self.at(end)) for action, begin, end in self._marks]

    def at(self, moment: Any) -> float:
        """Seconds from the start of the step to what now() gave. On a GPU both must be behind: after a host sync."""
        return between(self._origin, moment)


def between(begin: Any, end: Any) -> float:
    """Seconds from one now() to a later one. On a GPU both must be behind: after a host sync."""
    return end - begin if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1000
