"""The watchdog's judgement: from what the slots of a board say to who waits where for whom, and who will never come.

Pure functions on slots that were read, so that a case is a table in a test; who reads, when, and what is done about it
stands in comm/nursery.py (local ranks) and comm/remote.py (a launcher's).

    mismatch   two ranks made different calls under one sequence number: nothing can set that right, so said at once
    deadlock   ranks wait for each other in a circle, or for one that has ended: said at once
    hang       a rank has waited longer than the limit

Slots are read one after the other while ranks go on, so what is found must be found twice before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .board import ABSENT, ENDED, JOINING, RUNNING, Call, Name, Slot, waits

LONGEST_LOOK_S = 2.0
NO_NOTES: Mapping[int, str] = {}


@dataclass(frozen=True)
class Verdict:
    """Why no step can follow: the rank to look at, one sentence, and where every rank is."""

    kind: str
    rank: int
    sentence: str
    lines: tuple[str, ...]


class MismatchError(RuntimeError):
    """The ranks did not make the same calls. Raised where they find it out themselves, before a call or a step."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.sentence)
        self.verdict = verdict


class Watch:
    """What is kept between two looks: since when each rank waits for the same thing, and what was suspected."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since: dict[int, tuple[bytes, float]] = {}
        self._clock = self._last = 0.0
        self._suspected: tuple[object, ...] | None = None

    def look(
        self, now: float, seen: Sequence[bytes], slots: Callable[[], list[Slot]], notes: Callable[[], Mapping[int, str]]
    ) -> Verdict | None:
        """One look at the glances of all ranks; the slots are read only when some rank waits since the last look."""
        # A job that was stopped as a whole and went on has not waited in the meantime.
        self._clock += min(now - self._last, LONGEST_LOOK_S)
        self._last = now
        waited: dict[int, float] = {}
        for rank, one in enumerate(seen):
            if not waits(one):
                self._since.pop(rank, None)
            elif rank not in self._since or self._since[rank][0] != one:
                self._since[rank] = (one, self._clock)
            else:
                waited[rank] = self._clock - self._since[rank][1]
        if not waited:
            self._suspected = None
            return None
        found = judge(slots(), waited, self.limit_s, notes())
        name = None if found is None else (found.kind, found.sentence if found.kind == "mismatch" else found.lines)
        known, self._suspected = name is not None and name == self._suspected, name
        return found if known or (found is not None and found.kind == "hang") else None


def judge(
    slots: Sequence[Slot], waited: Mapping[int, float], limit_s: float, notes: Mapping[int, str]
) -> Verdict | None:
    """The verdict on some slots, ordered by rank. `waited`: seconds for which a rank has waited; `notes`: what is known
    of a rank from elsewhere, in a word ('stopped')."""
    return mismatch(slots, notes) or _deadlock(slots, notes) or _hang(slots, waited, limit_s, notes)


def mismatch(slots: Sequence[Slot], notes: Mapping[int, str] = NO_NOTES) -> Verdict | None:
    """The earliest calls, of those still on the board, that do not go together."""
    for shared, ends in _edges(slots).items():
        differ = _first_difference(ends)
        if differ is not None:
            return _told_apart(shared, *differ, story(slots, notes))
    return None


def _told_apart(shared: Name, sequence: int, calls: Mapping[int, Call], lines: tuple[str, ...]) -> Verdict:
    by_text: dict[str, list[int]] = {}
    for rank, call in calls.items():
        by_text.setdefault(call.text, []).append(rank)
    if len(by_text) > 1:
        what = ", but ".join(f"{ranks_named(ranks)} called {text}" for text, ranks in by_text.items())
    else:
        what = f"{ranks_named(calls)} called {next(iter(by_text))}, after calls that were not the same"
    where = f"call {sequence} of {ranks_named(shared[1])}"
    if shared[0] == "pair":
        where = f"message {sequence} from rank {shared[1][0]} to rank {shared[1][1]}"
    fewest = min(by_text.values(), key=len)
    return Verdict("mismatch", fewest[0], f"The ranks' calls do not go together: as {where}, {what}.", lines)


def missing(slot: Slot, slots: Mapping[int, Slot]) -> tuple[int, ...]:
    """The ranks that have not come to what `slot` waits for. What is no call waits for all calls before it: on a GPU the
    host comes to a stand only where it reads a number."""
    if slot.wait is None:
        return ()
    if slot.wait.channel is None:
        groups = [name for name in slot.calls if name[0] == "group"]
        behind = {
            rank for name in groups for rank in name[1] if rank in slots and slots[rank].came(name) < slot.came(name)
        }
        return tuple(sorted(behind))
    kind, ranks = slot.wait.channel
    if kind == "group":
        return tuple(
            rank for rank in ranks if rank in slots and slots[rank].came(slot.wait.channel) < slot.wait.sequence
        )
    theirs: Name = ("from" if kind == "to" else "to", (slot.rank,))
    return tuple(rank for rank in ranks if rank in slots and slots[rank].came(theirs) < slot.wait.sequence)


def story(slots: Sequence[Slot], notes: Mapping[int, str] = NO_NOTES) -> tuple[str, ...]:
    """Where every rank is, a line for all that are at one place."""
    by_rank = {slot.rank: slot for slot in slots}
    wanted = {rank for slot in slots if slot.rank not in notes for rank in missing(slot, by_rank)}
    places: dict[str, list[int]] = {}
    for slot in slots:
        places.setdefault(_place(slot, by_rank, slot.rank in wanted, notes.get(slot.rank, "")), []).append(slot.rank)
    return tuple(f"{ranks_named(ranks)}: {text}" for text, ranks in places.items())


def ranks_named(ranks: Iterable[int]) -> str:
    """'rank 2', 'ranks 0, 1 and 3', 'ranks 0 to 7'."""
    some = sorted(ranks)
    if len(some) == 1:
        return f"rank {some[0]}"
    if len(some) > 3 and some == list(range(some[0], some[-1] + 1)):
        return f"ranks {some[0]} to {some[-1]}"
    return f"ranks {', '.join(map(str, some[:-1]))} and {some[-1]}"


def _place(slot: Slot, slots: Mapping[int, Slot], wanted: bool, note: str) -> str:
    """Where one rank is, after the colon."""
    step = f", step {slot.step}" if slot.step else ""
    last = f"last finished: {slot.last.text}{step}" if slot.last is not None else "nothing finished yet"
    if note:
        last = f"last waited in: {slot.wait.text}{step}" if slot.wait is not None else last
        return f"{note}; {'never came; ' if wanted else ''}{last}"
    if slot.state == ABSENT:
        return "not joined yet"
    if slot.state == JOINING:
        return "waiting for the others to join"
    if slot.state == ENDED:
        return f"through with its run; {'never came; ' if wanted else ''}{last}"
    if slot.wait is None:
        return f"{'never came' if wanted else 'waiting for nobody'}; {last}"
    others = missing(slot, slots)
    if slot.wait.channel is None:
        return f"waiting for {slot.wait.text}{f' and {ranks_named(others)}' if others else ''}{step}"
    whom = f"for {ranks_named(others)} " if others else ""
    return f"waiting {whom}in {slot.wait.text}{'' if others else ', to which all have come'}{step}"


def _edges(slots: Sequence[Slot]) -> dict[tuple[str, tuple[int, ...]], list[tuple[int, tuple[Call, ...]]]]:
    """What more than one rank has called: (group, ranks) or (pair, (from, to)) -> (rank, its calls) of each."""
    found: dict[tuple[str, tuple[int, ...]], list[tuple[int, tuple[Call, ...]]]] = {}
    for slot in slots:
        for name, calls in slot.calls.items():
            found.setdefault(edge(name, slot.rank), []).append((slot.rank, calls))
    return found


def edge(name: Name, rank: int) -> Name:
    """What rank `rank`'s channel is an end of."""
    kind, ranks = name
    if kind == "group":
        return name
    return "pair", ((rank, ranks[0]) if kind == "to" else (ranks[0], rank))


