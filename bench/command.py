"""`python -m bench`: its options, and the order of a bench: prepare, rounds, profile, memory, tables."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from transformers.utils import logging

from . import results, tables
from .contestants.contestant import Contestant
from .contestants.field import COURSES, FIELD, ONE, RIVALS
from .memory import memory
from .parked import Lost, freeze, in_child, single_threaded
from .prediction import predictions
from .rounds import Record, Track
from .work import BASE, MEM, SMALL, Work, prepare

FIRST_STEPS = 3
MOST_RANKS_OF_MEMORY = 2
"""Contestants of more ranks are left out of the work `mem`, which is one of size and not of speed."""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which everyone has a turn [9]")
    parser.add_argument(
        "--most", type=int, default=27, help="rounds in all, while a bar's ratio is not known to 5 %% [27]"
    )
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn [2]")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="contestants with one of these in the name"
    )
    parser.add_argument("--quick", action="store_true", help="whether everything runs: 2 rounds, a small model")
    parser.add_argument("--profile", action="store_true", help="where plait's time goes: its clock, and by function")
    parser.add_argument("--profile-steps", type=int, default=20, help="steps of each profile [20]")
    parser.add_argument("--no-memory", action="store_true", help="leave out the work mem")
    parser.add_argument("--no-speed", action="store_true", help="leave out the rounds; first losses and memory alone")
    parser.add_argument("--plain-adamw", action="store_true", help="the peers' AdamW is torch's default, not fused")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables into a page, at their marks")
    parser.add_argument("--list", action="store_true", help="list the contestants")
    given = parser.parse_args(words)
    if given.quick:
        given.rounds, given.most, given.profile_steps = min(given.rounds, 2), 2, 2
    if min(given.rounds, given.steps, given.profile_steps) < 1:
        parser.error("--rounds, --steps and --profile-steps are 1 or more")
    if given.write:
        try:
            tables.around(given.write)
        except (OSError, ValueError) as error:
            parser.error(f"--write: {error}")
    return given


def chosen(only: Sequence[str]) -> list[Contestant]:
    """The contestants that take part, and always the one process whose losses are everyone's."""
    found = [one for one in FIELD if one.name == ONE or not only or any(part in one.name for part in only)]
    strange = [part for part in only if not any(part in one.name for one in FIELD)]
    if strange:
        raise SystemExit(f"no contestant has {strange} in its name: --list shows them")
    return found


def profile(track: Track, steps: int) -> list[dict[str, Any]]:
    """What plait's clock says of `steps` steps, and then the functions of rank 0 in as many others."""
    found = []
    for name, record in track.records.items():
        if record.contestant.profiled and not record.trouble:
            split = track.ask(name, "split", steps=steps)
            functions = track.ask(name, "functions", steps=steps)
            if split and functions:
                label = f"{record.contestant.label}, {record.contestant.ranks}"
                found.append({
                    "name": name, "label": label, "split": [rank["split"] for rank in split],
                    "functions": functions[0]["functions"],
                })  # fmt: skip
    return found


def main(words: Sequence[str] | None = None) -> int:
    given = options(words)
    if given.list:
        print("\n".join(f"{one.name:14} {one.label}, {one.ranks}" for one in FIELD))
        return 0
    entrants, begin = chosen(given.only), time.monotonic()
    logging.disable_progress_bar()
    if not single_threaded():
        raise SystemExit("this process has several threads, and its forks might hang: start it as python -m bench")
    freeze()
    signal.signal(signal.SIGTERM, _terminated)

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {line}", file=sys.stderr, flush=True)

    date = time.strftime("%Y-%m-%d")
    try:
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as scratch:
            found = _bench(given, entrants, Path(scratch), say)
    except Lost as lost:
        raise SystemExit(str(lost)) from None
    found |= {
        "date": date,
        "command": shlex.join(["python", "-m", "bench", *(sys.argv[1:] if words is None else words)]),
        "seconds": time.monotonic() - begin,
    }
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.write:
        tables.write(given.write, found)
    tables.show(found)
    rows = (row for course in found["courses"] for row in course["contestants"])
    return 0 if not any(row["trouble"] or row["memory_trouble"] for row in rows) else 1


def _terminated(number: int, frame: object) -> NoReturn:
    """Ends as an error does: ranks ended, files of the work removed."""
    raise SystemExit(128 + number)


def _bench(given: argparse.Namespace, entrants: list[Contestant], scratch: Path, say: Any) -> dict[str, Any]:
    work = replace(SMALL if given.quick else BASE, folder=scratch / "speed", fused=not given.plain_adamw)
    in_child(lambda: prepare(work))
    here = results.machine()
    tracks = [_course(given, course, entrants, work, say) for course in COURSES]
    raced = [track for track in tracks if track]
    say("speed is done")
    sizes: dict[str, Record] = {}
    if not given.no_memory:
        sizes = _memory(given, entrants, scratch, say)
    courses = [
        {
            "name": course, "rounds": rounds, "profile": profiled,
            "contestants": results.contestants(track.records, sizes, work),
            "rivals": results.rivals(track.records, sizes, work),
            "ceilings": results.ceilings(track.records, work),
            "predictions": predictions(track.records, work),
        }
        for course, track, rounds, profiled in raced
    ]  # fmt: skip
    everyone = [row for _, track, _, _ in raced for row in results.contestants(track.records, sizes, work)]
    return {
        "machine": here | {"others": results.machine_share(everyone)},
        "work": _described(work),
        "turns": {"rounds": max(rounds for _, _, rounds, _ in raced), "steps": given.steps},
        "courses": courses,
    }


def _course(
    given: argparse.Namespace, course: str, entrants: list[Contestant], work: Work, say: Any
) -> tuple[str, Track, int, list[dict[str, Any]]] | None:
    """The rounds of one course, and the profiles of those in it; None when nobody of it takes part."""
    here = [one for one in entrants if one.course == course and (one.name != ONE or len(entrants) == 1)]
    if not here:
        return None
    profiled, rounds = list[dict[str, Any]](), 0
    first = [one for one in entrants if one.name == ONE and one not in here]
    say(f"course: {course}")
    with Track([*first, *here], work, first=FIRST_STEPS, say=say) as track:
        if not given.no_speed:
            rounds = track.rounds(given.rounds, given.most, given.steps, RIVALS)
        if given.profile:
            profiled = profile(track, given.profile_steps)
    return course, track, rounds, profiled


def _memory(given: argparse.Namespace, entrants: list[Contestant], scratch: Path, say: Any) -> dict[str, Record]:
    work = replace(SMALL if given.quick else MEM, folder=scratch / "memory", fused=not given.plain_adamw)
    in_child(lambda: prepare(work))
    small = [one for one in entrants if one.ranks <= MOST_RANKS_OF_MEMORY and one.threads == 1]
    return memory(small, work, say)


def _described(work: Work) -> dict[str, Any]:
    return {key: value for key, value in asdict(work).items() if key != "folder"}
