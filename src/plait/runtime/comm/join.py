"""How the ranks of a run meet before they talk: where, for how long, and with one plan.

Local ranks meet on their board and in a file that only they can open: no port is opened. A launcher's ranks meet in the
store of rank 0, which listens on the address that MASTER_ADDR names and nowhere else, and writes all keys under a prefix
made from PLAIT_SECRET. A rank may prepare for as long as it likes before it comes: those that wait say so every ten
seconds. Nothing is pickled.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from ...design.errors import PlanError
from ...design.plan import Plan
from . import address, board
from .children import JOIN_S, STATUS_S, not_joined

Store = Any
"""One of torch's, which mypy does not see."""
LINGER_S = 5.0
"""How long rank 0, which keeps the store, stays for the others to read why they are refused."""


def all_here(memory: board.Memory, size: int) -> None:
    """Returns when every local rank has joined. Their parent says who has not, and ends them when it takes too long."""
    pause = 1e-4
    while any(board.state_of(board.glance(memory, rank)) == board.ABSENT for rank in range(size)):
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def file_store(path: str) -> Store:
    return FileStore(path, -1)


def server_or_client(
    host: str, port: int, rank: int, size: int, secret: str, *, hosts: bool, speaks: bool
) -> tuple[Store, Store]:
    """Two connections to the store of a launcher's ranks, one for this rank and one for its watch. `hosts`: this rank
    keeps the store; `speaks`: it says every ten seconds that it waits."""
    prefix = f"plait/{blake2b(secret.encode(), digest_size=16).hexdigest()}"
    if hosts:
        first = _serve(host, port, size)
    else:
        _await_server(host, port, rank, speaks)
        first = _connect(host, port, rank, size)
    return PrefixStore(prefix, first), PrefixStore(prefix, _connect(host, port, rank, size))


def _serve(host: str, port: int, size: int) -> Store:
    found = address.resolved(host, port)
    family = socket.AF_INET6 if ":" in found else socket.AF_INET
    try:
        listener = socket.create_server((found, port), family=family, backlog=2 * size + 8)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PlanError(f"Port {port} on {host} is in use: set MASTER_PORT to a free port.") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise PlanError(
                f"MASTER_ADDR '{host}' is {found}, which is not an address of this machine, where rank 0 runs: set it to "
                f"one of rank 0's, or, where a forwarded address leads here, to 0.0.0.0 on rank 0 alone."
            ) from None
        raise PlanError(f"Rank 0 cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}.") from None
    return TCPStore(
        host, port, size, True, timedelta(seconds=JOIN_S), False, master_listen_fd=listener.detach(), use_libuv=False
    )


def _connect(host: str, port: int, rank: int, size: int) -> Store:
    try:
        return TCPStore(host, port, size, False, timedelta(seconds=60), False)
    except dist.DistError:
        raise PlanError(f"Rank {rank} cannot reach {host}:{port}: check MASTER_ADDR and MASTER_PORT.") from None


def _await_server(host: str, port: int, rank: int, speaks: bool) -> None:
    """Returns when somebody listens. Asked here and not by torch, which neither says that it waits nor hears signals."""

    def words(waited: float) -> str:
        return f"rank 0 has not joined yet at {host}:{port}; rank {rank} has waited {waited:.0f} s."

    for waited in _patience(speaks, words):
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError:
            if waited > JOIN_S:
                break
            time.sleep(0.1)
    raise PlanError(
        f"Rank {rank} cannot reach {host}:{port}, where rank 0 should be, for {JOIN_S:.0f} s: check MASTER_ADDR and "
        f"MASTER_PORT, and that rank 0 was started."
    )


def _patience(speaks: bool, words: Any) -> Iterator[float]:
    """How long it has taken so far, again and again; says `words` of it every ten seconds."""
    begun = time.monotonic()
    status = STATUS_S
    while True:
        waited = time.monotonic() - begun
        if waited >= status:
            status += STATUS_S
            sentence = words(waited)
            if speaks and sentence:
                print(f"plait: {sentence}", file=sys.stderr, flush=True)
        yield waited


def plans_agree(store: Store, plan: Plan | None, rank: int, size: int) -> None:
    """Waits until every rank is here; raises a `PlanError` on all of them when they were not given the same plan."""
    text = json.dumps(plan.model_dump() if plan is not None else {}, sort_keys=True)
    store.set(f"plan/{rank}", text)
    store.set(f"joined/{rank}", blake2b(text.encode(), digest_size=16).hexdigest())
    keys = [f"joined/{one}" for one in range(size)]

    def absent() -> list[int]:
        return [one for one, key in enumerate(keys) if not store.check([key])]

    def words(waited: float) -> str:
        # One speaks for all: the lowest that is here.
        missing = absent()
        here = [one for one in range(size) if one not in missing]
        return not_joined(missing, waited) if missing and here[0] == rank else ""

    for waited in _patience(True, words):
        try:
            store.wait(keys, timedelta(seconds=1))
            break
        except dist.DistError:
            if waited > JOIN_S and (missing := absent()):
                sentence = f"Of {size} ranks, {not_joined(missing, waited)}"
                raise PlanError(f"{sentence} Is PLAIT_SECRET the same everywhere?") from None
    digests = store.multi_get(keys)
    other = next((one for one, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        sentence = difference(json.loads(store.get("plan/0")), json.loads(store.get(f"plan/{other}")), other)
        store.add("refused", 1)
        deadline = time.monotonic() + LINGER_S
        while rank == 0 and store.add("refused", 0) < size and time.monotonic() < deadline:
            time.sleep(0.02)
        raise PlanError(sentence)


def difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    """The first field in which the plans of rank 0 and of another differ, as a sentence."""
    names = [name for name in Plan.model_fields if first.get(name) != other.get(name)]
    what = names[0] if names else "a plan"
    return (
        f"Rank {rank} was started with {what} {other.get(what)!r} and rank 0 with {what} {first.get(what)!r}: give every "
        f"rank the same flags and the same configuration."
    )
