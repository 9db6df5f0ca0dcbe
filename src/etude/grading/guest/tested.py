"""The side of the tested process: runs the operations on the agent's library that a hidden test in another process
requests.

Nothing in this process is trusted. The agent's code shares it and may change any of it. It can then only send other
replies, to a process that compares them with values that this process does not hold (`verifier.py`). `wire.py` defines
the messages.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import operator
import socket
import sys
import warnings
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from ...sandbox.guest import root
from .wire import Context, Garbage, Gone, Unsendable, Wire

PLAIN_CLASSES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, object, type)
ABSTRACT = "abstract@"  # marks, among its members, a class that decides itself which objects are its instances
_HIDDEN = {"__dict__", "__weakref__", "__module__", "__doc__", "__slots__", "__annotations__", "__orig_bases__"}
_NAMED_ERRORS = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}

OPERATIONS: dict[str, Callable[..., object]] = {
    **{
        name: getattr(operator, name)
        for name in (
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "add",
            "sub",
            "mul",
            "matmul",
            "truediv",
            "floordiv",
            "mod",
            "lshift",
            "rshift",
            "and_",
            "or_",
            "xor",
            "iadd",
            "isub",
            "imul",
            "imatmul",
            "itruediv",
            "ifloordiv",
            "imod",
            "ilshift",
            "irshift",
            "iand",
            "ior",
            "ixor",
            "ipow",
            "neg",
            "pos",
            "abs",
            "invert",
            "index",
            "contains",
            "getitem",
            "setitem",
            "delitem",
        )
    },
    **{kind.__name__: kind for kind in (bool, int, float, complex, bytes, str)},
    **{
        function.__name__: function
        for function in (len, iter, next, hash, repr, reversed, round, divmod, pow, format, dir)
    },
    "fspath": lambda value: type(value).__fspath__(value),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *error: type(value).__exit__(value, *error),
}


class TestedSide(Wire):
    """Serves one verifier."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.proxies: dict[int, Any] = {}  # number of the verifier's object -> its proxy
        self.theirs: dict[int, int] = {}  # id of a proxy -> number
        self.kinds: dict[int, type] = {}  # number of the verifier's class -> class of proxies
        self.replaced: dict[tuple[Any, str], object] = {}  # attributes that tests have patched -> the earlier value
        self.issued: list[tuple[type[Warning], str]] = []

    def run(self) -> None:
        """Serve until the verifier hangs up."""
        warnings.simplefilter("always")
        warnings.showwarning = self._issue
        try:
            while True:
                self.answer(self.receive())
        except Gone:
            return

    def _issue(self, message: Warning | str, category: type[Warning], *place: object) -> None:
        if len(self.issued) < 100:
            self.issued.append((category, str(message)[:4000]))

    def warnings(self) -> list[Any]:
        """As `Wire.warnings`: the name of a built-in category, and the text."""
        issued, self.issued = self.issued, []
        return [[next(k.__name__ for k in kind.__mro__ if k in _NAMED_ERRORS.values()), text] for kind, text in issued]

    # Requests

    def serve(self, operation: str, values: list[Any], context: Context) -> object:
        """As `Wire.serve`."""
        return _SERVED[operation](self, *values)

    def _call(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> object:
        return target(*arguments, **keywords)

    def _method(self, target: Any, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> object:
        return getattr(target, name)(*arguments, **keywords)

    def _set(self, target: Any, name: str, value: object) -> None:
        if isinstance(target, (type, ModuleType)):
            self.replaced.setdefault((target, name), vars(target).get(name, self))
        setattr(target, name, value)

    def _delete(self, target: Any, name: str) -> None:
        """Delete an attribute. A class or module, which a test has patched, gets the earlier attribute back."""
        before = self.replaced.pop((target, name), self) if isinstance(target, (type, ModuleType)) else self
        if before is self:
            delattr(target, name)
        else:
            setattr(target, name, before)

    def _operate(self, name: str, *values: Any) -> object:
        return OPERATIONS[name](*values)

    def _import(self, name: str) -> list[str]:
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
        return [*map(str, names)]

    def _content(self, value: Any) -> object:
        return content(value)

    def _subclass(self, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> list[Any]:
        made = type(bases[0])(name, bases, dict(space))
        self.described.add(self.export(made))
        return [self.export(made)]

    # Objects of this side

    def encode_other(self, value: object, context: Context) -> list[Any]:
        """As `Wire.encode_other`."""
        number = self.theirs.get(id(value))
        if number is not None:
            return ["o", number]
        kind = value if isinstance(value, type) else type(value)
        if _Proxy in kind.__mro__:  # made beside those that were handed over, by a copy of their fields
            raise Unsendable("a copy of an object of a test")
        if isinstance(value, type):
            return ["k", self._class(value, context)]
        if isinstance(value, BaseException):
            return self.encode_exception(value, context)
        if type(value) is ModuleType and sys.modules.get(value.__name__) is value and _in_workspace(value):
            return ["m", value.__name__]
        return ["h", self.export(value), self._class(type(value), context)]

    def _class(self, kind: type, context: Context) -> Any:
        """The number of a class, with its description if the verifier does not know it yet."""
        if kind in PLAIN_CLASSES or (_NAMED_ERRORS.get(kind.__name__) is kind and issubclass(kind, BaseException)):
            return ["g", "builtins", kind.__name__]
        if (number := self.theirs.get(id(kind))) is not None:
            return ["o", number]
        number = self.export(kind)
        if number in self.described or number in context.described:
            return number
        context.described.append(number)
        bases = [self._class(base, context) for base in kind.__bases__ if base is not object]
        members = [[name, _member(value)] for name, value in vars(kind).items() if name not in _HIDDEN]
        if type(kind).__instancecheck__ is not type.__instancecheck__:
            members.append([ABSTRACT, "v"])
        return [number, str(kind.__module__), kind.__qualname__, bases, members]

    def encode_exception(self, error: BaseException, context: Context) -> list[Any]:
        """As `Wire.encode_exception`."""
        number = self.theirs.get(id(error))
        if number is not None:
            return ["o", number]
        kind = type(error) if isinstance(error, Exception) or type(error) is SystemExit else RuntimeError
        try:
            text = str(error)[:4000]
        except BaseException as e:  # from the code's own __str__
            text = type(e).__name__
        try:
            arguments = self.encode(error.args, context)
        except (Unsendable, RecursionError):
            arguments = self.encode((text,), context)
        return ["E", self.export(error), self._class(kind, context), arguments, text]

    # Proxies of the verifier's objects

    def decode_other(self, form: list[Any], context: Context) -> Any:
        """As `Wire.decode_other`."""
        match form:
            case ["o", number]:
                return self.own(number)
            case ["p", number]:
                return self.proxies[number]
            case ["m", name]:
                return importlib.import_module(name)
            case ["g", module, name]:
                shared: Any = importlib.import_module(module)
                for part in name.split("."):
                    shared = getattr(shared, part)
                return shared
            case ["F", number, name, parameters]:
                return self._keep(number, self._function(number, name, parameters, context))
            case ["P", number, kind]:
                return self._keep(number, object.__new__(self._kind(kind)))
            case ["E", *_]:
                return self.decode_exception(form, context)
            case ["D", kind, *parts]:
                makers = {"property": property, "classmethod": classmethod, "staticmethod": staticmethod}
                return makers[kind](*[self.decode(part, context) for part in parts])
        raise Garbage("an unknown form")

    def _keep(self, number: int, made: Any) -> Any:
        self.proxies[number] = made
        self.theirs[id(made)] = number
        return made

    def _kind(self, form: Any) -> type:
        if isinstance(form, int):
            return self.kinds[form]
        number, name, names = form
        space = {dunder: _forward(self, dunder) for dunder in names}
        self.kinds[number] = type(name, (_Proxy,), {"__slots__": (), "wire@": self, **space})
        return self.kinds[number]

    def _function(self, number: int, name: str, parameters: list[Any], context: Context) -> FunctionType:
        """A function of the same signature that calls a function of the verifier."""
        head, positional, named = [], [], []
        space: dict[str, Any] = {}
        for i, (parameter, kind, default) in enumerate(parameters):
            text = parameter
            if default:
                space[f"default{i}@"] = self.decode(default[0], context)
                text += f"=__builtins__['default{i}@']"
            if kind == inspect.Parameter.KEYWORD_ONLY:
                if not any(p[1] in (inspect.Parameter.VAR_POSITIONAL, kind) for p in parameters[:i]):
                    head.append("*")
                named.append(f"{parameter}={parameter}")
            elif kind == inspect.Parameter.VAR_POSITIONAL:
                text, positional = f"*{parameter}", [*positional, f"*{parameter}"]
            elif kind == inspect.Parameter.VAR_KEYWORD:
                text, named = f"**{parameter}", [*named, f"**{parameter}"]
            else:
                positional.append(parameter)
            head.append(text)
            following = parameters[i + 1][1] if i + 1 < len(parameters) else None
            if kind == inspect.Parameter.POSITIONAL_ONLY and following != kind:
                head.append("/")
        call = "".join(f"{part}, " for part in positional)
        source = f"def made({', '.join(head)}): return __builtins__['call@'](({call}), dict({', '.join(named)}))"
        space["call@"] = lambda arguments, keywords: self.request("call", self.proxies[number], arguments, keywords)
        scope: dict[str, Any] = {"__builtins__": {**space, "dict": dict}, "__name__": "tests"}
        exec(source, scope)
        function: FunctionType = scope["made"]
        function.__name__ = function.__qualname__ = name
        return function

    def decode_exception(self, form: Any, context: Context) -> BaseException:
        """As `Wire.decode_exception`."""
        if form[0] == "o":
            return self.own(form[1])
        if form[0] == "p":
            return self.proxies[form[1]]
        _, number, name, base, arguments = form
        kind = _NAMED_ERRORS[base]
        if name != base:
            kind = type(name, (kind,), {})
        try:
            made = kind(*self.decode(arguments, context))
        except TypeError:
            made = BaseException.__new__(kind)
        return self._keep(number, made)


_SERVED: dict[str, Callable[..., object]] = {
    "import": TestedSide._import,
    "get": lambda wire, target, name: getattr(target, name),
    "set": TestedSide._set,
    "del": TestedSide._delete,
    "call": TestedSide._call,
    "method": TestedSide._method,
    "op": TestedSide._operate,
    "content": TestedSide._content,
    "instance": lambda wire, value, kind: isinstance(value, kind),
    "subclass": lambda wire, value, kind: issubclass(value, kind),
    "class": TestedSide._subclass,
}


def content(value: Any) -> object:
    """The built-in content of an instance of a subclass, read without its own methods. Raises TypeError."""
    copies: dict[Any, Callable[[Any, Any], object]] = {
        **dict.fromkeys((str, bytes, bytearray), lambda base, v: base.__getitem__(v, slice(None))),
        **dict.fromkeys((int, float), lambda base, v: base.__pos__(v)),
        dict: lambda base, v: dict(dict.items(v)),
        **dict.fromkeys((list, tuple, set, frozenset), lambda base, v: base(base.__iter__(v))),
    }
    for base, copy in copies.items():
        if isinstance(value, base):
            return copy(base, value)
    raise TypeError(f"{type(value).__qualname__} has no built-in content")


def _member(value: object) -> str:
    if isinstance(value, (FunctionType, classmethod, staticmethod)):
        return "m"
    if value is None:
        return "n"
    return "m" if callable(value) and not isinstance(value, type) else "v"


def _in_workspace(module: ModuleType) -> bool:
    places = [module.__file__ or ""] if getattr(module, "__file__", None) else list(getattr(module, "__path__", ()))
    return any(place.startswith(root.WORKSPACE + "/") for place in places)


class _Proxy:
    """Stands for an object of the verifier."""

    __slots__ = ("__weakref__",)

    def __getattr__(self, name: str) -> Any:
        return _wire(self).request("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        _wire(self).request("set", self, name, value)

    def __instancecheck__(self, value: object) -> bool:
        return _wire(self).request("instance", value, self)


def _wire(proxy: _Proxy) -> Wire:
    return vars(type(proxy))["wire@"]


def _forward(wire: Wire, dunder: str) -> Callable[..., Any]:
    name = dunder.strip("_")
    if name == "call":
        return lambda self, *arguments, **keywords: wire.request("call", self, arguments, keywords)
    name = {"and": "and_", "or": "or_"}.get(name, name)
    if name[0] == "r" and name[1:] in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "pow"):
        turned = {"and": "and_", "or": "or_"}.get(name[1:], name[1:])
        return lambda self, other: wire.request("op", turned, other, self)
    return lambda self, *values: wire.request("op", name, self, *values)


def serve(sock: socket.socket) -> None:
    """Serve the verifier at the other end until it hangs up."""
    TestedSide(sock).run()
