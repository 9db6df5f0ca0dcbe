"""Altered plain values: other values that look as if a test could have written them.

Nobody who sees one can tell it from the value that it was made of: no mark is added. The same generator of random
numbers gives the same alteration of a value.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from random import Random
from typing import Any

TRIES = 12
_CLASSES = (string.ascii_lowercase, string.ascii_uppercase, string.digits)


def altered(value: Any, random: Random) -> Any:
    """A value of the same type that is not equal. Raises LookupError if none is found. Objects of other types in it are
    never asked for anything."""
    alter = _ALTER.get(type(value))
    if alter is not None and _opaque(value):
        alter = _resized if type(value) in (list, tuple) else None
    for _ in range(TRIES if alter is not None else 0):
        made = alter(value, random)  # type: ignore[misc]
        if made != value:
            return made
    raise LookupError("no altered value")


def alterable(value: object) -> bool:
    """Whether `altered` knows the type."""
    return type(value) in _ALTER


def _opaque(value: Any) -> bool:
    """Whether a value holds objects of other types."""
    if type(value) in (list, tuple, set, frozenset):
        return any(map(_opaque, value))
    if type(value) is dict:
        return any(map(_opaque, value)) or any(map(_opaque, value.values()))
    return value is not None and type(value) not in _ALTER


def _resized(items: Any, random: Random) -> Any:
    place = random.randrange(len(items))
    if len(items) > 1 and random.random() < 0.5:
        return items[:place] + items[place + 1 :]
    return items[: place + 1] + items[place:]


def _integer(value: int, random: Random) -> int:
    size = random.choice((3, 10, 2 * abs(value) + 3))
    made = value + random.randint(-size, size)
    return abs(made) if value >= 0 else made


def _float(value: float, random: Random) -> float:
    digits = len(repr(value).partition(".")[2])
    made = value + random.choice((-1, 1)) * random.choice((1, 2, 10)) / random.choice((1, 10**digits))
    return round(made, digits)


def _text(value: str, random: Random) -> str:
    if not value:
        return random.choice(string.ascii_lowercase)
    place = random.randrange(len(value))
    old = value[place]
    letters = next((letters for letters in _CLASSES if old in letters), value)
    kind = random.randrange(4)
    if kind == 0:
        return value[:place] + random.choice(letters) + value[place + 1 :]
    if kind == 1:
        return value[:place] + value[place + 1 :]
    if kind == 2:
        return value[:place] + random.choice(letters) + value[place:]
    parts = [*value]
    other = random.randrange(len(value))
    parts[place], parts[other] = parts[other], parts[place]
    return "".join(parts)


def _bytes(value: bytes, random: Random) -> bytes:
    return _text(value.decode("latin-1"), random).encode("latin-1")


def _items(items: list[Any], random: Random) -> list[Any]:
    """A list with an item altered, left out, repeated, or in another place."""
    if not items:
        return [random.choice((0, 1, 2, "a", "b", None))]
    place, other = random.randrange(len(items)), random.randrange(len(items))
    kind = random.randrange(5)
    if kind == 0 and len(items) > 1:
        return [*items[:place], *items[place + 1 :]]
    if kind == 1:
        return [*items[:place], items[other], *items[place:]]
    if kind == 2 and items[place] is not items[other]:
        items[place], items[other] = items[other], items[place]
        return items
    try:
        items[place] = altered(items[place], random)
    except LookupError:
        return [*items[: place + 1], *items[place:]]
    return items


def _members(items: list[Any], random: Random) -> list[Any]:
    return _items(sorted(items, key=repr), random)


def _entries(value: dict[Any, Any], random: Random) -> dict[Any, Any]:
    if not value:
        return {random.choice((0, 1, "a", "b")): random.choice((0, 1, "a", None))}
    made = dict(value)
    key = random.choice([*made])
    kind = random.randrange(3)
    if kind == 0 and len(made) > 1:
        del made[key]
        return made
    if kind == 1:
        try:
            made[altered(key, random)] = made.pop(key)
        except LookupError:
            return {}
        return made
    try:
        made[key] = altered(made[key], random)
    except LookupError:
        del made[key]
    return made


_ALTER: dict[type, Callable[[Any, Random], Any]] = {
    bool: lambda value, random: not value,
    int: _integer,
    float: _float,
    str: _text,
    bytes: _bytes,
    list: lambda value, random: _items([*value], random),
    tuple: lambda value, random: tuple(_items([*value], random)),
    set: lambda value, random: set(_members([*value], random)),
    frozenset: lambda value, random: frozenset(_members([*value], random)),
    dict: _entries,
}
