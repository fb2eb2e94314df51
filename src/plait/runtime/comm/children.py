"""Local ranks as their parent sees them: it takes their reports, looks at their board, and ends them.

Whatever happens first decides how the run ends: a rank that failed (the earliest failure is the one that is named, unless
the board shows that it only followed from calls that do not go together), or a verdict of comm/watch.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import board
from .failure import RankError, exception, judged
from .watch import Watch, mismatch, ranks_named, story

GRACE_S = 1.0
"""How long the others may report after the first failure, so that the earliest one is named, not the loudest."""
LOOK_S = 0.2
STATUS_S = 10.0
"""How often it is said who has not joined yet."""
JOIN_S = 1800.0
"""How long ranks wait for one that does not join. What a rank does before it joins has no other limit."""


@dataclass
class Child:
    name: str
    rank: int
    pid: int
    pipe: int
    said: bytes = b""
    status: int | None = None
    ended: float = 0.0

    def report(self) -> dict[str, Any] | None:
        try:
            return json.loads(self.said) if self.said else None
        except ValueError:
            return None

    @property
    def failed(self) -> bool:
        """Also one that ended in peace without a word: nobody knows what it did."""
        return self.status is not None and (self.status != 0 or self.report() is None)


class Lookout:
    """The parent's eye on the board of its ranks."""

    def __init__(self, memory: board.Memory, ranks: int, hang_timeout: float) -> None:
        self._memory, self._ranks, self._limit_s = memory, ranks, hang_timeout
        self._watch = Watch(hang_timeout)
        self._next = 0.0
        self._waits_to_join: float | None = None
        self._status = 0.0

    def look(self, children: Sequence[Child]) -> None:
        """Raises a `RankError` when the board shows that the run cannot go on."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_S
        seen = [board.glance(self._memory, rank) for rank in range(self._ranks)]
        self._joining([board.state_of(one) for one in seen], now)
        verdict = self._watch.look(now, seen, self.slots, lambda: _stopped(children[: self._ranks]))
        if verdict is not None:
            raise judged(verdict)

    def slots(self) -> list[board.Slot]:
        return [board.read(self._memory, rank, rank) for rank in range(self._ranks)]

    def _joining(self, states: list[int], now: float) -> None:
        """Says every ten seconds who has not come yet, while others wait for it."""
        waiting = [rank for rank, state in enumerate(states) if state == board.JOINING]
        absent = [rank for rank, state in enumerate(states) if state == board.ABSENT]
        if not waiting or not absent:
            self._waits_to_join = None
            return
        if self._waits_to_join is None:
            self._waits_to_join, self._status = now, now + STATUS_S
        waited = now - self._waits_to_join
        if waited > JOIN_S:
            raise RankError(absent[0], not_joined(absent, waited), code=4)
        if now >= self._status:
            self._status += STATUS_S
            print(f"plait: {not_joined(absent, waited)}", file=sys.stderr, flush=True)


def not_joined(absent: Sequence[int], waited_s: float) -> str:
    has = "has" if len(absent) == 1 else "have"
    return f"{ranks_named(absent)} {has} not joined yet; the others have waited {waited_s:.0f} s."


def watch_over(children: list[Child], lookout: Lookout | None) -> None:
    """Collects reports until all have ended, or one has failed and the others have had time to say what they saw."""
    deadline: float | None = None
    while True:
        _listen(children)
        failed = [child for child in children if child.failed]
        all_ended = all(child.status is not None for child in children)
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and (all_ended or time.monotonic() > deadline):
            raise _first_failure(failed, lookout)
        if all_ended:
            return
        if lookout is not None and not failed:
            lookout.look(children)


def end(children: list[Child]) -> None:
    for child in children:
        if child.pipe >= 0:
            os.close(child.pipe)
            child.pipe = -1
        if child.status is None:
            os.kill(child.pid, signal.SIGKILL)
    for child in children:
        if child.status is None:
            os.waitpid(child.pid, 0)
            child.status = -signal.SIGKILL


def _listen(children: list[Child]) -> None:
    """Waits a moment for something to happen, and takes note of it."""
    pipes = {child.pipe: child for child in children if child.pipe >= 0}
    if pipes:
        for pipe in select.select(list(pipes), [], [], 0.05)[0]:
            _read(pipes[pipe])
    else:
        time.sleep(0.01)
    for child in children:
        # Asked of the system, not read off the pipe: a process that the rank itself started may hold that open.
        if child.status is not None:
            continue
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid:
            while child.pipe >= 0 and select.select([child.pipe], [], [], 0)[0]:
                _read(child)
            child.status, child.ended = os.waitstatus_to_exitcode(status), time.monotonic()


def _read(child: Child) -> None:
    """Takes what a ready pipe holds, and closes it at its end."""
    data = os.read(child.pipe, 1 << 16)
    child.said += data
    if not data:
        os.close(child.pipe)
        child.pipe = -1


def _first_failure(failed: list[Child], lookout: Lookout | None) -> Exception:
    """The failure that explains the others: the earliest of those that are not merely the loss of another rank. A rank
    that a signal ended says nothing, and is known by when it was found."""
    causes = [child for child in failed if not (child.report() or {}).get("lost")] or failed
    child = min(causes, key=lambda c: (c.report() or {}).get("time", c.ended))
    report, status = child.report(), child.status or 0
    if lookout is not None and (status in (-signal.SIGABRT, -signal.SIGSEGV) or (report or {}).get("symptom")):
        verdict = mismatch(lookout.slots())
        if verdict is not None:
            return judged(verdict, trace=(report or {}).get("trace", ""))
    if report is not None and "error" in report:
        error = exception(report, child.name, child.rank)
        if report["code"] == 3 and isinstance(error, RankError):
            error.details = _where(failed, lookout)
        return error
    how = f"ended with code {status} and without a result"
    if status < 0:
        how = f"was ended by signal {-status} ({signal.Signals(-status).name})"
        if status == -signal.SIGKILL:
            how += "; if nobody sent it, the machine ran out of memory: use fewer ranks or a smaller batch"
    return RankError(child.rank, f"{child.name} {how}.", code=3, details=_where(failed, lookout))


def _where(failed: list[Child], lookout: Lookout | None) -> tuple[str, ...]:
    """Where every rank was when one failed, if any waited for another."""
    slots = lookout.slots() if lookout is not None else []
    lost = {child.rank for child in failed if (child.report() or {}).get("lost")}
    notes = {child.rank: "dead" for child in failed if child.rank < len(slots) and child.rank not in lost}
    return story(slots, notes) if any(slot.wait is not None for slot in slots) else ()


def _stopped(children: Sequence[Child]) -> dict[int, str]:
    """The ranks whose process is stopped, where the system tells."""
    found = {}
    for child in children:
        try:
            state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state in "Tt":
            found[child.rank] = f"stopped: kill -CONT {child.pid} lets it go on"
    return found
