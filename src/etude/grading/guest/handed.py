"""The operations that the library may carry out on the objects that a test hands over.

An operation has a name: the class of the object, and a family of operations. While the right library is recorded, the
names of its operations are kept by test; later an operation without its name is refused, and the test fails. So a
handed object is no capability: the library can do with it what the right library does, or what is much alike, and
nothing that leads on from there. Refused always: writes, names that lead to code or frames, and classes `type` and
`object` as arguments.

The families are as wide as different right solutions are: one iterates where another asks for items, one sorts by `<`
where another looks for equal items. A callable may be called however often and wherever in the test. No record is
needed to read the plain names of a function (NAMES), or to read what exists to be read: iterators, generators and views
of the standard library.
"""

from __future__ import annotations

import inspect
import os
import re
import types
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

from _pytest.outcomes import OutcomeException

from ...sandbox.guest import root
from .tested import OPERATIONS
from .wire import Garbage

NAMES = frozenset({"__name__", "__qualname__", "__doc__", "__module__"})
WRITES = frozenset({"setitem", "delitem", *(name for name in OPERATIONS if name[0] == "i" and name[1:] in OPERATIONS)})
WRITES |= {"iand", "ior", "ixor"}
_FAMILIES = {
    "read": "iter next len contains getitem reversed bool",
    "compare": "eq ne lt le gt ge hash",
    "compute": "add sub mul matmul truediv floordiv mod lshift rshift and_ or_ xor neg pos abs invert index int float "
    "complex round divmod pow",
    "text": "repr str format bytes",
    "context": "enter exit",
}
_METHODS = {
    "read": "keys values items get index count __iter__ __next__ __len__",
    "file": "read readline readlines",
    "print": "write writelines flush",
}
_OPERATION_FAMILY = {name: family for family, names in _FAMILIES.items() for name in names.split()}
_METHOD_FAMILY = {name: family for family, names in _METHODS.items() for name in names.split()}
# Attributes that lead from an object to its code, and from there to all that its process holds.
_LEADING = ("_", "gi_", "cr_", "ag_", "f_", "tb_", "co_", "func_")
# Arguments that name such an attribute, or, for `str.format`, any attribute.
_TEXT = re.compile(
    r"__\w+__\Z|(?:gi|cr|ag|tb)_(?:frame|code|yieldfrom|await|next)\Z|f_(?:globals|locals|builtins|back|code)\Z"
    r"|.*?\{\w*[.\[]\w",
    re.DOTALL,
)
_REFERENCES = ("h", "k", "g", "m", "o")  # forms of objects; descriptions of their classes have names of methods
_STANDARD = frozenset({"builtins", "itertools"})
# Events of the interpreter that give access to files (https://docs.python.org/3/library/audit_events.html).
_FILES = frozenset({"open", "os.listdir", "os.scandir", "os.chdir", "os.rename", "os.remove", "sqlite3.connect"})


def class_name(value: object) -> str:
    """The name of an object's class; of a class, its own."""
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"class {name}" if kind is value else name


def serve(wire: Any, operation: str, values: list[Any], owned: list[Any]) -> object:
    """Carry out an operation of the library on a handed object. `owned` are the objects and classes of this process
    that the request names. Raises Garbage for a request that no library sends."""
    if operation in ("call", "get", "set") and len(values) == {"call": 3, "get": 2, "set": 3}[operation]:
        target = values[0]
        if id(target) not in wire.numbers:
            raise Garbage("not handed over")
        if operation == "call":
            return _call(wire, target, values[1], values[2], owned)
        return _get(wire, target, values[1]) if operation == "get" else _refuse(wire, target, "a write")
    if operation == "op" and len(values) >= 2 and values[0] in OPERATIONS:
        return _operate(wire, values[0], values[1:], owned)
    if operation == "instance" and len(values) == 2 and isinstance(values[1], type) and id(values[1]) in wire.numbers:
        _allow(wire, values[1], "instance")
        return isinstance(values[0], values[1])
    raise Garbage("an unknown operation")


