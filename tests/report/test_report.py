"""What is drawn is what the records say, character by character and rectangle by rectangle."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from plait.design.cost.traffic import traffic as predict
from plait.design.facts import ModelFacts, ParameterFact, Piece
from plait.design.layout import Cut, Layout
from plait.design.mesh import Mesh
from plait.design.plan import Plan
from plait.design.records import Span, Timeline, Traffic
from plait.design.schedule import Action, Kind, lower, make
from plait.design.sharding import shard
from plait.design.simulate import simulate
from plait.report import sharding, timeline, traffic
from plait.report.words import duration, runs, size

SVG = "{http://www.w3.org/2000/svg}"


def fact(
    name: str, shape: tuple[int, ...], style: str | None, *, block: int | None = None, after: bool = False
) -> ParameterFact:
    cut = None if style is None else 0
    return ParameterFact(name, "weight", shape, block, after, style, cut, (Piece("", shape[0]),), "", len(shape) > 1)


FACTS = ModelFacts(
    "llama", 2, 64, 4, 4, 128, 64, "lm_head",
    (
        fact("model.embed_tokens", (128, 64), "embedding_rowwise"),
        fact("model.layers.0.mlp.up_proj", (256, 64), "colwise", block=0),
        fact("model.layers.1.mlp.up_proj", (256, 64), "colwise", block=1),
        fact("model.norm", (64,), None, after=True),
        fact("lm_head", (128, 64), "colwise_gather_output", after=True),
    ),
)  # fmt: skip


def lines(drawn: RenderableType, width: int = 80) -> list[str]:
    """As a terminal without colour shows it."""
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().splitlines()]


def play(name: str, ranks: int, microbatches: int, *, reduce: bool = False) -> Timeline:
    return simulate(lower(make(name, ranks, microbatches), reduce=reduce))


def cells(drawn: RenderableType) -> list[list[str]]:
    """The words of a table's rows."""
    return [line.split() for line in lines(drawn, 160)]


def test_small_timeline_to_the_character() -> None:
    assert lines(timeline.draw(play("1f1b", 2, 2), width=34, title="small"), 34)[:3] == [
        "small: bubble 33.3%, 9 units",
        "pp 0 0─1─····█0██··█1██  33.3%",
        "pp 1 ··0─█0██1─█1██····  33.3%",
    ]


def test_measured_seconds_are_scaled_and_reductions_drawn_below_computation() -> None:
    spans = (
        Span(0, Action(Kind.FORWARD, 0, 12), 0.0, 0.1),
        Span(0, Action(Kind.WAIT_GRADIENT, 0, 12), 0.1, 0.2),
        Span(0, Action(Kind.BACKWARD, 0, 12), 0.2, 0.4),
        Span(0, Action(Kind.REDUCE, 0, 12), 0.35, 0.5),
    )
    shown = lines(timeline.draw(Timeline(1, spans), width=32, title="measured"), 32)
    assert shown[0] == "measured: bubble 40.0%, 500 ms"
    assert shown[1] == "pp 0 12──····█12█████RRRR  40.0%"


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize(("name", "p", "m"), [("naive", 4, 1), ("gpipe", 4, 8), ("1f1b", 4, 8), ("1f1b", 8, 32)])
def test_bubble_is_the_textbooks_and_lines_fit(name: str, p: int, m: int, width: int) -> None:
    shown = lines(timeline.draw(play(name, p, m), width=width, title=name), width)
    bubble = f"{100 * (p - 1) / (m + p - 1):.1f}%"
    assert shown[0] == f"{name}: bubble {bubble}, {3 * (m + p - 1)} units"
    assert len(shown) == p + 2
    assert all(line.endswith(bubble) for line in shown[1 : p + 1])
    assert max(map(len, shown)) <= width


def test_every_number_fits_into_its_own_block() -> None:
    row = lines(timeline.draw(play("gpipe", 2, 3), width=100, title=""), 100)[1].split("  ")[0]
    assert [row.removeprefix("pp 0").count(str(m)) for m in (0, 1, 2)] == [2, 2, 2]  # a forward and a backward each


def test_pair_shares_one_scale_only_between_two_clocks_of_seconds() -> None:
    unit = play("1f1b", 2, 2)
    fast = Timeline(1, (Span(0, Action(Kind.FORWARD, 0, 0), 0.0, 0.5),))
    slow = Timeline(1, (Span(0, Action(Kind.FORWARD, 0, 0), 0.0, 1.0),))
    shared = lines(timeline.draw_pair(fast, slow, 80))
    assert shared[0] == "simulated: bubble 0.0%, 500 ms"
    assert shared[3] == "measured: bubble 0.0%, 1 s"
    drawn = [line.split()[2].rstrip("·") for line in (shared[1], shared[4])]
    assert len(drawn[1]) - 2 * len(drawn[0]) in (-1, 0, 1)
    own = lines(timeline.draw_pair(unit, slow, 80))
    assert own[0].startswith("simulated: bubble 33.3%, 9 units")
    assert own[2] == lines(timeline.draw(unit, width=80, title=""))[2]


