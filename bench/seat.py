"""Inside a rank: builds nothing, serves the bench. Reads a word, takes the steps that it asks for, says what they took.

turn k      -> seconds of k steps between two meetings of the ranks, processor seconds, losses, times of actions
split k     -> where a step's time went, mean over k steps (contestants that can tell)
functions k -> where the time of k steps went, by function (rank 0; the others take the steps)
trim        -> freed memory goes back to the system; private bytes now
end
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from cProfile import Profile
from pstats import Stats
from typing import Any

import torch.distributed as dist

from .contestants.contestant import Split, Step
from .measure import private_bytes

MOST_FUNCTIONS = 25


class BenchSeat:
    """The seat of rank `rank`, which has taken `first` steps when it says that it is ready. `lines` leads to the bench
    from every rank; `meet` returns when all ranks have come to it, `shared` gives the bytes that this one has in memory
    that it shares with others."""

    def __init__(
        self, lines: Sequence[socket.socket], rank: int, *, first: int, uss: int = 0,
        meet: Callable[[], object] | None = None, shared: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self._lines, self._first, self._uss = lines, first, uss
        self._meet, self._shared = meet or over_torch, shared
        self.rank = rank

    @property
    def ranks(self) -> int:
        return len(self._lines)

    def begin(self) -> None:
        """What this process has now is what it did not build."""
        self._uss = private_bytes()

    def at(self, rank: int, meet: Callable[[], object], shared: Callable[[], int]) -> BenchSeat:
        return BenchSeat(self._lines, rank, first=self._first, uss=self._uss, meet=meet, shared=shared)

    def serve(self, step: Step, split: Split | None = None, times: Split | None = None) -> None:
        """Takes the first steps, then does what is asked until the end is asked for."""
        self._times = times
        losses = [step() for _ in range(self._first)]
        self._say({"losses": losses, "uss": self._uss, "pid": os.getpid()})
        for word in self._lines[self.rank].makefile("r", encoding="utf-8"):
            asked = json.loads(word)
            if asked["do"] == "end":
                return
            answer = {"turn": self._turn, "split": self._split, "functions": self._functions, "trim": self._trim}
            self._say(answer[asked["do"]](step, split, asked.get("steps", 0)))

    def _say(self, words: dict[str, Any]) -> None:
        self._lines[self.rank].sendall(json.dumps(words).encode() + b"\n")

    def _turn(self, step: Step, split: Split | None, steps: int) -> dict[str, Any]:
        self._meet()
        begin, used = time.perf_counter(), time.process_time()
        losses = [step() for _ in range(steps)]
        self._meet()
        took = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - used, "losses": losses}
        return took | {"times": self._times() if self._times else {}, "shared": self._shared()}

    def _split(self, step: Step, split: Split | None, steps: int) -> dict[str, Any]:
        self._meet()
        total: dict[str, float] = {}
        for _ in range(steps if split else 0):
            assert split is not None
            for name, seconds in split().items():
                total[name] = total.get(name, 0.0) + seconds / steps
        return {"split": total}

    def _functions(self, step: Step, split: Split | None, steps: int) -> dict[str, Any]:
        self._meet()
        if self.rank > 0:
            for _ in range(steps):
                step()
            return {}
        profile = Profile()
        profile.enable()
        for _ in range(steps):
            step()
        profile.disable()
        return {"functions": top_functions(profile, steps)}

    def _trim(self, step: Step, split: Split | None, steps: int) -> dict[str, Any]:
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        self._meet()
        return {}


def over_torch() -> None:
    """Returns when all ranks have come here; a contestant of one process, or of none that talk, does not wait."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def top_functions(profile: Profile, steps: int) -> list[dict[str, Any]]:
    """The functions in which most time was spent (their own, without what they call), in seconds and calls a step."""
    found = []
    for (file, line, name), (_, calls, own, cumulative, _) in Stats(profile).stats.items():  # type: ignore[attr-defined]
        place = name if file == "~" else f"{'/'.join(file.split('/')[-2:])}:{line} {name}"
        found.append({"name": place, "calls": calls / steps, "own": own / steps, "with": cumulative / steps})
    return sorted(found, key=lambda one: -one["own"])[:MOST_FUNCTIONS]
