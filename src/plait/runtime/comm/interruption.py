"""Signals that ask a run to end in order: it saves, and ends at the next step.

The first is noted where all local ranks see it, in a byte that parent and children share; the second ends the run at
once. Under a launcher each rank has a note of its own. Ranks look at it between steps, and agree there.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """`number` is the signal that was heard first, 0 before any; made before ranks are forked."""

    def __init__(self) -> None:
        self._note = mmap.mmap(-1, mmap.PAGESIZE)
        self._owner, self._heard = os.getpid(), False

    @property
    def number(self) -> int:
        return self._note[0]

    def heard(self, number: int, frame: object) -> None:
        """A signal's handler. In the parent, and under a launcher, a second signal ends the process."""
        if self._heard and os.getpid() == self._owner:
            raise SystemExit(128 + number)
        self._heard = True
        if not self._note[0]:  # the same signal may have come to the others, too
            self._note[0] = number

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While it is entered, signals are noted. What was ignored stays so."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in heard:
            signal.signal(number, self.heard)
        try:
            yield
        finally:
            for number in heard:
                signal.signal(number, before[number])
