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
from .contestants.contestant import Contestant, Course
from .contestants.field import COURSES, FIELD, GROUPS, ONE, RIVALS
from .memory import memory
from .parked import Lost, freeze, in_child, single_threaded
from .prediction import predictions
from .rounds import Record, Track
from .work import MEM, SMALL, Work, prepare

FIRST_STEPS = 3


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which everyone has a turn [9]")
    parser.add_argument(
        "--most", type=int, default=27, help="rounds in all, while a bar's ratio is not known to 5 %% [27]"
    )
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn [2]")
    parser.add_argument("--group", choices=GROUPS, help="the courses of this group alone")
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
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="write the group's tables into a page, at their marks"
    )
    parser.add_argument("--list", action="store_true", help="list the contestants")
    given = parser.parse_args(words)
    if given.quick:
        given.rounds, given.most, given.profile_steps = min(given.rounds, 2), 2, 2
    if min(given.rounds, given.steps, given.profile_steps) < 1:
        parser.error("--rounds, --steps and --profile-steps are 1 or more")
    if given.write:
        if not given.group:
            parser.error("--write takes the tables of one --group")
        try:
            tables.around(given.write, given.group)
        except (OSError, ValueError) as error:
            parser.error(f"--write: {error}")
    return given


def chosen(only: Sequence[str], group: str | None = None) -> list[Contestant]:
    """The contestants that are asked for, and always the one process whose losses are everyone's."""
    here = [one for one in FIELD if group in (None, one.course.group)]
    strange = [part for part in only if not any(part in one.name for one in here)]
    if strange:
        raise SystemExit(f"no contestant has {strange} in its name: --list shows them")
    asked = [one.name for one in here if not only or any(part in one.name for part in only)]
    return [one for one in FIELD if one.name == ONE or one.name in asked]


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
        print("\n".join(f"{one.course.group:8} {one.name:20} {one.label}, {one.ranks}" for one in FIELD))
        return 0
    asked, begin = chosen(given.only, given.group), time.monotonic()
    entrants = [one for one in asked if not one.absent]
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
        "absent": [{"label": f"{one.label}, {one.ranks}", "why": one.absent} for one in asked if one.absent],
    }
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.write:
        tables.write(given.write, found, given.group)
    tables.show(found)
    rows = (row for course in found["courses"] for row in course["contestants"])
    return 0 if not any(row["trouble"] or row["memory_trouble"] for row in rows) else 1


def _terminated(number: int, frame: object) -> NoReturn:
    """Ends as an error does: ranks ended, files of the work removed."""
    raise SystemExit(128 + number)


def _bench(given: argparse.Namespace, entrants: list[Contestant], scratch: Path, say: Any) -> dict[str, Any]:
    works = {
        work: replace(SMALL if given.quick else work, folder=scratch / work.name, fused=not given.plain_adamw)
        for work in dict.fromkeys(one.course.work for one in entrants)
    }
    for work in works.values():
        in_child(lambda work=work: prepare(work))  # type: ignore[misc]
    here = results.machine()
    raced = [track for course in COURSES if (track := _course(given, course, entrants, works, say))]
    say("speed is done")
    sizes: dict[str, Record] = {}
    if not given.no_memory:
        sizes = _memory(given, entrants, scratch, say)
    courses: list[dict[str, Any]] = [
        {
            "name": course.name, "rounds": rounds, "profile": profiled, "work": _described(work),
            "contestants": results.contestants(track.records, sizes, work),
            "rivals": results.rivals(track.records, sizes, work),
            "ceilings": results.ceilings(track.records, work),
            "predictions": predictions(track.records, work),
        }
        for course, track, rounds, profiled in raced
        for work in [works[course.work]]
    ]  # fmt: skip
    everyone = [row for course in courses for row in course["contestants"]]
    return {
        "machine": here | {"others": results.machine_share(everyone)},
        "turns": {"rounds": max(rounds for _, _, rounds, _ in raced), "steps": given.steps},
        "courses": courses,
    }


def _course(
    given: argparse.Namespace, course: Course, entrants: list[Contestant], works: dict[Work, Work], say: Any
) -> tuple[Course, Track, int, list[dict[str, Any]]] | None:
    """The rounds of one course, and the profiles of those in it; None when nobody of it takes part. `works` are those
    that are prepared, by what a course calls them."""
    here = [one for one in entrants if one.course == course and (one.name != ONE or len(entrants) == 1)]
    if not here:
        return None
    profiled, rounds = list[dict[str, Any]](), 0
    first = [one for one in entrants if one.name == ONE and one not in here]
    say(f"course: {course.name}")
    with Track([*first, *here], works[course.work], first=FIRST_STEPS, say=say) as track:
        if not given.no_speed:
            rounds = track.rounds(given.rounds, given.most, given.steps * course.longer, RIVALS)
        if given.profile:
            profiled = profile(track, given.profile_steps)
    return course, track, rounds, profiled


def _memory(given: argparse.Namespace, entrants: list[Contestant], scratch: Path, say: Any) -> dict[str, Record]:
    work = replace(SMALL if given.quick else MEM, folder=scratch / "memory", fused=not given.plain_adamw)
    in_child(lambda: prepare(work))
    small = [one for one in entrants if one.ranks <= one.course.weighed and one.threads == 1]
    return memory(small, work, say)


def _described(work: Work) -> dict[str, Any]:
    return {key: value for key, value in asdict(work).items() if key != "folder"}