def _first_difference(ends: Sequence[tuple[int, tuple[Call, ...]]]) -> tuple[int, dict[int, Call]] | None:
    """The lowest sequence number, of those kept on two ranks, under which their hashes differ; and its calls by rank."""
    by_sequence: dict[int, dict[int, Call]] = {}
    for rank, calls in ends:
        for call in calls:
            by_sequence.setdefault(call.sequence, {})[rank] = call
    for sequence in sorted(by_sequence):
        if len({call.hash for call in by_sequence[sequence].values()}) > 1:
            return sequence, by_sequence[sequence]
    return None


def _deadlock(slots: Sequence[Slot], notes: Mapping[int, str]) -> Verdict | None:
    """Ranks that wait for ranks that wait, and so on in a circle, or up to one that has ended."""
    by_rank = {slot.rank: slot for slot in slots}
    ended = {slot.rank for slot in slots if slot.state == ENDED}
    waits_for = {slot.rank: missing(slot, by_rank) for slot in slots if slot.state == RUNNING}
    stuck = ended | {rank for rank, others in waits_for.items() if others}
    while True:
        free = {rank for rank in stuck - ended if not stuck & set(waits_for[rank])}
        if not free:
            break
        stuck -= free
    waiting = sorted(stuck - ended)
    if not waiting:
        return None
    gone = sorted({other for rank in waiting for other in waits_for[rank]} & ended)
    if gone:
        sentence = (
            f"{_capital(gone)} ended without a call that {ranks_named(waiting)} wait{'s' * (len(waiting) == 1)} for."
        )
        return Verdict("deadlock", gone[0], sentence, story(slots, notes))
    first = by_rank[waiting[0]]
    assert first.wait is not None
    sentence = (
        f"{_capital(waiting)} wait for each other and none can go on: rank {first.rank} waits for "
        f"{ranks_named(waits_for[first.rank])} in {first.wait.text}."
    )
    return Verdict("deadlock", first.rank, sentence, story(slots, notes))


