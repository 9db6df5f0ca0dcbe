"""Runs hidden tests in a process without the agent's code: the library under test is in another process.

An import hook replaces modules of the library by mirrors of those in the tested process (`tested.py`). Operations on
them travel over one socket (`wire.py`, `mirrors.py`). Assertions, fixtures and expected values stay here, and so does
the verdict, which leaves over a descriptor that the tested process never had.

Recordings limit the decisions of the library: a comparison that the tested process answers counts only if the recorded
run of the right library had one at the same place of the same test. So an object that claims to equal everything fails
where the library returns a plain value.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import inspect
import os
import signal
import socket
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from _pytest.config import Config
from _pytest.monkeypatch import MonkeyPatch

from ...sandbox.guest import root
from . import code, mirrors, suite
from .mirrors import SPECIAL, Bound, Handle, RemoteError, RemoteType
from .tested import OPERATIONS, PLAIN_CLASSES
from .wire import Context, Garbage, Gone, Unsendable, Wire

_PLAIN_BY_NAME = {kind.__name__: kind for kind in PLAIN_CLASSES}
_FRAMES = (
    "_",
    "gi_",
    "cr_",
    "ag_",
    "f_",
    "tb_",
    "co_",
    "func_",
)  # attributes that lead from an object to its test
_NAMES = frozenset({"__name__", "__qualname__", "__doc__", "__module__"})
RECORDING_SECONDS = 15.0  # of one test; longer than any should take on a busy machine
MAX_PLACES = 5000  # of one test


class Refused(BaseException):
    """The tested process would decide a comparison that it did not decide when the test was recorded."""


class Verifier(Wire):
    """The verifier's end of the connection.

    fault: the reason for which the current test can no longer pass, whatever its code catches.
    places: where the library decided in the current test; `allowed`: where it may.
    """

    def __init__(self, sock: socket.socket, names: Sequence[str], recording: bool) -> None:
        super().__init__(sock)
        self.names = frozenset(names)  # top-level modules of the library
        self.recording = recording
        self.fault = ""
        self.gone = False
        self.places: dict[str, None] = {}
        self.allowed: frozenset[str] = frozenset()
        self.silent = False
        self.handles: dict[int, Any] = {}
        self.classes: dict[int, RemoteType] = {}
        self.class_numbers: dict[type, int] = {}
        self.errors: dict[int, tuple[BaseException, int]] = {}  # id of a remote exception -> (exception, number)
        self.kinds: dict[type, int] = {}  # classes of objects passed on; below zero, unlike numbers of objects
        self.library_modules: list[str] = []  # modules of the library that were imported
        self.imported: dict[str, None] | None = None  # places that were used while test modules were imported
        type.__setattr__(Handle, "wire", self)
        type.__setattr__(RemoteError, "wire", self)

    # Decisions

    def decides(self, operation: str) -> bool:
        """Whether the library may decide at this place. A recording allows all decisions and keeps their places."""
        place = f"{self._place()} {operation}"
        if self.recording:
            if not self.silent and len(self.places) < MAX_PLACES:
                self.places[place] = None
            return True
        return place in self.allowed

    def begin(self, allowed: Iterable[str]) -> None:
        """Start a test."""
        self.allowed, self.places = frozenset(allowed), dict(self.imported or {})
        self.fault = self.fault if self.gone else ""

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Keep no places within this context."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def _place(self) -> str:
        frame: Any = sys._getframe(2)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(root.WORKSPACE):
                return f"{path[len(root.WORKSPACE) + 1 :]}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def refuse(self, handle: Handle) -> None:
        """Fail the test: an object is in a place where the library returned a plain value, or decided nothing."""
        self.blame(f"{type(handle).__qualname__} can't be compared here")
        raise Refused(self.fault)

    def patched(self, target: object) -> None:
        """Fail a test that patches an object of which the library has its own copy, since the patch would not reach the
        copy."""
        place = target if isinstance(target, ModuleType) else sys.modules.get(getattr(target, "__module__", None) or "")
        if isinstance(target, (ModuleType, type)) and isinstance(place, ModuleType) and _shared(place.__name__):
            self.blame(f"a patch of {place.__name__} does not reach the library")
            raise Refused(self.fault)

    def blame(self, fault: str) -> None:
        """Keep the reason for which the test fails."""
        self.fault = self.fault or fault

    # Messages: an error of the other side ends the connection, and fails the test

    def send(self, message: list[Any]) -> None:
        """As `Wire.send`."""
        if self.gone:
            raise Gone
        try:
            super().send(message)
        except Gone:
            self.end("the tested process ended")
            raise

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
        place = self._place() or "library:1"
        path, _, line = place.rpartition(":")
        warnings.warn_explicit(warning[1], kind, path, int(line))

    # Requests of the tested process: it may use objects that a test has passed on, and no names that lead on from them

    def serve(self, operation: str, values: list[Any]) -> object:
        """As `Wire.serve`. Raises Garbage for a request that no library needs."""
        if operation == "call" and len(values) == 3:
            target, arguments, keywords = values
            self._handed(target)
            return target(*arguments, **keywords)
        if operation in ("get", "set") and len(values) >= 2:
            target, name = values[:2]
            self._handed(target)
            if type(name) is not str or (name.startswith(_FRAMES) and name not in _NAMES):
                raise AttributeError(name)
            return getattr(target, name) if operation == "get" else setattr(target, name, values[2])
        if operation == "op" and len(values) >= 2 and values[0] in OPERATIONS:
            if not any(id(value) in self.numbers for value in values[1:3]):
                raise Garbage("not handed over")
            return OPERATIONS[values[0]](*values[1:])
        if operation == "instance" and len(values) == 2 and isinstance(values[1], type):
            return isinstance(values[0], values[1])
        raise Garbage("an unknown operation")

    def _handed(self, target: object) -> None:
        if id(target) not in self.numbers:
            raise Garbage("not handed over")

    # Objects of the tests

    def encode_other(self, value: Any, context: Context) -> list[Any]:
        """As `Wire.encode_other`."""
        kind = type(value)
        if isinstance(kind, RemoteType):
            if isinstance(value, BaseException):
                return self.encode_exception(value, context)
            return ["o", value._remote_number]
        if isinstance(kind, type) and issubclass(kind, RemoteType):
            return ["o", self.class_numbers[value]]
        if kind is RemoteModule:
            return ["m", value.__name__]
        if kind is Bound:
            return self.encode(value.remote(), context)
        if isinstance(value, BaseException):
            return self.encode_exception(value, context)
        if (reference := _reference(value)) is not None:
            return reference
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
                return self.own(number)
            case ["h", int(number), kind]:
                if number not in self.handles:
                    cls = self._class(kind, context)
                    cls = Handle if cls is object else cls
                    if not isinstance(cls, RemoteType) or issubclass(cls, BaseException):
                        raise Garbage("a handle of no class")
                    made = self.handles[number] = object.__new__(cls)
                    object.__setattr__(made, "_remote_number", number)
                elif type(kind) is list:
                    self._class(kind, context)
                return self.handles[number]
            case ["k", kind]:
                return self._class(kind, context)
            case ["g", "builtins", str()]:
                return self._class(form, context)
            case ["m", str(name)] if name.partition(".")[0] in self.names:
                return importlib.import_module(name)
            case ["E", *_]:
                return self.decode_exception(form, context)
        raise Garbage("an unknown form")

    def _class(self, form: Any, context: Context) -> type:
        """The class of a number, or of a description: [number, module, name, bases, members]."""
        if type(form) is int:
            return self.classes[form]
        match form:
            case ["g", "builtins", str(name)]:
                kind = _PLAIN_BY_NAME.get(name) or getattr(builtins, name)
                if isinstance(kind, type) and (kind in PLAIN_CLASSES or issubclass(kind, BaseException)):
                    return kind
            case ["o", number]:
                kind = self.own(number)
                if isinstance(kind, type):
                    return kind
            case [int(number), str(module), str(name), list(bases), list(members)] if number not in self.classes:
                if any(type(m) is not list or [type(part) for part in m] != [str, str] for m in members):
                    raise Garbage("a class of another form")
                made = mirrors.build(self, module, name, [self._class(base, context) for base in bases], members)
                self.classes[number] = made
                self.class_numbers[made] = number
                return made
        raise Garbage("no class")

    def decode_exception(self, form: Any, context: Context) -> BaseException:
        """As `Wire.decode_exception`."""
        if form[0] == "o":
            error = self.own(form[1])
            if not isinstance(error, BaseException):
                raise Garbage("no exception")
            return error
        tag, number, kind, arguments, text = form
        if tag != "E" or type(number) is not int or type(text) is not str:
            raise Garbage("no exception")
        cls = self._class(kind, context)
        values = self.decode(arguments, context)
        if number in self.handles:
            return self.handles[number]
        if not issubclass(cls, BaseException) or type(values) is not tuple or cls in (KeyboardInterrupt, GeneratorExit):
            raise Garbage("no exception")
        try:
            made: Any = cls.__new__(cls, *values) if isinstance(cls, RemoteType) else cls(*values)  # type: ignore[arg-type]
        except TypeError:
            made = Exception.__new__(cls) if issubclass(cls, Exception) else RuntimeError(text)
        made.args = values
        if isinstance(cls, RemoteType):
            vars(made).update(_remote_number=number, _remote_text=text)
        self.handles[number] = made
        self.errors[id(made)] = made, number
        return made


def _identifier(name: str) -> str:
    return name if name.isidentifier() else "made"


def _reference(value: Any) -> list[Any] | None:
    """The name of a module, or of a class or function in a module, that tests share with the library; else None."""
    if isinstance(value, ModuleType):
        return ["m", value.__name__] if _shared(value.__name__) else None
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not callable(value) or not _shared(module):
        return None
    shared: Any = sys.modules[module]
    for part in name.split("."):
        shared = getattr(shared, part, None)
    if shared is value or (type(shared) is type(value) is types.BuiltinMethodType and shared == value):
        return ["g", module, name]
    return None


@functools.cache
def _shared(module: str) -> bool:
    """Whether a module belongs to the standard library or to the dependencies."""
    if module == "builtins":
        return True
    spec = getattr(sys.modules.get(module), "__spec__", None)
    origin = getattr(spec, "origin", None) or ""
    stable = (sys.base_prefix + "/", root.SITE + "/", "/usr/lib/")
    return origin in ("built-in", "frozen") or origin.startswith(stable)


class RemoteModule(ModuleType):
    """The mirror of a library module. Attributes are kept until the test changes the module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__version__", "__author__", "__all__", "__doc__"):
            raise AttributeError(name)
        attribute = _wire().request("get", self, name)
        if isinstance(attribute, (Handle, RemoteType, RemoteModule)):
            self.__dict__[name] = attribute
        return attribute

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__") or isinstance(value, RemoteModule):
            super().__setattr__(name, value)
        else:
            _wire().request("set", self, name, value)
            self.__dict__.pop(name, None)

    def __delattr__(self, name: str) -> None:
        _wire().request("del", self, name)
        self.__dict__.pop(name, None)

    def __dir__(self) -> list[str]:
        return _wire().request("op", "dir", self)


