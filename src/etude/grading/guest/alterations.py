"""Other plain values that look as if a test could have written them.

Whoever sees them all with the value that they stand beside should not find it: it has no mark, and is not their middle.
The same generator of random numbers gives the same ones.
"""

from __future__ import annotations

import string
import types
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

TRIES = 12
MAX_LITERALS = 60  # of one type
MAX_ELEMENTS = 2000  # of a value that is altered, nested ones included
Literals = Mapping[type, list[Any]]
_CLASSES = (string.ascii_lowercase, string.ascii_uppercase, string.digits)


def lineup(
    value: Any, count: int, random: Random, step: Callable[[Any, Random], Any], jump: Callable[[Any, Random], Any]
) -> list[Any]:
    """At most `count` other values. Most of them lie on a path of alterations, a `step` from each to the next, on which
    the value has any place; a `jump` leads to a value of elsewhere. Both raise LookupError where there is none."""
    made: list[Any] = []
    keys = {_key(value)}

    def add(how: Callable[[Any, Random], Any], start: Any) -> Any:
        for _ in range(TRIES):
            try:
                other = how(start, random)
            except LookupError:
                break
            if (key := _key(other)) not in keys:
                keys.add(key)
                made.append(other)
                return other
        return start

    near = max(1, count - 2)
    before = random.randrange(near + 1)
    for length in (before, near - before):
        current = value
        for _ in range(length):
            current = add(step, current)
    while len(made) < count:
        size = len(made)
        add(jump, value)
        if len(made) == size:
            add(step, random.choice([value, *made]))
        if len(made) == size:
            break
    random.shuffle(made)
    return made


def _key(value: Any) -> Any:
    """A key that equal values share. Objects of other types are never asked."""
    if isinstance(value, dict):
        return dict, frozenset((_key(key), _key(item)) for key, item in value.items())
    if type(value) in (set, frozenset):
        return type(value), frozenset(map(_key, value))
    if type(value) in (list, tuple):
        return type(value), tuple(map(_key, value))
    return (type(value), value) if value is None or type(value) in _ALTER else id(value)


def literals(space: Mapping[str, Any]) -> dict[type, list[Any]]:
    """The constants in the functions of a module, by type."""
    constants: dict[type, dict[str, Any]] = {}
    pending: list[Any] = [*space.values()]
    pending += [inner for kind in pending if isinstance(kind, type) for inner in vars(kind).values()]
    codes = [value.__code__ for value in pending if type(value) is types.FunctionType]  # a mirror may pose as one
    while codes:
        for constant in codes.pop().co_consts:
            if isinstance(constant, types.CodeType):
                codes.append(constant)
            elif alterable(constant) and not (isinstance(constant, str) and ("%(py" in constant or "\n" in constant)):
                constants.setdefault(type(constant), {})[repr(constant)] = constant
    if tuple in constants:
        constants[list] = {name: [*value] for name, value in constants[tuple].items()}
    return {kind: [values[name] for name in sorted(values)[:MAX_LITERALS]] for kind, values in constants.items()}


def altered(value: Any, random: Random) -> Any:
    """A value of the same type that is not equal. Raises LookupError if there is none. Objects of other types in it are
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
    """Whether `altered` knows the type, and the value is not huge."""
    count, pending = 0, [value]
    while pending and count <= MAX_ELEMENTS:
        inner: Any = pending.pop()
        if type(inner) in (list, tuple, set, frozenset, dict):
            count += len(inner)
            pending += inner if count <= MAX_ELEMENTS else ()
            pending += inner.values() if type(inner) is dict else ()
    return type(value) in _ALTER and count <= MAX_ELEMENTS


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
