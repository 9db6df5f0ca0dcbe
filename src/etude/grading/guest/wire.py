"""Carries values, calls and exceptions between a hidden test and the library under test, which run in two processes.

One side (`verifier.py`) runs the test, the other (`tested.py`) holds the agent's tree. Plain values cross by copy. All
other objects stay in their process and cross as a handle, a number that their owner knows. A message is a length and
JSON. Nothing is unpickled, and input that this module would not write raises `Garbage`.

A request is [operation, argument...], a reply ["=", value, changes, warnings] or ["!", exception]. While a side waits
for its reply it serves requests of the other: callbacks. Arguments that a call changed in place are written back
if the side that sent them allows it.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import pathlib
import re
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

MAX_FRAME = 8 << 20
MAX_DEPTH = 100
MAX_EXPORTS = 200_000
BIG = 1 << 62
REPLY, RAISED = "=", "!"


class Garbage(BaseException):
    """The received data is malformed, or a message out of turn."""


class Gone(BaseException):
    """The other process has ended."""


class Unsendable(Exception):
    """A value that cannot cross: too deep or too large."""


class Context:
    """The containers of one message, numbered in order of first use, so that identity within the message is kept."""

    def __init__(self, known: Sequence[object] = ()) -> None:
        """`known` are containers of the request that this message replies to."""
        self.order: list[Any] = []
        self.given: dict[int, Any] = {}  # objects of the other side by number, as this message names them
        self.seen: dict[int, list[Any]] = {id(v): ["r", n] for n, v in enumerate(known)}
        self.known = known
        self.described: list[int] = []  # classes that this message describes
        self.owned: list[Any] | None = None  # in a request: objects of the side that serves it, which the other names
        self.depth = 0


_EXACT = datetime.datetime, datetime.date, datetime.time
_TEXTS: dict[type, str] = {
    decimal.Decimal: "Decimal",
    pathlib.PosixPath: "PosixPath",
    pathlib.PurePosixPath: "PurePosixPath",
    pathlib.PureWindowsPath: "PureWindowsPath",
    uuid.UUID: "UUID",
}
_FROM_TEXT: dict[str, Callable[[str], object]] = {
    "Decimal": decimal.Decimal,
    "PosixPath": pathlib.PosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
    "UUID": uuid.UUID,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
}
_SINGLE: dict[str, object] = {"...": Ellipsis, "NotImplemented": NotImplemented}
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f", collections.deque: "q"}
_MAPPINGS: dict[type, str] = {
    dict: "d",
    collections.OrderedDict: "do",
    collections.Counter: "dc",
    collections.defaultdict: "dd",
}
_MAKE_MAPPING = {"d": dict, "do": collections.OrderedDict, "dc": collections.Counter}
MUTABLE = frozenset((list, set, bytearray, collections.deque, *_MAPPINGS))


class Wire:
    """One end of the connection. Subclasses define the forms of objects that are not plain values, and their
    mirrors."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        self.lock = threading.RLock()
        self.exported: list[Any] = []
        self.numbers: dict[int, int] = {}  # id of an exported object -> its number
        self.described: set[int] = set()  # numbers of classes that the other side knows

    # Messages

    def send(self, message: list[Any]) -> None:
        """Send a message. Raises Unsendable, before anything was sent, and Gone."""
        try:
            data = json.dumps(message, separators=(",", ":")).encode()
        except (ValueError, RecursionError) as e:
            raise Unsendable(str(e)) from None
        if len(data) > MAX_FRAME:
            raise Unsendable("the value is too large")
        try:
            self.sock.sendall(struct.pack("<I", len(data)) + data)
        except OSError:
            raise Gone from None

    def receive(self) -> list[Any]:
        """The next message. Raises Gone, Garbage."""
        head = self._read(4)
        (size,) = struct.unpack("<I", head)
        if size > MAX_FRAME:
            raise Garbage("a message is too long")
        try:
            message = json.loads(self._read(size))
        except (ValueError, RecursionError):
            raise Garbage("a message is not JSON") from None
        if type(message) is not list or not message or type(message[0]) is not str:
            raise Garbage("a message has no operation")
        return message

    def _read(self, size: int) -> bytes:
        while len(self.buffer) < size:
            try:
                data = self.sock.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                raise Gone
            self.buffer += data
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def request(self, operation: str, *values: object) -> Any:
        """Send an operation with values to the other side, and wait for the result."""
        with self.lock:
            context = Context()
            message = [operation, *[self.encode(value, context) for value in values]]
            self.send(message)
            self.described.update(context.described)
            return self._result(self._wait(), context)

    def _wait(self) -> list[Any]:
        while True:
            message = self.receive()
            if message[0] in (REPLY, RAISED):
                return message
            self.answer(message)

    def _result(self, reply: list[Any], sent: Context) -> Any:
        made = Context(sent.order)
        made.given = sent.given
        if reply[0] == RAISED:
            raise self.checked(lambda: self.decode_exception(reply[1], made))
        if len(reply) != 4 or type(reply[2]) is not list or type(reply[3]) is not list:
            raise Garbage("a reply has another length")
        value = self.checked(lambda: self.decode(reply[1], made))
        for change in reply[2]:
            self.checked(lambda change=change: self._change(change, sent.order, made))
        for warning in reply[3]:
            self.warned(warning)
        return value

    def answer(self, message: list[Any]) -> None:
        """Serve a request of the other side."""
        made = Context()
        made.owned = []
        values = self.checked(lambda: [self.decode(part, made) for part in message[1:]])
        mutable = [(n, v) for n, v in enumerate(made.order) if type(v) in MUTABLE]
        before = [(n, v, bytes(v) if type(v) is bytearray else v.copy()) for n, v in mutable]
        context = Context(made.order)
        try:
            result = self.serve(message[0], values, made)
            changes = [self._changed(n, v, context) for n, v, old in before if not _same(v, old)]
            reply = [REPLY, self.encode(result, context), changes, self.warnings()]
            self._reply(reply, context)
        except (Garbage, Gone):
            raise
        except BaseException as e:  # the code may raise anything
            context = Context(made.order)
            try:
                self._reply([RAISED, self.encode_exception(e, context)], context)
            except Unsendable:
                self._reply([RAISED, self.encode_exception(ValueError("unsendable"), Context())], Context())

    def _reply(self, reply: list[Any], context: Context) -> None:
        self.send(reply)
        self.described.update(context.described)

    def checked(self, work: Callable[[], Any]) -> Any:
        """The result of `work` on data of the other side. Raises Garbage if the data is malformed."""
        try:
            return work()
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, re.error) as e:
            raise Garbage(f"{type(e).__name__}: {e}"[:200]) from None

    # Methods for subclasses

    def serve(self, operation: str, values: list[Any], context: Context) -> object:
        """Carry out a request of the other side, which was decoded in that context."""
        raise NotImplementedError

    def encode_other(self, value: object, context: Context) -> list[Any]:
        """The form of a value that is not plain."""
        raise NotImplementedError

    def decode_other(self, form: list[Any], context: Context) -> Any:
        """The object of a form that `encode_other` made."""
        raise NotImplementedError

    def encode_exception(self, error: BaseException, context: Context) -> list[Any]:
        """The form of an exception."""
        raise NotImplementedError

    def decode_exception(self, form: Any, context: Context) -> BaseException:
        """The exception of a form that `encode_exception` made."""
        raise NotImplementedError

    def changes(self, old: object, new: object) -> bool:
        """Whether the other side may change a container that it was given."""
        return True

    def warned(self, warning: Any) -> None:
        """Receive a warning that the other side has issued."""

    def warnings(self) -> list[Any]:
        """Warnings since the last reply."""
        return []

    # Plain values

    def export(self, value: object) -> int:
        """The number of an object of this side."""
        number = self.numbers.get(id(value))
        if number is None:
            if len(self.exported) >= MAX_EXPORTS:
                raise Unsendable("too many objects")
            number = self.numbers[id(value)] = len(self.exported)
            self.exported.append(value)
        return number

    def own(self, number: Any) -> Any:
        """The object of this side with that number."""
        if type(number) is not int or not 0 <= number < len(self.exported):
            raise Garbage("no such object")
        return self.exported[number]

    def encode(self, value: Any, context: Context) -> Any:
        """The JSON form of a value. Raises Unsendable."""
        kind = type(value)
        if value is None or kind is str or kind is bool or kind is float:
            return value
        if kind is int:
            return value if -BIG < value < BIG else ["i", hex(value)]
        if kind in _SEQUENCES or kind in _MAPPINGS or kind is bytearray:
            if (seen := context.seen.get(id(value))) is not None:
                return seen
            context.seen[id(value)] = ["a", len(context.order)]
            context.order.append(value)
            return self._container(value, kind, context)
        if kind is bytes:
            return ["b", value.decode("latin-1")]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind in _TEXTS:
            return ["x", _TEXTS[kind], str(value)]
        if kind in _EXACT and (getattr(value, "tzinfo", None) is None or type(value.tzinfo) is datetime.timezone):
            return ["x", kind.__name__, value.isoformat()]
        if kind is datetime.timedelta:
            return ["td", value.days, value.seconds, value.microseconds]
        if kind is fractions.Fraction:
            return ["fr", self.encode(value.numerator, context), self.encode(value.denominator, context)]
        if kind in (range, slice):
            parts = (value.start, value.stop, value.step)
            return ["rg" if kind is range else "sl", *[self.encode(part, context) for part in parts]]
        if kind is re.Pattern:
            return ["re", self.encode(value.pattern, context), value.flags]
        if value is Ellipsis or value is NotImplemented:
            return ["n", "..." if value is Ellipsis else "NotImplemented"]
        return self.encode_other(value, context)

    def _container(self, value: Any, kind: type, context: Context) -> list[Any]:
        context.depth += 1
        if context.depth > MAX_DEPTH:
            raise Unsendable("the value is too deep")
        encode = self.encode
        if kind is bytearray:
            form = ["ba", bytes(value).decode("latin-1")]
        elif kind in _SEQUENCES:
            form = [_SEQUENCES[kind], *[encode(item, context) for item in value]]
            if kind is collections.deque:
                form.insert(1, value.maxlen)
        else:
            form: list[Any] = [_MAPPINGS[kind]]
            if kind is collections.defaultdict:
                form.append(encode(value.default_factory, context))
            for key, item in value.items():
                form.append(encode(key, context))
                form.append(encode(item, context))
        context.depth -= 1
        return form

    def decode(self, form: Any, context: Context) -> Any:
        """The value of a JSON form. Raises Garbage, or any exception for malformed data (see `checked`)."""
        if type(form) is not list:
            if type(form) is dict:
                raise Garbage("an object")
            return form
        tag = form[0]
        if tag == "l" or tag == "s" or tag == "q":
            made: Any = [] if tag == "l" else set() if tag == "s" else collections.deque(maxlen=form[1])
            context.order.append(made)
            add = made.add if tag == "s" else made.append
            for item in form[2 if tag == "q" else 1 :]:
                add(self.decode(item, context))
            return made
        if tag == "t" or tag == "f":
            place = len(context.order)
            context.order.append(None)
            items = [self.decode(item, context) for item in form[1:]]
            made = context.order[place] = tuple(items) if tag == "t" else frozenset(items)
            return made
        if type(tag) is str and tag in _DECODERS:
            return _DECODERS[tag](self, form, context)
        return self.decode_other(form, context)

    def _mapping(self, form: list[Any], context: Context) -> Any:
        if form[0] == "dd":
            made: Any = collections.defaultdict()
            context.order.append(made)
            made.default_factory = self.decode(form[1], context)
            rest = form[2:]
        else:
            made = _MAKE_MAPPING[form[0]]()
            context.order.append(made)
            rest = form[1:]
        if len(rest) % 2:
            raise Garbage("a key without a value")
        for i in range(0, len(rest), 2):
            key = self.decode(rest[i], context)
            made[key] = self.decode(rest[i + 1], context)
        return made

    def _alias(self, form: list[Any], context: Context) -> Any:
        number, places = form[1], context.order if form[0] == "a" else context.known
        if type(number) is not int or not 0 <= number < len(places):
            raise Garbage("no such container")
        return places[number]

    def _bytearray(self, form: list[Any], context: Context) -> bytearray:
        made = bytearray(form[1].encode("latin-1"))
        context.order.append(made)
        return made

    # Changes in place

    def _changed(self, number: int, value: Any, context: Context) -> list[Any]:
        context.seen.pop(id(value), None)
        form = self.encode(value, context)
        context.seen[id(value)] = ["r", number]
        return [number, form]

    def _change(self, change: Any, sent: list[Any], made: Context) -> None:
        number, form = change
        old, new = sent[number], self.decode(form, made)
        if not self.changes(old, new):
            return
        if type(old) is not type(new) or type(old) not in MUTABLE:
            raise Garbage("an argument became another type")
        if isinstance(old, (list, bytearray)):
            old[:] = new
        elif isinstance(old, collections.deque):
            old.clear()
            old.extend(new)
        else:
            old.clear()
            old.update(new)