def _hang(
    slots: Sequence[Slot], waited: Mapping[int, float], limit_s: float, notes: Mapping[int, str]
) -> Verdict | None:
    """Someone has waited too long; the one to look at is the one that did not come and waits for nobody."""
    by_rank = {slot.rank: slot for slot in slots}
    late = [rank for rank, seconds in waited.items() if seconds > limit_s]
    if not late:
        return None
    longest = max(late, key=lambda rank: waited[rank])
    place = by_rank[longest].wait
    what = f"in {place.text}" if place and place.channel else f"for {place.text if place else 'the others'}"
    since = f"{waited[longest]:.0f} s {what}"
    reached, queue = set[int](), list(late)
    while queue:
        for other in missing(by_rank[queue.pop()], by_rank):
            if other not in reached:
                reached.add(other)
                queue.append(other)
    # One that is stopped holds up even a call to which all have come.
    never = sorted(notes) or sorted(rank for rank in reached if not missing(by_rank[rank], by_rank))
    way = f"--hang-timeout is {limit_s:g}: raise it when the rank is only slow"
    if not never:
        sentence = f"Rank {longest} has waited {since}, and nobody is missing: {way}."
        return Verdict("hang", longest, sentence, story(slots, notes))
    why = f" ({notes[never[0]]})" if never[0] in notes else ""
    sentence = f"{_capital(never)} never came{why}: rank {longest} has waited {since}; {way}."
    return Verdict("hang", never[0], sentence, story(slots, notes))


def _capital(ranks: Iterable[int]) -> str:
    named = ranks_named(ranks)
    return named[0].upper() + named[1:]
