"""Decoy comparisons: where the library decides, it is asked the same with other operands, the real one among them.

An object that claims to equal everything, or everything of its class, is wrong about a decoy. The right answers are
those of the right library, recorded by place of the test. A decoy that raises there, or whose answer is not the same
each time, is not used. Decoys depend on nothing inside the library: altered plain values, None, a fresh object, the
left operand itself, and objects of the same class that the same test has received before, identified by the place where
they came and their number at that place.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .mirrors import Handle

ALIKE, OTHERS = 4, 1  # decoys of one comparison: of the class of the real operand, and others
OBJECTS = 3  # objects of the library that can stand in one place
VISITS, LATER = 8, 8  # comparisons of one place that have decoys; of the later ones, one in LATER
MAX_RECEIVED = 2000  # objects of one test that are kept as decoys
MAX_ANSWERS = 400  # of one test

_CHANGES: dict[type, tuple[Callable[[Any], Any], ...]] = {
    bool: (lambda v: not v,),
    int: (lambda v: v + 1, lambda v: v - 1, lambda v: v * 2 + 7, lambda v: -v - 3),
    float: (lambda v: v + 1.0, lambda v: v - 0.5, lambda v: -v - 3.0),
    str: (lambda v: v + "x", lambda v: "x" + v, lambda v: v[:-1] + "~", lambda v: v + v + "1"),
    bytes: (lambda v: v + b"x", lambda v: b"x" + v, lambda v: v[:-1] + b"~"),
    list: (lambda v: [*v, 0], lambda v: [None, *v], lambda v: [*v[:-1], "x"], lambda v: [*v, *v, 1]),
    tuple: (lambda v: (*v, 0), lambda v: (None, *v), lambda v: (*v[:-1], "x"), lambda v: (*v, *v, 1)),
    set: (lambda v: v | {"x"}, lambda v: v | {0.5}, lambda v: {*[*v][1:], "y"}),
    frozenset: (lambda v: v | {"x"}, lambda v: v | {0.5}, lambda v: frozenset([*[*v][1:], "y"])),
    dict: (lambda v: {**v, "x": 0}, lambda v: {**v, 0.5: None}, lambda v: {**dict([*v.items()][1:]), "y": 1}),
}
_ANY = ("None", "object")  # decoys of no class


class ComparisonDecoys:
    """The decoys of one test at a time.

    answers: place and operation -> decoy -> the answer of the library, None if it is no use; once the right library is
        recorded, of that one.
    undecidable: in a recording, comparisons that no decoy of the same class tells from a library that always says the
        same.
    """

    def __init__(self, wire: Any, recording: bool, used: bool) -> None:
        """`used`: whether a recording has any."""
        self.wire = wire
        self.recording = recording
        self.used = used
        self.asking = False
        self.random = random.SystemRandom()  # forks share the state of the others
        self.begin({})

    def begin(self, answers: Mapping[str, Mapping[str, bool | None]]) -> None:
        """Start a test."""
        self.answers = {place: dict(known) for place, known in answers.items()}
        self.count = 0  # of answers in a recording
        self.real: dict[str, set[bool | None]] = {}
        self.received: dict[str, Handle] = {}
        self.counts: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self.objects: dict[str, list[str]] = {}  # place -> objects that came before its first comparison

    def receive(self, handle: Any) -> None:
        """Note an object of the library that is a result."""
        if (self.recording or self.answers) and isinstance(handle, Handle) and len(self.received) < MAX_RECEIVED:
            place = self.wire.place()
            self.received[f"#{place}#{self.counts[place]}"] = handle
            self.counts[place] += 1

    def compare(self, name: str, left: Any, right: Any) -> Any:
        """The library's answer on a comparison, after those on some decoys, in random order."""
        place = f"{self.wire.place()} {name}"
        self.visits[place] += 1
        due = self.visits[place] <= VISITS or self.random.randrange(LATER) == 0
        if self.recording:
            answer = self._ask(name, left, right)
            self.real.setdefault(place, set()).add(answer if type(answer) is bool else None)
            if due and self.used:
                self._record(place, name, left, right)
            return answer
        if not due or place not in self.answers:
            return self._ask(name, left, right)
        return self._mixed(place, name, left, right)

    def _ask(self, name: str, left: Any, right: Any) -> Any:
        before, self.asking = self.asking, True
        try:
            return self.wire.request("op", name, left, right)
        finally:
            self.asking = before

    def _record(self, place: str, name: str, left: Any, right: Any) -> None:
        if place not in self.objects:
            kind = type(right if isinstance(right, Handle) else left)
            others = (
                key
                for key, made in reversed(self.received.items())
                if type(made) is kind and made is not left and made is not right
            )
            self.objects[place] = [*itertools.islice(others, OBJECTS)]
        answers = self.answers.setdefault(place, {})
        answers[_type(right)] = True
        for decoy in ("None", "object", "self", *self.objects[place], *_changed(right)):
            if self.count >= MAX_ANSWERS and decoy not in answers:
                return
            self.count += decoy not in answers
            try:
                answer = self._ask(name, left, self._operand(decoy, left, right))
            except Exception:  # the library may raise anything
                answer = None
            answer = answer if type(answer) is bool else None
            answers[decoy] = answer if answers.get(decoy, answer) is answer else None

    def _operand(self, decoy: str, left: Any, right: Any) -> Any:
        """The operand of that name. Raises LookupError if the library has given no such object."""
        if decoy.startswith("#"):
            return self.received[decoy]
        if decoy in _ANY:
            return None if decoy == "None" else object()
        if decoy == "self":
            return left
        return _CHANGES[type(right)][int(decoy.rpartition(":")[2])](right)

    def _mixed(self, place: str, name: str, left: Any, right: Any) -> Any:
        recorded = self.answers[place]
        if _type(right) not in recorded:
            self.wire.blame("a comparison by the library has an operand of another type")
        others = [decoy for decoy in recorded if decoy in _ANY]
        changed = _changed(right)
        alike = [decoy for decoy in recorded if decoy == "self" or decoy[0] == "#" or decoy in changed]
        chosen: list[str] = self.random.sample(alike, min(ALIKE, len(alike)))
        chosen += self.random.sample(others, min(OTHERS, len(others)))
        order = [*chosen, ""]
        self.random.shuffle(order)
        answer, error = None, None
        for decoy in order:
            try:
                if not decoy:
                    answer = self._ask(name, left, right)
                    continue
                reply = self._ask(name, left, self._operand(decoy, left, right))
            except Exception as e:
                if not decoy:
                    error = e
                    continue
                reply = None
            if reply is not recorded[decoy]:
                self.wire.blame("a comparison by the library is wrong about another operand")
        if error is not None:
            raise error
        return answer

    def record(self) -> dict[str, dict[str, bool]]:
        """The answers that are of use."""
        useful = {place: {k: v for k, v in answers.items() if v is not None} for place, answers in self.answers.items()}
        return {place: answers for place, answers in useful.items() if len(answers) > 1}

    @property
    def undecidable(self) -> list[str]:
        """Places of comparisons without a decoy of the same class whose answer differs from the real one."""
        return [place for place, real in self.real.items() if not self._checks(place, real)]

    def _checks(self, place: str, real: set[bool | None]) -> bool:
        alike = (a for d, a in self.answers.get(place, {}).items() if d not in _ANY and not d.startswith("type:"))
        return any(answer is not None and real == {not answer} for answer in alike)


def _type(value: Any) -> str:
    """The type of an operand, as far as other decoys belong to it."""
    return f"type:{'object' if isinstance(value, Handle) else type(value).__name__}"


def _changed(value: Any) -> list[str]:
    """The names of the altered values of a plain value."""
    return [f"{type(value).__name__}:{n}" for n in range(len(_CHANGES.get(type(value), ())))]
