"""Numbers and lists as words: '1.5 MiB', '27.3%', '0-3', '33 units'."""

from __future__ import annotations

from collections.abc import Iterable

from ..design.records import Timeline


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1: '1.5 MiB'; whole bytes below a KiB: '512 B'."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def counted(number: int, noun: str) -> str:
    """'1 rank', '2 ranks', '4 microbatches'."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def runs(numbers: Iterable[int]) -> str:
    """'0-3, 7' from 0, 1, 2, 3, 7."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def in_units(timeline: Timeline) -> bool:
    """Whether the clock is the textbook's (whole units: forward 1, backward 2) and not one of seconds."""
    return isinstance(timeline.seconds, int)


def duration(timeline: Timeline) -> str:
    """'33 units' on the textbook's clock, else '1.24 s' or '12.4 ms'."""
    return f"{timeline.seconds} units" if in_units(timeline) else time(timeline.seconds)


def time(seconds: float) -> str:
    """'12.4 ms', '1.24 s', '3 min 20 s' or '2 h 5 min'."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def rank_bubble(timeline: Timeline, rank: int) -> float:
    """The share of the step in which one rank computed nothing."""
    return 1 - timeline.busy(rank) / timeline.seconds if timeline.seconds else 0.0
