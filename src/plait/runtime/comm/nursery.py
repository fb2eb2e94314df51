"""Forks local ranks from a process that has only imported, and watches over them until the last one ends.

Importing torch and transformers takes seconds, forking takes milliseconds. A parent that has run an operation on several
threads makes its children hang, so the nursery insists on a single thread. Whatever happens, no rank outlives the call:
a rank that fails ends the others, and the kernel ends them all if the parent is killed. Ranks and parent share the memory
of the board, and the ranks meet in a file without a name, so that no port is opened for it. `in_place` runs a rank that a
launcher started, and tells its failures in the same words.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch

from ...design.errors import PlanError
from ...design.plan import LocalTransport
from .board import SLOT
from .children import Child, Lookout, end, watch_over
from .failure import BadNumbersError, RankError, account, exception
from .interruption import Interruption
from .segment import unsupported
from .world import Rendezvous

__all__ = ["BadNumbersError", "RankError", "alone", "die_with", "in_place", "launch", "refuse_too_many"]

MOST_LOCAL = 64
"""More processes than this on one machine is a mistyped number far more often than a wish."""
PARENT_ONLY = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to every process of the job: the parent hears them and ends the ranks."""
HELD = {*PARENT_ONLY, signal.SIGTERM}


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


def launch(
    main: Callable[[Rendezvous], Any], ranks: int, *, helpers: tuple[Callable[[], Any], ...] = (),
    hang_timeout: float = 600, comm_check: bool = False, local_transport: LocalTransport = "auto",
    interruption: Interruption | None = None,
) -> list[Any]:  # fmt: skip
    """Runs `main(rendezvous)` in `ranks` forked processes and returns what each returned (JSON values), by rank.

    `helpers` are further functions, each run beside them in a process of its own; what they return is thrown away.
    `hang_timeout`, `comm_check` and `local_transport` are the plan's. With an `interruption` the
    first signal is noted there, for the ranks to end by; else it ends them. Raises the first failure: `PlanError` when
    a rank says the input is bad, `BrokenPipeError` when whoever read its output is gone, `RankError` otherwise.
    """
    refuse_too_many(ranks)
    if local_transport == "shared" and (why := unsupported()):
        raise PlanError(f"local_transport shared {why}: set local_transport auto.")
    _have_files_for(ranks)
    board = mmap.mmap(-1, ranks * SLOT)
    with _meeting_place() as place:

        def rank(number: int) -> Any:
            return main(
                Rendezvous(
                    number, ranks, local_rank=number, board=board, file=place, hang_timeout=hang_timeout,
                    comm_check=comm_check, local_transport=local_transport,
                )
            )  # fmt: skip

        jobs: list[tuple[str, Callable[[], Any]]] = [(f"Rank {n}", partial(rank, n)) for n in range(ranks)]
        jobs += [("The reference process", helper) for helper in helpers]
        return _forked(jobs, Lookout(board, ranks, hang_timeout), interruption)[:ranks]


@contextlib.contextmanager
def _meeting_place() -> Iterator[str]:
    """The path of a file for torch's store that only this process and its children can open."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("plait")
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with tempfile.TemporaryDirectory(prefix="plait-meeting-") as folder:  # made for this user alone
            yield os.path.join(folder, "store")


def alone(main: Callable[[], Any], name: str) -> Any:
    """Runs `main()`, which is no rank, in one forked process; `name` is what a failure calls it."""
    return _forked([(name, main)])[0]


def _forked(
    jobs: list[tuple[str, Callable[[], Any]]], lookout: Lookout | None = None, interruption: Interruption | None = None
) -> list[Any]:
    """Runs every job in a process of its own; `lookout` sees the board of those that are ranks."""
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    if threads != 1:
        raise PlanError(
            f"Local ranks are forked, which needs a process with one thread, but this one runs {threads}: launch "
            f"before any computation, set OMP_NUM_THREADS=1, or start the ranks with torchrun."
        )
    _flush()
    children: list[Child] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        # What is ignored stays so; Python's own Ctrl-C raises already.
        if interruption is None and handler not in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(number, _terminated)
    try:
        with interruption.listening() if interruption is not None else contextlib.nullcontext():
            return _watched(jobs, children, lookout, interruption)
    finally:
        with _signals_held():
            end(children)
        for number, handler in before.items():
            signal.signal(number, handler)


def _watched(
    jobs: list[tuple[str, Callable[[], Any]]], children: list[Child], lookout: Lookout | None,
    interruption: Interruption | None,
) -> list[Any]:  # fmt: skip
    for name, main in jobs:
        _fork(children, name, main, interruption)
    watch_over(children, lookout)
    return [(child.report() or {})["result"] for child in children]


def in_place(main: Callable[[], Any], rank: int, interruption: Interruption | None = None) -> Any:
    """Runs `main()` in this process, rank `rank` of a launcher's, and raises its failure as `launch` would."""
    try:
        with interruption.listening() if interruption is not None else contextlib.nullcontext():
            return main()
    except Exception as error:
        raise exception(account(error), f"Rank {rank}", rank) from error


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


def _fork(
    children: list[Child], name: str, main: Callable[[], Any], interruption: Interruption | None
) -> None:  # fmt: skip
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
            _child(main, child_end, parent, before, interruption)
        children.append(Child(name, len(children), pid, pipe))
    os.close(child_end)


def _child(
    main: Callable[[], Any], pipe: int, parent: int, held: set[signal.Signals], interruption: Interruption | None
) -> NoReturn:  # fmt: skip
    """The life of a child: never returns, never runs the parent's clean-up."""
    code = 3
    try:
        # Whoever sends it to every process of a job asks the run to end, too.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if interruption is None else interruption.heard)
        for number in PARENT_ONLY:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        die_with(parent)
        # What is here already is the parent's: looking through it for cycles finds none, and copies its pages.
        gc.freeze()
        torch.set_num_threads(1)
        said = json.dumps({"result": main()})
        _flush()
        code = 0
    except BaseException as error:  # also SystemExit: a rank has nowhere else to report
        report = account(error)
        code = report["code"]
        said = json.dumps(report)
    try:
        view = memoryview(said.encode())
        while view:
            view = view[os.write(pipe, view) :]
        _flush()
    finally:
        os._exit(code)


def die_with(parent: int) -> None:
    """Has the system end this process when `parent`, which forked it, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the line above
            os._exit(3)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _no_more(error: OSError, started: int) -> PlanError:
    return PlanError(f"The machine started {started} processes and no more: {error.strerror}. Use fewer ranks.")
