"""Writes the table of flags in docs/commands.md from the fields of `Plan`.

    python docs/commands.py

replaces what stands between `<!-- flags -->` and `<!-- end -->`; tests/docs/test_pages.py compares it with the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin

from plait.design.plan import Plan

PAGE = Path(__file__).parent / "commands.md"


def flag(name: str) -> str:
    """The flag of a field, as the command line has it."""
    if name == "model":
        return "`MODEL`"
    said = f"`--{name.replace('_', '-')}`"
    if bool in get_args(Plan.model_fields[name].annotation):
        said += f", `--no-{name.replace('_', '-')}`"
    return ("`-n`, " if name == "ranks" else "") + said


def values(annotation: Any) -> str:
    """'int', or the words that are allowed."""
    if bool in get_args(annotation):  # `bool`, and a word for whoever says neither
        return ", ".join(values(one) for one in get_args(annotation))
    if get_origin(annotation) is not None:
        return ", ".join(f"`{word}`" for word in get_args(annotation))
    return str(annotation.__name__)


def flags() -> str:
    """The table: one line a field."""
    lines = ["| flag | key | values | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, field in Plan.model_fields.items():
        cells = (flag(name), f"`{name}`", values(field.annotation), f"`{field.default}`", field.description or "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_flags(page: str) -> str:
    """The page with its table computed anew."""
    return re.sub(
        r"<!-- flags -->\n.*?<!-- end -->",
        lambda _: f"<!-- flags -->\n\n{flags()}\n\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    PAGE.write_text(with_flags(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
