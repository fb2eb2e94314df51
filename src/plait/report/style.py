"""How the page of a run looks: two palettes, one sheet, and the script of the button that changes between them.

Colours follow the reader's system until the button is used. Neighbouring colours differ in lightness as well as in hue.
"""

from __future__ import annotations

PALETTE = {
    # name: (light, dark)
    "paper": ("#fbfbf9", "#101418"),
    "card": ("#ffffff", "#171c22"),
    "ink": ("#1d2329", "#e3e8ed"),
    "muted": ("#5a6570", "#97a3af"),
    "line": ("#e2e5e9", "#2b333c"),
    "idle": ("#eceff2", "#222932"),
    "hatch": ("#c3cad2", "#414c58"),
    "blue": ("#1f66b0", "#3f86d0"),
    "sky": ("#a6cee3", "#9fc9e0"),
    "orange": ("#f0a04b", "#f0a04b"),
    "faint": ("#a6cee3", "#3d5d75"),
    "green": ("#2f8f72", "#3fa688"),
    "purple": ("#8c4a9e", "#b173c4"),
    "indigo": ("#7356b0", "#8467c4"),
    "mint": ("#63b795", "#63b795"),
    "shade": ("#0a2f5c4d", "#0a2f5c59"),
    "grey": ("#737f8c", "#8d99a5"),
    "warn": ("#9a3412", "#fdba74"),
    "warn-paper": ("#fff4e8", "#33231a"),
}

SHEET = """\
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 ui-sans-serif, system-ui, -apple-system, "Segoe UI", sans-serif; }
main, header, footer { max-width: 1120px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; position: relative; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 60px 2px 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 6px; }
h3 { font-size: 13px; margin: 0 0 4px; font-weight: 600; }
p { margin: 0 0 10px; max-width: 78ch; }
.muted, .note, footer { color: var(--muted); }
.note { font-size: 13px; }
button { position: absolute; right: 20px; top: 28px; padding: 5px 11px; border: 1px solid var(--line);
  border-radius: 7px; background: var(--card); color: var(--ink); font: inherit; font-size: 13px; cursor: pointer; }
button:focus-visible, summary:focus-visible, label:focus-within { outline: 2px solid var(--blue); outline-offset: 2px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px 14px;
  margin: 16px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(142px, 1fr)); gap: 10px; margin: 18px 0 0;
  padding: 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 9px 13px 8px; }
.tiles dt { color: var(--muted); font-size: 12px; }
.tiles dd { margin: 0; font-size: 20px; line-height: 1.3; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tiles dd.small { font-size: 12px; color: var(--muted); white-space: normal; }
.warning { background: var(--warn-paper); color: var(--warn); border: 1px solid currentColor; border-radius: 10px;
  padding: 10px 14px; margin: 16px 0 0; max-width: none; }
.beside { display: grid; gap: 8px 26px; grid-template-columns: minmax(0, 1fr); }
.trio { display: grid; gap: 4px 26px; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); margin-top: 6px; }
@media (min-width: 860px) { .beside { grid-template-columns: minmax(0, 5fr) minmax(0, 3fr); } }
.samples { max-height: 360px; overflow-y: auto; }
.samples figure { margin: 0 0 12px; }
.samples figcaption { color: var(--muted); font-size: 12px; }
pre { margin: 2px 0 0; padding: 8px 11px; background: var(--paper); border: 1px solid var(--line); border-radius: 7px;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre b { color: var(--blue); font-weight: 600; }
.plot { position: relative; margin: 10px 12px 30px 46px; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot span { position: absolute; font-size: 11.5px; color: var(--muted); font-variant-numeric: tabular-nums;
  white-space: nowrap; line-height: 1; }
.plot .y { right: calc(100% + 7px); transform: translateY(-50%); }
.plot .x { top: calc(100% + 8px); transform: translateX(-50%); }
.plot .x.last { transform: translateX(-100%); }
.plot .said { right: 2px; transform: translateY(-120%); }
.plot path { fill: none; vector-effect: non-scaling-stroke; }
.plot .grid { stroke: var(--line); stroke-width: 1; }
.plot .raw { stroke: var(--faint); stroke-width: 1.3; }
.plot .band { fill: var(--faint); opacity: 0.6; }
.plot .smooth { stroke: var(--blue); stroke-width: 2.2; stroke-linejoin: round; }
.plot .alone { stroke-width: 8; stroke-linecap: round; }
.plot .reference { stroke: var(--orange); stroke-width: 1.5; stroke-dasharray: 5 4; }
.plot .point rect { fill: transparent; }
.plot .point path { stroke: var(--blue); stroke-width: 8; stroke-linecap: round; opacity: 0; }
.plot .point:hover path { opacity: 1; }
.scales { border: 0; margin: 0; padding: 0; font-size: 12.5px; color: var(--muted); display: flex; gap: 14px; }
.scales label { cursor: pointer; border-radius: 5px; padding: 0 4px 0 0; }
.scale-log { display: none; }
.curves:has(#log:checked) .scale-log { display: block; }
.curves:has(#log:checked) .scale-linear { display: none; }
.key { list-style: none; display: flex; flex-wrap: wrap; gap: 3px 16px; padding: 0; margin: 6px 0 10px;
  font-size: 12.5px; color: var(--muted); }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.swatch.line { height: 3px; vertical-align: 3px; width: 18px; }
.swatch.raw { background: var(--faint); }
.swatch.smooth { background: var(--blue); }
.swatch.hatched { background: repeating-linear-gradient(135deg, var(--hatch) 0 2px, var(--idle) 2px 5px); }
.meaning { list-style: none; padding: 0; margin: 8px 0; font-size: 13px; color: var(--muted); columns: 2 340px;
  column-gap: 26px; }
.meaning li { break-inside: avoid; padding-left: 18px; text-indent: -18px; margin-bottom: 3px; }
.wide { overflow-x: auto; }
.pipeline { min-width: 720px; width: 100%; height: auto; display: block;
  font: 12px ui-sans-serif, system-ui, sans-serif; }
.pipeline text { fill: var(--ink); }
.pipeline .quiet { fill: var(--muted); }
.pipeline .title { font-weight: 600; }
.pipeline .middle { text-anchor: middle; }
.pipeline .end { text-anchor: end; }
.pipeline .tick { stroke: var(--line); }
.pipeline .on-light { fill: #10151b; pointer-events: none; font-size: 11px; }
.pipeline .on-dark { fill: #ffffff; pointer-events: none; font-size: 11px; }
.pipeline .wait { fill: transparent; }
.pipeline .shade { pointer-events: none; }
.pipeline .hatch { fill: url(#hatch); }
.bars { display: grid; grid-template-columns: auto minmax(0, 1fr) auto; gap: 5px 12px; align-items: center;
  margin: 4px 0 8px;  font-size: 13px; font-variant-numeric: tabular-nums; }
.bars .label { color: var(--muted); white-space: nowrap; }
.bars .value { text-align: right; white-space: nowrap; }
.bar { display: block; width: 100%; height: 13px; background: var(--idle); border-radius: 3px; }
.bar + .bar { margin-top: 2px; }
.stages { display: flex; flex-wrap: wrap; gap: 12px; margin: 8px 0 10px; }
.stage { border: 1px solid var(--line); border-radius: 9px; padding: 9px 11px 11px; }
.stage p { margin: 0 0 7px; font-size: 12.5px; color: var(--muted); max-width: 30ch; }
.ranks { border-collapse: separate; border-spacing: 4px; margin: 0 -4px; }
.ranks td, .ranks th { min-width: 34px; height: 26px; padding: 0 6px; text-align: center; border: 0; font-size: 12px;
  font-weight: 400; font-variant-numeric: tabular-nums; }
.ranks th { color: var(--muted); white-space: nowrap; min-width: 0; padding: 0 3px; }
.ranks td { border-radius: 6px; }
details { margin: 6px 0 4px; }
summary { cursor: pointer; color: var(--muted); font-size: 13px; width: fit-content; }
details table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; margin: 6px 0; }
details th { text-align: left; font-weight: 600; color: var(--muted); white-space: nowrap; }
details th, details td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right !important; white-space: nowrap; }
footer { font-size: 12.5px; padding-bottom: 34px; }
@media (max-width: 600px) { main, header, footer { padding-left: 12px; padding-right: 12px; }
  section { padding: 14px 13px 10px; } button { right: 12px; top: 20px; }
  .plot { margin-left: 40px; } h1 { font-size: 22px; } }
@media print { button { display: none; } section { break-inside: avoid; } }
"""

