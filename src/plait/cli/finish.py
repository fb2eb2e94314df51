"""What a run leaves behind when it ends: run.json, its samples, and the pictures made of them."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch

from .. import __version__
from ..design.cost.memory import memory
from ..design.records import Traffic
from ..design.simulate import mean_seconds, simulate
from ..report import page, record
from ..report.record import RunRecord
from ..report.words import counted
from ..runtime.data.tokens import Corpus
from ..runtime.training import measure
from ..runtime.training.loop import cut_off
from ..runtime.training.step import Run
from ..runtime.training.watch import Watch


def forget(folder: Path, done: int = 0) -> None:
    """Removes what an earlier run wrote at its end: it would tell of a run whose metrics are gone. Of a run that goes on
    after `done` steps the samples stay that were drawn by then."""
    for name in record.AT_THE_END:
        if name == record.SAMPLES and done and (folder / name).exists():
            cut_off(folder / name, done)
        else:
            (folder / name).unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """What a run was made with."""
    return {
        "plait": __version__, "torch": str(torch.__version__), "transformers": version("transformers"),
        "python": platform.python_version(),
    }  # fmt: skip


def gathered(run: Run, watch: Watch, corpus: Corpus, expected: list[Traffic], *, began: float, proof: str) -> RunRecord:
    """The record of a run that began to train at `began` and has taken its last step; every rank must ask, before
    anything else moves bytes."""
    seconds = time.time() - began
    plan, facts = run.plan, run.model.facts
    moved = measure.traffic(run.world, expected)
    timeline = measure.timeline(run)
    return RunRecord(
        plan=plan,
        facts=facts,
        began=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)),
        seconds=seconds,
        device=_device(run.world.device),
        versions=versions(),
        data=corpus.description,
        entropy=corpus.entropy,
        proof=proof,
        schedule=run.pipeline.schedule,
        simulated=simulate(run.pipeline.schedule, mean_seconds(timeline)),
        measured=timeline,
        traffic_predicted=tuple(expected),
        traffic_measured=tuple(moved),
        memory_predicted=tuple(memory(plan, facts)),
        memory_measured=tuple(measure.memory(run, watch)),
        step_times=tuple(measure.step_times(run, watch)),
    )  # fmt: skip


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"cpu ({platform.machine()}, {counted(cores, 'core')})"


def write(found: RunRecord, folder: Path) -> list[Path]:
    """Writes the record; the pictures are made of the files, as `plait report` makes them again."""
    record.write(found, folder)
    page.draw(folder)
    return [folder / name for name in (record.METRICS, *record.AT_THE_END)]
