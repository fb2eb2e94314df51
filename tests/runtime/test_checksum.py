"""The checksum of slices is zlib's CRC-32, whatever the bytes and however many."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from plait.runtime.checkpoint.checksum import BLOCK, FAR, NEAR, WORTH, Checksum

MOST = WORTH + 3 * BLOCK


@pytest.fixture(scope="module")
def noise() -> memoryview:
    return memoryview(random.Random(0).randbytes(MOST + 64))


def shifted(power: int) -> int:
    """x^(8 power), in the rest by the CRC's polynomial: by squaring, one bit of `power` at a time."""
    found, square = 1, 1 << 8
    while power:
        if power & 1:
            found = times(found, square)
        square, power = times(square, square), power >> 1
    return found


def times(one: int, other: int) -> int:
    product = 0
    for bit in range(32):
        product ^= one << bit if other >> bit & 1 else 0
    for bit in range(62, 31, -1):
        product ^= 0x104C11DB7 << bit - 32 if product >> bit & 1 else 0
    return product


def test_the_three_terms_are_a_multiple_of_the_polynomial() -> None:
    assert shifted(32) != 1
    assert shifted(FAR) ^ shifted(NEAR) ^ 1 == 0
    assert 0 < NEAR <= BLOCK


def test_it_is_zlibs(noise: memoryview) -> None:
    checksum, chosen = Checksum(), random.Random(1)
    edges = [FAR + count * BLOCK + more for count in (3, 4, 5) for more in (-1, 0, 1)] + [WORTH - 1, WORTH, WORTH + 1]
    for size in [0, 1, 4, 100, *edges, *(chosen.randrange(MOST) for _ in range(60))]:
        start = chosen.randrange(64)
        view = noise[start : start + size]
        assert checksum(view) == zlib.crc32(view), size


@pytest.mark.parametrize("byte", [b"\0", b"\xff"])
def test_bytes_that_are_all_the_same(byte: bytes) -> None:
    view = memoryview(byte * MOST)
    assert Checksum()(view) == zlib.crc32(view)


def test_any_flipped_bit_changes_it(noise: memoryview) -> None:
    checksum, data = Checksum(), bytearray(noise[:WORTH])
    was, chosen = checksum(memoryview(data)), random.Random(2)
    places = [0, 3, 4, BLOCK - 1, BLOCK, FAR - 1, FAR, WORTH - FAR, WORTH - 1]
    for at in [*places, *(chosen.randrange(WORTH) for _ in range(40))]:
        bit = 1 << chosen.randrange(8)
        data[at] ^= bit
        assert checksum(memoryview(data)) != was
        data[at] ^= bit
    assert checksum(memoryview(data)) == was


def test_each_thread_has_its_own(noise: memoryview) -> None:
    views = [noise[start : start + WORTH + start] for start in range(64)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda view: Checksum()(view), views))
    assert found == [zlib.crc32(view) for view in views]
