"""All contestants, and who is compared with whom."""

from __future__ import annotations

from dataclasses import dataclass

from . import ceiling, dtensor_tp, one_process, torch_ddp, transformers_tp
from .contestant import Contestant
from .plait_run import laid_out
from .torch_pipelining import pipelining

ONE = "one-1t"
"""The contestant whose losses are everyone's."""

STAGE = "one stage"


def pipelines(ranks: int) -> str:
    return f"pipelines of {ranks} ranks"


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
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble",
             "dualpipe-v": "DualPipeV"}  # fmt: skip
"""plait's names and torch's."""
OURS = ("zb-h1", "zb-h2")
"""Those that torch has not."""
PIPELINES = tuple(
    one
    for n in (2, 4)
    for one in (
        Contestant(f"ceiling-pp-{n}", "no communication", n, ceiling.race, proven=1, course=pipelines(n)),
        *(
            Contestant(f"torch-{schedule}-{n}", f"torch {word}", n, pipelining(schedule), course=pipelines(n))
            for schedule, word in SCHEDULES.items()
        ),
        *(
            Contestant(
                f"plait-{schedule}-{n}", f"plait {schedule}", n, laid_out(pp=n, schedule=schedule), launches=True,
                profiled=schedule in ("1f1b", "zb-v"), course=pipelines(n),
            )
            for schedule in (*SCHEDULES, *OURS)
        ),
    )
)  # fmt: skip
HALVES = "plait-halves-2"
"""Whose times of F, I and W the others are predicted from."""
PREDICTED = {f"plait-{schedule}-2": schedule for schedule in ("1f1b", "interleaved", "zb-v")}
TIMED = Contestant(
    HALVES, "plait gpipe, backward in halves", 2, laid_out(pp=2, schedule="gpipe", split_backward=True), launches=True,
    course=pipelines(2),
)  # fmt: skip
ACCUMULATION = (
    Contestant("one-accumulates", "one process, 8 microbatches", 1, one_process.race_in_microbatches, course=STAGE),
    Contestant("plait-one-stage", "plait, 1 stage, 8 microbatches", 1, laid_out(microbatches=8), launches=True,
               profiled=True, course=STAGE),
)  # fmt: skip
FIELD = (*ALONE, *DATA, *TENSOR, *PIPELINES, TIMED, *ACCUMULATION)
COURSES = tuple(dict.fromkeys(one.course for one in FIELD))
"""In each of them the one process takes part."""


@dataclass(frozen=True)
class Rivals:
    """Two contestants at the same work on as many ranks; `bar` is the ratio that `ours` must reach, None while none is
    set."""

    ours: str
    theirs: str
    bar: float | None = None
    less_bubble: str = ""
    """A schedule: the bar is `bar` of what its bubble leaves, simulated with the times of its own run."""


RIVALS = (
    Rivals("plait-one", ONE),
    *(Rivals(f"plait-dp-{n}", f"torch-ddp-{n}", bar=1.0) for n in (2, 4)),
    Rivals("plait-tp-2", "dtensor-tp-2"),
    Rivals("plait-tp-2", "auto-tp-2"),
    *(Rivals(f"plait-{s}-{n}", f"torch-{s}-{n}", bar=1.0) for n in (2, 4) for s in SCHEDULES),
    *(Rivals(f"plait-{s}-2", "ceiling-pp-2", bar=0.95, less_bubble=s) for s in (*SCHEDULES, *OURS)),
    Rivals("plait-one-stage", "one-accumulates", bar=round(1 / 1.02, 3)),
)


def ceiling_of(one: Contestant) -> str | None:
    """The contestant that bounds another from above; one process is bounded by none."""
    if one.ranks == 1:
        return None
    return f"ceiling-pp-{one.ranks}" if one.course == pipelines(one.ranks) else f"ceiling-{one.ranks}"
