"""Finds answers in what boxes have besides their task: in images of the system, and in copies of the library there.

A task is dropped if a place of the system holds its answer. A library of which the system has a copy, vendored or of
another version, gives no tasks at all: a copy is recognised by its path and by the names that it defines, or by the
name under which installers keep it.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from etude.code import is_script
from etude.errors import UserError
from etude.grading import AnswerFingerprint, held_runs, read_package
from etude.records import CodeTask
from etude.sandbox import SITE
from etude.sandbox.egress import normal_project, wheel_project
from etude.tasks import leaks
from etude.tasks.system_index import WORD, SystemIndex, index_of, words_of

RUN_SHARE = 0.9  # of an answer's runs of tokens; idioms of the language share half
COPY_SHARE = 0.25  # of a module's functions and classes, which another version still has
WORD_SHARE = 0.7  # of an answer's words that its bytecode keeps; it has no comments
_COMMENT = re.compile(r'"{3}.*?"{3}|\'{3}.*?\'{3}|/\*.*?\*/|(?:#|//)[^\n]*', re.DOTALL)
_DEFINED = re.compile(rb"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(?!__)(\w+)", re.MULTILINE)
_CODE = re.compile(r"(?:\.(?:cpython|pypy|abi)[^/]*)?(?:\.opt-\d)?\.(?:py|pyc|pyx|so|pyd)$")


@dataclass(frozen=True)
class Library:
    """The library that tasks are made from: the name of its project, and the names that each module defines, by its
    path as an import reads it ("more_itertools/more.py"). `package` is its name in node_modules."""

    project: str
    modules: Mapping[str, frozenset[bytes]]
    package: str = ""

    @property
    def names(self) -> frozenset[bytes]:
        """All names that the library defines."""
        return frozenset().union(*self.modules.values())


def library_of(name: str, repository: Path, source_roots: Iterable[str]) -> Library:
    """The library of a repository. `name` is that of a dataset, "more-itertools-10.1.0"."""
    modules: dict[str, frozenset[bytes]] = {}
    package = ""
    if (repository / "package.json").is_file() and any(map(is_script, _below(repository, source_roots))):
        package = str(read_package(repository).get("name") or "")
    for path in _below(repository, source_roots):
        if path.endswith(".py"):
            root = next(root for root in source_roots if path == root or path.startswith(f"{root}/"))
            above = PurePosixPath(root).parent.as_posix()
            defined = _DEFINED.findall((repository / path).read_bytes())
            below = path if above == "." else path.removeprefix(f"{above}/")
            modules[below] = frozenset(word for each in defined for word in WORD.findall(each))
    return Library(normal_project(wheel_project(name)), modules, package)


def _below(repository: Path, roots: Iterable[str]) -> list[str]:
    """Files at and below the source roots."""
    files = []
    for root in roots:
        place = repository / root
        hits = [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.is_file())
        files += [each.relative_to(repository).as_posix() for each in hits]
    return files


def refuse_copies(library: Library, systems: Sequence[SystemIndex], site: Path) -> None:
    """Raises UserError if the system of boxes, or the folder of the task's dependencies, has a copy of the library."""
    shown = [index.shown(place) for index in systems for place in copies(library, index)]
    advice = "leave it out of the image with `exclude`, or give another [sandbox]"
    if not shown:
        index = index_of(SITE, site)  # it may say that the library is installed
        names = [place.replace("!", "/") for place in index.places]
        hits = {*_modules(library, index, names), *_packages(library, index, names)}
        shown, advice = [*map(index.shown, sorted(hits))], "do without the package that brings it"
    if shown:
        more = f" and {len(shown) - 1} more places" if len(shown) > 1 else ""
        whose = f"boxes have a copy of {library.project} in {shown[0]}{more}"
        raise UserError(f"{whose}, from which every answer could be taken: {advice}")


def copies(library: Library, index: SystemIndex) -> list[int]:
    """The first place of each copy of the library, of any version."""
    names = [place.replace("!", "/") for place in index.places]
    hits = _named(library, names)
    for place in (*_modules(library, index, names), *_packages(library, index, names)):
        hits.setdefault(PurePosixPath(names[place]).parent.as_posix(), place)
    return sorted(set(hits.values()))


def _named(library: Library, names: Sequence[str]) -> dict[str, int]:
    """Path -> first place, of installed distributions, wheels and sources of the library, and of its folder in
    node_modules."""
    project = re.escape(library.project).replace(r"\-", "[-_.]+")
    pattern = rf"{project}-[^/]*\.(?:dist-info|egg-info|egg|whl|tar\.gz|tar\.bz2|tgz|zip)(?:/|$)"
    if library.package:
        pattern += rf"|(?:node_modules|nodejs)/{re.escape(library.package)}/"
    search = re.compile(rf"(?:^|/)(?:{pattern})", re.IGNORECASE).search
    hits: dict[str, int] = {}
    for place, name in enumerate(names):
        if (match := search(name)) is not None:
            hits.setdefault(name[: match.end()], place)
    return hits


