"""The board and the watchdog's judgement, on tables: who waits where for whom, and what is no cause for alarm."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from plait.runtime.comm import board
from plait.runtime.comm.agree import Agreement, Shared, disagreement
from plait.runtime.comm.board import ENDED, JOINING, KEPT, RUNNING, SLOT, TEXTS, Board, Name, Slot
from plait.runtime.comm.watch import MismatchError, Verdict, Watch, judge, mismatch, ranks_named, story

ALL: Name = ("group", (0, 1, 2))
X = torch.ones(2, 3)


class Boards:
    """Boards of some ranks in one memory. `calls('aab')` of a rank notes three operations over all ranks."""

    def __init__(self, ranks: int) -> None:
        self.memory = mmap.mmap(-1, ranks * SLOT)
        self.ranks = [Board(self.memory, rank) for rank in range(ranks)]
        for one in self.ranks:
            one.enter(RUNNING)
            one.at_step(1)

    def calls(self, rank: int, words: str, *, name: Name = ALL, waits: bool = False, tag: int = 0) -> None:
        own = self.ranks[rank]
        for word in words:
            mark = own.note(own.channel(name), "all_reduce", X, "tp", word, tag)
            own.wait(mark)
            own.go_on()
        if waits:
            own.wait(mark)

    @property
    def slots(self) -> list[Slot]:
        return [board.read(self.memory, rank, rank) for rank in range(len(self.ranks))]

    @property
    def glances(self) -> list[bytes]:
        return [board.glance(self.memory, rank) for rank in range(len(self.ranks))]

    def verdict(
        self, waited: Mapping[int, float] | None = None, notes: Mapping[int, str] | None = None
    ) -> Verdict | None:
        return judge(self.slots, waited or {}, 5, notes or {})


def test_what_is_written_is_read() -> None:
    boards = Boards(3)
    boards.calls(1, "aba")
    boards.calls(1, "m", name=("to", (2,)), waits=True, tag=7)
    boards.ranks[1].at_step(4)
    slot = boards.slots[1]
    assert (slot.state, slot.step, slot.came(ALL), slot.came(("to", (2,)))) == (RUNNING, 4, 3, 1)
    assert slot.wait is not None
    assert (slot.wait.channel, slot.wait.sequence) == (("to", (2,)), 1)
    texts = [call.text for call in slot.calls[ALL]]
    assert texts[0] == texts[2] != texts[1]
    assert texts[0].startswith("all_reduce float32 [2, 3] over tp (a) at test_watch.py:")
    assert slot.calls["to", (2,)][0].text.endswith(", tag 7")
    assert boards.slots[0].calls == {}


def test_the_last_calls_and_the_last_texts_are_kept() -> None:
    boards = Boards(1)
    own = boards.ranks[0]
    channel = own.channel(ALL)
    for number in range(TEXTS + 10):
        own.note(channel, "all_reduce", X, "tp", f"reason {number}")
    calls = boards.slots[0].calls[ALL]
    assert [call.sequence for call in calls] == list(range(TEXTS + 10 - KEPT + 1, TEXTS + 11))
    assert f"(reason {TEXTS + 9})" in calls[-1].text
    assert len(channel.known) <= TEXTS
    own.note(channel, "all_reduce", X, "tp", "reason 0")  # seen before, forgotten, and written again
    assert "(reason 0)" in boards.slots[0].calls[ALL][-1].text


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1, 5, 9), (0, 1, 5), (7,)])
def test_names_of_channels(ranks: tuple[int, ...]) -> None:
    for name in (("group", ranks), ("from", (3,))):
        assert board.name_from_text(board.name_to_text(name)) == name


def test_a_board_has_room_for_so_many_channels() -> None:
    own = Board.private()
    for rank in range(board.CHANNELS):
        own.channel(("to", (rank,)))
    with pytest.raises(ValueError, match="room for 40 channels"):
        own.channel(("to", (99,)))


# --- verdicts


def ahead(boards: Boards) -> None:
    boards.calls(0, "abc", waits=True)
    boards.calls(1, "ab")
    boards.calls(2, "a")


def long_past(boards: Boards) -> None:
    boards.calls(0, "a" * 3 * KEPT, waits=True)
    boards.calls(1, "b")


def crossing(boards: Boards) -> None:
    """A receive is posted and waited for, its message is on the way: nobody waits in a circle."""
    boards.calls(0, "a", name=("from", (1,)), waits=True)
    boards.calls(1, "b", name=("from", (0,)), waits=True)
    boards.calls(0, "b", name=("to", (1,)))
    boards.calls(1, "a", name=("to", (0,)))
    boards.ranks[0].wait((0, 1, 1))


@pytest.mark.parametrize("arrange", [ahead, long_past, crossing])
def test_what_may_still_become_right_is_no_mismatch(arrange: Callable[[Boards], None]) -> None:
    boards = Boards(3)
    arrange(boards)
    assert boards.verdict() is None


def test_different_calls_under_one_number() -> None:
    boards = Boards(3)
    boards.calls(0, "aab", waits=True)
    boards.calls(1, "aab", waits=True)
    boards.calls(2, "aac", waits=True)
    verdict = boards.verdict()
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == ("mismatch", 2)
    assert verdict.sentence.startswith(
        "The ranks' calls do not go together: as call 3 of ranks 0, 1 and 2, ranks 0 and 1 called all_reduce float32 "
        "[2, 3] over tp (b) at test_watch.py:"
    )
    assert ", but rank 2 called all_reduce float32 [2, 3] over tp (c) at test_watch.py:" in verdict.sentence


def test_a_skipped_call_shows_where_the_next_ones_differ() -> None:
    """Two equal calls in a row, of which rank 1 leaves one out: the numbers shift, and the first difference is named."""
    boards = Boards(3)
    boards.calls(0, "aab")
    boards.calls(2, "aab")
    boards.calls(1, "ab")
    verdict = boards.verdict()
    assert verdict is not None
    assert "as call 2 of" in verdict.sentence
    assert verdict.rank == 1


@pytest.mark.parametrize(
    ("sent", "received", "tags", "good"),
    [("ab", "ab", (1, 1), True), ("ab", "ba", (1, 1), False), ("a", "a", (1, 2), False), ("ab", "a", (1, 1), True)],
)
def test_messages_are_held_against_each_other(sent: str, received: str, tags: tuple[int, int], good: bool) -> None:
    boards = Boards(2)
    for rank, words, name in ((0, sent, ("to", (1,))), (1, received, ("from", (0,)))):
        for word in words:
            own = boards.ranks[rank]
            own.note(own.channel(name), "send" if rank == 0 else "receive", X, "pp", word, tags[rank])
    verdict = mismatch(boards.slots)
    assert (verdict is None) == good
    if verdict is not None:
        assert "message 1 from rank 0 to rank 1" in verdict.sentence


def test_ranks_that_wait_for_each_other() -> None:
    boards = Boards(3)
    boards.calls(0, "a", waits=True)
    boards.calls(1, "b", name=("group", (1, 2)), waits=True)
    boards.calls(2, "c", name=("from", (0,)), waits=True)
    verdict = boards.verdict()
    assert verdict is not None
    assert verdict.kind == "deadlock"
    assert verdict.sentence.startswith(
        "Ranks 0, 1 and 2 wait for each other and none can go on: rank 0 waits for ranks 1 and 2 in all_reduce float32"
    )
    assert verdict.lines[2].startswith("rank 2: waiting for rank 0 in ")


def test_a_rank_that_has_ended_comes_no_more() -> None:
    boards = Boards(3)
    boards.calls(0, "a", waits=True)
    boards.calls(2, "a", waits=True)
    boards.ranks[1].enter(ENDED)
    verdict = boards.verdict()
    assert verdict is not None
    assert verdict.sentence == "Rank 1 ended without a call that ranks 0 and 2 wait for."


def hung(boards: Boards) -> None:
    boards.calls(0, "aa", waits=True)
    boards.calls(1, "aa", waits=True)
    boards.calls(2, "a")


def test_a_hang_names_who_never_came() -> None:
    boards = Boards(3)
    hung(boards)
    assert boards.verdict({0: 4.9}) is None
    verdict = boards.verdict({0: 5.1, 1: 2.0}, {2: "stopped"})
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == ("hang", 2)
    assert verdict.sentence.startswith(
        "Rank 2 never came (stopped): rank 0 has waited 5 s in all_reduce float32 [2, 3]"
    )
    assert verdict.sentence.endswith("--hang-timeout is 5: raise it when the rank is only slow.")
    first, last = verdict.lines
    assert first.startswith("ranks 0 and 1: waiting for rank 2 in all_reduce")
    assert last.startswith("rank 2: stopped; never came; last finished: all_reduce float32 [2, 3] over tp (a) at ")
    assert last.endswith(", step 1")


def test_the_one_to_blame_stands_at_the_end_of_a_chain() -> None:
    """0 waits for 1, which waits for 2, which waits for nobody."""
    boards = Boards(3)
    boards.calls(0, "a", name=("group", (0, 1)), waits=True)
    boards.calls(1, "b", name=("group", (1, 2)), waits=True)
    verdict = boards.verdict({0: 6})
    assert verdict is not None
    assert verdict.sentence.startswith("Rank 2 never came: rank 0 has waited 6 s in ")


def test_numbers_wait_for_all_calls_before_them() -> None:
    """As on GPUs: calls were issued, the host reads a number, and rank 1 is a call behind."""
    boards = Boards(3)
    for rank, words in enumerate(("ab", "a", "ab")):
        boards.calls(rank, words)
    boards.ranks[0].pause("the numbers of the step")
    verdict = boards.verdict({0: 6})
    assert verdict is not None
    assert verdict.sentence.startswith("Rank 1 never came: rank 0 has waited 6 s for the numbers of the step; ")
    assert verdict.lines[0] == "rank 0: waiting for the numbers of the step and rank 1, step 1"


def test_a_story_has_a_line_for_every_place() -> None:
    boards = Boards(3)
    boards.ranks[0].enter(JOINING)
    boards.ranks[1].enter(board.ABSENT)
    boards.ranks[2].pause("the numbers of the step")
    assert story(boards.slots) == (
        "rank 0: waiting for the others to join",
        "rank 1: not joined yet",
        "rank 2: waiting for the numbers of the step, step 1",
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((3,), "rank 3"), ((1, 0), "ranks 0 and 1"), ((4, 0, 2), "ranks 0, 2 and 4"), (range(8), "ranks 0 to 7")],
)
def test_ranks_are_named(ranks: Sequence[int], words: str) -> None:
    assert ranks_named(ranks) == words


# --- looks


def look(watch: Watch, boards: Boards, now: float) -> Verdict | None:
    return watch.look(now, boards.glances, lambda: boards.slots, dict)


def test_a_suspicion_is_held_over_two_looks() -> None:
    boards, watch = Boards(3), Watch(100)
    for rank, words in enumerate(("ab", "ab", "ac")):
        boards.calls(rank, words, waits=True)
    assert look(watch, boards, 0.0) is None  # nobody waits since the last look
    assert look(watch, boards, 0.2) is None  # seen once
    found = look(watch, boards, 0.4)
    assert found is not None
    assert found.kind == "mismatch"


def test_slots_are_read_only_when_somebody_stands_still() -> None:
    boards, watch = Boards(3), Watch(1)

    def never() -> list[Slot]:
        raise AssertionError("read")

    for now in range(5):
        boards.calls(0, "a", waits=True)
        assert watch.look(now, boards.glances, never, dict) is None


def test_a_job_that_was_stopped_as_a_whole_has_not_waited() -> None:
    boards, watch = Boards(3), Watch(60)
    hung(boards)
    assert look(watch, boards, 0.0) is None
    assert look(watch, boards, 3600.0) is None
    for second in range(3601, 3655):
        assert look(watch, boards, second) is None
    found = [look(watch, boards, second) for second in range(3655, 3670)]
    assert [one.kind for one in found if one is not None][:1] == ["hang"]


# --- agreement before a step


def test_seals_agree_or_name_what_differs() -> None:
    boards = Boards(3)
    peers = [Shared(one, 3) for one in boards.ranks]
    for rank in range(3):
        boards.calls(rank, "aab")
    boards.calls(0, "m", name=("to", (2,)))
    peers[0].seal(1)
    peers[1].seal(1)
    assert peers[0].seals(1)[2] is None
    peers[2].seal(1)
    seals = [seal for seal in peers[0].seals(1) if seal is not None]
    assert disagreement(seals) == ("pair", (0, 2))  # rank 2 has not received
    boards.calls(2, "m", name=("from", (0,)))
    boards.calls(1, "late")  # after the seal: not part of the step
    peers[2].seal(1)
    assert disagreement([seal for seal in peers[1].seals(1) if seal is not None]) is None


def test_no_step_when_one_rank_made_other_calls() -> None:
    boards = Boards(3)
    peers = [Shared(one, 3) for one in boards.ranks]
    for rank, words in enumerate(("ab", "ab", "ac")):
        boards.calls(rank, words)
        peers[rank].seal(7)
    for rank in range(3):
        with pytest.raises(MismatchError, match=r"as call 2 of ranks 0, 1 and 2, .* No rank takes step 7\."):
            Agreement(boards.ranks[rank], peers[rank], rank, 3, 1.0).on_step(7)


def test_a_rank_that_made_fewer_calls_is_counted() -> None:
    boards = Boards(3)
    peers = [Shared(one, 3) for one in boards.ranks]
    for rank, words in enumerate(("aa", "aa", "a")):
        boards.calls(rank, words)
        peers[rank].seal(1)
    with pytest.raises(MismatchError, match=r"ranks 0, 1 and 2 make together, rank 2 made 1, ranks 0 and 1 made 2"):
        Agreement(boards.ranks[0], peers[0], 0, 3, 1.0).on_step(1)


def test_agreement_before_a_call() -> None:
    boards = Boards(2)
    both: Name = ("group", (0, 1))
    own, other = boards.ranks
    agreement = Agreement(own, Shared(own, 2), 0, 2, 0.05)
    mark = own.note(own.channel(both), "all_reduce", X, "tp", "a")
    with pytest.raises(RuntimeError, match="timed out: not all ranks came to make call 1"):
        agreement.before_call(own.channel(both), mark)
    other.note(other.channel(both), "all_reduce", X, "tp", "a")
    agreement.before_call(own.channel(both), mark)
    mark = own.note(own.channel(both), "all_reduce", X, "tp", "a")
    other.note(other.channel(both), "all_reduce", X.double(), "tp", "a")
    with pytest.raises(MismatchError, match=r"rank 0 called .*float32.* but rank 1 called .*float64"):
        agreement.before_call(own.channel(both), mark)


def test_a_call_costs_microseconds() -> None:
    """The quickest of many tries, since the machine does other things too; measured at one microsecond."""
    boards = Boards(1)
    own = boards.ranks[0]
    channel = own.channel(ALL)
    tries = []
    for _ in range(50):
        begun = time.perf_counter()
        for _ in range(100):
            own.wait(own.note(channel, "all_reduce", X, "tp", "a"))
            own.go_on()
        tries.append((time.perf_counter() - begun) / 100)
    assert min(tries) < 10e-6
