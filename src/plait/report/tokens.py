"""Who has which tokens of a row on the way through a block, with sequence parallelism: a row of the drawing a rank, a
column a place in the block, the tokens from left to right in each cell."""

from __future__ import annotations

from .svg import document, rect, text

CELL, HEIGHT, GAP, LEFT, TOP = 96.0, 16.0, 14.0, 64.0, 82.0
PLACES = (("norm", True), ("attention", False), ("residual, norm", True), ("MLP", False), ("residual", True))
"""Of a block, and whether each rank has its own tokens there."""


def svg(sizes: tuple[int, ...], *, title: str) -> str:
    """`sizes`: the tokens of a row that each place of tp has."""
    seq, ranks = sum(sizes), len(sizes)
    drawn: list[str] = []
    for number, (name, own) in enumerate(PLACES):
        x = LEFT + number * (CELL + GAP)
        drawn.append(text(x + CELL / 2, TOP - 30, name, "middle"))
        if number:
            word = "join" if not own else "scatter"
            drawn.append(text(x - GAP / 2, TOP - 10, word, "middle"))
        for rank in range(ranks):
            y = TOP + rank * (HEIGHT + 8)
            start = sum(sizes[:rank]) / seq
            drawn.append(rect(x, y, CELL, HEIGHT, "idle"))
            place, width = (x + start * CELL, sizes[rank] / seq * CELL) if own else (x, CELL)
            drawn.append(rect(place, y, width, HEIGHT, f"slice{rank % 4}"))
    for rank in range(ranks):
        drawn.append(text(LEFT - 10, TOP + rank * (HEIGHT + 8) + 12, f"tp {rank}", "end"))
    note = "coloured: the tokens of a row that a rank works on"
    height = TOP + ranks * (HEIGHT + 8) + 34
    drawn.append(text(LEFT, height - 14, note))
    return document(LEFT + len(PLACES) * (CELL + GAP) + 10, height, title, drawn)
