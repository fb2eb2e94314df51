"""Numbers from measurements: medians, ratios with an interval, private memory, the processor time of the machine.

All functions are pure but for `private_bytes` and `busy_seconds`, which read /proc where there is one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RESAMPLES = 10_000
SHARE = 0.95
CLOSE = 0.05
"""An interval counts as narrow when both its ends lie within this share of the ratio."""


@dataclass(frozen=True)
class Estimate:
    """A number and the 95 % interval that a bootstrap gives it."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """The distance of the farther end, as a share of the value."""
        return max(self.high - self.value, self.value - self.low) / self.value

    @property
    def narrow(self) -> bool:
        return self.half_width <= CLOSE


def _draws(rounds: int) -> np.ndarray:
    """Which rounds each resample takes, [RESAMPLES, rounds]; the same for the same number of rounds."""
    return np.random.default_rng(0).integers(rounds, size=(RESAMPLES, rounds))


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, ((1 - SHARE) / 2, (1 + SHARE) / 2))
    return Estimate(float(value), float(low), float(high))


def median(values: Sequence[float]) -> Estimate:
    """The median of one contestant's rounds."""
    array = np.asarray(values, dtype=float)
    return _estimate(np.median(array), np.median(array[_draws(len(array))], axis=1))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The ratio of two medians. The values are paired by round, and a resample takes whole rounds, so that a round in
    which the machine was slow is slow for both."""
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(
            f"{len(ours)} rounds against {len(theirs)}: a ratio takes the same rounds of both, at least one"
        )
    a, b = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    draws = _draws(len(a))
    resampled = np.median(a[draws], axis=1) / np.median(b[draws], axis=1)
    return _estimate(np.median(a) / np.median(b), resampled)


@dataclass(frozen=True)
class Spread:
    """How far apart the rounds of one contestant lie."""

    least: float
    low_quarter: float
    middle: float
    high_quarter: float
    most: float

    @property
    def share(self) -> float:
        """From the least to the most, as a share of the median."""
        return (self.most - self.least) / self.middle


def spread(values: Sequence[float]) -> Spread:
    return Spread(*(float(edge) for edge in np.quantile(np.asarray(values, dtype=float), (0, 0.25, 0.5, 0.75, 1))))


def private(smaps: Iterable[str]) -> int:
    """Bytes of memory that one process alone has (its USS), from the lines of its smaps. What stands in a segment of
    plait's, of which the others may not have looked at all, is counted as shared, and not here."""
    kilobytes, counts = 0, True
    for line in smaps:
        if line.startswith("Private_"):
            kilobytes += int(line.split()[1]) if counts else 0
        elif line[0] in "0123456789abcdef":
            counts = "/memfd:plait-segment" not in line
    return 1024 * kilobytes


def private_bytes(pid: int | str = "self") -> int:
    """The USS of a process now; 0 where the system does not say."""
    try:
        return private((Path("/proc") / str(pid) / "smaps").read_text().splitlines())
    except OSError:
        return 0


def busy(stat: str) -> int:
    """Ticks that all processors together were at work (user, nice, system, steal), from the text of /proc/stat."""
    fields = [int(word) for word in stat.splitlines()[0].split()[1:]]
    return fields[0] + fields[1] + fields[2] + (fields[7] if len(fields) > 7 else 0)


def busy_seconds() -> float | None:
    """Seconds of processor time that the whole machine has spent; None where the system does not say."""
    try:
        return busy(Path("/proc/stat").read_text()) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None