def test_split_backward_has_cells_of_its_own() -> None:
    shown = lines(timeline.draw(play("zb-h1", 2, 2), width=40, title="split"), 40)
    assert shown == [
        "split: bubble 14.3%, 7 units",
        "pp 0 0───1───····<0<<+0++<1<<+1++  14.3%",
        "pp 1 ····0───<0<<1───<1<<+0+++1++  14.3%",
        "0─ forward  <0 backward of the input",
        "+0 backward of the weights  · idle",
        "% bubble of the rank",
    ]


def test_later_stages_of_a_rank_are_doubled_and_the_legend_says_so() -> None:
    drawn = simulate(lower(make("interleaved", 2, 2, 2)))
    assert drawn.stages == ((0, 2), (1, 3))
    shown = lines(timeline.draw(drawn, width=80, title="chunks"), 80)
    assert shown[1].startswith("pp 0 0───1───0═══1═══········▓0▓▓▓▓▓▓····▓1▓▓▓▓▓▓█0███████1██████ ")
    assert "0═▓0 a later stage of the rank" in shown[3]
    assert "stage of the rank" not in lines(timeline.draw(play("1f1b", 2, 2), width=80, title=""))[3]
    four = simulate(lower(make("interleaved", 2, 2, 4)))
    assert "0═▓0 every second stage of the rank" in lines(timeline.draw(four, width=120, title=""), 120)[3]


def pair() -> Timeline:
    """A forward and a backward that run at the same time, after a forward."""
    first = Span(0, Action(Kind.FORWARD, 0, 0), 0, 2)
    both = [Span(0, Action(kind, 0, m), 2, 8) for kind, m in ((Kind.FORWARD, 1), (Kind.BACKWARD, 0))]
    return Timeline(1, (first, *both))


def test_two_at_the_same_time_share_their_cells() -> None:
    shown = lines(timeline.draw(pair(), width=28, title="pair"), 28)
    assert shown[1].startswith("pp 0 0───1▄▄▄▄▄0▄▄▄▄▄ ")
    assert "0▄1▄ at the same time" in "\n".join(shown)
    root = ET.fromstring(timeline.svg(pair(), title="pair"))
    first, forward, backward = root.findall(f"{SVG}g[@class='spans']/{SVG}rect")
    assert [one.get("class") for one in (first, forward, backward)] == ["forward", "forward", "backward"]
    assert forward.get("x") == backward.get("x")
    half = float(first.get("height", "")) / 2
    assert float(forward.get("height", "")) == float(backward.get("height", "")) == half
    assert float(backward.get("y", "")) == float(forward.get("y", "")) + half


@pytest.mark.parametrize(("name", "chunks"), [("zb-h1", 1), ("interleaved", 3)])
@pytest.mark.parametrize("width", [20, 40, 80])
def test_legends_fit_and_name_what_is_drawn(name: str, chunks: int, width: int) -> None:
    shown = lines(timeline.draw(simulate(lower(make(name, 2, 4, chunks), reduce=True)), width=width, title=name), width)
    assert max(map(len, shown)) <= width
    words = " ".join(shown)
    assert "gradient sum" not in words, "it takes no time on this clock"
    assert ("of the weights" in words) == (name == "zb-h1")


def test_svg_shades_the_stages_of_a_rank_from_below() -> None:
    drawn = simulate(lower(make("interleaved", 2, 2, 3)))
    root = ET.fromstring(timeline.svg(drawn, title="three stages a rank"))
    rects = root.findall(f"{SVG}g[@class='spans']/{SVG}rect")
    whole = max(float(rect.get("height", "")) for rect in rects)
    shades = Counter(rect.get("height") for rect in rects if rect.get("class") == "shade")
    # 2 ranks x 2 microbatches x forward and backward, on the second stage half and on the third all of the height.
    assert shades == {f"{whole / 2:g}": 8, f"{whole:g}": 8}
    assert "shaded: a later stage of the rank" in {text.text for text in root.iter(f"{SVG}text")}
    split = ET.fromstring(timeline.svg(play("zb-h1", 2, 2), title="split"))
    kinds = Counter(rect.get("class") for rect in split.findall(f"{SVG}g[@class='spans']/{SVG}rect"))
    assert kinds == {"forward": 4, "input": 4, "weight": 4}
    words = {text.text for text in split.iter(f"{SVG}text")}
    assert {"backward of the input", "backward of the weights"} <= words
    assert not {"backward", "gradient sum over dp", "shaded: a later stage of the rank"} & words