def _wire() -> Verifier:
    return Handle.wire


class RemoteFinder:
    """Finds modules of the library in the tested process, except those that the hidden tests bring."""

    def __init__(self, wire: Verifier) -> None:
        self.wire = wire

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        if name.partition(".")[0] not in self.wire.names:
            return None
        place = f"{root.WORKSPACE}/{name.replace('.', '/')}"
        if os.path.isfile(f"{place}.py") or (os.path.isdir(place) and "." in name):
            return None
        spec = ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        spec.submodule_search_locations = [place]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The mirror of the module of the same name."""
        return RemoteModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import the module in the tested process."""
        names = self.wire.request("import", module.__name__)
        if type(names) is not list or not all(type(name) is str for name in names):
            raise Garbage("no names")
        self.wire.library_modules.append(module.__name__)
        module.__dict__["__all__"] = names


class VerifiedSuite(suite.Suite):
    """The hidden tests of one run, each with the places at which the library may decide."""

    def __init__(self, config: Config, reporter: Any, cache: code.Cache, wire: Verifier) -> None:
        super().__init__(config, reporter, cache, None, root.WORKSPACE)
        self.wire = wire
        self.allowed: Mapping[str, Sequence[str]] = {}

    def _run_item(self, test: str, item: Any, following: Any, report: suite.Report) -> None:
        if self.wire.imported is None:
            self.wire.imported = dict(self.wire.places)
        self.wire.begin(self.allowed.get(test, ()))
        if self.wire.recording:  # a test that deadlocks over the two processes would take the time of all others
            signal.signal(signal.SIGALRM, self._late)
            signal.setitimer(signal.ITIMER_REAL, RECORDING_SECONDS)
            _watch_patches(self.wire)
        super()._run_item(test, item, following, report)

    def _late(self, number: int, frame: object) -> None:
        self.wire.end("the test takes too long")
        raise Gone


