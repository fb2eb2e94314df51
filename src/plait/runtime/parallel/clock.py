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
        return [(action, self._seconds(begin), self._seconds(end)) for action, begin, end in self._marks]

    def _seconds(self, mark: float | torch.cuda.Event) -> float:
        if isinstance(mark, float):
            assert isinstance(self._origin, float)
            return mark - self._origin
        assert isinstance(self._origin, torch.cuda.Event)
        return float(self._origin.elapsed_time(mark)) / 1000
