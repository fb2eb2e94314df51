"""Forks local ranks from a process that has only imported, and watches over them until the last one ends.

Importing torch and transformers takes seconds, forking takes milliseconds. A parent that has run an operation on several
threads makes its children hang, so the nursery insists on a single thread. Whatever happens, no rank outlives the call:
a rank that fails ends the others, and the kernel ends them all if the parent is killed. `in_place` runs a rank that a
launcher started, and tells its failures in the same words.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from ...design.errors import PlanError
from .world import LOOPBACK, Rendezvous

GRACE_S = 1.0
"""How long the others may report after the first failure, so that the earliest one is named, not the loudest."""
MOST_LOCAL = 64
"""More processes than this on one machine is a mistyped number far more often than a wish."""
BROKEN_PIPE = 128 + signal.SIGPIPE
PARENT_ONLY = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to every process of the job: the parent hears them and ends the ranks."""
HELD = {*PARENT_ONLY, signal.SIGTERM}

_LOST = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|got 0 bytes|remote peer", re.IGNORECASE
)
_PLACE = re.compile(r"^\s*\[[^\]]*\.(cc|cpp|h|hpp):\d+\]")
_LATE = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)


class BadNumbersError(Exception):
    """The run's numbers went bad (a loss or norm that is not finite)."""


class RankError(Exception):
    """A rank failed. `code` is the exit code that stands for it (docs/exit-codes.md)."""

    def __init__(self, rank: int, message: str, *, code: int, trace: str = "") -> None:
        super().__init__(message)
        self.rank, self.code, self.trace = rank, code, trace


@dataclass
class _Child:
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


def refuse_too_many(ranks: int) -> None:
    """Raises a `PlanError` when `ranks` is more than one machine is asked to fork."""
    if ranks > MOST_LOCAL:
        raise PlanError(
            f"{ranks} local ranks would be {ranks} processes on this machine of {os.cpu_count()} cores, and the most is "
            f"{MOST_LOCAL}: lower the degrees, or start the ranks on several machines with torchrun."
        )


def _have_files_for(ranks: int) -> None:
    """Every rank holds a few sockets to every other. torch ends the process where it cannot have one."""
    needed = 64 + 8 * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise PlanError(
                f"This system allows {hard} open files, and {ranks} ranks need {needed}: raise it with ulimit -n, or use "
                f"fewer ranks."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def launch(main: Callable[[Rendezvous], Any], ranks: int, *, helpers: tuple[Callable[[], Any], ...] = ()) -> list[Any]:
    """Runs `main(rendezvous)` in `ranks` forked processes and returns what each returned (JSON values), by rank.

    `helpers` are further functions, each run beside them in a process of its own; what they return is thrown away.
    Raises the first failure: `PlanError` when a rank says the input is bad, `BrokenPipeError` when whoever read its
    output is gone, `RankError` otherwise.
    """
    refuse_too_many(ranks)
    _have_files_for(ranks)
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]

        def rank(number: int) -> Any:
            if number:
                listener.close()
            fd = None if number else listener.fileno()
            return main(Rendezvous(number, ranks, LOOPBACK, port, number, True, fd))

        def helper(number: int) -> Any:
            listener.close()
            return helpers[number]()

        jobs: list[tuple[str, Callable[[], Any]]] = [(f"Rank {n}", partial(rank, n)) for n in range(ranks)]
        jobs += [("The reference process", partial(helper, n)) for n in range(len(helpers))]
        return _forked(jobs, started=listener.close)[:ranks]


def alone(main: Callable[[], Any], name: str) -> Any:
    """Runs `main()`, which is no rank, in one forked process; `name` is what a failure calls it."""
    return _forked([(name, main)])[0]


def _forked(jobs: list[tuple[str, Callable[[], Any]]], *, started: Callable[[], None] = lambda: None) -> list[Any]:
    """Runs every job in a process of its own, and calls `started` when all are under way."""
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    if threads != 1:
        raise PlanError(
            f"Local ranks are forked, which needs a process with one thread, but this one runs {threads}: launch "
            f"before any computation, set OMP_NUM_THREADS=1, or start the ranks with torchrun."
        )
    _flush()
    children: list[_Child] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        # What is ignored stays so; Python's own Ctrl-C raises already.
        if handler not in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(number, _terminated)
    try:
        for name, main in jobs:
            _fork(children, name, main)
        started()
        _watch(children)
        return [(child.report() or {})["result"] for child in children]
    finally:
        with _signals_held():
            _end(children)
        for number, handler in before.items():
            signal.signal(number, handler)


