"""Products of matrices whose weight is cut, drawn from its layout: what each rank multiplies, and what becomes of it.

cut by outputs    x [ whole ] . Wᵀ [ 0 | 1 ]  =  y [ 0 | 1 ]          side by side
cut by inputs     x [ 0 | 1 ] . Wᵀ [ 0 / 1 ]  =  y [ 0 ] + y [ 1 ]    added
"""

from __future__ import annotations

from ..design.layout import Box, Layout
from ..design.mesh import Mesh
from .svg import document, rect, text

SCALE, GAP, TOP, LEFT = 110.0, 46.0, 70.0, 20.0
Span = tuple[int, int]


def svg(layout: Layout, mesh: Mesh, *, tokens: int, title: str) -> str:
    """`layout` is that of a weight [out, in] over the tp ranks of a mesh; `tokens` is how high x is, in elements."""
    if len(layout.shape) != 2 or len(layout.cuts) != 1:
        raise ValueError(f"a product is drawn of a weight of 2 dims that is cut once, not of {layout}")
    out, into = layout.shape
    boxes = [box for box in (layout.box(mesh, rank) for rank in mesh.group(0, "tp")) if box is not None]
    by_outputs = layout.cuts[0].dim == 0
    unit = SCALE / max(out, into, tokens)
    drawing = _Drawing(unit, max(tokens, into) * unit)
    x_spans = [(0, into)] if by_outputs else [box[1] for box in boxes]
    drawing.matrix("x", tokens, into, [((0, tokens), span) for span in x_spans], whole=by_outputs)
    drawing.sign("·")
    drawing.matrix("Wᵀ", into, out, [(box[1], box[0]) for box in boxes])
    drawing.sign("=")
    if by_outputs:
        drawing.matrix("y", tokens, out, [((0, tokens), box[0]) for box in boxes])
        note = "x is whole on every rank; each makes its own columns of y, which stand side by side"
    else:
        for rank in range(len(boxes)):
            if rank:
                drawing.sign("+")
            drawing.matrix(f"y of rank {rank}", tokens, out, [((0, tokens), (0, out))], first=rank)
        note = "x is cut as Wᵀ is; each rank makes all of y in part, and the parts are added"
    height = TOP + drawing.height + 44
    words = text(LEFT, height - 14, note)
    return document(max(drawing.x, LEFT + 7 * len(note)) + 10, height, title, [*drawing.elements, words])


class _Drawing:
    """Matrices and signs from left to right, centred on one line."""

    def __init__(self, unit: float, height: float) -> None:
        self.x, self.unit, self.height = LEFT, unit, height
        self.elements: list[str] = []

    def sign(self, word: str) -> None:
        self.elements.append(text(self.x + GAP / 2 - 6, TOP + self.height / 2 + 5, word, "middle title"))
        self.x += GAP - 12

    def matrix(
        self, name: str, rows: int, columns: int, slices: list[Box], *, first: int = 0, whole: bool = False
    ) -> None:
        """`slices` are boxes of rows and columns: rank `first`'s and those after it, or one that is everybody's."""
        width, height = columns * self.unit, rows * self.unit
        y = TOP + (self.height - height) / 2
        for number, ((top, bottom), (left, right)) in enumerate(slices):
            rank = first + number
            kind = "idle" if whole else f"slice{rank % 4}"
            at = self.x + left * self.unit, y + top * self.unit
            size = (right - left) * self.unit, (bottom - top) * self.unit
            self.elements.append(rect(*at, *size, kind))
            ink = "" if whole else "on-dark" if rank % 4 in (1, 3) else "on-light"
            word = "all" if whole else str(rank)
            self.elements.append(text(at[0] + size[0] / 2, at[1] + size[1] / 2 + 4, word, f"middle {ink}".strip()))
        self.elements.append(text(self.x + width / 2, TOP - 12, name, "middle"))
        self.x += width + 12
