"""Planted faults: small named patches of the runtime, with which the checker is lied to.

A fault goes into the ranks alone; neither the reference nor the checker is told. Each is what somebody's tool once did.
"""

from __future__ import annotations

from . import batch, chunks, families, frozen, master, pipeline, precision, recompute, sequence, sums, weights, zero
from .fault import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for room in (sums, batch, pipeline, weights, zero, recompute, chunks, precision, frozen, master, families, sequence)
    for fault in room.FAULTS
}
"""Every planted fault by name."""
