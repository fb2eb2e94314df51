"""Numbers of a run for someone else's pictures: event files that TensorBoard reads, in RUN/tensorboard.

The package is asked for only when somebody tracks with it; `pip install 'plait[tensorboard]'` brings it.
"""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...design.errors import PlanError, listed, nearest
from .step import Report

TRACKERS = ("none", "tensorboard")
FOLDER = "tensorboard"


def refuse(tracker: str) -> None:
    """Raises a `PlanError` for a tracker that is not known, or whose package is not here."""
    if tracker not in TRACKERS:
        raise PlanError(f"--track cannot be '{tracker}': use {listed(TRACKERS)}.{nearest(tracker, TRACKERS)}")
    if tracker == "tensorboard" and find_spec("tensorboard") is None:
        raise PlanError(
            "--track tensorboard needs the package tensorboard, which is not installed: pip install 'plait[tensorboard]'."
        )


class TensorBoard:
    """Writes every report as scalars under the names of metrics.jsonl, and samples as text."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER

    @cached_property
    def _writer(self) -> Any:
        """Made with the first report: a run that fails before it leaves nothing behind."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder))

    def write(self, report: Report) -> None:
        scaled = () if report.scale is None else ("scale", "skipped")
        for name in ("loss", "grad_norm", "lr", "tokens", "tokens_per_s", *scaled):
            self._writer.add_scalar(name, getattr(report, name), report.step)

    def close(self, step: int, text: str) -> None:
        """The run is over; `text` was drawn after `step`, or is empty."""
        if text:
            self._writer.add_text("sample", f"```\n{text}\n```", step)
        self._writer.close()
