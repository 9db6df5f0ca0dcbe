"""Questions about files: their answers are found again in the documents by other means than those that asked them."""

from __future__ import annotations

import ast
import inspect
import os
import random
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from etude.corpus.filters import FunctionText, function_texts
from etude.corpus.retrieval import NAMESAKE, RetrievalOptions, RetrievalSample, folder_functions, retrieval_samples
from etude.corpus.sources import File

WORDS = ("chunk", "merge", "split", "count", "flatten", "group", "invert", "select")
ENDS = ("pages", "words", "rows", "keys", "paths", "nodes", "dates", "sets")


def module(number: int) -> str:
    """Functions of which names, words of names, and parameters recur in other modules."""
    word, other = WORDS[number], WORDS[(number + 1) % len(WORDS)]
    end, another = ENDS[number], ENDS[(number + 2) % len(ENDS)]
    return (
        f"def {word}_{end}(items, size={number}):\n    return [item for item in items if item > size]\n\n\n"
        f"def {other}_{another}(first, key):\n    total = key(first)\n    return total\n\n\n"
        f"class Box:\n    def update(self, value_{number}):\n        self.value = value_{number}\n"
        "        return self\n\n\n"
        f"def long_{word}(\n    a,\n    b,\n):\n    return a + b\n"
    )


def every() -> list[FunctionText]:
    return [f for n in range(len(WORDS)) for f in function_texts(File("demo", f"src/demo/{WORDS[n]}.py", module(n)))]


@pytest.fixture(scope="module")
def found() -> list[FunctionText]:
    return every()


def definitions(sample: RetrievalSample, name: str) -> dict[str, ast.FunctionDef]:
    """By title: the definition of `name` in the documents."""
    return {
        title: node
        for title, text in sample.documents
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == name
    }


def test_every_answer_stands_in_the_documents(found: list[FunctionText]) -> None:
    kinds = set()
    for sample in islice(retrieval_samples(found, RetrievalOptions(), 1), 300):
        assert 4 <= len(sample.documents) <= 8, "eight files"
        titles = [title for title, _ in sample.documents]
        assert len(set(titles)) == len(titles)
        assert all(len(text) <= 320 + 2 for _, text in sample.documents), "two functions and the lines between"
        assert 1 <= len(sample.questions) <= 4
        for question in sample.questions:
            kinds.add(question.kind)
            name = question.text.split()[-1]
            defined = definitions(sample, name)
            text = dict(sample.documents)[question.title]
            match question.kind:
                case "file":
                    assert list(defined) == [question.answer]
                case "signature":
                    assert list(defined) == [question.title]
                    assert question.answer in text.split("\n")
                case "opening":
                    assert name == question.title
                    assert question.answer == f"{name}\n{text.split(chr(10))[0]}"
                case "call":
                    [node] = defined.values()
                    called = ast.parse(question.answer).body[0]
                    bind(node, called.value)
                case "namesake":
                    assert len(defined) > 1
                    assert question.title in question.text
                    assert question.answer in text.split("\n")
    assert kinds == {"signature", "opening", "call", "file", NAMESAKE}


def bind(node: ast.FunctionDef, call: ast.Call) -> None:
    """The call gives what the function requires, under the names of its parameters."""
    node.body = [ast.Pass()]
    namespace: dict[str, object] = {}
    exec(compile(ast.unparse(node), "<definition>", "exec"), namespace)
    names = [ast.unparse(argument) for argument in call.args]
    bound = inspect.signature(namespace[node.name]).bind(*names)
    assert bound.arguments == {name: name for name in names} != {}


def test_distractors_resemble_what_is_asked_for(found: list[FunctionText]) -> None:
    """Two other files of seven share a word with the symbol asked for: by chance 71 % of samples of four have one."""
    options = RetrievalOptions(min_documents=4, max_documents=4, questions=1, kinds={"signature": 1.0})
    drawn = list(islice(retrieval_samples(found, options, 2), 200))
    shared = 0
    for sample in drawn:
        [question] = sample.questions
        words = question.text.split()[-1].split("_")
        others = [text for title, text in sample.documents if title != question.title]
        names = re.findall(r"def (\w+)", "\n".join(others))
        shared += any(word in name.split("_") for word in words for name in names)
    assert shared > 0.9 * len(drawn)


def test_samples_follow_the_seed_and_their_order_can_be_changed(found: list[FunctionText]) -> None:
    first, again, other = (list(islice(retrieval_samples(found, RetrievalOptions(), seed), 20)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    moved = [sample.reordered(random.Random(0)) for sample in first]
    assert all(sorted(a.documents) == sorted(b.documents) for a, b in zip(first, moved, strict=True))
    assert [s.documents for s in first] != [s.documents for s in moved]
    assert [s.questions for s in first] == [s.questions for s in moved]


def test_samples_are_the_same_in_every_process(found: list[FunctionText]) -> None:
    """Strings hash differently in each."""
    code = (
        "import tests.corpus.test_retrieval as t\n"
        "from itertools import islice\n"
        "print([s for s in islice(t.retrieval_samples(t.every(), t.RetrievalOptions(), 3), 20)])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True, timeout=120,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert said == {f"{list(islice(retrieval_samples(found, RetrievalOptions(), 3), 20))}\n"}


def test_a_repository_of_few_files_is_refused(found: list[FunctionText]) -> None:
    few = [f for f in found if f.path.endswith(("chunk.py", "merge.py"))]
    with pytest.raises(ValueError, match="short functions in at least 4 files"):
        next(retrieval_samples(few, RetrievalOptions(), 0))


def test_a_folder_is_a_repository(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for n, word in enumerate(WORDS):
        (tmp_path / f"{word}.py").write_text(module(n))
        (tmp_path / "tests" / f"test_{word}.py").write_text(module(n))
    found = folder_functions(tmp_path)
    assert {f.path for f in found} == {f"{word}.py" for word in WORDS}
    assert {f.package for f in found} == {tmp_path.name}
    assert next(retrieval_samples(found, RetrievalOptions(), 0)).repository == tmp_path.name
