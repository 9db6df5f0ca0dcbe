"""Import order: the files of a repository such that each stands behind those that it imports, as far as circles allow.

Imports are read by lines, in Python, JavaScript, TypeScript, Go, Java and C; files of other languages import nothing,
and keep their places by path.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from etude.code import SCRIPT_SUFFIXES

_PYTHON = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)"
    r"|import[ \t]+([\w.]+(?:[ \t]*,[ \t]*[\w.]+)*))",
    re.M,
)
_SCRIPT = re.compile(r"""(?:\bfrom|\bimport|\brequire\(|\bimport\()\s*["'](\.{1,2}/[^"'\n]+|\.{1,2})["']""")
_GO_BLOCK = re.compile(r"^import\s*(?:\(([^)]*)\)|(?:[\w.]+\s+)?\"([^\"\n]+)\")", re.M)
_QUOTED = re.compile(r'"([^"\n]+)"')
_JAVA = re.compile(r"^import\s+(?:static\s+)?([\w.]+)", re.M)
_C = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.M)
_MOST = 500  # imports of a file that are read


def imports_of(text: str, language: str) -> tuple[str, ...]:
    """The imports of a file as it names them, in order, each once."""
    match language:
        case "python":
            names = [name for match in _PYTHON.finditer(text) for name in _python_names(match)]
        case "javascript" | "typescript" | "tsx":
            names = _SCRIPT.findall(text)
        case "go":
            names = [name for block, one in _GO_BLOCK.findall(text) for name in [*_QUOTED.findall(block), one] if name]
        case "java":
            names = _JAVA.findall(text)
        case "c" | "cpp":
            names = _C.findall(text)
        case _:
            names = []
    return tuple(dict.fromkeys(names))[:_MOST]


def _python_names(match: re.Match[str]) -> list[str]:
    """Modules; of `from a import b` both a.b, which may be a module, and a."""
    base, names, plain = match.groups()
    if plain is not None:
        return [name.strip() for name in plain.split(",")]
    words = [part.split()[0] for part in names.split("#")[0].strip("() \t\r").split(",") if part.split()]
    joint = "" if base.endswith(".") else "."
    return [*(f"{base}{joint}{word}" for word in words if word.isidentifier()), base]


def import_order(files: Sequence[tuple[str, str, Sequence[str]]]) -> list[int]:
    """The places of files (path, language, imports), such that imports come first. Files are visited by path, their
    imports in the order in which they stand; of a circle, the file that is visited first comes last."""
    resolve = _Resolver([path for path, _, _ in files])
    seen: set[int] = set()
    order: list[int] = []
    for first in sorted(range(len(files)), key=lambda i: files[i][0]):
        stack = [] if first in seen else [(first, iter(resolve.targets(*files[first])))]
        seen.add(first)
        while stack:
            at, targets = stack[-1]
            for target in targets:
                if target not in seen:
                    seen.add(target)
                    stack.append((target, iter(resolve.targets(*files[target]))))
                    break
            else:
                order.append(at)
                stack.pop()
    return order


class _Resolver:
    """Finds the files that imports mean."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._place: Mapping[str, int] = {path: i for i, path in enumerate(paths)}
        self._modules: dict[str, int] = {}  # "a.b" -> its file
        self._folders: dict[str, list[int]] = defaultdict(list)  # of Go files
        self._ends: dict[str, list[int]] = defaultdict(list)  # the last two parts of a path -> files
        for path, place in self._place.items():
            folder, name = posixpath.split(path)
            if name.endswith((".py", ".pyi")):
                parts = path.rpartition(".")[0].removesuffix("/__init__").split("/")
                for start in range(max(1, len(parts) - 1)):  # the folder from which it is imported is not known
                    self._modules.setdefault(".".join(parts[start:]), place)
            elif name.endswith(".go") and not name.endswith("_test.go"):
                self._folders[folder].append(place)
            for end in {name, posixpath.join(posixpath.basename(folder), name)}:
                self._ends[end].append(place)

    def targets(self, path: str, language: str, imports: Sequence[str]) -> list[int]:
        """The places of the imported files, in order."""
        held: list[int] = []
        for name in imports:
            held += self._one(path, language, name)
        return held

    def _one(self, path: str, language: str, name: str) -> list[int]:
        folder = posixpath.dirname(path)
        match language:
            case "python":
                return self._python(path, name)
            case "javascript" | "typescript" | "tsx":
                base = posixpath.normpath(posixpath.join(folder, name))
                stem = base.removesuffix(".js").removesuffix(".mjs")  # of TypeScript, which names the file to be made
                ends = ["", *SCRIPT_SUFFIXES, *(f"/index{suffix}" for suffix in SCRIPT_SUFFIXES)]
                tries = [base + end for end in ends] + [stem + suffix for suffix in SCRIPT_SUFFIXES]
                return next(([self._place[one]] for one in tries if one in self._place), [])
            case "go":
                parts = name.split("/")
                tails = ("/".join(parts[i:]) for i in range(1, len(parts)))
                return next((self._folders[tail] for tail in tails if tail in self._folders), [])
            case "java":
                tail = name.replace(".", "/") + ".java"
                return self._ending(tail)
            case _:
                base = posixpath.normpath(posixpath.join(folder, name))
                return [self._place[base]] if base in self._place else self._ending(name)

    def _ending(self, tail: str) -> list[int]:
        key = "/".join(tail.split("/")[-2:])
        held = [place for place in self._ends.get(key, ()) if f"/{self._paths[place]}".endswith(f"/{tail}")]
        return held[:1]

    def _python(self, path: str, name: str) -> list[int]:
        if name.startswith(".") or "." not in name:
            name = name if name.startswith(".") else f".{name}"  # beside it
            up = len(name) - len(name.lstrip("."))
            package = posixpath.dirname(path)
            for _ in range(up - 1):
                package = posixpath.dirname(package)
            base = posixpath.join(package, *name.lstrip(".").split("."))
            tries = [f"{base}.py", f"{base}/__init__.py", f"{base}.pyi"]
            return next(([self._place[one]] for one in tries if one in self._place), [])
        return [self._modules[name]] if name in self._modules else []
