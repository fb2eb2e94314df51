"""The few HTML elements that the page of a run is made of. Text is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

MOST_RANKS = 64
"""Ranks drawn and listed, evenly chosen where there are more."""


def said(value: object) -> str:
    """Words as they are: nothing in them is markup, and what cannot be printed is shown as a question mark in a box."""
    text = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in str(value)
    )
    return escape(text.encode("utf-8", "replace").decode())


def section(name: str, title: str, *content: str) -> str:
    head = f'<h2 id="{name}-title">{said(title)}</h2>'
    return "\n".join([f'<section id="{name}" aria-labelledby="{name}-title">', head, *content, "</section>"])


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{said(text)}</p>' if kind else f"<p>{said(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, name: str, words: Collection[int] = ()) -> str:
    """The numbers under a picture, folded away; the columns `words` are words, the others numbers."""

    def cell(kind: str, column: int, value: object) -> str:
        side = "" if column in words else ' class="number"'
        return f"<{kind}{side}>{said(value)}</{kind}>"

    lines = [f"<details><summary>{said(name)}</summary>", '<div class="wide"><table>']
    lines.append(f"<thead><tr>{''.join(cell('th', column, value) for column, value in enumerate(head))}</tr></thead>")
    lines.append("<tbody>")
    lines += [f"<tr>{''.join(cell('td', column, value) for column, value in enumerate(row))}</tr>" for row in rows]
    return "\n".join([*lines, "</tbody></table></div></details>"])


def key(entries: Iterable[tuple[str, str]]) -> str:
    """(class of the colour, what it stands for) as a legend."""
    items = "".join(f'<li><span class="swatch {kind}"></span>{said(words)}</li>' for kind, words in entries)
    return f'<ul class="key">{items}</ul>'


def meaning(entries: Iterable[tuple[str, str, str]]) -> str:
    """A legend whose entries need a sentence: (class, what it stands for, what that is)."""
    items = "".join(
        f'<li><span class="swatch {kind}"></span>{said(name)}: {said(words)}</li>' for kind, name, words in entries
    )
    return f'<ul class="meaning">{items}</ul>'


Piece = tuple[str, float, str]
"""(class of the colour, length, what it is)"""


def bars(rows: Iterable[tuple[str, Sequence[Sequence[Piece]], str]], longest: float, *, name: str) -> str:
    """(label, one or more bars of pieces one after the other, value) a row; `longest` fills the width."""
    lines = [f'<div class="bars" role="img" aria-label="{said(name)}">']
    for label, stacked, value in rows:
        drawn = "".join(_bar(pieces, longest) for pieces in stacked)
        lines.append(
            f'<span class="label">{said(label)}</span><span>{drawn}</span><span class="value">{said(value)}</span>'
        )
    return "\n".join([*lines, "</div>"])


def _bar(pieces: Sequence[Piece], longest: float) -> str:
    drawn, place = [], 0.0
    for kind, length, words in pieces:
        width = 1000 * length / longest if longest else 0.0
        if width >= 0.05:
            title = f"<title>{said(words)}</title>"
            drawn.append(f'<rect class="{kind}" x="{place:.2f}" y="0" width="{width:.2f}" height="10">{title}</rect>')
        place += width
    return f'<svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none">{"".join(drawn)}</svg>'


def some(count: int, most: int = MOST_RANKS) -> list[int]:
    """0 to count - 1, or `most` of them, evenly chosen, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def left_out(count: int, what: str, most: int = MOST_RANKS) -> str:
    """The sentence that says so, or nothing."""
    if count <= most:
        return ""
    return paragraph(f"{most} of {count:,} {what}, evenly chosen, are shown; run.json holds all.", "note")
