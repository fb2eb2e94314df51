"""The board of a launcher's ranks: no memory is shared, so a thread of each rank carries its slot to the store.

Every half second the thread writes this rank's slot and reads whether the run has failed. Rank 0's also reads the others'
slots, asks comm/watch.py, and counts a rank of which nothing was heard for three seconds as dead. Whoever finds out first
why the run fails writes it under one key, and every process ends with its code; rank 0 says it. The store is rank 0's (or
the launcher's): a rank that loses it has lost rank 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from . import board
from .agree import Seal
from .board import Board, Call, Channel, Mark, Name, Slot, Wait
from .failure import RankError, account, exception
from .join import Store
from .watch import Verdict, Watch, story

BEAT_S = 0.5
DEAD_S = 3.0
"""A rank of which nothing was heard for so long is dead."""
PATIENCE_S = 5.0
"""How long a rank that only saw others fail waits to learn why."""
KEPT = 32
"""Calls of each channel that the others get to see."""
FAILED = "failed"


class Remote:
    """`Peers` by way of the store, and the thread that keeps them up to date."""

    def __init__(self, own: Board, store: Store, line: Store, rank: int, size: int, limit_s: float) -> None:
        self._own, self._store, self._line, self._rank, self._size = own, store, line, rank, size
        self._watch = Watch(limit_s)
        self._beat = 0
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        self._publish(self._store)
        _outlive_abort()
        self._thread = threading.Thread(target=self._run, name="plait-watch", daemon=True)
        self._thread.start()

    # --- what this rank and the others called

    def seal(self, step: int) -> None:
        pairs = {board.name_to_text(name): (one.sequence, one.hash) for name, one in self._own.channels.items()}
        self._store.set(f"seal/{self._rank}/{step % 2}", json.dumps([step, pairs]))

    def seals(self, step: int) -> list[Seal | None]:
        found: list[Seal | None] = []
        for said in self._store.multi_get([f"seal/{rank}/{step % 2}" for rank in range(self._size)]):
            at, pairs = json.loads(said)
            seal = {board.name_from_text(name): (pair[0], pair[1]) for name, pair in pairs.items()}
            found.append(seal if at == step else None)
        return found

    def announce(self, channel: Channel, mark: Mark) -> None:
        self._store.set(_call_key(self._rank, channel.name, mark[2]), f"{mark[2]} {channel.hash}")

    def hashes(self, name: Name, sequence: int, ranks: Iterable[int]) -> dict[int, int | None]:
        found: dict[int, int | None] = {}
        for rank in ranks:
            key = _call_key(rank, name, sequence)
            found[rank] = None
            if self._store.check([key]):
                at, mixed = map(int, self._store.get(key).split())
                found[rank] = mixed if at == sequence else None
                if name[0] != "group":
                    self._store.delete_key(key)  # read by one rank, once
        return found

    def slots(self) -> list[Slot]:
        time.sleep(1.5 * BEAT_S)  # until the others have written theirs
        said = self._store.multi_get([f"slot/{rank}" for rank in range(self._size)])
        return [_slot(one, rank) for rank, one in enumerate(said)]

    # --- the end

    def leave(self) -> None:
        """This rank is through. Rank 0 stays until all are, since it may keep the store, and watches meanwhile."""
        if self._rank:
            self._stop()
        self._publish(self._store)
        self._store.add("left", 1)
        while self._rank == 0 and self._store.add("left", 0) < self._size:
            time.sleep(0.01)
        self._stop()

    def failed(self, error: BaseException) -> None:
        """Tells the others why this rank fails. One that may only have seen another fail waits to learn why, and is
        then ended by its thread."""
        report = account(error)
        if report["symptom"]:
            time.sleep(PATIENCE_S)
        self._stop()
        raised = exception(report, f"Rank {self._rank}", self._rank)
        lines = raised.details if isinstance(raised, RankError) else ()
        with contextlib.suppress(dist.DistError):
            self._tell(report["code"], str(raised), lines, self._store)
            self._store.add("noted", int(self._rank > 0))
            self._linger(self._store)

    def _stop(self) -> None:
        self._leaving.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT_S)

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._leaving.wait(BEAT_S):
                self._publish(self._line)
                if self._line.check([FAILED]):
                    self._end(json.loads(self._line.get(FAILED)))
                self._listen(range(1, self._size) if self._rank == 0 else (0,))
        except dist.DistError:
            if self._leaving.wait(BEAT_S):
                return
            sentence = f"Rank {self._rank} has lost the store of rank 0: rank 0, or what keeps the store, is gone."
            lines = story([board.read(self._own.memory, 0, self._rank)])
            self._exit({"code": 3, "sentence": sentence, "lines": lines}, speaks=True)

    def _publish(self, line: Store) -> None:
        self._beat += 1
        glance = board.glance(self._own.memory, 0).hex()
        head = json.dumps([self._beat, os.getpid(), _system(), glance])
        line.set(f"slot/{self._rank}", f"{head}\n{_to_json(board.read(self._own.memory, 0, self._rank, last=KEPT))}")

    def _listen(self, ranks: Iterable[int]) -> None:
        """Hears the ranks that this one watches, and ends the run when one is dead or the watchdog says so."""
        now = time.monotonic()
        said = {rank: self._line.get(f"slot/{rank}") for rank in ranks}
        notes: dict[int, str] = {}
        for rank, one in said.items():
            if rank not in self._heard or self._heard[rank][0] != one:
                self._heard[rank] = (one, now)
            note = _note(one, now - self._heard[rank][1])
            if note:
                notes[rank] = note
        dead = [rank for rank, note in notes.items() if note == "dead"]
        if self._rank and not dead:
            return
        if dead:
            time.sleep(1.5 * BEAT_S)  # the others write where that leaves them
            said = {rank: self._line.get(f"slot/{rank}") for rank in ranks}
        own = self._line.get(f"slot/{self._rank}")

        def slots() -> list[Slot]:
            return [
                _slot(own if rank == self._rank else one, rank)
                for rank, one in sorted({**said, self._rank: own}.items())
            ]

        if dead:
            sentence = f"Rank {dead[0]} died: nothing was heard of it for {DEAD_S:g} s, or its process is gone."
            lines = story(slots(), dict.fromkeys(dead, "dead"))
            self._fail(3, sentence, lines)
        seen = [bytes.fromhex(json.loads(one.partition(b"\n")[0])[3]) for _, one in sorted({**said, 0: own}.items())]
        verdict: Verdict | None = self._watch.look(now, seen, slots, lambda: notes)
        if verdict is not None:
            self._fail(4, verdict.sentence, verdict.lines)

    def _fail(self, code: int, sentence: str, lines: tuple[str, ...]) -> NoReturn:
        self._end(self._tell(code, sentence, lines, self._line))

    def _tell(self, code: int, sentence: str, lines: tuple[str, ...], line: Store) -> dict[str, Any]:
        """Writes why the run fails, unless somebody has: the first word counts."""
        said = json.dumps({"code": code, "sentence": sentence, "lines": lines, "rank": self._rank})
        first: dict[str, Any] = json.loads(line.compare_set(FAILED, "", said))
        return first

    def _end(self, failure: dict[str, Any]) -> NoReturn:
        # Who raised it says it; rank 0 says it for all the others.
        self._exit(failure, speaks=self._rank == 0, linger=self._rank == 0)

    def _exit(self, failure: dict[str, Any], *, speaks: bool, linger: bool = False) -> NoReturn:
        text = "".join(f"  {line}\n" for line in failure["lines"]) + f"plait: {failure['sentence']}\n"
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        if speaks:
            with contextlib.suppress(OSError):
                os.write(2, ("\x1b[?25h" if os.isatty(2) else "").encode() + text.encode())
        with contextlib.suppress(dist.DistError):
            self._line.add("noted", int(self._rank > 0))
            if linger:
                self._linger(self._line)
        os._exit(failure["code"])

    def _linger(self, line: Store) -> None:
        """Rank 0 may keep the store: it stays until the others have read why."""
        deadline = time.monotonic() + 4 * BEAT_S
        while self._rank == 0 and line.add("noted", 0) < self._size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)


def _outlive_abort() -> None:
    """Gloo ends the process where a collective meets another of a different size: the thread of this file then has the
    time to say which. The handler is libc's own sleep, which takes the signal's number, 6, for its seconds."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _call_key(rank: int, name: Name, sequence: int) -> str:
    """Two keys for a group's calls, since no rank is two calls ahead; one for each message."""
    return f"call/{rank}/{board.name_to_text(name)}/{sequence % 2 if name[0] == 'group' else sequence}"


