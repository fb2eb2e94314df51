"""A number over the steps of a run as a line: raw behind, smoothed in front, on a linear or a logarithmic scale.

The drawing stretches to whatever width there is, its lines and words do not: the SVG holds shapes only, in a box of 1000
x 1000, and the words of the axes stand beside it. More than `MOST_POINTS` steps are gathered in bins, of which the raw
line shows least and greatest, the smoothed one the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .markup import said

MOST_POINTS = 500
SIZE = 1000
NARROW, WIDE, LETTER = 190, 320, 7
"""Pixels: the least width of a low chart and of a high one, and of a letter on its axes."""

Point = tuple[int, float]


@dataclass(frozen=True)
class Axis:
    """From values to places, 0 (lowest) to 1; `count` is about how many values it names."""

    low: float
    high: float
    log: bool = False
    count: int = 6

    def place(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (value - low) / (high - low) if high > low else 0.5

    @property
    def ticks(self) -> list[float]:
        """A handful of round values."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) >= 3:
                return found
        return round_values(self.low, self.high, self.count)


def round_values(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between `low` and `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """The mean over the `window` steps around each, fewer at the ends: it does not lag behind."""
    sums = [0.0, *accumulate(value for _, value in points)]
    half, count = window // 2, len(points)
    found = []
    for place, (step, _) in enumerate(points):
        reach = min(half, place, count - 1 - place)
        found.append((step, (sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1)))
    return found


def binned(points: Sequence[Point]) -> list[tuple[Point, float, float]]:
    """(middle step and mean, least, greatest) of at most `MOST_POINTS` bins."""
    size = -(-len(points) // MOST_POINTS)
    found = []
    for first in range(0, len(points), size):
        bin_ = points[first : first + size]
        values = [value for _, value in bin_]
        found.append(((bin_[len(bin_) // 2][0], sum(values) / len(values)), min(values), max(values)))
    return found


def window_of(count: int) -> int:
    """Steps that are smoothed over: a twentieth of the run, an odd number, none where it is short."""
    return max(1, count // 20) // 2 * 2 + 1


def curve(
    points: Sequence[Point], *, name: str, height: int, log: bool = False, smooth: bool = True, ticks: int = 6,
    reference: tuple[float, str] | None = None,
) -> str:  # fmt: skip
    """The chart, `height` pixels high; `reference` is a value to compare with, and its name."""
    points = [(step, value) for step, value in points if math.isfinite(value) and (value > 0 or not log)]
    if not points:
        return f"<p>{said(name)}: no finite value.</p>"
    bins = binned(points)
    x = Axis(points[0][0], points[-1][0])
    y = _height([bound for _, *bounds in bins for bound in bounds], log, ticks, reference)
    if reference and not y.low <= reference[0] <= y.high:
        reference = None
    shapes = [f'<path class="grid" d="M0 {_down(y, tick)}H{SIZE}"/>' for tick in y.ticks]
    window = window_of(len(points)) if smooth else 1
    if len(bins) < len(points):
        around = [*((b[0][0], b[2]) for b in bins), *((b[0][0], b[1]) for b in reversed(bins))]
        shapes.append(f'<path class="band" d="{_path(x, y, around)}Z"/>')
    elif window > 1:
        shapes.append(f'<path class="raw" d="{_path(x, y, points)}"/>')
    if reference:
        shapes.append(f'<path class="reference" d="M0 {_down(y, reference[0])}H{SIZE}"/>')
    line = [b[0] for b in binned(smoothed(points, window))]
    shapes.append(f'<path class="smooth{" alone" if len(line) == 1 else ""}" d="{_path(x, y, line)}"/>')
    shapes += _points(x, y, [b[0] for b in bins], name)
    svg = f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none">{"".join(shapes)}</svg>'
    label = said(f"{name} over {len(points):,} steps, from {points[0][1]:.4g} to {points[-1][1]:.4g}")
    words = _words(x, y, reference, NARROW if height < 100 else WIDE)
    return f'<div class="plot" style="height:{height}px" role="img" aria-label="{label}">{svg}{words}</div>'


def _height(values: Sequence[float], log: bool, ticks: int, reference: tuple[float, str] | None) -> Axis:
    """The axis of the values, with the reference where it is not far off."""
    low, high = min(values), max(values)
    if reference and abs(reference[0] - (low + high) / 2) <= high - low and (reference[0] > 0 or not log):
        low, high = min(low, reference[0]), max(high, reference[0])
    if log:
        return Axis(low * 0.99, high * 1.01, log, ticks)
    pad = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
    return Axis(low - pad, high + pad, log, ticks)


def _words(x: Axis, y: Axis, reference: tuple[float, str] | None, width: int) -> str:
    words = [f'<span class="y" style="top:{_down(y, tick) / 10:.2f}%">{tick:,.6g}</span>' for tick in y.ticks]
    end = f"step {x.high:,.0f}"
    label = LETTER * len(end)
    steps = {round(tick) for tick in round_values(x.low, x.high, max(1, min(5, width // (label + LETTER))))}
    # A word is centred on its step, the last one ends there: those that would touch it are left out.
    for step in sorted(step for step in steps if (1 - x.place(step)) * width > 1.5 * label):
        words.append(f'<span class="x" style="left:{100 * x.place(step):.2f}%">{step:,}</span>')
    words.append(f'<span class="x last" style="left:100%">{end}</span>')
    if reference:
        words.append(f'<span class="said" style="top:{_down(y, reference[0]) / 10:.2f}%">{said(reference[1])}</span>')
    return "".join(words)


def _down(y: Axis, value: float) -> float:
    return round(SIZE * (1 - y.place(value)), 1)


def _path(x: Axis, y: Axis, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{SIZE * x.place(step):.1f} {_down(y, value)}" for step, value in points) + "h0.01"


def _points(x: Axis, y: Axis, points: Sequence[Point], name: str) -> list[str]:
    """A strip for each point, which shows it while the pointer is there."""
    width = SIZE / max(1, len(points))
    found = []
    for number, (step, value) in enumerate(points):
        strip = f'<rect x="{number * width:.1f}" width="{width:.1f}" height="{SIZE}"/>'
        dot = f'<path d="M{SIZE * x.place(step):.1f} {_down(y, value)}h0.01"/>'
        found.append(f'<g class="point">{strip}{dot}<title>step {step:,}: {said(name)} {value:.4g}</title></g>')
    return found
