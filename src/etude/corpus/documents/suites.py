"""Decontamination: pieces of suites, and the search for them and their copies in texts.

A piece is a definition that a gold answer changes (of a task of `etude tasks build` or a Harbor folder, or a row of a
table of edits), or a definition of a hidden test. Its tokens are words and operators: brackets, commas, quotes, comment
marks and layout do not count, so a reflowed copy has the same. A copy is

    verbatim   where a third of the piece's runs of 13 tokens stand close together
    renamed    where nine tenths of its runs do after names are replaced by the distances to their last mention

The pieces of a dataset are those of its held-out tasks, or of all tasks if it has no held-out ones.
"""

from __future__ import annotations

import keyword
import re
import tomllib
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from etude.code import Span, is_script, language_of, lines_of, run_codes, syntax_nodes, word_codes
from etude.corpus.documents.texts import decoded
from etude.corpus.edits.synthetic import WORDS
from etude.errors import UserError

RUN = 13
VERBATIM, RENAMED = 1 / 3, 0.9  # shares of a piece's runs
LEAST_RENAMED = (
    12  # runs of a piece whose renamed copies are sought: shorter ones, such as getters, are alike by chance
)
_NEAR = 2  # lengths of the piece, within which its runs are counted
_TOKEN = re.compile(r"\w+|[^\w\s()\[\]{},;#\\'\"`]|//+")
_CONTEXT = 5  # lines around a change that no definition holds
_KEPT = {*keyword.kwlist, *keyword.softkwlist, *WORDS, *map(str, range(101))}
_FIXED = np.unique(word_codes(sorted(_KEPT)))
_MAX_BYTES = 1_000_000


class SuiteIndex(msgspec.Struct, frozen=True):
    """The runs of all pieces: sorted codes and the numbers of their pieces, verbatim and renamed; for each piece the
    number of its distinct runs. `short` pieces have fewer than RUN tokens, and are not searched."""

    codes: tuple[np.ndarray, np.ndarray]
    owners: tuple[np.ndarray, np.ndarray]
    counts: tuple[np.ndarray, np.ndarray]
    short: int


def check_suite(path: Path) -> None:
    """Raises UserError for a path that is neither a dataset nor a table of edits."""
    if path.suffix == ".parquet" and path.is_file():
        return
    if not path.is_dir() or (not any(path.glob("tasks/*/task.toml")) and not any(path.glob("*.parquet"))):
        raise UserError(
            f"--suite {path} is neither a dataset of tasks nor a table of edits (.parquet): give the "
            "folder that `etude tasks build`, `harbor` or `fast-apply` made"
        )


def suite_pieces(path: Path) -> Iterator[str]:
    """The pieces of a suite."""
    if path.suffix == ".parquet" or not (path / "tasks").is_dir():
        from etude.edits import load_examples

        tables = [path] if path.is_file() else sorted(path.glob("heldout.parquet")) or sorted(path.glob("*.parquet"))
        for example in (example for table in tables for example in load_examples(table)):
            yield from changed_pieces(example.file, example.result, example.language)
        return
    tasks = sorted(folder.parent for folder in path.glob("tasks/*/task.toml"))
    for task in [task for task in tasks if _split(task) == "heldout"] or tasks:
        yield from _of_task(task)
    for file in _files(path / "hidden"):
        if (text := _text(file)) is not None:
            yield from whole_pieces(text, language_of(file.name) or "")


def index_of_suites(suites: Sequence[str]) -> SuiteIndex:
    """The index of all suites. Raises UserError for one that holds nothing to be searched."""
    pieces: list[str] = []
    for suite in suites:
        some = [*suite_pieces(Path(suite))]
        if suite_index(some).counts[0].size == 0:
            raise UserError(f"--suite {suite} holds no answer or test of {RUN} tokens, so nothing can be kept out")
        pieces += some
    return suite_index(pieces)


def _split(task: Path) -> str:
    try:
        table = tomllib.loads((task / "task.toml").read_text(encoding="utf-8"))
        return str(table.get("metadata", {}).get("etude", {}).get("split", ""))
    except (OSError, ValueError, AttributeError) as e:
        raise UserError(f"{task} cannot be read ({e}); build the suite again") from None


def _of_task(task: Path) -> Iterator[str]:
    for file in _files(task / "solution" / "files"):
        path = file.relative_to(task / "solution" / "files")
        before, after = _text(task / "environment" / "files" / path), _text(file)
        if after is not None:
            yield from changed_pieces(before or "", after, language_of(file.name) or "")
    if not (task / "solution" / "files").is_dir():  # a task that others wrote: a script or a patch
        for file in _files(task / "solution"):
            if (text := _text(file)) is not None:
                lines = [line[1:] for line in lines_of(text) if line.startswith("+") and not line.startswith("+++")]
                yield "\n".join(lines) or text
    for file in _files(task / "tests"):
        if (file.suffix == ".py" or is_script(file.name)) and (text := _text(file)) is not None:
            yield from whole_pieces(text, language_of(file.name) or "")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _text(path: Path) -> str | None:
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return None
    return decoded(path.read_bytes())