def _note(said: bytes, silent_s: float) -> str:
    """'dead' or 'stopped' for a rank of which nothing is heard. On this machine the system knows better than a clock."""
    if silent_s < 2 * BEAT_S:
        return ""
    _, pid, system, glance = json.loads(said.partition(b"\n")[0])
    if board.state_of(bytes.fromhex(glance)) == board.ENDED:
        return ""
    if system and system == _system():
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "dead"
        return {"T": f"stopped: kill -CONT {pid} lets it go on", "Z": "dead", "X": "dead"}.get(state, "")
    return "dead" if silent_s > DEAD_S else ""


def _system() -> str:
    """The same on two ranks that see each other's processes under the same numbers; '' where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _to_json(slot: Slot) -> str:
    def place(wait: Wait | None) -> Any:
        return wait and [wait.channel and board.name_to_text(wait.channel), wait.sequence, wait.text]

    texts = list({call.text: None for calls in slot.calls.values() for call in calls})
    numbers = {text: number for number, text in enumerate(texts)}
    calls = {
        board.name_to_text(name): [[call.sequence, call.hash, numbers[call.text]] for call in some]
        for name, some in slot.calls.items()
    }
    return json.dumps([slot.state, slot.step, place(slot.wait), place(slot.last), texts, calls])


def _slot(said: bytes, rank: int) -> Slot:
    state, step, wait, last, texts, calls = json.loads(said.partition(b"\n")[2])

    def place(one: Any) -> Wait | None:
        return Wait(one[0] and board.name_from_text(one[0]), one[1], one[2]) if one else None

    return Slot(
        rank, state, step, place(wait), place(last),
        {board.name_from_text(n): tuple(Call(s, h, texts[t]) for s, h, t in some) for n, some in calls.items()},
    )  # fmt: skip
