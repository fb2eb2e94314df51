"""The drawing of what ZeRO-3 fetches when, and the account that it is drawn from."""

from __future__ import annotations

from plait.design.unit import Unit
from plait.report.fetching import needs, svg

BLOCKS = [Unit(f"block {block}", 0, block, ("weight",), (6,), 3) for block in range(5)]


def step(blocks: int) -> list[tuple[str, Unit]]:
    forward = [("forward", unit) for unit in BLOCKS[:blocks]]
    return forward + [("backward", unit) for _, unit in reversed(forward)]


def test_the_last_two_blocks_are_still_there_when_backward_begins() -> None:
    for blocks in (2, 3, 5):
        found = needs(step(blocks))
        assert [need.fetched for need in found] == [True] * blocks + [False] * 2 + [True] * (blocks - 2)


def test_a_unit_takes_the_place_of_the_one_before_the_last() -> None:
    found = needs(step(5))
    assert [need.before for need in found[:5]] == [None, None, *BLOCKS[:3]]
    assert [need.before for need in found[7:]] == [BLOCKS[4], BLOCKS[3], BLOCKS[2]]


def test_every_rank_keeps_its_share_and_works_with_all() -> None:
    names = dict(zip(BLOCKS[:3], "abc", strict=True))
    drawn = svg(step(3), names, title="three blocks")
    for index in range(3):
        # 3 blocks kept and 3 sums of gradients on the one rank; 6 whole units at work on each of three.
        assert drawn.count(f'"slice{index}"') == 3 + 3 + 6 * 3
    for words in ("a before, then b", "forward c", "backward a"):
        assert words in drawn
