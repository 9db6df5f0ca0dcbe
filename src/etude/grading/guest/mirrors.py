"""Mirrors: objects and classes in the verifier that stand for those of the tested process. Each operation is a request.

Each class of the tested process has a mirror with the same bases and the same special methods, so that isinstance,
except, with and operators work as written. A class that extends a built-in type has built-in content, which can be
fetched.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .tested import ABSTRACT
from .wire import Garbage

_CONTENT = {str, bytes, bytearray, int, float, list, tuple, dict, set, frozenset}
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge", "contains")
_BINARY = (
    "getitem", "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor",
    "divmod", "pow", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ilshift", "irshift", "iand",
    "ior", "ixor", "ipow",
)  # fmt: skip
_REFLECTED = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor",
              "divmod", "pow")  # fmt: skip
# Operators without an operand from the test: their result needs no more trust than a plain value.
_FREE = (
    "len", "iter", "next", "bool", "hash", "repr", "str", "int", "float", "complex", "index", "abs", "neg", "pos",
    "invert", "reversed", "round", "bytes", "fspath", "enter", "setitem", "delitem", "format", "dir",
)  # fmt: skip
_OPERATOR = {"and": "and_", "or": "or_"}
# Names that plain values have as well: only through them can an object pose as a plain value.
PLAIN_NAMES = frozenset(name for kind in (*_CONTENT, complex, range) for name in dir(kind) if not name.startswith("__"))
_STANDARD = ("builtins", "itertools", "functools", "collections", "re", "types")
_KNOWN = (
    {kind.__name__: kind for kind in vars(types).values() if isinstance(kind, type)}
    | {kind.__name__: kind for kind in (map, filter, zip, enumerate, reversed, memoryview, functools.partial)}
    | {kind.__name__: kind for kind in vars(itertools).values() if isinstance(kind, type)}
)
_MAKERS = (type, types.CodeType)  # no object of the library shows these as its class: a test may call that


class RemoteType(type):
    """The metaclass of mirrors of the tested process's classes."""

    # No library has such names: attributes of its own objects are never hidden by these.
    _remote_wire: Any
    _remote_content: type | None  # the built-in type that the class extends
    _remote_compares: bool  # whether the class has its own comparison nevertheless
    _remote_abstract: bool  # whether only the tested process can tell its instances

    def __new__(mcs, name: str, bases: tuple[type, ...], space: dict[str, Any], mirrored: bool = False) -> Any:
        """Make a class. A class that a test derives from one of the library is made in both processes."""
        made = super().__new__(mcs, name, bases, space)
        if not mirrored:
            theirs = [value for key, value in space.items() if key in SPECIAL and value is not None]
            if any(isinstance(value, Bound) or isinstance(type(value), RemoteType) for value in theirs):
                # They would decide in its stead.
                made._remote_wire.blame("a class of the tests has members of the library")
                raise TypeError(made._remote_wire.fault)
            own = {key: value for key, value in space.items() if key not in ("__classcell__", "__qualname__")}
            made._remote_wire.subclassed(made, bases, own)
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any], mirrored: bool = False) -> None:
        super().__init__(name, bases, space)

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        return cls._remote_wire.request("call", cls, arguments, keywords)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_remote") or name in ("__abstractmethods__", "__annotations__"):
            raise AttributeError(name)
        return cls._remote_wire.request("get", cls, name)

    def __setattr__(cls, name: str, value: object) -> None:
        if isinstance(value, Method):  # the end of a patch
            cls._remote_wire.request("del", cls, name)
            return
        cls._remote_wire.request("set", cls, name, value)
        if name in vars(cls):
            type.__delattr__(cls, name)

    def __delattr__(cls, name: str) -> None:
        cls._remote_wire.request("del", cls, name)

    def __instancecheck__(cls, value: object) -> bool:
        if cls in type(value).__mro__:
            return True
        return cls._remote_abstract and cls._remote_wire.says("instance", value, cls)

    def __subclasscheck__(cls, kind: type) -> bool:
        if cls in type.mro(kind) if isinstance(kind, RemoteType) else cls in kind.__mro__:
            return True
        return cls._remote_abstract and cls._remote_wire.says("subclass", kind, cls)

    def __iter__(cls) -> Iterator[Any]:
        return cls._remote_wire.request("op", "iter", cls)

    def __len__(cls) -> int:
        return cls._remote_wire.request("op", "len", cls)

    def __bool__(cls) -> bool:
        return True

    def __contains__(cls, value: object) -> bool:
        if not cls._remote_wire.decides("contains"):
            cls._remote_wire.refuse(cls)
        return cls._remote_wire.request("op", "contains", cls, value) is True

    def __getitem__(cls, key: object) -> Any:
        return cls._remote_wire.request("op", "getitem", cls, key)


