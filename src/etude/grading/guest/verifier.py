"""Runs hidden tests in a process without the agent's code: the library under test is in another process.

An import hook replaces modules of the library by mirrors of those in the tested process (`tested.py`). Operations on
them travel over one socket (`wire.py`, `mirrors.py`). Assertions, fixtures and expected values stay here, and so does
the verdict, which leaves over a descriptor that the tested process never had.

Recordings limit the decisions of the library: a comparison that the tested process answers counts only if the recorded
run of the right library had one at the same place of the same test. So an object that claims to equal everything fails
where the library returns a plain value. What the library does with objects that a test hands over is limited likewise
(`handed.py`), and decisions are checked with decoys (`decoys.py`).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import json
import signal
import socket
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from _pytest.config import Config

from ...sandbox.guest import root
from . import code, handed, mirrors, suite
from .alterations import Literals, literals
from .decoys import ComparisonDecoys, constructs
from .mirrors import SPECIAL, Bound, Handle, RemoteError, RemoteType
from .remote_modules import RemoteFinder, RemoteModule, reference, shared, watch_patches
from .tested import PLAIN_CLASSES
from .wire import RAISED, Context, Garbage, Gone, Unsendable, Wire, contents

_PLAIN_BY_NAME = {kind.__name__: kind for kind in PLAIN_CLASSES}
RECORDING_SECONDS = 15.0  # of one test; longer than any should take on a busy machine
MAX_PLACES = 5000  # of one test
MAX_REQUESTS = 5000  # of one test while it is recorded: some seconds on a busy machine


class Refused(BaseException):
    """The tested process would decide something that the right library did not decide when the test was recorded."""


@dataclass(frozen=True)
class Recorded:
    """The recording of a test: names of operations and decisions, and the right answers on decoys, with the calls that
    are made for them (`decoys.py`)."""

    places: Sequence[str] = ()
    decoys: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    origins: Sequence[str] = ()


class Verifier(Wire):
    """The verifier's end of the connection.

    fault: the reason for which the current test can no longer pass, whatever its code catches.
    places: the decisions and operations of the library in the current test (`handed.py`); `allowed`: those it may make.
    judged: lines at which a result was a plain value or an exception.
    """

    def __init__(self, sock: socket.socket, request: Mapping[str, Any], met: Callable[[], None]) -> None:
        """`met` is called when the tested process has sent its first bytes."""
        super().__init__(sock)
        self.recording = recording = request["recording"]
        self.finder = RemoteFinder(self, request["names"], None if recording else request["exports"])
        self.decoys = ComparisonDecoys(self, recording, request["secret"])
        self.meet: Callable[[], None] | None = met
        self.serving = 0  # operations of the library that are under way in this process
        self.judged: dict[str, None] = {}
        self.fault = ""
        self.gone = False
        self.places: dict[str, None] = {}
        self.allowed: frozenset[str] = frozenset()
        self.silent = False
        self.handles: dict[int, Any] = {}
        self.constants: dict[str, Literals] = {}  # by module
        self.leaving: Any = None  # the exception that leaves a block of the library
        self.begun = False  # whether a test has
        self.requests = 0  # of this test
        self.met: set[int] = set()  # numbers of objects that were results in this test, or while tests were imported
        self.met_at_import: frozenset[int] = frozenset()
        self.looked_up: list[tuple[RemoteModule, str]] = []  # in this test
        self.classes: dict[int, RemoteType] = {}
        self.class_numbers: dict[type, int] = {}
        self.errors: dict[int, tuple[BaseException, int]] = {}  # id of a remote exception -> (exception, number)
        self.kinds: dict[type, int] = {}  # classes of objects passed on; below zero, unlike numbers of objects
        self.imported: dict[str, None] = {}  # places that were used while test modules were imported
        type.__setattr__(Handle, "_remote_wire", self)
        type.__setattr__(RemoteError, "_remote_wire", self)

    # Decisions

    def decides(self, operation: str) -> bool:
        """Whether the library may decide at this place. A recording allows all decisions and keeps their places."""
        place = f"{self.place()} {operation}"
        if self.recording:
            if not self.silent and len(self.places) < MAX_PLACES:
                self.places[place] = None
            return True
        return place in self.allowed

    def says(self, question: str, *values: object) -> bool:
        """Whether the library may decide at this place, and says yes."""
        return self.decides(question) and self.request(question, *values) is True

    def allows(self, operation: str) -> bool:
        """Whether the library may carry out an operation on the objects of this test: see `handed.py`."""
        if self.recording:
            if len(self.places) < MAX_PLACES:
                self.places[operation] = None
            return True
        return operation in self.allowed

    def begin(self, recorded: Recorded, fault: str = "") -> None:
        """Start a test; `fault` is that of the import of its file."""
        if not self.begun:
            self.begun, self.met_at_import = True, frozenset(self.met)
        self.met = set(self.met_at_import)
        for module, name in self.looked_up:
            vars(module).pop(name, None)
        self.looked_up.clear()
        self.allowed, self.places = frozenset(recorded.places), dict(self.imported)
        self.decoys.begin(recorded.decoys, recorded.origins)
        self.judged = {}
        self.requests = 0
        self.fault = self.fault if self.gone else fault

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Keep no places within this context."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def place(self) -> str:
        """The line of the test that is under way: of the innermost frame in its files."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(root.WORKSPACE):
                return f"{path[len(root.WORKSPACE) + 1 :]}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def literals(self) -> Literals:
        """The constants of the test module of `place`."""
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(root.WORKSPACE):
            frame = frame.f_back
        space = {} if frame is None else frame.f_globals
        name = str(space.get("__name__"))
        if name not in self.constants:
            self.constants[name] = literals(space)
        return self.constants[name]

    def refuse(self, handle: Handle) -> None:
        """Fail the test: an object is in a place where the library returned a plain value, or decided nothing."""
        self.blame(f"{type(handle).__qualname__} can't be compared here")
        raise Refused(self.fault)

    def patched(self, target: object) -> None:
        """Fail a test that patches an object of which the library has its own copy, since the patch would not reach the
        copy."""
        place = target if isinstance(target, ModuleType) else sys.modules.get(getattr(target, "__module__", None) or "")
        if isinstance(target, (ModuleType, type)) and isinstance(place, ModuleType) and shared(place.__name__):
            self.blame(f"a patch of {place.__name__} does not reach the library")
            raise Refused(self.fault)

    def blame(self, fault: str) -> None:
        """Keep the reason for which the test fails."""
        self.fault = self.fault or fault

    def changes(self, old: object, new: object) -> bool:
        """As `Wire.changes`. The test fails if the library changes what the right library leaves alone: written back,
        a change could make an argument what the test expects."""
        if self.decoys.asking:
            return False
        if not (allowed := self.decides("change")) and contents(old, self._key) != contents(new, self._key):
            self.blame("an argument is changed where the right library leaves it alone")
        return allowed

    def _key(self, value: Any) -> str:
        """A key that equal plain values share, and mirrors of one object."""
        return json.dumps(self.encode(value, Context()))

    # Messages: an error of the other side ends the connection, and fails the test

    def request(self, operation: str, *values: object) -> Any:
        """As `Wire.request`. A test with very many requests is not recorded: it would take all the time of the rest."""
        self.requests += 1
        if self.recording and self.requests > MAX_REQUESTS:
            self.blame(f"more than {MAX_REQUESTS} operations")
            raise Refused(self.fault)
        call = functools.partial(super().request, operation)
        if self.decoys.asking or not constructs(operation, values):
            return call(*values)
        return self.decoys.construct(call, values)

    def send(self, message: list[Any]) -> None:
        """As `Wire.send`."""
        if self.gone:
            raise Gone
        try:
            super().send(message)
        except Gone:
            self.end("the tested process ended")
            raise

    def _read(self, size: int) -> bytes:
        data = super()._read(size)
        if self.meet is not None:
            self.meet()
            self.meet = None
        return data

    def _result(self, reply: list[Any], sent: Context) -> Any:
        counts_here = self.recording and not self.decoys.asking
        try:
            value = super()._result(reply, sent)
        except Exception:
            if counts_here:
                self.judged[self.place()] = None
            raise
        if self.serving and len(reply) > 1:  # a callback may look up what it reads from its argument
            handed.texts(self, reply[1:2])
        if counts_here and value is not None and not isinstance(value, (Handle, RemoteModule, type)):
            self.judged[self.place()] = None
        return value

    def receive(self) -> list[Any]:
        """As `Wire.receive`."""
        try:
            return super().receive()
        except Gone:
            self.end("the tested process ended")
            raise
        except Garbage as e:
            self.end(f"garbage: {e}")
            raise

    def checked(self, work: Callable[[], Any]) -> Any:
        """As `Wire.checked`."""
        try:
            return super().checked(work)
        except Garbage as e:
            self.end(f"garbage: {e}")
            raise

    def end(self, fault: str) -> None:
        """Close the connection for good."""
        self.blame(fault)
        if not self.gone:
            self.gone = True
            self.sock.close()

    def warned(self, warning: Any) -> None:
        """Issue a warning of the library in this process."""
        if type(warning) is not list or [type(part) for part in warning] != [str, str]:
            raise Garbage("no warning")
        kind = getattr(builtins, warning[0], None)
        if not isinstance(kind, type) or not issubclass(kind, Warning):
            raise Garbage("no warning")
        if self.decoys.asking:
            return
        place = self.place() or "library:1"
        path, _, line = place.rpartition(":")
        warnings.warn_explicit(warning[1], kind, path, int(line))

    # Requests of the tested process: it may use objects that a test has passed on as the right library does

    def answer(self, message: list[Any]) -> None:
        """As `Wire.answer`."""
        if message[0] in ("call", "op"):
            try:
                handed.texts(self, message[2:])
            except TypeError as e:
                self._reply([RAISED, self.encode_exception(e, Context())], Context())
                return
        try:
            super().answer(message)
        except Garbage as e:
            self.end(f"garbage: {e}")
            raise

    def serve(self, operation: str, values: list[Any], context: Context) -> object:
        """As `Wire.serve`. Raises Garbage for a request that no library sends."""
        return handed.serve(self, operation, values, context.owned or [])

    # Objects of the tests

    def encode_other(self, value: Any, context: Context) -> list[Any]:
        """As `Wire.encode_other`."""
        kind = type(value)
        if isinstance(kind, RemoteType):
            if isinstance(value, BaseException):
                return self.encode_exception(value, context)
            context.given[value._remote_number] = value
            return ["o", value._remote_number]
        if isinstance(kind, type) and issubclass(kind, RemoteType):
            return ["o", self.class_numbers[value]]
        if kind is RemoteModule:
            return ["m", value.__name__]
        if kind is Bound:
            return self.encode(value.remote(), context)
        if isinstance(value, BaseException):
            return self.encode_exception(value, context)
        if (form := reference(value)) is not None:
            return form
        if kind in (property, classmethod, staticmethod):
            parts = (value.fget, value.fset, value.fdel) if kind is property else (value.__func__,)
            return ["D", kind.__name__, *[self.encode(part, context) for part in parts]]
        number = self.export(value)
        if number in self.described or number in context.described:
            return ["p", number]
        context.described.append(number)
        if kind in (types.FunctionType, types.MethodType) and (parameters := self._signature(value, context)):
            return ["F", number, _identifier(value.__name__), parameters]
        return ["P", number, self._kind(kind, context)]

    def _kind(self, kind: type, context: Context) -> Any:
        """The number of a class of proxies in the tested process. The class itself is not passed on: no code there may
        call it."""
        number = self.kinds.setdefault(kind, -1 - len(self.kinds))
        if number in self.described or number in context.described:
            return number
        context.described.append(number)
        names = [name for name in SPECIAL if name != "__hash__" and getattr(kind, name, None) is not None]
        own = [name for name in names if getattr(kind, name) is not getattr(object, name, None)]
        return [number, _identifier(kind.__name__), own]

    def _signature(self, value: Any, context: Context) -> list[Any]:
        """The parameters of a function, as far as they are known; the tested process makes a function with the same."""
        try:
            parameters = inspect.signature(value, follow_wrapped=False).parameters.values()
        except (ValueError, TypeError):
            return []
        empty = inspect.Parameter.empty
        form = []
        for p in parameters:
            default = [] if p.default is empty else [self.encode(p.default, context)]
            form.append([p.name, int(p.kind), default])
        return form

    def encode_exception(self, error: BaseException, context: Context) -> list[Any]:
        """As `Wire.encode_exception`."""
        known = self.errors.get(id(error))
        if known is not None:
            return ["o", known[1]]
        number = self.export(error)
        if number in self.described or number in context.described:
            return ["p", number]
        context.described.append(number)
        kind = next(k for k in type(error).__mro__ if k.__module__ == "builtins")
        try:
            arguments = self.encode(error.args, context)
        except Unsendable:
            arguments = self.encode((str(error)[:4000],), context)
        return ["E", number, _identifier(type(error).__name__), kind.__name__, arguments]

    def subclassed(self, made: RemoteType, bases: tuple[type, ...], space: dict[str, Any]) -> None:
        """Make a test's subclass of a library class in the tested process as well."""
        kept = {key: value for key, value in space.items() if key not in ("__module__", "__dict__", "__weakref__")}
        (number,) = self.request("class", made.__name__, bases, kept)
        if type(number) is not int or number in self.classes:
            raise Garbage("no class")
        self.classes[number] = made
        self.class_numbers[made] = number

    # Objects of the library

    def decode_other(self, form: list[Any], context: Context) -> Any:
        """As `Wire.decode_other`."""
        match form:
            case ["o", number]:
                return self._owned(self.own(number), "returned", context)
            case ["h", int(number), kind]:
                if number not in self.handles or type(kind) is list:
                    cls = self._class(kind)
                    cls = Handle if cls is object else cls
                    if not isinstance(cls, RemoteType) or issubclass(cls, BaseException):
                        raise Garbage("a handle of no class")
                    self.handles.setdefault(number, mirrors.stand_in(cls, number))
                return self.handles[number] if context.owned is not None else self._result_object(number, context)
            case ["k", kind] | (["g", "builtins", str()] as kind):
                cls = self._class(kind)
                return cls if isinstance(cls, RemoteType) else self._owned(cls, "returned", context)
            case ["m", str(name)]:
                if (module := self.finder.known(name)) is None:
                    self.blame(f"the module {name} was not recorded")
                    raise Refused(self.fault)
                return module
            case ["E", *_]:
                return self.decode_exception(form, context)
        raise Garbage("an unknown form")

    def _result_object(self, number: int, context: Context) -> Any:
        """The mirror of a result. An object that the test has already, where the right library gives a new one, gets
        another mirror: lists and calls that hold it are not compared by identity. An operand of this very call keeps
        its own: a copy that is the object itself is seen to be."""
        made = self.handles[number]
        if isinstance(made, BaseException):
            return made
        if number in context.given:
            made = context.given[number]
        elif number not in self.met:  # of another test in the same process, on which nothing must depend
            made = self.handles[number] = mirrors.stand_in(type(made), number) if self.begun else made
        elif not self.decides("known"):
            made = mirrors.stand_in(type(made), number)
        self.met.add(number)
        self.decoys.receive(made)
        return made

    def _owned(self, value: Any, how: str, context: Context) -> Any:
        """An object or real class of this process that comes from the library: part of a request, or a result, which is
        the library's decision."""
        if context.owned is not None:
            context.owned.append(value)
        elif value is not self.leaving and not self.decides(f"{handed.class_name(value)} {how}"):
            self.blame(f"{handed.class_name(value)} is {how} where the right library does not")
            raise Refused(self.fault)
        return value

    def _class(self, form: Any) -> type:
        """The class of a number, or of a description: [number, module, name, bases, members]."""
        if type(form) is int:
            return self.classes[form]
        match form:
            case ["g", "builtins", str(name)]:
                kind = _PLAIN_BY_NAME.get(name) or getattr(builtins, name)
                if isinstance(kind, type) and (kind in PLAIN_CLASSES or issubclass(kind, BaseException)):
                    return kind
            case [int(number), str(module), str(name), list(bases), list(members)] if number not in self.classes:
                if any(type(m) is not list or [type(part) for part in m] != [str, str] for m in members):
                    raise Garbage("a class of another form")
                made = mirrors.build(self, module, name, [self._base(base) for base in bases], members)
                self.classes[number] = made
                self.class_numbers[made] = number
                return made
        raise Garbage("no class")

    def _base(self, form: Any) -> type:
        """A base of a mirror. What is raised here is caught as an Exception, so that no library ends this process."""
        kind = self._class(form)
        return Exception if issubclass(kind, BaseException) and not issubclass(kind, Exception) else kind

    def decode_exception(self, form: Any, context: Context) -> BaseException:
        """As `Wire.decode_exception`."""
        if form[0] == "o":
            error = self.own(form[1])
            if not isinstance(error, BaseException):
                raise Garbage("no exception")
            return self._owned(error, "raised", context)
        tag, number, kind, arguments, text = form
        if tag != "E" or type(number) is not int or type(text) is not str:
            raise Garbage("no exception")
        cls = self._class(kind)
        values = self.decode(arguments, context)
        if number in self.handles:
            return self.handles[number]
        if not (issubclass(cls, Exception) or cls is SystemExit) or type(values) is not tuple:
            raise Garbage("no exception")
        if cls is SystemExit:
            self._owned(cls, "raised", context)
        try:
            made: Any = cls.__new__(cls, *values) if isinstance(cls, RemoteType) else cls(*values)  # type: ignore[arg-type]
        except TypeError:
            made = BaseException.__new__(cls)
        made.args = values
        if isinstance(cls, RemoteType):
            vars(made).update(_remote_number=number, _remote_text=text)
        self.handles[number] = made
        self.errors[id(made)] = made, number
        return made


