"""One contestant's ranks: forked once from a process that has only imported, and parked between turns.

    bench ---fork---> rank 0 .. rank n-1        each builds, takes its first steps, and says so
    bench ---turn k-> all ranks                 meet, k steps, meet; rank 0's clock is the turn's
                      parked in a read          no processor time until the next word

Bench and rank speak in lines of JSON over a pair of sockets. The ranks find each other as a launcher's would, by RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a contestant that forks its ranks itself does so from a process of its own. A
rank that fails or falls silent is a `Lost`, and takes its contestant along.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch

from .contestants.contestant import Contestant
from .seat import BenchSeat
from .work import Work

LOOPBACK = "127.0.0.1"
PATIENCE_S = 600.0
"""How long a rank may be silent before its contestant is given up."""
FAREWELL_S = 10.0
PEEK_S = 0.004
"""Between two looks at the memory of ranks at work."""

Answers = list[dict[str, Any]]


class Lost(Exception):
    """A contestant has a rank that failed, ended or fell silent."""


def single_threaded() -> bool:
    """Whether this process may be forked."""
    tasks = "/proc/self/task"
    return not os.path.isdir(tasks) or len(os.listdir(tasks)) == 1


def in_child(main: Callable[[], None]) -> None:
    """Runs `main()` in a forked process and waits for it: for what computes, which this process must not."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(1)
            main()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise Lost("the work could not be prepared (see above)")


class Parked:
    """The ranks of `contestant` at `work`, parked after `first` steps. `others` are whose sockets they must not keep."""

    def __init__(self, contestant: Contestant, work: Work, *, first: int, others: Iterable[Parked] = ()) -> None:
        self.contestant = contestant
        self._children: list[int] = []
        pairs = [socket.socketpair() for _ in range(contestant.ranks)]
        self._sockets = [here for here, _ in pairs]
        self._heard = [b""] * contestant.ranks
        lines = [there for _, there in pairs]
        foreign = [one for other in others for one in other._sockets]
        port, parent = _free_port(), os.getpid()
        for rank in range(1 if contestant.launches else contestant.ranks):
            pid = os.fork()
            if pid == 0:
                for one in (*foreign, *self._sockets):
                    one.close()
                _child(contestant, work, lines, rank, port, parent, first)
            self._children.append(pid)
        for line in lines:
            line.close()
        try:
            self.ready = self._hear()
        except BaseException:
            self.kill()
            raise
        self.pids = [one["pid"] for one in self.ready]
        self._stir(signal.SIGSTOP)

    def _stir(self, how: signal.Signals) -> None:
        """A process that has forked the ranks and watches them would go on watching: it is stopped while they are
        parked."""
        for pid in self._children if self.contestant.launches else ():
            os.kill(pid, how)

    def ask(self, do: str, *, meanwhile: Callable[[], None] | None = None, **values: Any) -> Answers:
        """Wakes all ranks for one thing and returns what each says, by rank. `meanwhile` is called every few
        milliseconds until all have answered."""
        self._stir(signal.SIGCONT)
        line = json.dumps({"do": do} | values).encode() + b"\n"
        for one in self._sockets:
            try:
                one.sendall(line)
            except OSError as error:
                raise self._lost(f"a rank has ended: {error.strerror}") from None
        answers = self._hear(meanwhile)
        if do != "end":
            self._stir(signal.SIGSTOP)
        return answers

    def _hear(self, meanwhile: Callable[[], None] | None = None) -> Answers:
        said: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(said) < len(self._sockets):
            if time.monotonic() > deadline:
                silent = [rank for rank in range(len(self._sockets)) if rank not in said]
                raise self._lost(f"no word from rank {silent} in {PATIENCE_S:.0f} s")
            waiting = {one: rank for rank, one in enumerate(self._sockets) if rank not in said}
            for one in select.select(list(waiting), [], [], PEEK_S if meanwhile else 1.0)[0]:
                rank = waiting[one]
                data = one.recv(1 << 16)
                if not data:
                    raise self._lost(f"rank {rank} ended without a word")
                self._heard[rank] += data
                line, end, rest = self._heard[rank].partition(b"\n")
                if end:
                    said[rank], self._heard[rank] = json.loads(line), rest
                    if "error" in said[rank]:
                        raise self._lost(f"rank {rank}: {said[rank]['error']}")
            if meanwhile:
                meanwhile()
        return [said[rank] for rank in range(len(self._sockets))]

    def _lost(self, why: str) -> Lost:
        self.kill()
        return Lost(f"{self.contestant.name}: {why}")

    def close(self) -> None:
        """Ends the ranks in peace, and by force those that do not."""
        if self._children:
            with suppress(Lost):
                self.ask("end")
            end = time.monotonic() + FAREWELL_S
            while self._children and time.monotonic() < end:
                self._children = [pid for pid in self._children if os.waitpid(pid, os.WNOHANG)[0] == 0]
                time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)  # what they have forked dies with them
        for pid in self._children:
            os.waitpid(pid, 0)
        self._children = []
        for one in self._sockets:
            one.close()


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _child(
    contestant: Contestant, work: Work, lines: Sequence[socket.socket], rank: int, port: int, parent: int, first: int
) -> NoReturn:
    """The life of a rank, or of the process that launches all of them: never returns."""
    words: dict[str, Any] = {"ended": True}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends the ranks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(3)
        warnings.filterwarnings("ignore")
        torch.set_num_threads(contestant.threads)
        seat = BenchSeat(lines, rank, first=first)
        if contestant.launches:
            os.register_at_fork(after_in_child=seat.begin)
        else:
            seat.begin()
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(contestant.ranks),
                "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port),
            }  # fmt: skip
        contestant.race(work, seat)
    except BaseException as error:  # also SystemExit: a rank has nowhere else to report
        first_line = next(iter(str(error).splitlines()), "")
        words = {"error": f"{type(error).__name__}: {first_line}", "trace": traceback.format_exc()}
    for line in lines if contestant.launches else (lines[rank],):
        with suppress(OSError):
            line.sendall(json.dumps(words).encode() + b"\n")
    os._exit(0 if "ended" in words else 1)


def freeze() -> None:
    """Called once before the first fork: what has been imported is not looked at by the ranks' garbage collectors, and
    so not copied by them."""
    gc.collect()
    gc.freeze()
