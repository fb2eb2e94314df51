"""Addresses: whether the other nodes can reach the one that MASTER_ADDR names, and which interface leads to it.

A machine's own name often stands for 127.0.1.1 in its hosts file, so that a rank that goes by it tells the others an
address at which they find themselves.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from ...design.errors import PlanError

SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Interface:
    name: str
    address: str


def resolved(host: str, port: int) -> str:
    """The first address of a host. Raises an `OSError` when it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def refuse_loopback(host: str, port: int, *, local_size: int, size: int) -> None:
    """Raises a `PlanError` when ranks on several nodes are told to meet where each node finds only itself."""
    found = resolved(host, port)
    if local_size < size and is_loopback(found):
        raise PlanError(
            f"MASTER_ADDR '{host}' is {found} here, which no other node can reach, but {local_size} of {size} ranks "
            f"are on this node: set MASTER_ADDR to an address of rank 0's machine on the network between the nodes "
            f"(ip addr shows them), or correct '{host}' in /etc/hosts."
        )


def choose(host: str, port: int) -> Interface | None:
    """The interface over which this machine reaches `host`, None where the system does not tell."""
    found = resolved(host, port)
    if is_loopback(found):
        return Interface("lo0" if sys.platform == "darwin" else "lo", found)
    family = socket.AF_INET6 if ":" in found else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((found, port))  # sends nothing: it looks up the route
        except OSError:
            return None
        source = str(probe.getsockname()[0])
    return next((Interface(name, source) for name in _names() if source in _addresses(name)), None)


def _names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _addresses(name: str) -> list[str]:
    """The addresses of an interface, where the system tells (Linux)."""
    found = []
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    except OSError:
        pass
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for words in map(str.split, lines):
        if words[-1] == name:
            found.append(str(ipaddress.ip_address(bytes.fromhex(words[0]))))
    return found
