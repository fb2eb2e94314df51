"""All contestants, and who is compared with whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..work import SMALL
from . import ceiling, deepspeed_zero, one_process, torch_ddp, transformers_tp
from .contestant import Contestant, Course
from .deepspeed_zero import deepspeed
from .dtensor_tp import dtensor
from .fsdp2 import fsdp2
from .plait_run import laid_out
from .torch_pipelining import pipelining

ONE = "one-1t"
"""The contestant whose losses are everyone's."""

STAGE = Course("one stage", "layouts")
HOST = Course("host", "zero", SMALL, longer=10, weighed=0)
"""A model so small that a step is mostly what is done besides computing."""


def pipelines(ranks: int) -> Course:
    return Course(f"pipelines of {ranks} ranks", "layouts")


def cut(ranks: int) -> Course:
    return Course(f"tensor parallel on {ranks} ranks", "tensor", weighed=4)


def shared_out(ranks: int) -> Course:
    return Course(f"ZeRO on {ranks} ranks", "zero", weighed=4)


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
TENSOR_PEERS = {
    "dtensor": ("DTensor TP", dtensor()), "dtensor-sp": ("DTensor TP, sequence parallel", dtensor(sp=True)),
    "dtensor-loss": ("DTensor TP, loss_parallel", dtensor(cut_loss=True)),
    "dtensor-sp-loss": ("DTensor TP, both", dtensor(sp=True, cut_loss=True)),
    "auto": ('transformers tp_plan="auto"', transformers_tp.race),
}  # fmt: skip
TENSOR = tuple(
    one
    for n in (2, 4)
    for one in (
        Contestant(f"ceiling-tp-{n}", "no communication", n, ceiling.race, proven=1, course=cut(n)),
        *(
            Contestant(f"{name}-{n}", label, n, race, course=cut(n)) for name, (label, race) in TENSOR_PEERS.items()
        ),
        *(
            Contestant(
                f"plait-{name}-{n}", label, n, laid_out(tp=n, sp=sp), launches=True, profiled=True, course=cut(n)
            )
            for name, label, sp in (("tp", "plait tp", False), ("sp", "plait tp, sp", True))
        ),
    )
)  # fmt: skip
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
STAGES: dict[str, dict[str, Any]] = {
    "zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3}, "zero3-keep": {"zero": 3, "keep_gathered": "yes"},
}  # fmt: skip
LABELS = {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zero3-keep": "ZeRO-3, kept"}
"""plait's stages of ZeRO; a ZeRO-3 that keeps what it has gathered is what FSDP2 without resharding is."""
SAME_STAGE = {
    "zero1": ("ddp-zero1", "deepspeed1"), "zero2": ("deepspeed2",), "zero3": ("fsdp2", "deepspeed3"),
    "zero3-keep": ("fsdp2-keep",),
}  # fmt: skip
"""Their peers."""
ZERO = tuple(
    one
    for n in (2, 4)
    for one in (
        Contestant(f"ceiling-zero-{n}", "no communication", n, ceiling.race, proven=1, course=shared_out(n)),
        Contestant(f"ddp-zero1-{n}", "torch DDP + ZeroRedundancyOptimizer", n, torch_ddp.race_zero, course=shared_out(n)),
        Contestant(f"fsdp2-{n}", "torch FSDP2", n, fsdp2(reshard=True), course=shared_out(n)),
        Contestant(f"fsdp2-keep-{n}", "torch FSDP2, no reshard", n, fsdp2(reshard=False), course=shared_out(n)),
        *(
            Contestant(f"deepspeed{stage}-{n}", f"DeepSpeed ZeRO-{stage}", n, deepspeed(stage=stage),
                       course=shared_out(n), needs=deepspeed_zero.PACKAGE)
            for stage in (1, 2, 3)
        ),
        *(
            Contestant(f"plait-{stage}-{n}", f"plait {LABELS[stage]}", n, laid_out(dp=n, **degrees), launches=True,
                       profiled=True, course=shared_out(n))
            for stage, degrees in STAGES.items()
        ),
    )
)  # fmt: skip
TINY = (
    Contestant("plait-tiny-1", "plait, 1 rank", 1, laid_out(), launches=True, profiled=True, course=HOST),
    Contestant("fsdp2-tiny-2", "torch FSDP2", 2, fsdp2(reshard=True), course=HOST),
    Contestant(
        "plait-tiny-zero3-2", "plait ZeRO-3", 2, laid_out(dp=2, zero=3), launches=True, profiled=True, course=HOST
    ),
)
FIELD = (*ALONE, *DATA, *TENSOR, *PIPELINES, TIMED, *ACCUMULATION, *ZERO, *TINY)
COURSES = tuple(dict.fromkeys(one.course for one in FIELD))
"""In each of them the one process takes part."""
GROUPS = tuple(dict.fromkeys(course.group for course in COURSES))


@dataclass(frozen=True)
class Rivals:
    """Two contestants at the same work on as many ranks; `bar` is the ratio that `ours` must reach, None while none is
    set."""

    ours: str
    theirs: str
    bar: float | None = None
    less_bubble: str = ""
    """A schedule: the bar is `bar` of what its bubble leaves, simulated with the times of its own run."""
    memory_bar: float | None = None
    """The most that our fullest rank may have, as a share of theirs."""


def _bar(ranks: int, peer: str) -> float | None:
    """Of tensor parallelism."""
    return 1.3 if ranks == 2 else 1.5 if peer == "dtensor" else None


RIVALS = (
    Rivals("plait-one", ONE),
    *(Rivals(f"plait-dp-{n}", f"torch-ddp-{n}", bar=1.0) for n in (2, 4)),
    *(
        Rivals(
            f"plait-{ours}-{n}",
            f"{peer}-{n}",
            bar=_bar(n, peer),
            memory_bar=1.0,
        )
        for n in (2, 4)
        for ours, peers in (("tp", ("dtensor", "dtensor-loss", "auto")), ("sp", ("dtensor-sp", "dtensor-sp-loss")))
        for peer in peers
    ),
    *(Rivals(f"plait-{s}-{n}", f"torch-{s}-{n}", bar=1.0) for n in (2, 4) for s in SCHEDULES),
    *(Rivals(f"plait-{s}-2", "ceiling-pp-2", bar=0.95, less_bubble=s) for s in (*SCHEDULES, *OURS)),
    Rivals("plait-one-stage", "one-accumulates", bar=round(1 / 1.02, 3)),
    *(
        Rivals(f"plait-{stage}-{n}", f"{peer}-{n}", bar=1.15 if (peer, n) == ("fsdp2", 4) else 1.0, memory_bar=1.0)
        for n in (2, 4)
        for stage, peers in SAME_STAGE.items()
        for peer in peers
    ),
    Rivals("plait-zero3-4", "ceiling-zero-4", bar=0.90),
    Rivals("plait-tiny-1", ONE, bar=round(1 / 1.1, 3)),
    Rivals("plait-tiny-zero3-2", "fsdp2-tiny-2", bar=1.0),
)


def ceiling_of(one: Contestant) -> str | None:
    """The contestant that bounds another of its course from above, where there is one."""
    return next(
        (it.name for it in FIELD if it.race is ceiling.race and (it.course, it.ranks) == (one.course, one.ranks)), None
    )
