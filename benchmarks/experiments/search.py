"""The `search` tool on questions about packages as they are installed, against plain BM25 and grep.

Questions are made from the packages themselves, and what they were made from is not in the index:

docstring    the first sentence of a function's docstring; all docstrings are cut out of the text that is searched
test         the words of a test function's name, asked for the function that the test calls; tests are not searched

    recall/PACKAGE/KIND    share of questions whose function is among the first ten, for `search`; baseline: plain BM25
    grep/PACKAGE/KIND      the same for grep: chunks by the number of the question's words that they contain
    split/PACKAGE/KIND     the same for BM25 over words split as `search` splits them

A question is left out if it names its function. Weights were chosen on the packages of TUNED, not on those of HELD_OUT.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import math
import random
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.harness.chunks import CodeChunk, chunks
from etude.harness.ranking import Lexical, Scorer, best, words

TUNED = ("rich", "sqlalchemy", "mpmath")
HELD_OUT = ("networkx", "starlette", "jinja2", "urllib3", "pydantic")
PER_KIND = 150
TOP = 10
_WORD = re.compile(r"\w+")
_COMMON = "the a an of to in is and or for if this that with from by on as be it are return returns"


@dataclass(frozen=True)
class Question:
    """What is asked, and the functions that answer it as (path, qualified name)."""

    text: str
    answers: frozenset[tuple[str, str]]


class Bm25:
    """Plain BM25 (k1 1.2, b 0.75) over the words of chunk, path and name."""

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split
        self._keys: tuple[bytes, ...] = ()

    def __call__(self, question: str, found: Sequence[CodeChunk]) -> Sequence[float]:
        keys = tuple(chunk.key for chunk in found)
        if keys != self._keys:
            self._keys = keys
            self._counts = [Counter(self._split(f"{c.path} {c.text}")) for c in found]
            self._mean = statistics.fmean(c.total() for c in self._counts)
            self._postings: dict[str, list[int]] = defaultdict(list)
            for number, counts in enumerate(self._counts):
                for word in counts:
                    self._postings[word].append(number)
        total = [0.0] * len(found)
        for word in self._split(question):
            having = self._postings.get(word, [])
            idf = math.log(1 + (len(found) - len(having) + 0.5) / (len(having) + 0.5))
            for number in having:
                counts = self._counts[number]
                tf = counts[word]
                total[number] += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * counts.total() / self._mean))
        return total


def grep(question: str, found: Sequence[CodeChunk]) -> Sequence[float]:
    """How many of the question's words a chunk contains, as `grep -i` finds them."""
    asked = {word.lower() for word in _WORD.findall(question)} - set(_WORD.findall(_COMMON))
    return [float(sum(word in chunk.text.lower() for word in asked)) for chunk in found]