class _There:
    """An attribute that every Python object has: reads and writes go to the object of the tested process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, value: Any, kind: Any = None) -> Any:
        return kind._remote_wire.request("get", kind if value is None else value, self.name)


class Handle(metaclass=RemoteType, mirrored=True):
    """The mirror of an object of the tested process."""

    # No annotations here: tests would see them on the mirrored object.
    __slots__ = ("__weakref__", "_remote_number")
    __doc__ = _There("__doc__")  # type: ignore[assignment]
    if TYPE_CHECKING:
        _remote_wire: Any
    _remote_content = None
    _remote_compares = _remote_abstract = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_remote"):
            raise AttributeError(name)
        wire = type(self)._remote_wire
        if name in PLAIN_NAMES and not wire.decides(f"get {name}"):
            return getattr(_content(self), name)
        return wire.request("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        type(self)._remote_wire.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        type(self)._remote_wire.request("del", self, name)

    def __repr__(self) -> str:
        return str(type(self)._remote_wire.request("op", "repr", self))

    def __str__(self) -> str:
        return str(type(self)._remote_wire.request("op", "str", self))

    def __format__(self, form: str) -> str:
        return str(type(self)._remote_wire.request("op", "format", self, form))

    def __dir__(self) -> list[str]:
        return type(self)._remote_wire.request("op", "dir", self)

    def __copy__(self) -> Any:
        return type(self)._remote_wire.request("call", copy.copy, (self,), {})

    def __deepcopy__(self, memo: object) -> Any:
        return type(self)._remote_wire.request("call", copy.deepcopy, (self,), {})

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("an object of another process cannot be pickled here")


class RemoteError(Exception, metaclass=RemoteType, mirrored=True):
    """The mix-in for mirrors of the library's exception classes."""

    _remote_wire: Any
    _remote_content = None
    _remote_compares = _remote_abstract = False
    _remote_number: int
    _remote_text: str

    def __str__(self) -> str:
        text = vars(self).get("_remote_text")
        return super().__str__() if text is None else text

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_remote", "__")):
            raise AttributeError(name)
        return type(self)._remote_wire.request("get", self, name)


def stand_in(kind: Any, number: int) -> Any:
    """A new mirror of an object."""
    made = object.__new__(kind)
    object.__setattr__(made, "_remote_number", number)
    return made


class Bound:
    """A method of an object of the tested process, before its call."""

    def __init__(self, target: Any, name: str, first: tuple[Any, ...] = ()) -> None:
        self._target, self._name, self._first = target, name, first

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        target = self._target
        wire: Any = type(target)._remote_wire if not isinstance(target, RemoteType) else target._remote_wire
        if self._name in PLAIN_NAMES and isinstance(target, Handle) and not wire.decides(f"get {self._name}"):
            return getattr(_content(target), self._name)(*arguments, **keywords)
        return wire.request("method", target, self._name, self._first + arguments, keywords)

    def remote(self) -> Any:
        """The method itself, as an object of the tested process."""
        target = self._target
        wire: Any = type(target)._remote_wire if not isinstance(target, RemoteType) else target._remote_wire
        method = wire.request("get", target, self._name)
        return functools.partial(method, *self._first) if self._first else method

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_remote"):
            raise AttributeError(name)
        return getattr(self.remote(), name)