FILLS = {
    "forward": "sky", "backward": "blue", "input": "indigo", "weight": "mint", "reduce": "orange", "idle": "idle",
    "shade": "shade",
    "data": "purple", "compute": "blue", "communication": "orange", "bubble": "hatch", "optimizer": "green",
    "other": "grey", "weights": "blue", "master_weights": "purple", "gradients": "orange", "state": "green",
    "activations": "sky", "predicted": "sky", "measured": "blue", "slice0": "sky", "slice1": "blue", "slice2": "orange",
    "slice3": "purple", "units": "mint", "working": "grey",
}  # fmt: skip
"""Class of a rectangle or a swatch -> its colour."""

SCRIPT = """\
const root = document.documentElement, button = document.getElementById("theme");
const dark = () => getComputedStyle(root).colorScheme === "dark";
const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
button.hidden = false;
button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
name();
"""


def sheet() -> str:
    """The whole style sheet."""
    light, dark = (_variables(place) for place in (0, 1))
    fills = "\n".join(f".{kind} {{ fill: var(--{colour}); }} .swatch.{kind}, td.{kind} {{ background: var(--{colour}); }}"
                      for kind, colour in FILLS.items())  # fmt: skip
    # A shade alone cannot be told from a dark page: in the legend it lies on a colour.
    shade = ".swatch.shade { background: linear-gradient(var(--shade), var(--shade)), var(--sky); }"
    inks = "td.slice0, td.slice2 { color: #10151b; } td.slice1, td.slice3 { color: #ffffff; }"
    return "\n".join([
        f":root {{ color-scheme: light; {light} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}",
        f':root[data-theme="light"] {{ color-scheme: light; {light} }}',
        f':root[data-theme="dark"] {{ color-scheme: dark; {dark} }}',
        SHEET, fills, shade, inks,
    ])  # fmt: skip


def _variables(place: int) -> str:
    return " ".join(f"--{name}: {colours[place]};" for name, colours in PALETTE.items())
