"""What this rank moved, counted where it is moved: one `Traffic` row per (axis, why, operation); and when it waited.

`design/cost/traffic.py` predicts the same rows; a test holds the two equal to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...design.records import Traffic


class Ledger:
    """Counts calls and payload bytes. `add` costs two additions, so it is always on. With a `clock` (something that says
    what time it is) it also keeps when each call that was waited for began and ended, as (axis, why, begin, end)."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str, int], list[int]] = {}
        self.clock: Callable[[], Any] | None = None
        self.waits: list[tuple[str, str, Any, Any]] = []

    def add(self, axis: str, why: str, operation: str, ranks: int, payload: int) -> None:
        row = self._rows.setdefault((axis, why, operation, ranks), [0, 0])
        row[0] += 1
        row[1] += payload

    def rows(self, rank: int) -> list[Traffic]:
        return [
            Traffic(rank, axis, why, operation, ranks, calls, payload)
            for (axis, why, operation, ranks), (calls, payload) in self._rows.items()
        ]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is moved inside the block is not counted: the ledger is a step's, and this lies between two."""
        rows, self._rows = self._rows, {}
        try:
            yield
        finally:
            self._rows = rows

    def now(self) -> Any:
        return self.clock() if self.clock is not None else None

    def waited(self, axis: str, why: str, since: Any) -> None:
        """A call was made at `since` (what now() gave) and its result is there."""
        if self.clock is not None:
            self.waits.append((axis, why, since, self.clock()))

    def clear(self) -> None:
        self._rows.clear()
        self.waits.clear()
