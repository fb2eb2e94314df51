"""The scripts that write the docs, loaded as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{script}", DOCS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return load("figures")


@pytest.fixture(scope="module")
def commands() -> ModuleType:
    return load("commands")