def plain(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def load(package: str, limit: int, seed: int) -> tuple[list[CodeChunk], dict[str, list[Question]]]:
    """The chunks of an installed package without tests and docstrings, and at most `limit` questions of each kind."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None, f"{package} is no plain package"
    root = Path(spec.origin).parent
    searched: list[CodeChunk] = []
    questions: dict[str, list[Question]] = {"docstring": [], "test": []}
    defined: dict[str, set[tuple[str, str]]] = defaultdict(set)
    tests: list[ast.Module] = []
    for file in sorted(root.rglob("*.py")):
        path = f"{package}/{file.relative_to(root).as_posix()}"
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        if "/tests/" in path or "/test_" in path:
            tests.append(tree)
            continue
        for name, node in functions(tree.body, ""):
            defined[node.name].add((path, name))
            if question := sentence(node):
                questions["docstring"].append(Question(question, frozenset({(path, name)})))
        searched += chunks(path, without_docstrings(text, tree))
    questions["test"] = [q for tree in tests for q in of_tests(tree, defined)]
    kept = {chunk.name and (chunk.path, chunk.name) for chunk in searched}
    rng = random.Random(seed)
    for kind, asked in questions.items():
        asked = [q for q in asked if q.answers & kept]
        questions[kind] = rng.sample(asked, min(limit, len(asked)))
    return searched, questions


def functions(body: Sequence[ast.stmt], inside: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inside + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{inside}{node.name}.")


def sentence(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The first sentence of a docstring as a question; "" if it is too short, or names the function."""
    text = (ast.get_docstring(node) or "").partition("\n\n")[0]
    text = re.split(r"(?<=[.!?])\s", " ".join(text.split()))[0]
    short = len(_WORD.findall(text)) < 5 or len(text) > 300
    return "" if short or re.search(rf"\b{re.escape(node.name)}\b", text, re.IGNORECASE) else text


def without_docstrings(text: str, tree: ast.Module) -> str:
    """The same lines, those of docstrings blank, so that chunks keep their places."""
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            own = isinstance(node, ast.Module) or first.lineno > node.lineno
            if own and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                for number in range(first.lineno - 1, first.end_lineno or first.lineno):
                    lines[number] = ""
    return "\n".join(lines)


def of_tests(tree: ast.Module, defined: dict[str, set[tuple[str, str]]]) -> Iterator[Question]:
    """Questions of the tests that call just one function of the package that few others share a name with."""
    for _, node in functions(tree.body, ""):
        said = [word for word in re.split(r"_|(?<=[a-z])(?=[A-Z])", node.name.removeprefix("test")) if word]
        if not node.name.startswith("test_") or len(said) < 3:
            continue
        called = {_called(call) for call in ast.walk(node) if isinstance(call, ast.Call)} & defined.keys()
        if len(called) == 1:
            (name,) = called
            named = re.sub(r"\W|_", "", name).lower() in "".join(said).lower()
            if len(defined[name]) == 1 and not named:
                yield Question(" ".join(said), frozenset(defined[name]))


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def recall(asked: Sequence[Question], searched: Sequence[CodeChunk], scorer: Scorer) -> float:
    """Share of questions with an answer among the first ten."""
    hits = 0
    for question in asked:
        found = {(chunk.path, chunk.name) for chunk, _ in best(question.text, searched, scorer, TOP)}
        hits += bool(found & question.answers)
    return hits / len(asked)


def run(quick: bool, packages: Sequence[str] = HELD_OUT, seed: int = 0) -> dict[str, Any]:
    """Rows and checks; about a minute. `quick`: three packages, 40 questions of a kind."""
    rows: list[dict[str, Any]] = []
    won: list[tuple[float, float, float, int]] = []
    for package in packages[:3] if quick else packages:
        searched, questions = load(package, 40 if quick else PER_KIND, seed)
        for kind, asked in questions.items():
            if len(asked) < 10:
                continue
            ours, bm25, grepped, split = (
                recall(asked, searched, scorer) for scorer in (Lexical(), Bm25(plain), grep, Bm25(words))
            )
            where = f"{package}/{kind}"
            unit = f"recall@{TOP} of {len(asked)} questions over {len(searched)} chunks"
            rows.append({"case": f"recall/{where}", "value": round(ours, 4), "unit": unit, "baseline": round(bm25, 4)})
            rows.append({"case": f"grep/{where}", "value": round(grepped, 4), "unit": unit, "baseline": None})
            rows.append({"case": f"split/{where}", "value": round(split, 4), "unit": unit, "baseline": None})
            won.append((ours, bm25, grepped, len(asked)))
    total = sum(n for *_, n in won)
    means = [sum(w[i] * w[3] for w in won) / total for i in range(3)]
    ours, bm25 = round(means[0], 4), round(means[1], 4)
    rows.append({"case": "recall/all", "value": ours, "unit": f"recall@{TOP}", "baseline": bm25})
    checks = {
        "search finds more than BM25 over all questions": means[0] > means[1],
        "search finds more than grep over all questions": means[0] > means[2],
        "search finds no less than BM25 in every package": all(a >= b for a, b, *_ in won),
    }
    return {"bench": "search", "rows": rows, "checks": checks}


def main() -> None:
    """`python -m benchmarks.experiments.search [--packages NAME ...] [--seed N]`: one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", nargs="+", default=list(HELD_OUT))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.quick, arguments.packages, arguments.seed), indent=1))


if __name__ == "__main__":
    main()