def in_place(main: Callable[[], Any], rank: int) -> Any:
    """Runs `main()` in this process, rank `rank` of a launcher's, and raises its failure as `launch` would."""
    try:
        return main()
    except Exception as error:
        raise _exception(_account(error), f"Rank {rank}", rank) from error


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals_held() -> Iterator[set[signal.Signals]]:
    """Signals that would end this process wait until the block is done; gives what was held before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork(children: list[_Child], name: str, main: Callable[[], Any]) -> None:
    """Adds a child that runs `main`."""
    parent = os.getpid()
    try:
        pipe, child_end = os.pipe()
    except OSError as error:
        raise _no_more(error, len(children)) from None
    # A signal between the fork and the child's own handlers would run the parent's clean-up in the child.
    with _signals_held() as before:
        try:
            pid = os.fork()
        except OSError as error:
            raise _no_more(error, len(children)) from None
        if pid == 0:
            os.close(pipe)
            for child in children:
                os.close(child.pipe)
            _child(main, child_end, parent, before)
        children.append(_Child(name, len(children), pid, pipe))
    os.close(child_end)


def _child(main: Callable[[], Any], pipe: int, parent: int, held: set[signal.Signals]) -> NoReturn:
    """The life of a child: never returns, never runs the parent's clean-up."""
    code = 3
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in PARENT_ONLY:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        _die_with(parent)
        torch.set_num_threads(1)
        said = json.dumps({"result": main()})
        _flush()
        code = 0
    except BaseException as error:  # also SystemExit: a rank has nowhere else to report
        report = _account(error)
        code = report["code"]
        said = json.dumps(report)
    try:
        view = memoryview(said.encode())
        while view:
            view = view[os.write(pipe, view) :]
        _flush()
    finally:
        os._exit(code)


def _account(error: BaseException) -> dict[str, Any]:
    """What a rank says of its failure: the exit code, the words, and whether it only lost sight of another rank."""
    text = str(error)
    # The first line, without the place in a C++ file that torch and Gloo put in front.
    first = next((_PLACE.sub("", line).strip() for line in text.splitlines() if line.strip()), "").rstrip(".")
    code, message, lost = 3, f"{type(error).__name__}: {first}" if first else type(error).__name__, False
    if isinstance(error, PlanError):
        code, message = 2, text
    elif isinstance(error, BadNumbersError):
        code, message = 7, text
    elif isinstance(error, BrokenPipeError):
        code = BROKEN_PIPE
    elif isinstance(error, RuntimeError):
        lost = bool(_LOST.search(text))
        if not lost and _LATE.search(text):
            code = 4
    trace = "".join(traceback.format_exception(error))
    return {"error": message, "code": code, "lost": lost, "time": time.monotonic(), "trace": trace}


def _exception(report: dict[str, Any], name: str, rank: int) -> Exception:
    """The error that `launch` raises for a report."""
    if report["code"] == 2:
        return PlanError(report["error"])
    if report["code"] == BROKEN_PIPE:
        return BrokenPipeError(report["error"])
    how = "waited in vain for the others" if report["code"] == 4 else "failed"
    how = "lost its connection to a rank that ended" if report["lost"] else how
    return RankError(rank, f"{name} {how}: {report['error']}", code=report["code"], trace=report["trace"])


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the line above
            os._exit(3)


def _watch(children: list[_Child]) -> None:
    """Collects reports until all have ended, or one has failed and the others have had time to say what they saw."""
    deadline: float | None = None
    while True:
        _listen(children)
        failed = [child for child in children if child.failed]
        all_ended = all(child.status is not None for child in children)
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and (all_ended or time.monotonic() > deadline):
            raise _first_failure(failed)
        if all_ended:
            return


def _listen(children: list[_Child]) -> None:
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


def _read(child: _Child) -> None:
    """Takes what a ready pipe holds, and closes it at its end."""
    data = os.read(child.pipe, 1 << 16)
    child.said += data
    if not data:
        os.close(child.pipe)
        child.pipe = -1


def _first_failure(failed: list[_Child]) -> Exception:
    """The failure that explains the others: the earliest of those that are not merely the loss of another rank. A rank
    that a signal ended says nothing, and is known by when it was found."""
    causes = [child for child in failed if not (child.report() or {}).get("lost")] or failed
    child = min(causes, key=lambda c: (c.report() or {}).get("time", c.ended))
    report, status = child.report(), child.status or 0
    if report is not None and "error" in report:
        return _exception(report, child.name, child.rank)
    how = f"ended with code {status} and without a result"
    if status < 0:
        how = f"was ended by signal {-status} ({signal.Signals(-status).name})"
        if status == -signal.SIGKILL:
            how += "; if nobody sent it, the machine ran out of memory: use fewer ranks or a smaller batch"
    return RankError(child.rank, f"{child.name} {how}.", code=3)


def _end(children: list[_Child]) -> None:
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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _no_more(error: OSError, started: int) -> PlanError:
    return PlanError(f"The machine started {started} processes and no more: {error.strerror}. Use fewer ranks.")