_DECODERS: dict[str, Callable[[Wire, list[Any], Context], Any]] = {
    **dict.fromkeys(_MAPPINGS.values(), Wire._mapping),
    "a": Wire._alias,
    "r": Wire._alias,
    "ba": Wire._bytearray,
    "b": lambda w, f, c: f[1].encode("latin-1"),
    "i": lambda w, f, c: int(f[1], 16),
    "c": lambda w, f, c: complex(float(f[1]), float(f[2])),
    "x": lambda w, f, c: _FROM_TEXT[f[1]](f[2]),
    "n": lambda w, f, c: _SINGLE[f[1]],
    "td": lambda w, f, c: datetime.timedelta(f[1], f[2], f[3]),
    "fr": lambda w, f, c: fractions.Fraction(w.decode(f[1], c), w.decode(f[2], c)),
    "rg": lambda w, f, c: range(*[w.decode(part, c) for part in f[1:4]]),
    "sl": lambda w, f, c: slice(*[w.decode(part, c) for part in f[1:4]]),
    "re": lambda w, f, c: re.compile(w.decode(f[1], c), int(f[2]) & ~re.DEBUG.value),
}


def contents(value: Any, other: Callable[[Any], Any]) -> Any:
    """A key that containers of the same contents share; `other` gives that of any other object."""
    kind = type(value)
    if kind is bytearray:
        return kind, bytes(value)
    if kind in _SEQUENCES:
        keys: Any = [contents(item, other) for item in value]
    elif kind in _MAPPINGS:
        keys = [(contents(key, other), contents(item, other)) for key, item in value.items()]
    else:
        return other(value)
    return kind, tuple(keys) if kind in (list, tuple, collections.deque, collections.OrderedDict) else frozenset(keys)


def _same(value: Any, old: Any) -> bool:
    """Whether a container still holds the same objects."""
    if len(value) != len(old):
        return False
    if isinstance(value, dict):
        return all(map(is_, value, old)) and all(map(is_, value.values(), old.values()))
    if isinstance(value, set):
        return value == old
    return value == old if isinstance(value, bytearray) else all(map(is_, value, old))
