"""Makes samples of cross-file retrieval: files of a repository, and questions whose answers occur in one of them.

    signature    Complete the definition:\\ndef chunk               def chunk(array, size=1):
    opening      Quote the first line of:\\nlists.py                lists.py\\ndef chunk(array, size=1):
    call         Complete the call:\\nvalue = zip_all               value = zip_all(first, second)
    file         Name the file that defines:\\ndef chunk            lists.py
    namesake     Complete the definition in lists.py:\\ndef chunk   as `signature`, where another file defines one too

A document is an excerpt of a file: one or two short functions under the file's path. The other documents of a sample
share the name, or words of the name, of a symbol in a question, or are drawn by chance; their order is random. Answers
are compared as text, so no judge is needed.
"""

from __future__ import annotations

import ast
import posixpath
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from etude.code import parse
from etude.corpus.filters import FunctionText, function_texts, keep_function, kept_files
from etude.corpus.sources import PackageSource

RETRIEVAL_KINDS: Mapping[str, float] = {"signature": 0.35, "opening": 0.25, "call": 0.2, "file": 0.2}
NAMESAKE = "namesake"  # the only kind of question about symbols that several documents define
# Packages outside of the bundled models' training data (models/nano/README.md).
RETRIEVAL_HELD_OUT = ("boltons==26.2.0", "funcy==2.1", "pydash==8.1.0", "toolz==1.2.0")
_HEADER = re.compile(r"(?:async )?def \w+\(.*\)(?: -> .+)?:")
_LONGEST = 72  # characters of an answer
_TRIES = 20  # draws per document before a sample is given up
_NAMESAKES = 0.15  # share of samples about a name that several files define, if there is such a name


@dataclass(frozen=True)
class RetrievalOptions:
    """Sizes of samples: `min_documents` to `max_documents` documents of at most `chars` characters, and up to
    `questions` questions."""

    min_documents: int = 4
    max_documents: int = 10
    chars: int = 320
    questions: int = 4
    kinds: Mapping[str, float] = field(default_factory=lambda: dict(RETRIEVAL_KINDS))


@dataclass(frozen=True)
class RetrievalQuestion:
    """A question with its answer. `title` is that of the document that holds the answer."""

    kind: str
    text: str
    answer: str
    title: str


@dataclass(frozen=True)
class RetrievalSample:
    """Documents as (title, text), and questions. Each question is asked after all documents."""

    repository: str
    documents: tuple[tuple[str, str], ...]
    questions: tuple[RetrievalQuestion, ...]

    def reordered(self, rng: random.Random) -> RetrievalSample:
        """The same sample with its documents in a random order."""
        return replace(self, documents=tuple(rng.sample(self.documents, len(self.documents))))


class FunctionLibrary:
    """The functions of one package from which samples can be made."""

    def __init__(self, functions: Sequence[FunctionText], options: RetrievalOptions) -> None:
        self.options = options
        self.functions = [function for function in functions if _askable(function, options.chars)]
        self._by_path: dict[str, list[FunctionText]] = {}
        self._by_name: dict[str, list[FunctionText]] = {}
        self._by_word: dict[str, list[FunctionText]] = {}
        for function in self.functions:
            self._by_path.setdefault(function.path, []).append(function)
            self._by_name.setdefault(function.name, []).append(function)
            for word in _words(function.name):
                self._by_word.setdefault(word, []).append(function)
        self._repeated = [
            function
            for name, same in self._by_name.items()
            for function in same
            if not name.startswith("__") and len({other.path for other in same}) > 1
        ]

    @property
    def usable(self) -> bool:
        """Whether the package has functions in enough files."""
        return len(self._by_path) >= self.options.min_documents

    def sample(self, rng: random.Random) -> RetrievalSample | None:
        """A random sample; None if this draw has fewer than `min_documents` files, or no question."""
        about_namesakes = bool(self._repeated) and rng.random() < _NAMESAKES
        first = rng.choice(self._repeated if about_namesakes else self.functions)
        chosen = {first.path: self._excerpt(first, rng)}
        if about_namesakes:
            other = rng.choice([f for f in self._by_name[first.name] if f.path != first.path])
            chosen[other.path] = self._excerpt(other, rng)
        alike = [f for word in _words(first.name) for f in self._by_word[word] if f.path != first.path]
        count = rng.randint(self.options.min_documents, self.options.max_documents)
        for _ in range(_TRIES * count):
            if len(chosen) >= count:
                break
            other = rng.choice(alike if alike and rng.random() < 0.5 else self.functions)
            if other.path not in chosen:
                chosen[other.path] = self._excerpt(other, rng)
        if len(chosen) < self.options.min_documents:
            return None
        common = posixpath.commonpath([posixpath.dirname(path) for path in chosen])
        titles = {path: path[len(common) + 1 :] if common else path for path in chosen}
        questions = self._questions(first, chosen, titles, rng)
        documents = [(titles[path], "\n\n".join(f.source for f in excerpt)) for path, excerpt in chosen.items()]
        rng.shuffle(documents)
        return RetrievalSample(first.package, tuple(documents), questions) if questions else None

    def _excerpt(self, function: FunctionText, rng: random.Random) -> list[FunctionText]:
        """The function and, in half of the cases, another short one of its file, in file order."""
        others = [f for f in self._by_path[function.path] if f.name != function.name]
        if not others or rng.random() < 0.5:
            return [function]
        other = rng.choice(others)
        if len(function.source) + len(other.source) > self.options.chars:
            return [function]
        pair = [function, other]
        return sorted(pair, key=self._by_path[function.path].index)

    def _questions(
        self,
        first: FunctionText,
        chosen: Mapping[str, list[FunctionText]],
        titles: Mapping[str, str],
        rng: random.Random,
    ) -> tuple[RetrievalQuestion, ...]:
        """Questions about `first` and, for the rest, about other functions; at most one for each name."""
        defined = [f for excerpt in chosen.values() for f in excerpt]
        named: dict[str, list[FunctionText]] = {}
        for function in defined:
            named.setdefault(function.name, []).append(function)
        others = rng.sample(defined, len(defined))
        kinds, weights = list(self.options.kinds), list(self.options.kinds.values())
        questions: dict[str, RetrievalQuestion] = {}
        for function in [first, *others]:
            if len(questions) == self.options.questions:
                break
            kind, title = rng.choices(kinds, weights)[0], titles[function.path]
            opens = chosen[function.path][0] is function
            if len(named[function.name]) > 1:
                kind = NAMESAKE
            elif (kind == "opening" and not opens) or (kind == "call" and not _arguments(function)):
                kind = "signature"
            question = _ask(function, kind, title)
            if question is not None:
                questions.setdefault(function.name, question)
        return tuple(rng.sample(list(questions.values()), len(questions)))


