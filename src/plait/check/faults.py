"""Planted faults: small named patches of the runtime, with which the checker is lied to.

A fault goes into the ranks alone; neither the reference nor the checker is told. Each is what somebody's tool once did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """`patch()` puts it into this process; `layout` are plan values that give it something to spoil; `kind` is where the
    checker must find it first (cause.kind_of), and `at` what its first place must hold."""

    meaning: str
    kind: str
    at: str
    layout: dict[str, Any]
    patch: Callable[[], None]


FAULTS: dict[str, Fault] = {}
"""Every planted fault by name."""
