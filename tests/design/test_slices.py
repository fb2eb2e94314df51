"""What ranks write is each element of the model once, and what they keep is what their boxes and stretches say."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.design.errors import PlanError
from plait.design.layout import box_shape, elements
from plait.design.plan import Plan
from plait.design.rules import validate
from plait.design.sharding import Sharding, shard
from plait.design.slices import Slice, Writers, boxes_of, kept, quantity_of
from plait.runtime.hf.read import read

LAYOUTS = [
    {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "replicas": replicas}
    for dp, tp, pp, zero, replicas in product((1, 2, 3, 4), (1, 2, 3, 8), (1, 2), (0, 1, 3), (1, 2))
    if dp * tp * pp <= 12 and (replicas == 1 or (dp == 4 and zero)) and (dp > 1 or not zero)
]
MODELS = ("llama-tiny", "gpt2-tiny", "mixtral-tiny", "phi3-tiny")


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_stretch_is_few_boxes(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    flat = np.arange(size).reshape(shape)
    boxes = boxes_of(shape, start, stop)
    found = [flat[tuple(slice(*side) for side in box)].ravel() for box in boxes]
    assert np.array_equal(np.concatenate([*found, np.empty(0, int)]), np.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def sharding_of(model: str, layout: dict[str, Any]) -> Sharding | None:
    facts = read(model).facts
    plan = Plan(model=model, batch=12 * layout["dp"], **layout)
    try:
        validate(plan, facts)
    except PlanError:
        return None
    return shard(facts, plan)


def place(whole: np.ndarray, one: Slice) -> np.ndarray:
    return whole[tuple(slice(*side) for side in one.box)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", [{}, {"freeze": "*.0.*"}], ids=("all trained", "some frozen"))
def test_every_element_is_written_once(model: str, way: dict[str, str]) -> None:
    seen = 0
    for layout in LAYOUTS[MODELS.index(model) :: len(MODELS)]:
        sharding = sharding_of(model, layout | way)
        if sharding is None:
            continue
        seen += 1
        counts = {one.name: np.zeros(one.shape, np.int8) for one in sharding.parameters}
        sizes = []
        for rank in range(sharding.mesh.size):
            mine = Writers(sharding).writes(rank)
            sizes.append(sum(elements(one.box) for found in mine.values() for one in found))
            for name, found in mine.items():
                for one in found:
                    place(counts[name], one)[...] += 1
        assert all((count == 1).all() for count in counts.values()), layout
        if layout["tp"] == layout["pp"] == 1:  # copies share the work
            assert max(sizes) <= 1.1 * sum(sizes) / len(sizes) + 64, layout
    assert seen > 10


@pytest.mark.parametrize("model", MODELS)
def test_slices_stand_where_a_rank_has_them(model: str) -> None:
    """Numbers that say where they are, taken as a rank takes its slice and its stretch of it."""
    for layout in LAYOUTS[MODELS.index(model) :: len(MODELS)]:
        sharding = sharding_of(model, layout)
        if sharding is None:
            continue
        written = [Writers(sharding).writes(rank) for rank in range(sharding.mesh.size)]
        for one in sharding.parameters:
            whole = np.arange(math.prod(one.shape)).reshape(one.shape)
            for rank in range(sharding.mesh.size):
                boxes = one.boxes(sharding.mesh, rank)
                if not boxes:
                    assert kept(sharding, one.name, "state", rank) == []
                    continue
                parts = [whole[tuple(slice(*side) for side in box)] for box in boxes]
                local = np.concatenate(parts, one.first.dim).ravel() if len(parts) > 1 else parts[0].ravel()
                start, stop = sharding.stretch(one.name, "state", rank) or (0, local.size)
                mine = np.ascontiguousarray(local[start:stop])
                here = kept(sharding, one.name, quantity_of(one), rank)
                for piece in [*here, *written[rank].get(one.name, [])]:
                    strides = [stride * mine.itemsize for stride in piece.strides]
                    there = np.lib.stride_tricks.as_strided(mine[piece.start :], box_shape(piece.box), strides)
                    assert np.array_equal(there, place(whole, piece)), (layout, one.name, rank)
                assert sum(elements(piece.box) for piece in here) == mine.size


def test_a_master_writes_alone() -> None:
    sharding = sharding_of("llama-tiny", {"dp": 3})
    assert sharding is not None
    writers = Writers(sharding, together=False)
    assert [bool(writers.writes(rank)) for rank in range(3)] == [True, False, False]
    assert sum(elements(one.box) for found in writers.writes(0).values() for one in found) == sum(
        math.prod(one.shape) for one in sharding.parameters
    )
