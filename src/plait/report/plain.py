"""The objects of the design wing as plain JSON, and back.

    dataclass               {"name": value, ...}
    tuple of one kind       {"columns": ["rank", "action", ...], "rows": [[0, "0F0", ...], ...]}
    Action                  "2F0"
    Plan                    its fields
    a float without value   null

This is the only place that knows how. What does not fit its type is refused, with the place where it stands. A table may
have a quarter of a million rows: values whose type JSON has, too, are taken as they are.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..design.errors import PlanError, listed
from ..design.plan import Plan
from ..design.schedule import Action, Kind

SIMPLE = frozenset({int, float, str, bool})
WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
KINDS = {kind.letter: kind for kind in Kind}


def plain(value: Any) -> Any:
    """An object of the design wing as JSON values; floats keep nine digits."""
    if type(value) in (int, str, bool, NoneType):
        return value
    if type(value) is float:
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, Plan):
        return value.model_dump()
    if isinstance(value, Action):
        return str(value)
    if is_dataclass(value):
        kind: Any = type(value)
        return {name: plain(getattr(value, name)) for name, _ in _hints(kind)}
    if isinstance(value, tuple | list):
        first = value[0] if value else None
        if is_dataclass(first) and not isinstance(first, Action):
            kind = type(first)
            names = [name for name, _ in _hints(kind)]
            return {"columns": names, "rows": [[plain(getattr(row, name)) for name in names] for row in value]}
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__name__} has no place in a record")


def revive(kind: Any, value: Any, place: str) -> Any:
    """The object of type `kind` that JSON values stand for; `place` is where they stand, for the refusal."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else revive(next(one for one in inner if one is not NoneType), value, place)
    if kind is Plan:
        return Plan.read(_as(dict, value, place), source=place)
    if kind is Action:
        return _action(value, place)
    if is_dataclass(kind):
        return _object(kind, value, place)
    if origin is Literal:
        if value not in inner:
            raise PlanError(f"{place} must be {listed(map(repr, inner))}.")
        return value
    if origin is tuple:
        return tuple(_items(inner[0], value, place))
    if origin is dict:
        return {key: revive(inner[1], item, f"{place}.{key}") for key, item in _as(dict, value, place).items()}
    if kind is float and (value is None or type(value) is int):
        return math.nan if value is None else value
    return _as(kind, value, place)


@cache
def _hints(kind: Any) -> tuple[tuple[str, Any], ...]:
    """(name, type) of each field."""
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def _as(kind: Any, value: Any, place: str) -> Any:
    if type(value) is not kind:
        raise PlanError(f"{place or 'it'} must be {WORDS[kind]}.")
    return value


def _object(kind: Any, value: Any, place: str) -> Any:
    values, dot = _as(dict, value, place), f"{place}." if place else ""
    found = {}
    for name, hint in _hints(kind):
        if name not in values:
            raise PlanError(f"{dot}{name} is missing.")
        cell = values[name]
        found[name] = cell if type(cell) is hint and hint in SIMPLE else revive(hint, cell, dot + name)
    return kind(**found)


def _items(kind: Any, value: Any, place: str) -> list[Any]:
    """The items of a tuple: a table's rows where they are dataclasses, else a list."""
    if is_dataclass(kind) and kind is not Action and isinstance(value, dict):
        return _rows(kind, value, place)
    items = _as(list, value, place)
    return [revive(kind, item, f"{place}[{number}]") for number, item in enumerate(items)]


def _rows(kind: Any, value: dict[str, Any], place: str) -> list[Any]:
    hints = _hints(kind)
    names = [name for name, _ in hints]
    if value.get("columns") != names:
        raise PlanError(f"{place}.columns must be {', '.join(names)}.")
    found = []
    for number, row in enumerate(_as(list, value.get("rows"), f"{place}.rows")):
        here = f"{place}.rows[{number}]"
        if len(_as(list, row, here)) != len(names):
            raise PlanError(f"{here} must have {len(names)} values.")
        cells = [
            cell if type(cell) is hint and hint in SIMPLE else revive(hint, cell, f"{here} {name}")
            for (name, hint), cell in zip(hints, row, strict=True)
        ]
        found.append(kind(*cells))
    return found


def _action(value: Any, place: str) -> Action:
    read = re.fullmatch(r"(\d+)([A-Z]+)(\d+)", value) if isinstance(value, str) else None
    if read is None or read[2] not in KINDS:
        raise PlanError(f"{place} must be an action, like 2F0.")
    return Action(KINDS[read[2]], int(read[1]), int(read[3]))