def test_svg_has_one_rectangle_a_computation_and_names_its_bubble() -> None:
    drawn = play("1f1b", 4, 8)
    root = ET.fromstring(timeline.svg(drawn, title="a < b & c"))
    assert root.findtext(f"{SVG}title") == "a < b & c"
    spans = root.findall(f"{SVG}g[@class='spans']/{SVG}rect")
    kinds = [rect.get("class") for rect in spans]
    assert kinds.count("forward") == kinds.count("backward") == 32
    assert len(spans) == sum(span.action.kind.lane == "compute" for span in drawn.spans)
    widths = {kind: {rect.get("width") for rect in spans if rect.get("class") == kind} for kind in kinds}
    assert [len(found) for found in widths.values()] == [1, 1]
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "bubble 27.3%, 33 units" in words
    assert [f"pp {rank}" in words for rank in range(4)] == [True] * 4


def test_svg_of_a_layout_names_the_ranks_of_each_slice() -> None:
    layout = Layout((8, 6), (Cut(1, ("tp",)),))
    root = ET.fromstring(sharding.svg(layout, Mesh((("dp", 2), ("tp", 2))), title="rowwise"))
    slices = root.findall(f"{SVG}g[@class='slices']/{SVG}rect")
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert len(slices) == 2
    assert {"ranks 0, 2", "ranks 1, 3", "dim 0: 8", "dim 1: 6"} <= set(words)
    assert words.count("8 x 3") == 2
    assert slices[0].get("y") == slices[1].get("y")
    with pytest.raises(ValueError, match="1 or 2 dims"):
        sharding.svg(Layout((2, 2, 2)), Mesh((("tp", 2),)), title="")


def test_sharding_table_sums_bytes_by_rank() -> None:
    plan = Plan(pp=2, dp=2, tp=2)
    shown = lines(sharding.table(shard(FACTS, plan), plan))
    first, last = (128 * 64 + 256 * 64) // 2, (256 * 64 + 128 * 64) // 2 + 64
    rows = [line for line in shown if line.endswith((" 2", " 2, 4"))]
    assert [line.split()[:4] for line in rows] == [[*map(str, (r, r // 4, r // 2 % 2, r % 2))] for r in range(8)]
    assert all(f"{first:,} {size(first * 4)}" in line for line in rows[:4])
    assert all(f"{last:,} {size(last * 4)}" in line for line in rows[4:])
    assert "embed_tokens, 0 " in rows[0]
    assert "1, norm, lm_head" in rows[7]
    assert ["1 of 2" in line for line in rows] == [True, False] * 4
    assert rows[0].endswith(" 2")
    assert rows[7].endswith(" 2, 4")
    assert f"{FACTS.elements:,} parameters, {size(FACTS.elements * 4)} once" in "\n".join(shown)


def test_traffic_table_sums_and_marks() -> None:
    rows = predict(Plan(pp=2, dp=2, tp=2, microbatches=2, seq=16), FACTS)
    shown = cells(traffic.table(rows, rows))
    for axis, why in (("pp", "activation"), ("dp", "gradients")):
        sent = sum(row.sent for row in rows if (row.axis, row.why) == (axis, why))
        line = next(line for line in shown if {axis, why} <= set(line))
        assert line[-3:] == [f"{int(sent):,}"] * 2 + [traffic.EQUAL]
    total = next(line for line in shown if line[:1] == ["all"])
    assert total == ["all", *[f"{int(sum(row.sent for row in rows)):,}"] * 2, traffic.EQUAL]


def test_traffic_table_marks_what_equal_sums_hide() -> None:
    one, other = (Traffic(rank, "dp", "gradients", "all_reduce", 2, 1, 64) for rank in (0, 1))
    moved = [replace(one, payload=32), replace(other, payload=96)]
    line = next(line for line in cells(traffic.table([one, other], moved)) if "gradients" in line)
    assert line[-3:] == ["128", "128", traffic.DIFFERENT]
    absent = next(line for line in cells(traffic.table([one], [])) if "gradients" in line)
    assert absent == ["dp", "gradients", "all_reduce", "1", "/", "0", "64", "-", traffic.DIFFERENT]


def test_words() -> None:
    assert [size(count) for count in (0, 1023, 1024, 1258291, 5 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.2 MiB", "5.0 TiB",
    ]  # fmt: skip
    assert runs([0, 1, 2, 3, 7, 9, 10]) == "0-3, 7, 9-10"
    assert duration(Timeline(1, (Span(0, Action(Kind.FORWARD, 0, 0), 0.0, 0.0123),))) == "12.3 ms"
