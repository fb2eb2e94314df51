"""The transport through shared memory: what it gives, in which order it sums, that no place is used before all have taken
what stood there, and how it ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.design.errors import PlanError
from plait.design.mesh import Mesh
from plait.runtime.comm import nursery as forks
from plait.runtime.comm import segment, shared
from plait.runtime.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduced,
    barrier,
    gather_shares,
    receive,
    reduce_scatter,
    room,
    send,
)
from plait.runtime.comm.failure import RankError
from plait.runtime.comm.nursery import launch
from plait.runtime.comm.world import Rendezvous, World
from tests.nursery import Nursery

SIZES = (0, 1, 5, 1000, shared.FEW // 4 + 7, 100_003)
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def dp(ranks: int) -> Mesh:
    return Mesh((("pp", 1), ("dp", ranks), ("tp", 1)))


def brought(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (100 * torch.randn(size, generator=torch.Generator().manual_seed(97 * seed + rank))).to(dtype)


def in_order(parts: list[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    whole = parts[0]
    for part in parts[1:]:
        whole = combine(whole, part)
    return whole


def collectives(ranks: int, transport: str) -> Any:
    """What differs from one process, by name: everything is summed in the order of the group."""

    def main(meeting: Rendezvous) -> Any:
        wrong = []
        with World(meeting, dp(ranks)) as world:
            group, own = world.group("dp"), world.rank
            for dtype in TYPES:
                for size in SIZES:
                    parts = [brought(rank, size, dtype) for rank in range(ranks)]
                    total = in_order(parts, torch.add)
                    summed, most = parts[own].clone(), parts[own].clone()
                    all_reduce(summed, group, why="t")
                    all_reduce(most, group, why="t", op="max")
                    before = parts[own].clone()
                    apart = all_reduced(before, group, why="t")
                    share = torch.zeros(size, dtype=dtype)
                    pieces = [torch.cat([part * (place + 1) for place in range(ranks)]) for part in parts]
                    scattered = reduce_scatter(
                        pieces[own].clone(), share, group, torch.empty_like(pieces[own]), why="t", add=False
                    )
                    scattered.wait()
                    kept = torch.ones(size, dtype=dtype)
                    space = torch.empty_like(pieces[own])
                    reduce_scatter(pieces[own].clone(), kept, group, space, why="t", add=True).wait()
                    mine = in_order([part[own * size :][:size] for part in pieces], torch.add)
                    whole = torch.zeros(ranks * size, dtype=dtype)
                    place = whole[own * size :][:size]
                    place.copy_(parts[own])
                    gather_shares(whole, place, group, why="t").wait()
                    right = {
                        "sum": (summed, total), "max": (most, in_order(parts, torch.maximum)), "apart": (apart, total),
                        "left alone": (before, parts[own]), "scattered": (share, mine), "added": (kept, mine + 1),
                        "gathered": (all_gather(parts[own], group, why="t"), torch.stack(parts)),
                        "in place": (whole, torch.cat(parts)),
                    }  # fmt: skip
                    wrong += [f"{name} {dtype} {size}" for name, (a, b) in right.items() if not torch.equal(a, b)]
        return wrong

    return launch(main, ranks, local_transport=transport)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_equal_one_process_in_order(nursery: Nursery, ranks: int) -> None:
    """Bitwise, and on every rank the same bits."""
    assert nursery(collectives, ranks, "shared") == [[]] * ranks


def test_two_ranks_have_the_same_bits_over_gloo(nursery: Nursery) -> None:
    """Two numbers have one sum, whatever the order."""
    assert nursery(collectives, 2, "torch") == [[], []]


def crowd(ranks: int, seed: int) -> Any:
    """Calls of many sizes on several groups, many under way at once, waited for in another order, by ranks that dawdle;
    and more messages than a ring has places, of which the first is taken last."""

    def main(meeting: Rendezvous) -> Any:
        mesh = Mesh((("pp", 2), ("dp", ranks // 2), ("tp", 1)))
        dice, pace = random.Random(seed), random.Random(meeting.rank)
        wrong = 0
        with World(meeting, mesh) as world:
            groups = [world.group("pp"), world.group("dp"), world.everyone]
            for turn in range(30):
                under_way = []
                for number in range(dice.randint(1, 8)):
                    group, size = groups[dice.randrange(3)], dice.choice((3, 700, 40_000))
                    whole = in_order(
                        [brought(one, size, torch.float32, turn * 8 + number) for one in group.ranks], torch.add
                    )
                    x = brought(world.rank, size, torch.float32, turn * 8 + number)
                    under_way.append((all_reduce(x, group, why="t", wait=False), x, whole))
                    if pace.random() < 0.2:
                        time.sleep(pace.random() / 300)
                pace.shuffle(under_way)
                for handle, x, whole in under_way:
                    handle.wait()
                    wrong += not torch.equal(x, whole)
            group, many = world.group("pp"), segment.RING + 40
            other = 1 - group.index
            arriving = [torch.empty(5) for _ in range(many)]
            if group.index == 0:
                handles = [send(torch.full((5,), 1.0 * tag), other, group, why="t", tag=tag) for tag in range(many)]
            else:
                handles = [receive(x, other, group, why="t", tag=tag) for tag, x in enumerate(arriving)]
                time.sleep(0.05)
            for handle in reversed(handles[: segment.RING]):
                handle.wait()
            for handle in handles[segment.RING :]:
                handle.wait()
            if group.index == 1:
                wrong += sum(x.tolist() != [tag] * 5 for tag, x in enumerate(arriving))
        return wrong

    return launch(main, ranks, local_transport="shared")


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_used_before_all_have_taken_it(nursery: Nursery, seed: int) -> None:
    assert nursery(crowd, 4, seed) == [0] * 4


def places(_: str) -> Any:
    """Bytes that a rank shares after some steps of the same calls, and after twice as many."""

    def main(meeting: Rendezvous) -> Any:
        with World(meeting, dp(2)) as world:
            near = world._near
            assert near is not None
            used = []
            for _ in range(2):
                for _ in range(25):
                    handles = [
                        all_reduce(torch.ones(size), world.group("dp"), why="t", wait=False) for size in (10, 999, 5000)
                    ]
                    for handle in handles:
                        handle.wait()
                    barrier(world)  # nobody begins a step before all have taken what stood there in the last
                used.append(near.used)
            return used

    return launch(main, 2, local_transport="shared")


def test_places_are_used_again(nursery: Nursery) -> None:
    for first, later in nursery(places, ""):
        # One step's places, each up to a quarter larger than what it holds, and those of small messages.
        assert 4 * 6009 <= first <= later <= 1.25 * 4 * 6009 + 5 * 64


def rooms(ranks: int, transport: str) -> Any:
    """Steps in which what is brought stands in rooms, by ranks that dawdle, and change it at once when they may."""

    def main(meeting: Rendezvous) -> Any:
        pace, wrong = random.Random(meeting.rank), 0
        with World(meeting, dp(ranks)) as world:
            group, own, cpu = world.group("dp"), world.rank, world.device
            for turn in range(12):
                size = (1, 5, 997, 70_001)[turn % 4]
                parts = [brought(rank, ranks * size, torch.float32, turn) for rank in range(ranks)]
                total = in_order(parts, torch.add)
                mine = slice(own * size, (own + 1) * size)
                buckets = [room(ranks * size, group, torch.float32, cpu).copy_(parts[own]) for _ in range(3)]
                handles = [all_reduce(bucket, group, why="t", wait=False) for bucket in buckets]
                unit = room(ranks * size, group, torch.float32, cpu).copy_(parts[own])
                space = torch.empty(ranks * size)
                shared_out = reduce_scatter(unit, unit[mine], group, space, why="t", add=False)
                if pace.random() < 0.5:
                    time.sleep(pace.random() / 100)
                for handle, bucket in zip(handles, buckets, strict=True):
                    handle.wait()
                    wrong += not torch.equal(bucket, total)
                    bucket.fill_(-1)
                shared_out.wait()
                wrong += not torch.equal(unit[mine], total[mine])
                # Another call with all of them: nobody reads the unit any more.
                apart = all_reduced(bucket, group, why="t")
                wrong += not torch.equal(apart, torch.full_like(apart, -1.0 * ranks))
                unit.fill_(-2)
                weights = room(ranks * size, group, torch.float32, cpu)
                weights[mine] = parts[own][mine]
                gather_shares(weights, weights[mine], group, why="t").wait()
                wrong += not torch.equal(
                    weights, torch.cat([part[at * size :][:size] for at, part in enumerate(parts)])
                )
                barrier(world)
                weights.fill_(-3)
        return wrong

    return launch(main, ranks, local_transport=transport)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "transport"), [(2, "shared"), (3, "shared"), (4, "shared"), (2, "torch")])
def test_what_stands_in_a_room_is_not_copied_and_not_torn(nursery: Nursery, ranks: int, transport: str) -> None:
    assert nursery(rooms, ranks, transport) == [0] * ranks


def shares(_: str) -> Any:
    """Bytes that a rank shares: with a room, after its calls, with another in the place of the first, and what a copy
    would have taken."""

    def main(meeting: Rendezvous) -> Any:
        with World(meeting, dp(2)) as world:
            group, near, used = world.group("dp"), world._near, []
            assert near is not None
            for _ in range(2):
                x = room(1000, group, torch.float32, world.device)
                used.append(near.used)
                assert not x.any()
                for _ in range(3):
                    all_reduce(x.fill_(1), group, why="t")
                used.append(near.used)
                view = x[3:]
                del x
                assert view.tolist() == [2.0] * 997
                del view
            all_reduce(torch.ones(1000), group, why="t")
            return [*used, near.used]

    return launch(main, 2, local_transport="shared")


def test_a_room_is_shared_once_and_free_when_nobody_has_it(nursery: Nursery) -> None:
    for used in nursery(shares, ""):
        assert used[:4] == [4032] * 4
        assert used[4] >= 4032


def mixed(ranks: int) -> Any:
    """What stands in a room on some ranks and not on others: sums that are wrong."""

    def main(meeting: Rendezvous) -> Any:
        wrong = 0
        with World(meeting, dp(ranks)) as world:
            group, near = world.group("dp"), world._near
            assert near is not None
            for turn, size in enumerate((1, 5, 997, 70_001)):
                parts = [brought(rank, size, torch.float32, turn) for rank in range(ranks)]
                x = near.room(size, torch.float32) if (world.rank + turn) % 2 else torch.empty(size)
                all_reduce(x.copy_(parts[world.rank]), group, why="t")
                wrong += not torch.equal(x, in_order(parts, torch.add))
        return wrong

    return launch(main, ranks, local_transport="shared")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_of_which_some_stand_in_rooms(nursery: Nursery, ranks: int) -> None:
    """As where ZeRO's group spans hosts on one rank of tp and not on the other."""
    assert nursery(mixed, ranks) == [0] * ranks


