"""The third pass: groups of documents become rows.

seal (`seal.py`) -> syntax -> suites (`suites.py`) -> pieces of at most `window_characters` -> text, or prefix, middle
and suffix

    rows/NNNNN.jsonl   the rows, as they will stand in the parts
    rows/NNNNN.npy     for each row: 1 if it is held out, its place in the order of the parts, place and length
    rows/NNNNN.json    written last: figures by source

A row is `{"text"}`, `{"prefix", "suffix", "middle"}` or `{"messages", "tools"}`, with `id`, `source` and `origin`.
Lines are counted in the text as it is kept, without the definitions of suites.
"""

from __future__ import annotations

import io
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from etude.code import Span, SyntaxNodes, error_share, line_comment, lines_of, syntax_nodes
from etude.corpus.documents import work
from etude.corpus.documents.seal import sealed
from etude.corpus.documents.structs import OF_ROWS, CorpusDocument, DocumentGroup, DocumentPlace, DocumentPlan
from etude.corpus.documents.suites import SuiteIndex, copies_in, load_index
from etude.corpus.documents.texts import OWN_LINES
from etude.corpus.fim import split

MAX_ERRORS = 0.01  # share of a file's bytes that does not parse
_CUTS = 20  # times that a text is searched and cut; a second copy of a piece shows when the first has gone
_HOLE = 4000  # characters of a node that is to be filled in, at most


def make_rows(folder: Path, number: int) -> bytes:
    """Makes the rows of one list of groups; the answer is the content of its last file."""
    plan = work.plan_of(folder)
    groups = msgspec.json.decode(work.file(folder, "groups", number, "json").read_bytes(), type=list[DocumentGroup])
    figures: dict[str, Counter[str]] = defaultdict(Counter)
    out, index = io.BytesIO(), list[tuple[int, int, int, int]]()
    for group in groups:
        for row, held_out in _of_group(folder, plan, group, figures):
            data = msgspec.json.encode(row) + b"\n"
            order = blake3(f"{plan.seed}/{row['id']}".encode()).digest(8)
            index.append((int(held_out), int.from_bytes(order, "little"), out.tell(), len(data)))
            out.write(data)
    work.write(work.file(folder, "rows", number, "jsonl"), out.getvalue())
    work.write_array(work.file(folder, "rows", number, "npy"), np.array(index, dtype=np.uint64).reshape(-1, 4))
    return json.dumps(figures, sort_keys=True).encode()


def read_documents(folder: Path, places: tuple[DocumentPlace, ...]) -> Iterator[CorpusDocument]:
    """The documents at places of the first pass."""
    for place in places:
        with work.file(folder, "read", place.shard, "jsonl").open("rb") as file:
            file.seek(place.offset)
            yield msgspec.json.decode(file.read(place.length), type=CorpusDocument)


