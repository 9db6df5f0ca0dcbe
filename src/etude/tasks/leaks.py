"""Finds answers that an agent could copy: text that a task removed and that occurs elsewhere in the tree."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from etude.code import text_shingles
from etude.grading import LEAK_SHARE, AnswerFingerprint, answer_fingerprint, answer_runs, folder_texts
from etude.records import CodeTask
from etude.tasks.inventory import files_below

SHINGLE = 8  # tokens; shorter runs are common phrases of the language
_MAX_BYTES = 1 << 20
_BINARY = (".pyc", ".pyo", ".so", ".pyd")


class LeakIndex:
    """The shingles of a tree. The index is made once and serves the check of every task."""

    def __init__(self, root: Path) -> None:
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._files: dict[tuple[str, ...], tuple[str, ...]] = {}  # the first two that hold a shingle
        for file, text in texts_below(root):
            counts = text_shingles(text, SHINGLE)
            self._counts.update(counts)
            for shingle in counts:
                held = self._files.get(shingle, ())
                if len(held) < 2:
                    self._files[shingle] = (*held, file)

    def share(self, original: str, broken: str) -> float:
        """The share (0..1) of the shingles lost from a body that the rest of the tree still holds. Pass bodies, not
        functions: the ends of docstrings are alike in a whole library."""
        own = text_shingles(original, SHINGLE)
        lost = own - text_shingles(broken, SHINGLE)
        if not lost:
            return 0.0
        return sum(self._counts[shingle] > own[shingle] for shingle in lost) / len(lost)

    def place(self, path: str, original: str, broken: str) -> str:
        """The file, other than `path` if possible, that holds most of the shingles that `share` counts."""
        lost = text_shingles(original, SHINGLE) - text_shingles(broken, SHINGLE)
        files = Counter(file for shingle in lost for file in self._files.get(shingle, ()))
        return next((file for file, _ in files.most_common() if file != path), path)


def texts_below(root: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of all files of a tree that hold text and are not large."""
    for path, file in files_below(root):
        data = file.read_bytes()
        if len(data) <= _MAX_BYTES and b"\0" not in data:
            yield path, data.decode("utf-8", "replace")


def answers_of(task: CodeTask) -> list[AnswerFingerprint]:
    """The answer of a task in each file that it breaks."""
    return [answer_fingerprint(task.solution[path], text) for path, text in task.changes.items()]


def stored(folders: Mapping[str, Path], tasks: Iterable[CodeTask]) -> dict[str, str]:
    """CodeTask id -> a place in which its answer is kept: an installed copy, bytecode, an archive or a git object.
    LeakIndex compares the text of the repository itself; this function reads the dependencies and all files that are
    not text. Bytecode keeps only constants: a file with all the long constants that a task removed counts as a copy."""
    answers = {task.id: answers_of(task) for task in tasks}
    places: dict[str, str] = {}
    for label, folder in folders.items():
        for place, data in folder_texts(folder):
            text = b"\0" not in data[:4096] and not place.endswith(_BINARY)
            if text and label == "repository" and "!" not in place and ": object " not in place:
                continue
            tokens = frozenset(answer_runs(data.decode("utf-8", "replace"))) if text else frozenset()
            for task, parts in answers.items():
                if task not in places and any(_holds(part, tokens, data, text) for part in parts):
                    places[task] = f"{label}/{place}"
    return places


def _holds(part: AnswerFingerprint, tokens: frozenset[tuple[str, ...]], data: bytes, text: bool) -> bool:
    if text:
        return bool(part.shingles) and len(part.shingles & tokens) >= LEAK_SHARE * len(part.shingles)
    return bool(part.constants) and all(constant in data for constant in part.constants)
