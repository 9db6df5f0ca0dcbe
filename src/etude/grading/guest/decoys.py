"""Decoy comparisons: where the library decides, it is asked the same with other operands, the real one among them.

An object that claims to equal everything, or everything of its class, is wrong about a decoy. The right answers are
those of the right library, recorded by place of the test. A decoy that raises there, or whose answer is not the same
each time, is not used. Decoys depend on nothing inside the library: altered plain values, None, a fresh object, the
left operand itself, objects of the same class that the same test has received before, identified by the place where
they came and their number at that place, and objects that a constructor gives for altered arguments.

The tested process knows how decoys are made. So other values look as real ones, some are those of other tests, all are
drawn by a secret of the recordings, and a constructor that makes an operand is called with other arguments before and
after the real ones: no form, order or age tells which of the values or objects the test asks about.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .alterations import Literals, alterable, altered, lineup
from .mirrors import Handle, RemoteType

FIRST, ALIKE, OTHERS = 8, 3, 1  # decoys of one comparison: of the real operand's class, for a new place and an old one
ALTERED = MADE = 7  # altered values of one operand, and objects for altered arguments
OBJECTS = 3  # objects of the library that can stand in one place
VISITS, LATER = 8, 3  # comparisons of one place that have decoys; of the later ones, one in LATER
MAX_RECEIVED = 2000  # objects of one test that are kept as decoys
MAX_ANSWERS = 400  # of one test
MAX_ORIGINS = 16  # calls of one test that are made with altered arguments, too
_ANY = ("None", "object")  # decoys of no class


class NoDecoy(Exception):
    """There is no other value, or a constructor takes no other argument."""


class ComparisonDecoys:
    """The decoys of one test at a time.

    answers: place and operation -> decoy -> the answer of the library, None if it is no use; once the right library is
        recorded, of that one.
    origins: the calls of constructors that make operands: place and number at that place.
    undecidable: in a recording, comparisons that no decoy of the same class tells from a library that always says the
        same.
    """

    def __init__(self, wire: Any, recording: bool, secret: str) -> None:
        """`secret`: of the recordings; empty if they have no decoys."""
        self.wire = wire
        self.recording = recording
        self.secret = secret
        self.asking = False
        self.random = random.SystemRandom()  # forks share the state of the others
        self.begin({}, ())

    def begin(self, answers: Mapping[str, Mapping[str, bool | None]], origins: Sequence[str]) -> None:
        """Start a test."""
        self.answers = {place: dict(known) for place, known in answers.items()}
        self.origins = dict.fromkeys(origins)
        self.count = 0  # of answers in a recording
        self.real: dict[str, set[bool | None]] = {}
        self.received: dict[str, Handle] = {}
        self.counts: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.came: dict[int, str] = {}  # number of an object -> the call that made it
        self.made: dict[str, list[Any]] = {}  # call -> its results for altered arguments
        self.visits: Counter[str] = Counter()
        self.objects: dict[str, list[str]] = {}  # place -> objects that came before its first comparison

    def receive(self, handle: Any) -> None:
        """Note an object of the library that is a result."""
        if self.asking or not (self.recording or self.answers):
            return
        if isinstance(handle, Handle) and len(self.received) < MAX_RECEIVED:
            place = self.wire.place()
            self.received[f"#{place}#{self.counts[place]}"] = handle
            self.counts[place] += 1

    def construct(self, call: Callable[..., Any], values: Sequence[Any]) -> Any:
        """The result of `call(*values)`, the request for a call of a class or of its method. A call whose result will
        be an operand is made with altered arguments, too."""
        origin = f"{(place := self.wire.place())} call {self.calls[place]}"
        self.calls[place] += 1
        if origin not in self.origins:
            made = call(*values)
        else:
            made = self._among_others(origin, call, values)
        if isinstance(made, Handle):
            self.came[made._remote_number] = origin
        return made

    def _among_others(self, origin: str, call: Callable[..., Any], values: Sequence[Any]) -> Any:
        requests = self._requests(origin, values)
        others = self.made[origin] = [None] * MADE
        result, error = None, None
        for number in self.random.sample(range(-1, len(requests)), len(requests) + 1):
            if number < 0:
                try:
                    result = call(*values)
                except Exception as e:
                    error = e
                continue
            before, self.asking = self.asking, True
            try:
                others[number] = call(*requests[number])
            except Exception:  # there is no such decoy, with the right library either
                continue
            finally:
                self.asking = before
        if error is not None:
            raise error
        return result

    def _requests(self, origin: str, values: Sequence[Any]) -> list[Any]:
        """The values of a request with other arguments. None if an argument may tell of the call."""
        *head, arguments, keywords = values
        passed = {**dict(enumerate(arguments)), **keywords}
        places = [place for place, value in passed.items() if alterable(value)]
        if not places or not all(map(_harmless, passed.values())):
            return []
        known = self.wire.literals()

        def step(passed: dict[Any, Any], random: random.Random) -> dict[Any, Any]:
            place = random.choice(places)
            return {**passed, place: altered(passed[place], random)}

        def jump(passed: dict[Any, Any], random: random.Random) -> dict[Any, Any]:
            place = random.choice(places)
            return {**passed, place: _literal(passed[place], random, known)}

        made = lineup(passed, MADE, self._generator(origin), step, jump)
        split = len(arguments)
        return [
            [*head, tuple(g[n] for n in range(split)), {name: v for name, v in g.items() if name in keywords}]
            for g in made
        ]

    def _values(self, place: str, right: Any) -> list[Any]:
        """Other values for the right operand."""
        known = self.wire.literals()
        generator = self._generator(f"{place} {type(right).__name__}")
        return lineup(right, ALTERED, generator, altered, lambda value, random: _literal(value, random, known))

    def _generator(self, place: str) -> random.Random:
        return random.Random(f"{self.secret} {place}")

    def compare(self, name: str, left: Any, right: Any) -> Any:
        """The library's answer on a comparison, after those on some decoys, in random order."""
        place = f"{self.wire.place()} {name}"
        self.visits[place] += 1
        due = self.visits[place] <= VISITS or self.random.randrange(LATER) == 0
        if self.recording:
            answer = self._ask(name, left, right)
            self.real.setdefault(place, set()).add(answer if type(answer) is bool else None)
            if due and self.secret:
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
        for operand in (left, right):
            origin = self.came.get(operand._remote_number) if isinstance(operand, Handle) else None
            if origin is not None and len(self.origins) < MAX_ORIGINS:
                self.origins[origin] = None
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
        values = self._values(place, right) if alterable(right) else []
        changed = [f"altered:{n}" for n in range(len(values))]
        made = [f"made:{n}" for n in range(MADE) if self._origin(left, right)]
        for decoy in ("None", "object", "self", *self.objects[place], *changed, *made):
            if self.count >= MAX_ANSWERS and decoy not in answers:
                return
            self.count += decoy not in answers
            try:
                answer = self._ask(name, *self._operands(decoy, left, right, values))
            except Exception:  # the library may raise anything
                answer = None
            answer = answer if type(answer) is bool else None
            answers[decoy] = answer if answers.get(decoy, answer) is answer else None

    def _origin(self, left: Any, right: Any) -> str | None:
        """The call with altered arguments that has made an operand, the right one if it can be."""
        numbers = [operand._remote_number for operand in (right, left) if isinstance(operand, Handle)]
        return next((origin for n in numbers if (origin := self.came.get(n)) in self.made), None)

    def _operands(self, decoy: str, left: Any, right: Any, values: Sequence[Any]) -> tuple[Any, Any]:
        """The operands of a decoy. Raises NoDecoy if this run has none, LookupError if an object has not come."""
        kind, _, number = decoy.rpartition(":")
        if kind == "made":
            origin = self._origin(left, right)
            made = None if origin is None else self.made[origin][int(number)]
            if made is None:
                raise NoDecoy
            of_right = isinstance(right, Handle) and self.came.get(right._remote_number) == origin
            return (left, made) if of_right else (made, right)
        if decoy.startswith("#"):
            return left, self.received[decoy]
        if kind == "altered":
            if int(number) >= len(values):
                raise NoDecoy
            return left, values[int(number)]
        return left, left if decoy == "self" else None if decoy == "None" else object()

    def _mixed(self, place: str, name: str, left: Any, right: Any) -> Any:
        recorded = self.answers[place]
        if _type(right) not in recorded:
            self.wire.blame("a comparison by the library has an operand of another type")
        others = [decoy for decoy in recorded if decoy in _ANY]
        can_be = [decoy for decoy in recorded if decoy not in _ANY and not decoy.startswith("type:")]
        if not alterable(right):
            can_be = [decoy for decoy in can_be if not decoy.startswith("altered:")]
        if self._origin(left, right) is None:
            can_be = [decoy for decoy in can_be if not decoy.startswith("made:")]
        count = FIRST if self.visits[place] <= 2 else ALIKE
        chosen: list[str] = self.random.sample(can_be, min(count, len(can_be)))
        chosen += self.random.sample(others, min(OTHERS, len(others)))
        values = self._values(place, right) if alterable(right) else []
        order = [*chosen, ""]
        self.random.shuffle(order)
        answer, error = None, None
        for decoy in order:
            try:
                if not decoy:
                    answer = self._ask(name, left, right)
                    continue
                reply = self._ask(name, *self._operands(decoy, left, right, values))
            except Exception as e:
                if not decoy:
                    error = e
                if not decoy or isinstance(e, NoDecoy):
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


def _harmless(value: Any) -> bool:
    return value is None or alterable(value) or isinstance(value, (Handle, RemoteType))


def _literal(value: Any, random: random.Random, known: Literals) -> Any:
    """A value of the tests of the same type. Raises LookupError if there is none."""
    return random.choice(known.get(type(value), ()))


def _type(value: Any) -> str:
    """The type of an operand, as far as other decoys belong to it."""
    return f"type:{'object' if isinstance(value, Handle) else type(value).__name__}"


def constructs(operation: str, values: Sequence[Any]) -> bool:
    """Whether a request calls a class or its method."""
    return operation in ("call", "method") and isinstance(values[0], RemoteType)
