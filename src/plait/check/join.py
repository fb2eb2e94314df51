"""What all ranks found, joined: the places in order, which of them depart, and copies that are not the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..design.sharding import Sharding
from .places import BYTES, EXACT, PARTS, REPLICAS, WORDS, Departure, Found, Place, Verdict, Worst, held_of

Findings = Mapping[str, Found]
"""One rank's, by `Place.key`."""


def join(
    numerics: str, step: int, order: list[Any], findings: list[Findings], sharding: Sharding, before: Verdict | None
) -> Verdict:
    """The verdict after `step`: `order` is the reference's list of (key, scale, bound), `findings` are by rank."""
    departures: list[Departure] = []
    noted: dict[str, list[tuple[Departure, bool]]] = {}

    def note(departure: Departure, departs: bool) -> None:
        noted.setdefault(departure.place.quantity, []).append((departure, departs))
        if departs:
            departures.append(departure)

    copies: list[tuple[Departure, bool]] = []
    for key, scale, bound in order:
        place = Place.of(step, key)
        if copies and place.quantity != copies[0][0].place.name.split(" of ")[0]:
            for departure, departs in copies:
                note(departure, departs)
            copies = []
        found = {rank: mine[key] for rank, mine in enumerate(findings) if key in mine}
        note(*_one(place, found, scale, bound))
        if place.quantity in PARTS:
            copies.append(_copies(place, found, sharding))
    for departure, departs in copies:
        note(departure, departs)
    for key in dict.fromkeys(key for mine in findings for key in mine if key.startswith(f"{BYTES}|")):
        note(*_one(Place.of(step, key), {r: mine[key] for r, mine in enumerate(findings) if key in mine}, 0.0, 0.0))
    return _verdict(numerics, step, departures, noted, before)


def _one(place: Place, found: Mapping[int, Found], scale: float, bound: float) -> tuple[Departure, bool]:
    """One place over the ranks that should have it; one that nobody has departs too."""
    wrong = tuple(rank for rank, mine in found.items() if not mine.deviation <= bound)
    if not found:
        return Departure(place, (), float("inf"), scale, bound, None), True
    worst = max(found.values(), key=lambda mine: mine.deviation)
    known = 1.0 if place.quantity in EXACT else scale
    return Departure(place, wrong, worst.deviation, known, bound, worst.ratio), bool(wrong)


def _copies(place: Place, found: Mapping[int, Found], sharding: Sharding) -> tuple[Departure, bool]:
    """Ranks that hold the same box of a part hold the same bits."""
    by_box: dict[Any, dict[int, list[int]]] = {}
    for rank, mine in found.items():
        held = held_of(sharding, place.name, place.quantity, rank)
        by_box.setdefault(held, {}).setdefault(mine.digest, []).append(rank)
    # The copies that are fewer are the odd ones out; of equally many, the later ranks.
    odd = [
        rank
        for digests in by_box.values()
        for ranks in sorted(digests.values(), key=lambda ranks: (-len(ranks), ranks))[1:]
        for rank in ranks
    ]
    named = Place(place.step, REPLICAS, f"{place.quantity} of {place.name}")
    return Departure(named, tuple(sorted(odd)), float(len(odd)), 0.0, 0.0, None), bool(odd)


def _verdict(
    numerics: str, step: int, departures: list[Departure], noted: dict[str, list[tuple[Departure, bool]]],
    before: Verdict | None,
) -> Verdict:  # fmt: skip
    rows = {row.quantity: row for row in (before.worst if before else ())}
    for quantity, places in noted.items():
        worst = max((departure for departure, _ in places), key=lambda departure: departure.relative)
        row = Worst(
            quantity,
            len(places),
            worst.relative,
            str(worst.place),
            max(departure.used for departure, _ in places),
            sum(departs for _, departs in places),
        )
        rows[quantity] = _both(rows[quantity], row) if quantity in rows else row
    ordered = tuple(rows[quantity] for quantity in WORDS if quantity in rows)
    return Verdict(numerics, step, ordered, tuple(departures))


def _both(one: Worst, other: Worst) -> Worst:
    further = max(one, other, key=lambda row: row.relative)
    return replace(
        further,
        places=one.places + other.places,
        used=max(one.used, other.used),
        departing=one.departing + other.departing,
    )