class Method:
    """A method of a mirrored class; `owner` is the mirror."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner: type | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner

    def __get__(self, value: Any, kind: type | None = None) -> Any:
        if value is None:
            return Bound(kind, self.name)
        for cls in type(value).__mro__:
            if self.name in vars(cls):
                if cls is self.owner:
                    break
                return Bound(self.owner, self.name, (value,))  # super()
        return Bound(value, self.name)


def _content(handle: Handle) -> Any:
    """The built-in content of an object that may not decide by itself. Fails the test if there is none."""
    kind = type(handle)
    if kind._remote_content is None:
        kind._remote_wire.refuse(handle)
    value = kind._remote_wire.request("content", handle)
    if type(value) is not kind._remote_content:
        raise Garbage("content of another type")
    return value


_EVALUATE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "contains": lambda a, b: b in a,
}


def _compared(name: str) -> Callable[[Any, Any], Any]:
    """A comparison operator. Content is compared in this process. An object without content, or with a comparison of
    its own, is compared by the library, if it was so when the test was recorded."""
    evaluate = _EVALUATE[name]

    def compare(self: Any, other: Any) -> Any:
        kind = type(self)
        wire = kind._remote_wire
        if kind._remote_content is not None and not kind._remote_compares:
            if isinstance(other, Handle) and type(other)._remote_content is not None:
                other = _content(other)
            return evaluate(_content(self), other)
        if wire.recording and kind._remote_content is not None:
            there = wire.request("op", name, self, other)
            if there is True or there is False:
                with wire.quiet():
                    here = evaluate(_content(self), _content(other) if _has_content(other) else other)
                if here is there:
                    return there
        if not wire.decides(name):
            return evaluate(_content(self), _content(other) if _has_content(other) else other)
        return wire.decoys.compare(name, self, other)

    return compare


def _has_content(value: object) -> bool:
    return isinstance(value, Handle) and type(value)._remote_content is not None


def _operated(name: str, turned: bool) -> Callable[..., Any]:
    operation = _OPERATOR.get(name, name)

    def operate(self: Any, *others: Any) -> Any:
        kind = type(self)
        if not kind._remote_wire.decides(name):
            return getattr(_content(self), f"__{name}__")(*others)
        operands = (*others[:1], self) if turned else (self, *others)
        return kind._remote_wire.request("op", operation, *operands)

    return operate


def _freely(name: str) -> Callable[..., Any]:
    def operate(self: Any, *others: Any) -> Any:
        return type(self)._remote_wire.request("op", name, self, *others)

    return operate


def _called(self: Any, *arguments: Any, **keywords: Any) -> Any:
    return type(self)._remote_wire.request("call", self, arguments, keywords)


def _bound(self: Any, value: Any, kind: type | None = None) -> Any:
    return self if value is None else types.MethodType(self, value)


def _raised(self: Any, *error: Any) -> Any:
    """The end of a block. What it raised leaves it, assertions of the test above all, unless the right library swallows
    such an exception here."""
    wire = type(self)._remote_wire
    before, wire.leaving = wire.leaving, error[1]
    try:
        swallows = bool(wire.request("op", "exit", self, *error[:2], None))
    finally:
        wire.leaving = before
    return swallows and error[0] is not None and wire.decides(f"swallow {error[0].__name__}")


SPECIAL: dict[str, Any] = {
    **{f"__{name}__": _compared(name) for name in _COMPARE},
    **{f"__{name}__": _operated(name, False) for name in _BINARY},
    **{f"__r{name}__": _operated(name, True) for name in _REFLECTED},
    **{f"__{name}__": _freely(name) for name in _FREE},
    "__call__": _called,
    "__exit__": _raised,
}


def build(wire: Any, module: str, name: str, bases: list[type], members: list[list[str]]) -> RemoteType:
    """Make the mirror of a class. Malformed arguments raise any exception."""
    content = next((base for base in bases if base in _CONTENT), None)
    mirrors = tuple(base for base in bases if isinstance(base, RemoteType))
    content = content or next((base._remote_content for base in mirrors if base._remote_content is not None), None)
    errors = any(issubclass(base, BaseException) for base in bases)
    space: dict[str, Any] = {"__module__": module, "__qualname__": name, "_remote_content": content}
    own = dict(members)
    for key, kind in members:
        if kind == "n" and key in SPECIAL:
            space[key] = None
        elif key in SPECIAL and not (errors and key in ("__str__", "__repr__")):
            space[key] = SPECIAL[key]
        elif kind == "m" and key.isidentifier() and (not key.startswith(("__", "_remote")) or key == "__init__"):
            space[key] = Method(key)
    for key in SPECIAL if content is not None and not mirrors else ():
        inherited = getattr(content, key, None)
        if key not in own and inherited is not getattr(object, key, None):
            space[key] = None if inherited is None else SPECIAL[key]
    if "__eq__" in own and own.get("__hash__", "n") == "n":
        space["__hash__"] = None
    compares = content is not None and "__eq__" in own
    space["_remote_compares"] = compares or any(base._remote_compares for base in mirrors)
    space["_remote_abstract"] = ABSTRACT in own or any(base._remote_abstract for base in mirrors)
    if module in _STANDARD and not errors:
        real = _KNOWN.get(name) or getattr(sys.modules.get(module), name, None)
        if isinstance(real, type) and real is not object and not issubclass(real, _MAKERS) and name[0] != "_":
            space["__class__"] = property(lambda self: real)
        if name == "function":
            space["__get__"] = _bound
        if "__call__" in own:
            space["__module__"] = _There("__module__")
    elif content is not None and not errors:
        shadow = type(name.rpartition(".")[2], (content,), {"__module__": module})
        space["__class__"] = property(lambda self: shadow)
    if errors:
        built_in = tuple(base for base in bases if not isinstance(base, RemoteType))
        mirrors = (
            (*mirrors, *built_in) if any(issubclass(m, RemoteError) for m in mirrors) else (RemoteError, *built_in)
        )
    elif not mirrors:
        mirrors = (Handle,)
    if not errors:
        space["__slots__"] = ()
    return RemoteType(name.rpartition(".")[2], mirrors, space, mirrored=True)
