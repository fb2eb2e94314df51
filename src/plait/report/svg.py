"""The few SVG elements that the pictures are made of: self-contained, readable on light and dark, the same every time.

Neighbouring kinds differ in lightness as well as in hue, so the pictures survive a black-and-white printer.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

STYLE = """\
svg { font: 12px ui-sans-serif, system-ui, sans-serif; }
.paper { fill: #ffffff; }
.idle { fill: #e8ebef; }
text { fill: #1f2328; }
.forward, .slice0 { fill: #a6cee3; }
.backward, .slice1 { fill: #1f66b0; }
.input { fill: #7356b0; }
.weight { fill: #63b795; }
.reduce, .slice2 { fill: #f0a04b; }
.shade { fill: #0a2f5c; fill-opacity: 0.3; }
.slice3 { fill: #8c4a9e; }
.title { font-weight: 600; font-size: 14px; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117; }
  .idle { fill: #262c36; }
  text { fill: #e6edf3; }
}
.on-light { fill: #10151b; }
.on-dark { fill: #ffffff; }"""


def number(value: float) -> str:
    """At most two decimals, none that are zero: what makes a drawing the same on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words on the baseline `y`; `kind` holds the classes for anchor and colour."""
    classes = f' class="{kind}"' if kind else ""
    return f'<text{classes} x="{number(x)}" y="{number(y)}">{escape(words)}</text>'


def group(kind: str, elements: Iterable[str]) -> list[str]:
    return [f'<g class="{kind}">', *elements, "</g>"]


def document(width: float, height: float, title: str, elements: Iterable[str]) -> str:
    """A whole file; the title is drawn on top and read by screen readers."""
    box = f"{number(width)} {number(height)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box}" width="{number(width)}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        rect(0, 0, width, height, "paper"),
        text(16, 26, title, "title"),
        *elements,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