def _of_group(
    folder: Path, plan: DocumentPlan, group: DocumentGroup, figures: dict[str, Counter[str]]
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Rows of a group, and whether they are held out."""
    kept: list[tuple[CorpusDocument, SyntaxNodes | None]] = []
    for document in read_documents(folder, group.places):
        clean, nodes = _clean(folder, document, figures[plan.sources[document.source].name])
        if clean is not None:
            kept.append((clean, nodes))
    if group.window and len(kept) > 1:
        documents = [document for document, _ in kept]
        yield window_row(plan, documents), documents[0].held_out
        _count(figures, plan, documents, "windows")
        return
    for document, nodes in kept:
        for row in document_rows(plan, document, nodes):
            yield row, document.held_out
            figures[plan.sources[document.source].name]["fill in the middle"] += "middle" in row
        _count(figures, plan, [document], "")


def _count(figures: dict[str, Counter[str]], plan: DocumentPlan, documents: list[CorpusDocument], what: str) -> None:
    counter = figures[plan.sources[documents[0].source].name]
    for document in documents:
        size = len(document.text) or len(msgspec.json.encode(document.messages))
        counter["documents"] += 1
        counter["characters"] += size
        counter["held-out documents"] += document.held_out
        counter["held-out characters"] += size * document.held_out
        rows = plan.sources[document.source].kind in OF_ROWS
        counter["without a parser"] += not rows and document.language not in plan.syntax
        counter["without a date"] += rows and bool(plan.after) and not document.date
    counter[what] += bool(what)


def _clean(
    folder: Path, document: CorpusDocument, counter: Counter[str]
) -> tuple[CorpusDocument | None, SyntaxNodes | None]:
    """A document without secrets and pieces of suites, that parses, with its nodes; None if it is dropped."""
    made, secrets = sealed(document)
    if made is None:
        counter["drop secrets"] += 1
        return None, None
    counter["secrets replaced"] += secrets
    nodes = syntax_nodes(made.text, made.language) if made.messages is None else None
    if error_share(made.text, made.language, nodes) > MAX_ERRORS:
        counter["drop syntax"] += 1
        return None, None
    index = load_index(folder)
    if index is None:
        return made, nodes
    if made.messages is not None:
        if not any(copies_in(text, index) for text in _strings([made.messages, made.tools])):
            return made, None
        counter["drop suite"] += 1
        return None, None
    for _ in range(_CUTS):
        text, count = without(made.text, index, nodes)
        if text is not None and not count:
            return made, nodes
        if text is None or len(lines_of(text)) < OWN_LINES:
            break
        counter["definitions of suites cut"] += count
        made = msgspec.structs.replace(made, text=text)
        nodes = syntax_nodes(text, made.language)
        if error_share(text, made.language, nodes) > MAX_ERRORS:
            break
    counter["drop suite"] += 1
    return None, None


def _strings(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict | list):
            left += each.values() if isinstance(each, dict) else each


def without(text: str, index: SuiteIndex, nodes: SyntaxNodes | None) -> tuple[str | None, int]:
    """The text without the definitions that hold copies of pieces of suites, and their number; None if a copy stands
    in no definition."""
    cuts: set[Span] = set()
    for runs in copies_in(text, index):
        held = Counter(nodes.definition(start, end) if nodes is not None else None for start, end in runs)
        cut = max(
            held, key=lambda span: (span is not None, held[span])
        )  # a run of a neighbour may be like one by chance
        if cut is None:
            return None, 0
        cuts.add(cut)
    for start, end in sorted(cuts, reverse=True):
        text = text[:start] + text[end:]
    return text, len(cuts)


def document_rows(plan: DocumentPlan, document: CorpusDocument, nodes: SyntaxNodes | None) -> Iterator[dict[str, Any]]:
    """The rows of a document that stands alone: pieces of at most `window_characters`, a share of them to be filled in
    the middle."""
    if document.messages is not None:
        held = {"messages": document.messages, **({"tools": document.tools} if document.tools else {})}
        yield _row(plan, held, document, _origin(plan, document, 1, 1))
        return
    rng = random.Random(f"{plan.seed}/{document.source}/{document.path}")
    code = plan.sources[document.source].kind not in OF_ROWS
    for start, text in pieces(document.text, plan.window_characters, nodes):
        filled = code and rng.random() < plan.fim
        parts = pieces(text, plan.fim_characters, nodes, start) if filled else [(0, text)]
        for inner, part in parts:
            at = start + inner
            first = 1 + document.text.count("\n", 0, at)
            origin = _origin(plan, document, first, first + max(0, part.count("\n") - part.endswith("\n")))
            content = _fill(part, at, nodes, rng) if filled else {"text": part}
            yield _row(plan, content, document, origin)


def _fill(text: str, start: int, nodes: SyntaxNodes | None, rng: random.Random) -> dict[str, Any]:
    """A text to be filled in the middle: half of the holes are nodes of the syntax."""
    spans = nodes.draw(rng, 8, _HOLE) if nodes is not None and rng.random() < 0.5 else []
    held = [(a - start, b - start) for a, b in spans if start <= a and b <= start + len(text) and b - a < len(text)]
    if held:
        low, high = held[0]
        prefix, middle, suffix = text[:low], text[low:high], text[high:]
    else:
        prefix, middle, suffix = split(text, rng)
    return {"prefix": prefix, "suffix": suffix, "middle": middle}


def pieces(text: str, longest: int, nodes: SyntaxNodes | None, begin: int = 0) -> Iterator[tuple[int, str]]:
    """Pieces of a text with their places: it is cut where a definition begins, else at a line, else anywhere. The nodes
    are of a text in which this one begins at `begin`."""
    starts = [start - begin for start, _ in nodes.definitions()] if nodes is not None and len(text) > longest else []
    at = 0
    while at < len(text):
        end = at + longest
        if end < len(text):
            before = [start for start in starts if at + longest // 2 < start <= end]
            line = text.rfind("\n", at, end) + 1
            end = before[-1] if before else line if line > at else end
        yield at, text[at:end]
        at = end


def window_row(plan: DocumentPlan, documents: list[CorpusDocument]) -> dict[str, Any]:
    """One row of several files in import order, each below a comment with its path. `origin.files` has the place of
    each in the text."""
    parts: list[str] = []
    files: list[dict[str, Any]] = []
    at = 0
    for document in documents:
        head = line_comment(document.language, document.path) + "\n"
        files.append(_origin(plan, document, 1, len(lines_of(document.text))) | {"at": at + len(head)})
        parts.append(head + document.text + ("\n" if document.text.endswith("\n") else "\n\n"))
        at += len(parts[-1])
    text = "".join(parts)
    last = max(document.date for document in documents)
    origin = {
        "path": documents[0].path,
        "revision": files[0]["revision"],
        "licence": files[0]["licence"],
        "lines": [1, len(lines_of(text))],
        "date": last,
        "files": files,
    }
    return _row(plan, {"text": text}, documents[0], origin)


def _origin(plan: DocumentPlan, document: CorpusDocument, first: int, last: int) -> dict[str, Any]:
    source = plan.sources[document.source]
    licence = document.licence or source.licence
    return {
        "path": document.path,
        "revision": source.revision if document.held_out else source.base or source.revision,
        "licence": licence,
        "lines": [first, last],
        "date": document.date,
    }


def _row(
    plan: DocumentPlan, content: dict[str, Any], document: CorpusDocument, origin: dict[str, Any]
) -> dict[str, Any]:
    source = plan.sources[document.source].name
    key = blake3(msgspec.json.encode((content, source, origin))).hexdigest(16)
    return {**content, "id": key, "source": source, "origin": origin}