def changed_pieces(before: str, after: str, language: str) -> Iterator[str]:
    """The definitions of `after` that differ from `before`, or the lines around a change that none holds."""
    lines = lines_of(after, ends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    nodes = syntax_nodes(after, language)
    pieces: set[tuple[int, int]] = set()
    for tag, _, _, low, high in SequenceMatcher(None, lines_of(before), lines_of(after), autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        held = (
            [span for span in nodes.definitions() if span[0] < starts[high] and starts[low] < span[1]] if nodes else []
        )
        if nodes is not None and low < high and (inner := nodes.definition(starts[low], starts[high] - 1)) is not None:
            held = [inner]
        pieces |= {*held} or {(starts[max(0, low - _CONTEXT)], starts[min(len(lines), high + _CONTEXT)])}
    yield from (after[start:end] for start, end in sorted(pieces))


def whole_pieces(text: str, language: str) -> Iterator[str]:
    """The definitions of a text; the text itself if it has none."""
    nodes = syntax_nodes(text, language)
    spans = nodes.definitions() if nodes is not None else []
    yield from (text[start:end] for start, end in spans or [(0, len(text))])


def suite_index(pieces: Iterator[str] | Sequence[str]) -> SuiteIndex:
    """The index of pieces."""
    parts: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    short = 0
    for piece in pieces:
        codes = word_codes(_TOKEN.findall(piece))
        if len(codes) < RUN:
            short += 1
            continue
        for kind, runs in enumerate(_runs(codes)):
            searched = kind == 0 or len(runs) >= LEAST_RENAMED
            parts[kind].append(np.unique(runs) if searched else runs[:0])
    made: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for arrays in parts:
        counts = np.array([len(array) for array in arrays], dtype=np.int64)
        codes = np.concatenate([np.zeros(0, dtype=np.uint64), *arrays])
        owners, order = np.repeat(np.arange(len(arrays)), counts), np.argsort(codes, kind="stable")
        made.append((codes[order], owners[order], counts))
    (a, b, c), (d, e, f) = made
    return SuiteIndex((a, d), (b, e), (c, f), short)


@lru_cache(maxsize=1)
def load_index(folder: Path) -> SuiteIndex | None:
    """The index in a work folder; None without suites."""
    if not (folder / "suite.npz").exists():
        return None
    with np.load(folder / "suite.npz", allow_pickle=False) as held:
        codes, owners, counts = ((held[f"{name}0"], held[f"{name}1"]) for name in ("codes", "owners", "counts"))
        return SuiteIndex(codes, owners, counts, int(held["short"]))


def save_index(index: SuiteIndex, path: Path) -> None:
    """Writes an index."""
    arrays = {f"{name}{i}": getattr(index, name)[i] for name in ("codes", "owners", "counts") for i in (0, 1)}
    with path.open("wb") as file:
        np.savez(file, short=np.array(index.short), **arrays)


def _runs(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes of all runs, verbatim and without names."""
    if len(codes) < RUN:
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint64)
    order = np.argsort(codes, kind="stable")
    same = codes[order][1:] == codes[order][:-1]
    back = np.full(len(codes), RUN, dtype=np.uint64)  # distance to the last mention
    back[order[1:][same]] = np.minimum(order[1:][same] - order[:-1][same], RUN).astype(np.uint64)
    places = np.minimum(np.searchsorted(_FIXED, codes), len(_FIXED) - 1)
    fixed = (_FIXED[places] == codes) | _operators(codes)
    length = len(codes) - RUN + 1
    columns: list[np.ndarray] = []
    for k in range(RUN):
        within = np.where(back[k : k + length] <= k, back[k : k + length], np.uint64(0))
        columns.append(np.where(fixed[k : k + length], codes[k : k + length], within))
    return run_codes(codes, RUN), run_codes(columns, RUN)


_OPERATORS = np.unique(word_codes([chr(i) for i in range(33, 127) if not chr(i).isalnum() and chr(i) != "_"] + ["//"]))


def _operators(codes: np.ndarray) -> np.ndarray:
    places = np.minimum(np.searchsorted(_OPERATORS, codes), len(_OPERATORS) - 1)
    return _OPERATORS[places] == codes


def copies_in(text: str, index: SuiteIndex) -> list[list[Span]]:
    """The copies of pieces of suites in a text: of each the places (first character, end) of its runs."""
    codes = word_codes(_TOKEN.findall(text))
    copies = [runs for kind, runs in enumerate(_runs(codes)) for runs in _close_together(runs, index, kind)]
    if not copies:
        return []
    places = [match.span() for match in _TOKEN.finditer(text)]
    return [[(places[run][0], places[run + RUN - 1][1]) for run in runs] for runs in copies]


def _close_together(runs: np.ndarray, index: SuiteIndex, kind: int) -> list[list[int]]:
    """The runs, by their first tokens, that stand together and are enough of a piece."""
    known, owners, counts = index.codes[kind], index.owners[kind], index.counts[kind]
    if not known.size or not runs.size:
        return []
    lows, highs = np.searchsorted(known, runs, "left"), np.searchsorted(known, runs, "right")
    matches: dict[int, list[int]] = {}
    for place in np.flatnonzero(highs > lows).tolist():
        for piece in owners[lows[place] : highs[place]].tolist():
            matches.setdefault(piece, []).append(place)
    copies: list[list[int]] = []
    share = (VERBATIM, RENAMED)[kind]
    for piece, places in matches.items():
        count = int(counts[piece])
        needed = max(1, int(np.ceil(share * count)))
        if len(places) < needed:
            continue
        first = 0
        for last, place in enumerate(places):
            while place - places[first] > _NEAR * (count + RUN):
                first += 1
            if last - first + 1 >= needed and len({*runs[places[first : last + 1]].tolist()}) >= needed:
                copies.append(places[first : last + 1])
                break
    return copies
