"""How a rank ends badly: what it says of its failure, and the error that stands for it where the run was started."""

from __future__ import annotations

import re
import signal
import time
import traceback
from typing import Any

from ...design.errors import PlanError
from .watch import MismatchError, Verdict

BROKEN_PIPE = 128 + signal.SIGPIPE

_LOST = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|got 0 bytes|remote peer", re.IGNORECASE
)
_PLACE = re.compile(r"^\s*\[[^\]]*\.(cc|cpp|h|hpp):\d+\]")
_BACK_END = re.compile(r"gloo|nccl|local transport", re.IGNORECASE)
_LATE = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)


class BadNumbersError(Exception):
    """The run's numbers went bad (a loss or norm that is not finite)."""


class RankError(Exception):
    """A rank failed. `code` is the exit code that stands for it (docs/exit-codes.md), and `details` are the lines that
    say where every rank was."""

    def __init__(self, rank: int, message: str, *, code: int, trace: str = "", details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.rank, self.code, self.trace, self.details = rank, code, trace, details


def account(error: BaseException) -> dict[str, Any]:
    """What a rank says of its failure: the exit code, the words, whether it only lost sight of another rank, and whether
    it is a back end's complaint, of which the cause may stand on the board."""
    text = str(error)
    # The first line, without the place in a C++ file that torch and Gloo put in front.
    first = next((_PLACE.sub("", line).strip() for line in text.splitlines() if line.strip()), "").rstrip(".")
    code, message, lost = 3, f"{type(error).__name__}: {first}" if first else type(error).__name__, False
    details: tuple[str, ...] = ()
    if isinstance(error, PlanError):
        code, message = 2, text
    elif isinstance(error, BadNumbersError):
        code, message = 7, text
    elif isinstance(error, BrokenPipeError):
        code = BROKEN_PIPE
    elif isinstance(error, MismatchError):
        code, message, details = 4, text, error.verdict.lines
    elif isinstance(error, RuntimeError):
        lost = bool(_LOST.search(text))
        if not lost and _LATE.search(text):
            code = 4
    return {
        "error": message,
        "code": code,
        "lost": lost,
        "symptom": lost or (isinstance(error, RuntimeError) and bool(_BACK_END.search(text))),
        "mismatch": isinstance(error, MismatchError),
        "details": details,
        "time": time.monotonic(),
        "trace": "".join(traceback.format_exception(error)),
    }


def exception(report: dict[str, Any], name: str, rank: int) -> Exception:
    """The error that is raised for a report."""
    if report["code"] == 2:
        return PlanError(report["error"])
    if report["code"] == BROKEN_PIPE:
        return BrokenPipeError(report["error"])
    sentence = f"{name} {_how(report)}: {report['error']}"
    if report["mismatch"]:
        sentence = report["error"]
    return RankError(rank, sentence, code=report["code"], trace=report["trace"], details=tuple(report["details"]))


def _how(report: dict[str, Any]) -> str:
    if report["lost"]:
        return "lost its connection to a rank that ended"
    return "waited in vain for the others" if report["code"] == 4 else "failed"


def judged(verdict: Verdict, trace: str = "") -> RankError:
    """The error that is raised for a verdict of the watchdog."""
    return RankError(verdict.rank, verdict.sentence, code=4, trace=trace, details=verdict.lines)