def _identifier(name: str) -> str:
    return name if name.isidentifier() else "made"


class VerifiedSuite(suite.Suite):
    """The hidden tests of one run, each with its recording."""

    fatal = ()  # nothing that the library raises ends this process

    def __init__(self, config: Config, reporter: Any, cache: code.Cache, wire: Verifier) -> None:
        super().__init__(config, reporter, cache, None, root.WORKSPACE)
        self.wire = wire
        self.recorded: Mapping[str, Recorded] = {}
        self.spoilt: dict[str, str] = {}  # path -> what the library did while the file was imported

    def _collect(self, path: str, ids: Sequence[str]) -> dict[str, Any]:
        wire = self.wire
        try:
            return super()._collect(path, ids)
        finally:
            wire.imported |= wire.places
            self.spoilt[path], wire.fault = wire.fault, wire.fault if wire.gone else ""

    def _run_item(self, test: str, item: Any, following: Any, report: suite.Report) -> None:
        self.wire.begin(self.recorded.get(test, Recorded()), self.spoilt.get(test.partition("::")[0], ""))
        if self.wire.recording:  # a test that deadlocks over the two processes would take the time of all others
            signal.signal(signal.SIGALRM, self._late)
            signal.setitimer(signal.ITIMER_REAL, RECORDING_SECONDS)
            watch_patches(self.wire)
        super()._run_item(test, item, following, report)

    def _late(self, number: int, frame: object) -> None:
        self.wire.end("the test takes too long")
        raise Gone


