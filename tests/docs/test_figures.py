"""The committed pictures and tables of the docs are what plait computes today."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from plait.design.mesh import AXES
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.design.schedule import METHODS, Kind
from plait.design.styles import STYLES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "methods").glob("*.md"))


def test_pictures_are_up_to_date(figures: ModuleType) -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "figures").glob("*.svg")}
    drawn = figures.figures()
    assert sorted(committed) == sorted(drawn)
    stale = [name for name in drawn if committed[name] != drawn[name]]
    assert not stale, f"run python docs/figures.py: {stale} changed"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_up_to_date(figures: ModuleType, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.with_numbers(text) == text, f"run python docs/figures.py: the tables of {page.name} changed"


def test_every_table_is_shown(figures: ModuleType) -> None:
    shown = {name for page in PAGES for name in re.findall(r"<!-- numbers: (.+?) -->", page.read_text("utf-8"))}
    assert shown == set(figures.numbers())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_plans_on_the_page_are_valid(figures: ModuleType, page: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks or page.name == "README.md"
    for block in blocks:
        validate(Plan.read(tomllib.loads(block), source=page.name), figures.example_model())


@pytest.mark.parametrize("page", [*PAGES, DOCS / "glossary.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_schedule_style_axis_and_kind_is_explained() -> None:
    for name in METHODS:
        assert (DOCS / "methods" / f"{name}.md").exists()
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    tensor = (DOCS / "methods" / "tensor.md").read_text(encoding="utf-8")
    index = (DOCS / "methods" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in tensor and f"`{name}`" in glossary for name in STYLES)
    assert all(f"`{axis}`" in index and f"`{axis}`" in glossary for axis in AXES)
    kinds = re.sub(r"\s+", " ", glossary.partition("**action**")[2].partition("**lane**")[0])
    assert all(re.search(rf"\b{kind.letter}\b", kinds) for kind in Kind)
    assert all(f"]({page.name})" in index for page in PAGES if page.name != "README.md")