def _call(wire: Any, target: Any, arguments: Any, keywords: Any, owned: list[Any]) -> object:
    if type(arguments) is not tuple or type(keywords) is not dict:
        raise Garbage("no arguments")
    bound = getattr(target, "__self__", None) if type(target) in _BOUND else None
    if bound is None or isinstance(bound, types.ModuleType):
        _allow(wire, target, "call")
    else:
        name = str(target.__name__)
        _allow(wire, bound, _METHOD_FAMILY.get(name, name))
    _pass(wire, target, owned, (target,))
    with _serving(wire):
        return target(*arguments, **keywords)


_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def _get(wire: Any, target: Any, name: Any) -> object:
    if type(name) is not str or (name.startswith(_LEADING) and name not in NAMES):
        raise AttributeError(name)
    if name in NAMES:
        value = getattr(target, name)
        if type(value) is str or value is None:
            return value
        raise AttributeError(name)
    if not wire.recording and _lacks(target, name):  # any library may look for it
        raise AttributeError(name)
    _allow(wire, target, _METHOD_FAMILY.get(name, name))
    with _serving(wire):
        return getattr(target, name)


def _operate(wire: Any, name: str, operands: list[Any], owned: list[Any]) -> object:
    targets = [operand for operand in operands[:2] if id(operand) in wire.numbers]
    if not targets:
        raise Garbage("not handed over")
    for target in targets:
        if name in WRITES:
            _refuse(wire, target, "a write")
        _allow(wire, target, _OPERATION_FAMILY.get(name, name))
    _pass(wire, targets[0], owned, targets)
    with _serving(wire):
        return OPERATIONS[name](*operands)


def _lacks(target: object, name: str) -> bool:
    """Whether an object has no attribute of that name, and makes none when it is asked for."""
    for kind in type(target).__mro__:
        if "__getattr__" in vars(kind) or isinstance(vars(kind).get("__getattribute__"), types.FunctionType):
            return False
    missing = object()
    return inspect.getattr_static(target, name, missing) is missing


def _allow(wire: Any, target: object, name: str) -> None:
    """Refuse an operation that the right library did not carry out on such an object."""
    kind = class_name(target)
    if type(target).__module__ in _STANDARD and name == "read" and not isinstance(target, type):
        return
    if not wire.allows(f"{kind} {name}"):
        _refuse(wire, target, name)


def _pass(wire: Any, target: object, owned: list[Any], targets: Sequence[object]) -> None:
    """Refuse arguments from this process that the right library did not pass."""
    for value in owned:
        if any(value is one for one in targets):
            continue
        if value is type or value is object or not wire.allows(f"{class_name(value)} passed"):
            _refuse(wire, target, f"{class_name(value)} as an argument")


def texts(wire: Any, forms: Sequence[Any]) -> None:
    """Refuse texts in a request that lead to attributes in functions which look up or format, unless the right library
    passes such texts."""
    pending: list[Any] = [*forms]
    while pending:
        form = pending.pop()
        if type(form) is list:
            tag = form[0] if form else None
            pending += () if tag in _REFERENCES else form[3:4] if tag == "E" else form[1:]
        elif type(form) is str and _TEXT.match(form):
            name = form if form.isidentifier() else "with fields"
            if not wire.allows(f"text {name} passed"):
                _refuse(wire, form, "an argument that names attributes")


def _refuse(wire: Any, target: object, what: str) -> None:
    wire.blame(f"{class_name(target)}: {what} is refused")
    raise TypeError(wire.fault)


@contextmanager
def _serving(wire: Any) -> Any:
    """The context in which code of a test runs on behalf of the library: see `watch`. An assertion that fails there
    fails the test, and its message, which may hold an expected value, stays here."""
    wire.serving += 1
    try:
        yield
    except (AssertionError, OutcomeException):
        if not wire.allows("a failed assertion"):
            wire.blame("an assertion fails in a callback")
            raise AssertionError from None
        raise
    finally:
        wire.serving -= 1


def watch(wire: Any) -> Any:
    """A hook for audit events: what runs on behalf of the library opens files of the tests only where it does for the
    right library, and never by descriptor."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if wire.serving and event in _FILES:
            path = arguments[0] if arguments else None
            if type(path) is int:
                allowed = wire.allows("open a descriptor")
            else:
                real = os.path.realpath(os.fsdecode(path or "."))
                allowed = not real.startswith((root.WORKSPACE, "/proc")) or wire.allows(f"open {real}")
            if not allowed:
                wire.blame("a file of the tests is opened")
                raise PermissionError(wire.fault)

    return hook