def verify(request: dict[str, Any], tests: VerifiedSuite, write: Callable[[dict[str, Any]], None]) -> None:
    """Run tests, and write the outcome of each: {"test", "outcome", "message", "fault"}, for a recording also "places",
    "decoys", and how many lines of the test were judged here, by the library, and by it without a decoy that tells."""
    wire = tests.wire
    tests.recorded = {test: Recorded(**recorded) for test, recorded in request["allowed"].items()}
    tests.recorded |= {test: Recorded(origins=origins) for test, origins in request["origins"].items()}
    wire.allowed = frozenset(place for recorded in tests.recorded.values() for place in recorded.places)
    sys.meta_path.insert(0, wire.finder)  # type: ignore[arg-type]
    sys.addaudithook(handed.watch(wire))

    def report(test: str, outcome: str, message: str, line: int) -> None:
        fault = wire.fault or tests.spoilt.get(test.partition("::")[0], "")
        kind = "" if not fault else "gone" if wire.gone else "refused"
        if fault.startswith("garbage"):
            kind = "garbage"
        if fault and outcome == "passed":
            outcome = "failed"
        message = fault if fault and fault not in message else message
        record: dict[str, Any] = {"test": test, "outcome": outcome, "message": suite.one_line(message)}
        record |= {"fault": kind, "line": line}
        if wire.recording:
            decoys, decided = wire.decoys, wire.decoys.real
            counts = [len(wire.judged), len(decided), len(decoys.undecidable)]
            record |= {"places": list(wire.places), "decoys": decoys.record(), "judged": counts}
            record["origins"] = [*decoys.origins]
        write(record)

    tests.run(request["tests"], report)
