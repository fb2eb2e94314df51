"""One thread a process, as in a run; and one nursery for the session, forked before any test has computed anything."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

from tests import smollm2 as real
from tests.nursery import Nursery

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    place = Nursery()
    yield place
    place.close()


class Models:
    """Directories with a config.json each: TINY with some changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, **changes: Any) -> str:
        name = "-".join(["tiny", *(f"{key}={value}" for key, value in changes.items())])
        if len(name) > 100:
            name = f"tiny-{blake2b(name.encode(), digest_size=8).hexdigest()}"
        path = self._folder / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(TINY | changes))
        return str(path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-layouts", action="store_true", help="every layout, not a covering set of them")


def pytest_configure(config: pytest.Config) -> None:
    """Without deadlines (a busy machine is no fault of a layout), and the same examples in every run of `make test`;
    new ones each time with --all-layouts, to look further."""
    settings.register_profile("plait", deadline=None, derandomize=not config.getoption("--all-layouts"))
    settings.load_profile("plait")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of a real model; the test is skipped where the packages that bring it are not installed."""
    reason = real.missing()
    if reason:
        pytest.skip(reason)
    return real.directory()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The nursery is forked first, while this process still has one thread. Without --all-layouts the `rest` is left
    out."""
    if not config.getoption("--all-layouts"):
        rest = [item for item in items if item.get_closest_marker("rest")]
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if not item.get_closest_marker("rest")]
    items.sort(key=lambda item: "nursery" not in getattr(item, "fixturenames", ()))
