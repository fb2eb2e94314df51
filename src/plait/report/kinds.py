"""How each kind of action looks: its colour, its words, and its cells in characters.

    0─  F  forward                     █0  B  backward
    <0  I  backward of the input       +0  W  backward of the weights       R  sum of gradients over dp

The first stage of a rank looks so. Every second one is doubled in characters (═ ▓ « #, on brighter colours) and shaded
in pictures: the later the stage, the higher the shade.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..design.records import Span
from ..design.schedule import Kind


@dataclass(frozen=True)
class Look:
    """`name` is the class of its rectangles; a number on it is in `ink`. Cells are `fills` (of the first stage of a rank,
    of the second), on `colour`; `front` of them stand before the number."""

    name: str
    words: str
    ink: str
    fills: tuple[str, str]
    colour: str
    front: int = 1

    def fill_style(self, chunk: int) -> str:
        """Of a cell without a number. A full block is ink alone."""
        colour = self._colour(chunk)
        return colour if self.fills[0] == "█" else f"{self._number_ink} on {colour}"

    def number_style(self, chunk: int) -> str:
        return f"{self._number_ink} on {self._colour(chunk)}"

    def fill(self, chunk: int) -> str:
        return self.fills[chunk % 2]

    def _colour(self, chunk: int) -> str:
        return f"bright_{self.colour}" if chunk % 2 else self.colour

    @property
    def _number_ink(self) -> str:
        return "bright_white" if self.ink == "on-dark" else "black"


LOOKS: dict[Kind, Look] = {
    Kind.FORWARD: Look("forward", "forward", "on-light", ("─", "═"), "cyan", front=0),
    Kind.BACKWARD: Look("backward", "backward", "on-dark", ("█", "▓"), "blue"),
    Kind.BACKWARD_INPUT: Look("input", "backward of the input", "on-dark", ("<", "«"), "magenta"),
    Kind.BACKWARD_WEIGHT: Look("weight", "backward of the weights", "on-light", ("+", "#"), "green"),
    Kind.REDUCE: Look("reduce", "gradient sum over dp", "on-light", ("R", "R"), "yellow", front=0),
}
"""What is drawn, in the order of legends. Sends, receives and waits are not."""

LATER = "a later stage of the rank"


def drawn(spans: Iterable[Span]) -> list[Kind]:
    """The kinds that take time in `spans`, in the order of legends."""
    there = {span.action.kind for span in spans if span.end > span.start}
    return [kind for kind in LOOKS if kind in there]


def label(span: Span) -> str:
    return "R" if span.action.kind is Kind.REDUCE else str(span.action.microbatch)


def together(spans: Collection[Span]) -> dict[Span, Span]:
    """Of one rank's spans, each forward that runs at the same time as a backward, with that backward."""
    others = {(s.start, s.end): s for s in spans if s.action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
    return {
        span: others[span.start, span.end]
        for span in spans
        if span.action.kind is Kind.FORWARD and span.end > span.start and (span.start, span.end) in others
    }
