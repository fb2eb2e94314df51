"""Another reading of a schedule's table, to test the first: `carry_out` knows nothing of the order law, only tensors,
queues and blocking. And what the tests of tables do to them: a table from text, an action moved, one left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plait.design.schedule import Action, Kind, Schedule

Queues = Callable[[int, int], object]
QUEUES: dict[str, Queues] = {
    "one queue a pair": lambda one, other: frozenset((one, other)),
    "one queue a rank": lambda one, other: "everything",
}
Place = tuple[int, str, int]
"""(stage, letter, microbatch)."""


class Stuck(Exception):
    """The table cannot go on."""


class World:
    """The ranks of a lowered table with values in the place of tensors. A send blocks until its receive is posted; a
    transfer happens when it is first in the queue of both its ranks; a wait blocks until the tensor is there."""

    def __init__(self, schedule: Schedule, queues: Queues, *, receives_block: bool) -> None:
        self.queues, self.receives_block = queues, receives_block
        self.where = schedule.placement or tuple(range(len(schedule.rows)))
        self.length = len(self.where) // schedule.chains
        self.posted: dict[tuple[int, object], list[Action]] = {}
        self.arrived: set[Place] = set()  # the transfer is complete
        self.usable: set[Place] = set()  # the same, waited for
        self.computed: set[Place] = set()

    def peer(self, action: Action) -> tuple[int, int]:
        """(stage, rank) of the other end of a transfer."""
        onward = action.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT)
        stage = action.stage + (1 if onward else -1)
        assert stage // self.length == action.stage // self.length, f"{action} leaves the model"
        return stage, self.where[stage]

    def match(self, rank: int, action: Action) -> None:
        _, other = self.peer(action)
        mine = self.posted.get((rank, self.queues(rank, other)), [])
        theirs = self.posted.get((other, self.queues(other, rank)), [])
        if not mine or not theirs or self.peer(mine[0])[1] != other or self.peer(theirs[0])[1] != rank:
            return
        ends = {mine[0].kind.letter, theirs[0].kind.letter}
        same = mine[0].microbatch == theirs[0].microbatch and self.peer(mine[0])[0] == theirs[0].stage
        if ends not in ({"SA", "RA"}, {"SG", "RG"}) or not same:
            raise Stuck(f"{mine[0]} meets {theirs[0]}")
        for queue in (mine, theirs):
            done = queue.pop(0)
            self.arrived.add((done.stage, done.kind.letter, done.microbatch))

    def transfer(self, rank: int, action: Action) -> bool:
        place = stage, letter, m = action.stage, action.kind.letter, action.microbatch
        queue = self.posted.setdefault((rank, self.queues(rank, self.peer(action)[1])), [])
        if action not in queue and place not in self.arrived:
            gives = [(stage, kind, m) for kind in ("F" if letter == "SA" else "BI")]
            assert letter[0] == "R" or any(given in self.computed for given in gives), f"{action} sends nothing"
            queue.append(action)
        self.match(rank, action)
        return place in self.arrived or (letter[0] == "R" and not self.receives_block)

    def has(self, stage: int, source: int, letters: str, wait: str, m: int) -> bool:
        """Whether what `source` gives is there: on the same rank as soon as it is computed, else waited for."""
        if source < 0 or source // self.length != stage // self.length or source == len(self.where):
            return True
        if self.where[source] == self.where[stage]:
            return any((source, letter, m) in self.computed for letter in letters)
        return (stage, wait, m) in self.usable

    def compute(self, action: Action) -> None:
        stage, letter, m = action.stage, action.kind.letter, action.microbatch
        assert (stage, letter, m) not in self.computed, f"{action} twice"
        assert (stage, "R") not in {place[:2] for place in self.computed}, f"{action} after its stage's reduction"
        if letter == "F":
            assert self.has(stage, stage - 1, "F", "WA", m), f"{action} has no input"
        elif letter in "BI":
            assert (stage, "F", m) in self.computed, f"{action} before its forward"
            assert self.has(stage, stage + 1, "BI", "WG", m), f"{action} has no gradient"
            assert not {(stage, "B", m), (stage, "I", m)} & self.computed, f"{action} is a second backward"
        elif letter == "W":
            assert (stage, "I", m) in self.computed, f"{action} has nothing to settle"
        else:
            done = {place[2] for place in self.computed if place[0] == stage and place[1] in "BW"}
            begun = {place[2] for place in self.computed if place[0] == stage and place[1] == "F"}
            assert done == begun, f"{action} is too early"
        self.computed.add((stage, letter, m))

    def step(self, rank: int, action: Action) -> bool:
        """Whether `rank` can leave this action behind."""
        stage, letter, m = action.stage, action.kind.letter, action.microbatch
        assert self.where[stage] == rank, f"{action} on rank {rank}"
        if letter in ("SA", "SG", "RA", "RG"):
            return self.transfer(rank, action)
        if letter in ("WA", "WG"):
            kind = Kind.RECEIVE_ACTIVATION if letter == "WA" else Kind.RECEIVE_GRADIENT
            self.match(rank, Action(kind, stage, m))
            self.usable.add((stage, letter, m))
            return (stage, "R" + letter[1], m) in self.arrived
        self.compute(action)
        return True


def carry_out(schedule: Schedule, queues: Queues, *, receives_block: bool) -> None:
    """Raises `Stuck`, or an assertion's error, if the lowered table cannot be carried out to its end."""
    world = World(schedule, queues, receives_block=receives_block)
    places = [0] * len(schedule.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while places[rank] < len(row):
                queued = sum(map(len, world.posted.values()))
                if not world.step(rank, row[places[rank]]):
                    moved |= queued != sum(map(len, world.posted.values()))
                    break
                places[rank] += 1
                moved = True
    if any(place < len(row) for place, row in zip(places, schedule.rows, strict=True)):
        raise Stuck(str(places))
    assert not any(world.posted.values())
    _all_is_computed(schedule, world)


def _all_is_computed(schedule: Schedule, world: World) -> None:
    """Every microbatch on every stage of its chain, forward and one backward; each in one chain."""
    counted: list[int] = []
    for first in range(0, len(world.where), world.length):
        begun = sorted(m for stage, letter, m in world.computed if (stage, letter) == (first, "F"))
        counted += begun
        for stage in range(first, first + world.length):
            found = {letter: sorted(m for s, k, m in world.computed if (s, k) == (stage, letter)) for letter in "FBIW"}
            assert found["F"] == begun
            assert sorted(found["B"] + found["I"]) == begun
            assert found["I"] == found["W"]
    assert sorted(counted) == list(range(schedule.microbatches))


def moved(schedule: Schedule, rank: int, old: int, new: int) -> Schedule:
    """The table with one action of one row taken from place `old` to place `new`."""
    row = list(schedule.rows[rank])
    row.insert(new, row.pop(old))
    rows = list(schedule.rows)
    rows[rank] = tuple(row)
    return replace(schedule, rows=tuple(rows))


def without(schedule: Schedule, action: Action) -> Schedule:
    return replace(schedule, rows=tuple(tuple(a for a in row if a != action) for row in schedule.rows))


def table(text: str, microbatches: int = 1) -> Schedule:
    """A schedule from its printed form, one row a line."""
    kinds = {kind.letter: kind for kind in Kind}
    rows = []
    for line in text.strip().splitlines():
        words = [(int(w[0]), w[1:].rstrip("0123456789"), w) for w in line.split()]
        rows.append(tuple(Action(kinds[letter], stage, int(w[1 + len(letter) :])) for stage, letter, w in words))
    return Schedule("written", microbatches, tuple(rows))


def printed(schedule: Schedule, rank: int) -> str:
    return " ".join(map(str, schedule.rows[rank]))