def _watch_patches(wire: Verifier) -> None:
    """Make pytest's `monkeypatch` and `unittest.mock`, if it is imported, report their patches to the wire from now
    on."""
    mock = sys.modules.get("unittest.mock")
    if mock is not None and not hasattr(mock._patch.get_original, "__wrapped__"):
        mock._patch.get_original = _showing(wire, mock._patch.get_original, lambda patch: patch.target)
    if not hasattr(MonkeyPatch.setattr, "__wrapped__"):
        MonkeyPatch.setattr = _showing(wire, MonkeyPatch.setattr, lambda _, target, *rest, **named: target)  # type: ignore


def _showing(wire: Verifier, change: Callable[..., Any], target: Callable[..., object]) -> Callable[..., Any]:
    """`change`, preceded by a report to the wire of the object that it will change."""

    @functools.wraps(change)
    def shown(*arguments: Any, **named: Any) -> Any:
        changed = target(*arguments, **named)
        wire.patched(sys.modules.get(changed.rpartition(".")[0]) if isinstance(changed, str) else changed)
        return change(*arguments, **named)

    return shown


def verify(request: dict[str, Any], tests: VerifiedSuite, write: Callable[[dict[str, Any]], None]) -> None:
    """Run tests, and write the outcome of each: {"test", "outcome", "message", "fault"}, for a recording also
    "places"."""
    wire = tests.wire
    tests.allowed = request["allowed"]
    wire.allowed = frozenset(place for places in tests.allowed.values() for place in places)
    sys.meta_path.insert(0, RemoteFinder(wire))  # type: ignore[arg-type]

    def report(test: str, outcome: str, message: str) -> None:
        fault = "" if not wire.fault else "gone" if wire.gone else "refused"
        if wire.fault.startswith("garbage"):
            fault = "garbage"
        if wire.fault and outcome == "passed":
            outcome = "failed"
        message = wire.fault if wire.fault and wire.fault not in message else message
        record = {"test": test, "outcome": outcome, "message": suite.one_line(message), "fault": fault}
        write(record | {"places": list(wire.places)} if wire.recording else record)

    tests.run(request["tests"], report)