def repositories(functions: Sequence[FunctionText], options: RetrievalOptions) -> list[FunctionLibrary]:
    """One library for each package that has enough files. The largest packages give no more samples than small ones."""
    by_package: dict[str, list[FunctionText]] = {}
    for function in functions:
        by_package.setdefault(function.package, []).append(function)
    every = [FunctionLibrary(members, options) for members in by_package.values()]
    return [repository for repository in every if repository.usable]


def retrieval_samples(
    functions: Sequence[FunctionText], options: RetrievalOptions, seed: int
) -> Iterator[RetrievalSample]:
    """Endless samples, each from one package, drawn by the square root of its size. Raises ValueError if no package has
    enough files, or none of them gives a sample."""
    rng, usable = random.Random(seed), repositories(functions, options)
    if not usable:
        few = options.min_documents
        raise ValueError(f"no package has short functions in at least {few} files; give the corpus more code")
    weights = [len(repository.functions) ** 0.5 for repository in usable]
    missed = 0
    while True:
        sample = rng.choices(usable, weights)[0].sample(rng)
        missed = 0 if sample else missed + 1
        if missed == 1000:
            raise ValueError("the corpus gives no question about its functions; give it more code")
        if sample is not None:
            yield sample


def folder_functions(folder: Path) -> list[FunctionText]:
    """The functions in any folder of Python files, without tests."""
    source = PackageSource(folder.resolve().name, "", "", folder)
    return [f for file in kept_files(source) for f in function_texts(file) if keep_function(f, min_lines=2)]


def package_functions(source: PackageSource) -> list[FunctionText]:
    """The functions of a package that pass the filters."""
    return [function for file in kept_files(source) for function in function_texts(file) if keep_function(function)]


def _askable(function: FunctionText, chars: int) -> bool:
    header = function.source.split("\n", 1)[0]
    return len(function.source) <= chars and len(header) <= _LONGEST and _HEADER.fullmatch(header) is not None


def _ask(function: FunctionText, kind: str, title: str) -> RetrievalQuestion | None:
    """A question about a function; None if the answer would be too long."""
    name = function.name
    header = function.source.split("\n", 1)[0]
    match kind:
        case "signature":
            text, answer = f"Complete the definition:\ndef {name}", header
        case "opening":
            text, answer = f"Quote the first line of:\n{title}", f"{title}\n{header}"
        case "call":
            text, answer = f"Complete the call:\nvalue = {name}", f"value = {name}({_arguments(function)})"
        case "file":
            text, answer = f"Name the file that defines:\ndef {name}", title
        case "namesake":
            text, answer = f"Complete the definition in {title}:\ndef {name}", header
        case _:
            raise ValueError(f"unknown kind of question {kind!r}; known: {', '.join((*RETRIEVAL_KINDS, NAMESAKE))}")
    return RetrievalQuestion(kind, text, answer, title) if len(answer) <= _LONGEST else None


def _arguments(function: FunctionText) -> str:
    """The arguments of a call, if they follow from the definition: no parameter has a default, a star or an annotation,
    and the first is not `self` or `cls`; "" for other functions."""
    tree = parse(function.source)
    assert tree is not None
    assert isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = tree.body[0].args
    names = [a.arg for a in arguments.args]
    text = ", ".join(names)
    return text if ast.unparse(arguments) == text and names[:1] not in (["self"], ["cls"]) else ""


def _words(name: str) -> list[str]:
    """The words of a name, sorted: a set of strings has another order in every process, and samples must follow their
    seed."""
    return sorted({word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name) if len(word) > 2})
