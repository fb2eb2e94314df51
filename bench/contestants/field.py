"""All contestants, and who is compared with whom."""

from __future__ import annotations

from dataclasses import dataclass

from . import ceiling, dtensor_tp, one_process, torch_ddp, transformers_tp
from .contestant import Contestant
from .plait_run import laid_out
from .torch_pipelining import pipelining

ONE = "one-1t"
"""The contestant whose losses are everyone's."""

ALONE = (
    Contestant(ONE, "one process, 1 thread", 1, one_process.race),
    Contestant("one-2t", "one process, 2 threads", 1, one_process.race, threads=2),
    Contestant("plait-one", "plait, 1 rank", 1, laid_out(), launches=True, profiled=True),
)
DATA = tuple(
    one
    for n in (2, 4)
    for one in (
        Contestant(f"ceiling-{n}", "no communication", n, ceiling.race, proven=1),
        Contestant(f"torch-ddp-{n}", "torch DDP", n, torch_ddp.race),
        Contestant(f"plait-dp-{n}", "plait dp", n, laid_out(dp=n), launches=True, profiled=True),
    )
)
TENSOR = (
    Contestant("dtensor-tp-2", "DTensor TP", 2, dtensor_tp.race),
    Contestant("auto-tp-2", 'transformers tp_plan="auto"', 2, transformers_tp.race),
    Contestant("plait-tp-2", "plait tp", 2, laid_out(tp=2), launches=True, profiled=True),
)
PIPELINES = tuple(
    one
    for n in (2, 4)
    for schedule, word in (("gpipe", "GPipe"), ("1f1b", "1F1B"))
    for one in (
        Contestant(f"torch-{schedule}-{n}", f"torch {word}", n, pipelining(schedule)),
        Contestant(
            f"plait-{schedule}-{n}", f"plait {schedule}", n, laid_out(pp=n, schedule=schedule),
            launches=True, profiled=schedule == "1f1b",
        ),
    )
)  # fmt: skip
FIELD = (*ALONE, *DATA, *TENSOR, *PIPELINES)


@dataclass(frozen=True)
class Rivals:
    """Two contestants at the same work on as many ranks; `bar` is the ratio that `ours` must reach, None while none is
    set."""

    ours: str
    theirs: str
    bar: float | None = None


RIVALS = (
    Rivals("plait-one", ONE),
    *(Rivals(f"plait-dp-{n}", f"torch-ddp-{n}", bar=1.0) for n in (2, 4)),
    Rivals("plait-tp-2", "dtensor-tp-2"),
    Rivals("plait-tp-2", "auto-tp-2"),
    *(Rivals(f"plait-{s}-{n}", f"torch-{s}-{n}") for n in (2, 4) for s in ("gpipe", "1f1b")),
)


def ceiling_of(ranks: int) -> str | None:
    """The contestant that bounds those of `ranks` ranks from above; one process is bounded by none."""
    return f"ceiling-{ranks}" if ranks > 1 else None