def _modules(library: Library, index: SystemIndex, names: Sequence[str]) -> Iterator[int]:
    """Places of files at the path of a module, with a share of its names."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for module in library.modules:
        by_name[module.rpartition("/")[2]].append(module)
    for place, name in enumerate(names):
        if not (ending := _CODE.search(name)):
            continue
        plain = name[: ending.start()].replace("__pycache__/", "") + ".py"
        for module in by_name.get(plain.rpartition("/")[2], ()):
            if plain == module or plain.endswith(f"/{module}"):
                least = 1 if "/" in module else 2  # a module alone may have a name of many
                if _shares(index, [place], library.modules[module], least):
                    yield place


def _packages(library: Library, index: SystemIndex, names: Sequence[str]) -> Iterator[int]:
    """The first places of packages of the library's name with a share of all its names, in whatever modules."""
    for package in {module.partition("/")[0] for module in library.modules if "/" in module}:
        start = re.compile(rf"(?:^|.*/){re.escape(package)}/(?:__pycache__/)?__init__\.[^/]*$")
        for first in (place for place, name in enumerate(names) if start.match(name) and _CODE.search(name)):
            folder = PurePosixPath(names[first].replace("__pycache__/", "")).parent.as_posix()
            below = [n for n, name in enumerate(names) if name.startswith(f"{folder}/") and _CODE.search(name)]
            if _shares(index, below, library.names, 2):
                yield first


def _shares(index: SystemIndex, places: Sequence[int], names: frozenset[bytes], least: int) -> bool:
    held = sum(bool(np.isin(places, index.having(name)).any()) for name in names)
    return held >= max(least, COPY_SHARE * len(names))


def held(systems: Sequence[SystemIndex], tasks: Iterable[CodeTask]) -> dict[str, str]:
    """CodeTask id -> a place of the system that holds the task's answer."""
    wanted = [(task.id, answer) for task in tasks for answer in _answers(task)]
    hits: dict[str, str] = {}
    for index in systems:
        candidates: dict[int, list[int]] = defaultdict(list)
        for number, (task, answer) in enumerate(wanted):
            for place in () if task in hits else answer.candidates(index):
                candidates[place].append(number)
        for place, data in index.contents(candidates):
            holds = _Wanted.in_text if index.text_P[place] else _Wanted.in_code
            for task, answer in (wanted[number] for number in candidates[place]):
                if task not in hits and holds(answer, data):
                    hits[task] = index.shown(place)
    return hits


@dataclass(frozen=True)
class _Wanted:
    """An answer, and the words that a place with it has. `runs` counts its runs of tokens by the words in them,
    `around` are those of the whole function without its comments, `words` are all names in the runs, `inner` the words
    within its constants."""

    part: AnswerFingerprint
    runs: Mapping[frozenset[bytes], int]
    around: frozenset[bytes]
    words: frozenset[bytes]
    inner: frozenset[bytes]

    @classmethod
    def of(cls, part: AnswerFingerprint, function: str) -> _Wanted:
        words = words_of({token for run in part.shingles for token in run})
        runs = Counter(frozenset(words[token] for token in run if token in words) for run in part.shingles)
        around = frozenset(WORD.findall(_COMMENT.sub(" ", function).encode("ascii", "ignore")))
        names = {token.encode() for token in words if token.isidentifier() and not keyword.iskeyword(token)}
        # The ends of a constant may touch other bytes in compiled code.
        inner = {word for text in part.constants for word in WORD.findall(re.sub(rb"^\w+|\w+$", b"", text))}
        return cls(part, runs, around, frozenset(names), frozenset(inner))

    def candidates(self, index: SystemIndex) -> Sequence[int]:
        """The places that have the words of the answer."""
        hits = index.text_P & _have(index, self.around, WORD_SHARE)
        if hits.any():
            held = np.zeros(len(index.places), np.int64)
            for words, count in self.runs.items():
                held += count * _have(index, words, 1.0)
            hits &= held >= RUN_SHARE * len(self.part.shingles)
        if self.part.constants and self.words:
            compiled = ~index.text_P & _have(index, self.inner, 1.0)
            hits |= compiled & _have(index, self.words, WORD_SHARE)
        return np.flatnonzero(hits).tolist()

    def in_text(self, data: bytes) -> bool:
        """Whether a text holds the answer: nearly all of its runs of tokens."""
        most = len(self.patterns) - RUN_SHARE * len(self.patterns)  # that may be missing
        missing = 0
        for pattern in self.patterns:  # much faster than the tokens of the text, which are few that pass
            missing += pattern.search(data) is None
            if missing > most:
                return False
        held = held_runs(self.part.shingles, data.decode("utf-8", "replace"))
        return bool(held) and len(held) >= RUN_SHARE * len(self.part.shingles)

    @cached_property
    def patterns(self) -> Sequence[re.Pattern[bytes]]:
        """The runs with any space between their tokens."""
        runs = sorted(self.part.shingles, key=lambda run: -len(run[0]))
        return [re.compile(rb"\s*".join(re.escape(token.encode()) for token in run)) for run in runs]

    def in_code(self, data: bytes) -> bool:
        """Whether compiled code holds the answer: all its constants, and most of its names."""
        names = sum(word in data for word in self.words)
        return all(constant in data for constant in self.part.constants) and names >= WORD_SHARE * len(self.words)


def _have(index: SystemIndex, words: Iterable[bytes], share: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which places have a share of the words."""
    words = tuple(words)
    count = np.zeros(len(index.places), np.int32)
    for word in words:
        count[index.having(word)] += 1
    return count >= share * len(words)


def _answers(task: CodeTask) -> Iterator[_Wanted]:
    """The answer of a task in each file that it breaks."""
    for (path, broken), part in zip(task.changes.items(), leaks.answers_of(task), strict=True):
        right, function = task.solution[path].split("\n"), ""
        if path == task.focus.path:
            last = task.focus.last_line + len(right) - len(broken.split("\n"))
            function = "\n".join(right[task.focus.first_line - 1 : last])
        yield _Wanted.of(part, function)
