"""The one error that means: what was asked for cannot be done, and here is what can.

A `PlanError` is a sentence with the numbers in it and a way out. It is raised before any rank starts, and the command
line turns it into that sentence and exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PlanError(ValueError):
    """What was asked for cannot be done; the message says why, with the numbers, and what would work."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' for the known word closest to `word`, or '' when none is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{found[0]}'?" if found else ""


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def listed(values: Iterable[object]) -> str:
    """'1, 2 or 4' from 1, 2, 4."""
    words = [str(v) for v in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
