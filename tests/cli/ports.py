"""Which ports some processes listen on, read from /proc; and what a stranger may send there."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pickle
import random
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

LISTENS = "0A"


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """(address, port) of every socket on which one of the processes listens."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in inodes:
                address, _, port = words[1].partition(":")
                found.append((_address(address), int(port, 16)))
    return sorted(set(found))


def _address(text: str) -> str:
    """An address as /proc has it, in words of 32 bits in the machine's order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return str(
        ipaddress.ip_address(
            struct.pack(f">{len(words)}I", *(struct.unpack(">I", struct.pack("=I", w))[0] for w in words))
        )
    )


def nobody_listens(ports: Iterable[tuple[str, int]]) -> None:
    """Asserts that the ports are free again."""
    for place in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place, timeout=5)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def attack(ports: Sequence[tuple[str, int]], marker: Path) -> None:
    """Sends to each port, to all at once, what a stranger may: a pickle that acts, and a megabyte of anything."""
    threads = [threading.Thread(target=_attack, args=(*place, pickle.dumps(Bomb(marker)))) for place in ports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _attack(address: str, port: int, bomb: bytes) -> None:
    noise = random.Random(port).randbytes(1 << 20)
    for data in (bomb, struct.pack(">Q", len(bomb)) + bomb, noise):
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1) as line:
            line.settimeout(0.5)
            line.sendall(data)
