"""What a bench found, as one object of JSON: everything that the tables show, and the numbers behind them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import plait

from .contestants.field import ONE, RIVALS, Rivals, ceiling_of
from .measure import Estimate, median, spread
from .prediction import bubble
from .rounds import Record, compare, gap
from .work import Work


def estimate(found: Estimate | None) -> dict[str, float] | None:
    return asdict(found) if found else None


def verdict(found: Estimate, bar: float | None) -> str:
    """Whether a bar is met: the ratio must reach it, and its interval lie within 5 % of it."""
    if bar is None:
        return ""
    if not found.narrow:
        return f"open, known to {100 * found.half_width:.1f} %"
    return "met" if found.value >= bar else "not met"


def contestants(speed: dict[str, Record], sizes: dict[str, Record], work: Work) -> list[dict[str, Any]]:
    """A row for each contestant of the rounds, with its memory from the other work."""
    return [_contestant(record, speed, sizes.get(name), work) for name, record in speed.items()]


def _contestant(record: Record, speed: dict[str, Record], size: Record | None, work: Work) -> dict[str, Any]:
    one, above = record.contestant, ceiling_of(record.contestant)
    steps = [work.tokens_a_step / seconds for seconds in record.step_seconds]
    of = compare(speed, Rivals(one.name, above)) if above and above != one.name else None
    return {
        "name": one.name,
        "label": one.label,
        "ranks": one.ranks,
        "trouble": record.trouble,
        "first_losses": record.losses,
        "loss_gap": gap(record, speed[ONE]) if record.losses else None,
        "tokens_per_s": estimate(median(steps)) if steps else None,
        "of_ceiling": estimate(of),
        "step_seconds": record.step_seconds,
        "cpu_seconds": record.cpu_seconds,
        "others": record.others,
        "memory_mb": [round(size_of / 2**20) for size_of in size.memory] if size else [],
        "memory_trouble": size.trouble if size else "",
    }


def rivals(speed: dict[str, Record], sizes: dict[str, Record], work: Work) -> list[dict[str, Any]]:
    found = []
    for one in RIVALS:
        it = compare(speed, one)
        if it is None:
            continue
        bar = one.bar
        if bar is not None and one.less_bubble:
            bar *= 1 - bubble(one.less_bubble, speed[one.ours], work)
        found.append(
            asdict(one)
            | {"bar": bar, "ratio": estimate(it), "verdict": verdict(it, bar)}
            | {"memory": (share := most_memory(sizes, one)), "memory_verdict": memory_verdict(share, one.memory_bar)}
        )
    return found


def most_memory(sizes: dict[str, Record], one: Rivals) -> float | None:
    """The memory of our fullest rank over that of theirs, where both were measured."""
    ours, theirs = (sizes[name].memory if name in sizes else [] for name in (one.ours, one.theirs))
    return max(ours) / max(theirs) if ours and theirs else None


def memory_verdict(share: float | None, bar: float | None) -> str:
    if share is None or bar is None:
        return ""
    return "met" if share <= bar else "not met"


def ceilings(speed: dict[str, Record], work: Work) -> list[dict[str, Any]]:
    """How far the ceilings, and the one process, spread over the rounds: what a difference must exceed to be one."""
    rows = []
    for name in dict.fromkeys([ONE, *(above for one in speed.values() if (above := ceiling_of(one.contestant)))]):
        if name in speed and speed[name].step_seconds:
            found = spread([work.tokens_a_step / seconds for seconds in speed[name].step_seconds])
            rows.append({"name": name, "share": found.share} | asdict(found))
    return rows


def machine() -> dict[str, Any]:
    """What it ran on, without a name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "processor": _after("/proc/cpuinfo", "model name") or platform.machine(),
        "memory": _after("/proc/meminfo", "MemTotal"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "plait": f"{plait.__version__} {_commit()}".strip(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def _after(file: str, key: str) -> str:
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return ""


def _commit() -> str:
    """The commit that is checked out, with a plus when files differ from it."""
    root = Path(__file__).parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    return ""


def machine_share(rows: Sequence[dict[str, Any]]) -> float | None:
    """The largest share of the machine that others had during any turn."""
    shares = [share for row in rows for share in row["others"] if share is not None]
    return max(shares, default=None)
