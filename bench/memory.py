"""The memory of each contestant at the work `mem`, one after another: the peak of each rank's private memory in a step,
less what that rank had before it built anything.

Private memory (USS) is what would come free if the rank ended: pages shared with the process that it was forked from, and
the libraries' code, are nobody's. What a rank of plait shares with its neighbours to send it is counted on top. The bench
looks every few milliseconds while the ranks are at a step after their first, when the optimizer's state is there; freed
memory goes back to the system before that step.
"""

from __future__ import annotations

from collections.abc import Iterable

from .contestants.contestant import Contestant
from .contestants.field import ONE
from .measure import private_bytes
from .rounds import Record, Say, Track
from .work import Work


def memory(contestants: Iterable[Contestant], work: Work, say: Say) -> dict[str, Record]:
    """Records with `memory`. Contestants come one by one, each alone on the machine."""
    records: dict[str, Record] = {}
    for contestant in sorted(contestants, key=lambda one: one.name != ONE):
        track = Track((), work, first=1, say=say)
        track.records = records
        with track:
            track.enter(contestant)
            if track.pids:
                records[contestant.name].memory = _peaks(track, contestant.name)
    return records


def _peaks(track: Track, name: str) -> list[int]:
    pids, start = track.pids, [answer["uss"] for answer in track.ready(name)]
    peaks = [0] * len(pids)

    def look() -> None:
        peaks[:] = [max(peak, private_bytes(pid)) for peak, pid in zip(peaks, pids, strict=True)]

    answers = track.ask(name, "trim") and track.ask(name, "turn", steps=1, meanwhile=look)
    if not answers:
        return []
    shared = [answer["shared"] for answer in answers]
    return [peak - before + more for peak, before, more in zip(peaks, start, shared, strict=True)]
