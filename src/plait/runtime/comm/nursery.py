"""Forks local ranks from a process that has only imported, and watches over them until the last one ends.

Importing torch and transformers takes seconds, forking takes milliseconds. A parent that has run an operation on several
threads makes its children hang, so the nursery insists on a single thread. Whatever happens, no rank outlives the call:
a rank that fails ends the others, and the kernel ends them all if the parent is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ...design.errors import PlanError
from .world import LOOPBACK, Rendezvous

GRACE_S = 1.0
"""How long the others may report after the first failure, so that the earliest one is named, not the loudest."""


class BadNumbersError(Exception):
    """The run's numbers went bad (a loss or norm that is not finite)."""


class RankError(Exception):
    """A rank failed. `code` is the exit code that stands for it (docs/exit-codes.md)."""

    def __init__(self, rank: int, message: str, *, code: int, trace: str = "") -> None:
        super().__init__(message)
        self.rank, self.code, self.trace = rank, code, trace


@dataclass
class _Child:
    rank: int
    pid: int
    pipe: int
    said: bytes = b""
    status: int | None = None

    def report(self) -> dict[str, Any] | None:
        try:
            return json.loads(self.said) if self.said else None
        except ValueError:
            return None


def launch(main: Callable[[Rendezvous], Any], ranks: int, *, helpers: tuple[Callable[[], Any], ...] = ()) -> list[Any]:
    """Runs `main(rendezvous)` in `ranks` forked processes and returns what each returned (JSON values), by rank.

    `helpers` are further functions, each run beside them in a process of its own; what they return is thrown away.
    Raises the first failure: `PlanError` when a rank says the input is bad, `RankError` otherwise.
    """
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    if threads != 1:
        raise PlanError(
            f"Local ranks are forked, which needs a process with one thread, but this one runs {threads}: launch "
            f"before any computation, set OMP_NUM_THREADS=1, or start the ranks with torchrun."
        )
    sys.stdout.flush()
    sys.stderr.flush()
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    children: list[_Child] = []
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        for rank in range(ranks + len(helpers)):
            pipe, child_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(pipe)
                if rank:
                    listener.close()
                if rank < ranks:
                    meeting = Rendezvous(
                        rank, ranks, LOOPBACK, port, rank, True, listener.fileno() if not rank else None
                    )
                    _child(lambda: main(meeting), child_end)  # noqa: B023 (runs at once, in the child)
                _child(helpers[rank - ranks], child_end)
            os.close(child_end)
            children.append(_Child(rank, pid, pipe))
        listener.close()
        _watch(children, ranks)
        return [_result(child) for child in children[:ranks]]
    finally:
        _end(children)
        listener.close()
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _child(main: Callable[[], Any], pipe: int) -> NoReturn:
    """The life of a child: never returns, never runs the parent's clean-up."""
    code = 3
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends the ranks
        _die_with_parent()
        torch.set_num_threads(1)
        report: dict[str, Any] = {"result": main()}
        code = 0
    except BaseException as error:  # also SystemExit: a rank has nowhere else to report
        code = 2 if isinstance(error, PlanError) else 7 if isinstance(error, BadNumbersError) else 3
        message = (
            str(error) if code != 3 else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        report = {"error": message, "code": code, "time": time.time(), "trace": traceback.format_exc()}
    try:
        view = memoryview(json.dumps(report).encode())
        while view:
            view = view[os.write(pipe, view) :]
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _watch(children: list[_Child], ranks: int) -> None:
    """Collects reports until all have ended or one has failed."""
    deadline: float | None = None
    while any(child.status is None for child in children):
        open_pipes = {child.pipe: child for child in children if child.pipe >= 0}
        ready, _, _ = select.select(list(open_pipes), [], [], 0.05) if open_pipes else ([], [], [])
        if not open_pipes:
            time.sleep(0.01)
        for pipe in ready:
            data = os.read(pipe, 1 << 16)
            open_pipes[pipe].said += data
            if not data:
                os.close(pipe)
                open_pipes[pipe].pipe = -1
        for child in children:
            if child.status is None and child.pipe < 0:
                _, status = os.waitpid(child.pid, 0)
                child.status = os.waitstatus_to_exitcode(status)
        failed = [child for child in children if child.status]
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and (time.monotonic() > deadline or all(c.status is not None for c in children)):
            raise _first_failure(failed, ranks)


def _first_failure(failed: list[_Child], ranks: int) -> Exception:
    """A rank ended by a signal said nothing and explains what the others say; otherwise the earliest report counts."""
    silent = [child for child in failed if child.report() is None]
    if silent:
        child, status = silent[0], silent[0].status or 0
        how = (
            f"was ended by signal {-status} ({signal.Signals(-status).name})"
            if status < 0
            else f"ended with code {status}"
        )
        return RankError(child.rank, f"Rank {child.rank} {how}.", code=3)
    child = min(failed, key=lambda c: (c.report() or {}).get("time", 0.0))
    report = child.report() or {}
    if report["code"] == 2:
        return PlanError(report["error"])
    who = f"Rank {child.rank}" if child.rank < ranks else "The reference process"
    return RankError(child.rank, f"{who} failed: {report['error']}", code=report["code"], trace=report["trace"])


def _result(child: _Child) -> Any:
    report = child.report()
    if report is None:
        raise RankError(child.rank, f"Rank {child.rank} ended without a result.", code=3)
    return report["result"]


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
