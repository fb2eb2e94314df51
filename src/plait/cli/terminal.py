"""The console that commands print on: rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class Terminal(Console):
    """Prints words as they are: a path or a model's name may hold brackets and colons, which rich reads as markup."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> NoReturn:
        """Called inside rich's own `except BrokenPipeError`. rich would end the process with 1, which means here that a
        check failed; app.py ends it quietly with 141."""
        raise BrokenPipeError("whoever read the output is gone")
