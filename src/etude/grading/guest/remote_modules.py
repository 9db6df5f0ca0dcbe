"""Modules of the library as a hidden test sees them: mirrors of those in the tested process.

The names that `from module import *` brings are those of the right library: no name of the tests, such as `len`, gets
another meaning. Modules of the standard library and of dependencies are shared: both processes have their own.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import BuiltinMethodType, ModuleType
from typing import Any

from _pytest.monkeypatch import MonkeyPatch

from ...sandbox.guest import root
from .mirrors import Handle, RemoteType
from .wire import Garbage


class RemoteModule(ModuleType):
    """The mirror of a library module. Attributes are kept until the test ends or changes the module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__version__", "__author__", "__all__", "__doc__"):
            raise AttributeError(name)
        attribute = _wire().request("get", self, name)
        if isinstance(attribute, (Handle, RemoteType, RemoteModule)):
            self.__dict__[name] = attribute
            if _wire().begun:
                _wire().looked_up.append((self, name))
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


def _wire() -> Any:
    return Handle._remote_wire


class RemoteFinder:
    """Finds modules of the library in the tested process, except those that the hidden tests bring.

    exports: module -> the names that the right library gives to `from module import *`; None while it is recorded.
    imported: the same of the modules that were imported.
    """

    def __init__(self, wire: Any, names: Sequence[str], exports: Mapping[str, Sequence[str]] | None) -> None:
        """`names` are the top-level modules of the library."""
        self.wire = wire
        self.names = frozenset(names)
        self.exports = exports
        self.imported: dict[str, list[str]] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        if name.partition(".")[0] not in self.names:
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
        if self.exports is not None:
            names = [name for name in self.exports.get(module.__name__, ()) if name in names]
        self.imported[module.__name__] = names
        module.__dict__["__all__"] = names

    def known(self, name: str) -> ModuleType | None:
        """The mirror of a module that the tested process names; None for one that the right library did not import.
        Raises Garbage for a name that no module has."""
        parts = name.split(".")  # an import sets an attribute of the package
        if parts[0] not in self.names or not all(part.isidentifier() and not part.startswith("__") for part in parts):
            raise Garbage("no module of the library")
        module = sys.modules.get(name)
        if module is None and (self.exports is None or name in self.exports):
            module = importlib.import_module(name)
        return module if type(module) is RemoteModule else None


def watch_patches(wire: Any) -> None:
    """Make pytest's `monkeypatch` and `unittest.mock`, if it is imported, report their patches to the wire from now
    on."""
    mock = sys.modules.get("unittest.mock")
    if mock is not None and not hasattr(mock._patch.get_original, "__wrapped__"):
        mock._patch.get_original = _showing(wire, mock._patch.get_original, lambda patch: patch.target)
    if not hasattr(MonkeyPatch.setattr, "__wrapped__"):
        MonkeyPatch.setattr = _showing(wire, MonkeyPatch.setattr, lambda _, target, *rest, **named: target)  # type: ignore


def _showing(wire: Any, change: Callable[..., Any], target: Callable[..., object]) -> Callable[..., Any]:
    """`change`, preceded by a report to the wire of the object that it will change."""

    @functools.wraps(change)
    def shown(*arguments: Any, **named: Any) -> Any:
        changed = target(*arguments, **named)
        wire.patched(sys.modules.get(changed.rpartition(".")[0]) if isinstance(changed, str) else changed)
        return change(*arguments, **named)

    return shown


def reference(value: Any) -> list[Any] | None:
    """The name of a module, or of a class or function in a module, that tests share with the library; else None."""
    if isinstance(value, ModuleType):
        return ["m", value.__name__] if shared(value.__name__) else None
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not callable(value) or not shared(module):
        return None
    target: Any = sys.modules[module]
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is value or (type(target) is type(value) is BuiltinMethodType and target == value):
        return ["g", module, name]
    return None


@functools.cache
def shared(module: str) -> bool:
    """Whether a module belongs to the standard library or to the dependencies."""
    if module == "builtins":
        return True
    spec = getattr(sys.modules.get(module), "__spec__", None)
    origin = getattr(spec, "origin", None) or ""
    stable = (sys.base_prefix + "/", root.SITE + "/", "/usr/lib/")
    return origin in ("built-in", "frozen") or origin.startswith(stable)
