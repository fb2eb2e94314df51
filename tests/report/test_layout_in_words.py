"""A layout in words, for headers and verdicts."""

from __future__ import annotations

import pytest

from plait.design.plan import Plan
from plait.report.sharding import layout


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"pp": 2, "dp": 2, "microbatches": 3}, "pp 2 x dp 2 x tp 1, 1f1b, 3 microbatches"),
     ({"dp": 4, "zero": 3}, "pp 1 x dp 4 x tp 1, ZeRO-3, 1f1b, 1 microbatch"),
     ({"dp": 4, "zero": 1, "replicas": 2, "recompute": "attention"},
      "pp 1 x dp 4 x tp 1, ZeRO-1 in 2 replicas, 1f1b, recompute attention, 1 microbatch"),
     ({"recompute": "full", "recompute_every": 2},
      "pp 1 x dp 1 x tp 1, 1f1b, recompute full every 2 blocks, 1 microbatch")],
)  # fmt: skip
def test_what_a_layout_is_called(fields: dict[str, int], words: str) -> None:
    assert layout(Plan.read(fields), sp=False) == words


def test_whether_with_sp_is_said() -> None:
    assert layout(Plan.read({"tp": 2}), sp=True) == "pp 1 x dp 1 x tp 2 with sp, 1f1b, 1 microbatch"