def let_go(file: str) -> Any:
    """Rank 0 lets go of a room whose share rank 1 has not taken yet, and makes others."""
    size = 5000

    def main(meeting: Rendezvous) -> Any:
        with World(meeting, dp(2)) as world:
            group, near, rank = world.group("dp"), world._near, world.rank
            assert near is not None
            whole = room(2 * size, group, torch.float32, world.device)
            at, mine = near.place(whole), whole[rank * size :][:size].fill_(rank + 1)
            handle = gather_shares(whole, mine, group, why="t")
            if rank:
                while not Path(file).exists():
                    time.sleep(0.01)
                handle.wait()
                assert whole.tolist() == [1.0] * size + [2.0] * size
            else:
                handle.wait()
                del whole, mine, handle
                other = room(2 * size, group, torch.float32, world.device).fill_(-1)
                assert near.place(other) != at
                Path(file).touch()
            barrier(world)
            if not rank:
                assert near.place(room(2 * size, group, torch.float32, world.device)) == at
        return True

    return launch(main, 2, local_transport="shared")


def test_a_room_is_kept_until_all_have_taken_what_was_posted_of_it(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery(let_go, str(tmp_path / "gone on")) == [True, True]


def resident() -> int:
    """Bytes of segments that are there, as this process sees them."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = "plait-segment" in line
        elif ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def memory_of_rooms(_: str) -> Any:
    def main(meeting: Rendezvous) -> Any:
        with World(meeting, dp(2)) as world:
            near, found = world._near, [resident()]
            assert near is not None
            first, second = (near.room(1 << 20, torch.float32) for _ in range(2))
            found.append(resident())
            del first, second
            found.append(resident())
            # The two places are one again, and what is made there is zeros.
            third = near.room(1 << 21, torch.float32)
            assert not third.any()
            found.append(near.used)
        return found

    return launch(main, 2, local_transport="shared")


def test_the_memory_of_a_room_goes_back_with_it(nursery: Nursery) -> None:
    for before, there, after, used in nursery(memory_of_rooms, ""):
        assert there >= before + (8 << 20)
        assert after <= before + 65536
        assert used == 8 << 20


def ends(kind: str) -> Any:
    """How a run ends whose ranks do not bring the same, or lose one: code, sentence, what is left of the segments."""

    def main(meeting: Rendezvous) -> Any:
        with World(meeting, dp(2)) as world:
            if kind == "sizes":
                transport = world.group("dp").transport
                assert transport is not None
                transport.all_reduce(torch.ones(3 + world.rank), "sum").wait()
            if world.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            all_reduce(torch.ones(1 << 20), world.group("dp"), why="t")

    try:
        return launch(main, 2, local_transport="shared")
    except RankError as error:
        return [error.code, str(error), leftovers()]


def leftovers() -> list[str]:
    """Processes of this job that still map a segment when those that were ended have had time to go."""
    until = time.monotonic() + 10
    while (found := mapping()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def mapping() -> list[str]:
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if os.getpgid(int(maps.parent.name)) == os.getpgid(0) and "plait-segment" in maps.read_text():
                found.append(str(maps))
        except OSError:
            continue
    return found


def test_another_size_is_an_error(nursery: Nursery) -> None:
    code, sentence, _ = nursery(ends, "sizes")
    assert code == 3
    assert "the local transport expects 12 bytes of rank 1, which brings 16" in sentence or "expects 16" in sentence


def test_no_segment_outlives_its_ranks(nursery: Nursery) -> None:
    code, sentence, left = nursery(ends, "kill")
    assert code == 3
    assert sentence.startswith("Rank 1 was ended by signal 9 (SIGKILL)")
    assert left == []


def test_a_neighbour_that_is_gone() -> None:
    """What a rank says by itself, where no parent tells it."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    own, other = segment.Segment.made(), segment.Segment.made()
    other.words[segment.PROCESS] = ended.pid
    near = segment.Neighbours({0: own, 1: other}, 0, 60)
    with pytest.raises(RuntimeError, match=r"^connection closed: the process of rank 1 is gone$"):
        near.until(lambda: False, [1])


def without_a_view(transport: str) -> Any:
    """What carries the bytes of four ranks, one of which cannot open the others' files; or why nothing does."""

    def main(meeting: Rendezvous) -> Any:
        if meeting.rank == 2:

            def hidden(pid: int, fd: int) -> segment.Segment:
                raise PermissionError(pid)

            segment.Segment.opened = hidden  # type: ignore[method-assign, assignment]
        with World(meeting, dp(4)) as world:
            x = torch.ones(3)
            all_reduce(x, world.group("dp"), why="t")
            return [type(world.group("dp").transport).__name__, x.tolist()]

    try:
        return launch(main, 4, local_transport=transport)  # type: ignore[arg-type]
    except PlanError as error:
        return str(error)


def test_a_rank_that_cannot_see_the_others_has_all_use_torch(nursery: Nursery) -> None:
    assert nursery(without_a_view, "auto") == [["Distributed", [4.0] * 3]] * 4
    said = nursery(without_a_view, "shared")
    assert said.startswith("local_transport shared needs ranks on one host that can open each other's files in /proc")


def test_where_it_cannot_be_it_is_refused_or_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment.platform, "machine", lambda: "aarch64")
    why = segment.unsupported()
    assert why == "is for Linux on x86-64, and this is linux on aarch64"
    monkeypatch.setattr(forks, "unsupported", segment.unsupported)
    with pytest.raises(
        PlanError, match=r"^local_transport shared is for Linux on x86-64.*: set local_transport auto\.$"
    ):
        launch(lambda _: None, 2, local_transport="shared")
