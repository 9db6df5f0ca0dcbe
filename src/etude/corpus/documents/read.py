"""The first pass, a shard at a time: reads files, leaves out what is not worth learning, and takes the fingerprints by
which copies are found.

    read/NNNNN.jsonl   the documents that are left
    read/NNNNN.npy     a row for each, of 64-bit numbers: place and length of its line, characters, two halves of the
                       digest of its tokens, then BANDS MinHash bands; all zero for a text too short for a shingle
    read/NNNNN.json    written last: the number of documents left out, by reason
"""

from __future__ import annotations

import io
import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from etude.code import lines_of, run_codes, syntax_nodes, word_codes, words_of
from etude.corpus.dedup import signature
from etude.corpus.documents import work
from etude.corpus.documents.imports import imports_of
from etude.corpus.documents.sources import contents
from etude.corpus.documents.structs import OF_ROWS, CorpusDocument, CorpusSource, DocumentPlan, SourceFile, SourceShard
from etude.corpus.documents.texts import decoded, language_of_text, refusal

SHINGLE, BANDS, BAND_ROWS = 5, 14, 8
OFFSET, LENGTH, CHARACTERS, DIGEST, MINHASH = 0, 1, 2, 3, 5  # columns; DIGEST takes two, MINHASH BANDS
COLUMNS = MINHASH + BANDS
_MAX_CONVERSATION = 4_000_000  # bytes


def read_shard(folder: Path, number: int) -> bytes:
    """Reads one shard of the plan; the answer is the content of its last file."""
    plan = work.plan_of(folder)
    shard = msgspec.json.decode(work.file(folder, "plan", number, "json").read_bytes(), type=SourceShard)
    source = plan.sources[shard.source]
    drops: Counter[str] = Counter()
    out, rows = io.BytesIO(), list[list[int]]()
    for document, words in _documents(plan, source, shard, drops):
        line = msgspec.json.encode(document) + b"\n"
        size = len(document.text) or len(line)
        near = document.messages is None  # conversations share the definitions of tools
        rows.append([out.tell(), len(line), size, *fingerprint(words, near)])
        out.write(line)
    work.write(work.file(folder, "read", number, "jsonl"), out.getvalue())
    work.write_array(work.file(folder, "read", number, "npy"), np.array(rows, dtype=np.uint64).reshape(-1, COLUMNS))
    return json.dumps(drops).encode()


def fingerprint(words: list[str], near: bool) -> list[int]:
    """The two halves of the digest of a text's tokens, and its MinHash bands: zeros unless `near`."""
    halves = blake3(" ".join(words).encode("utf-8", "surrogatepass")).digest(16)
    made = signature(np.unique(run_codes(word_codes(words), SHINGLE)), BANDS, BAND_ROWS) if near else None
    bands = [0] * BANDS if made is None else run_codes([*made.T.astype(np.uint64)], BAND_ROWS).tolist()
    return [int.from_bytes(halves[:8], "little"), int.from_bytes(halves[8:], "little"), *bands]


def _documents(
    plan: DocumentPlan, source: CorpusSource, shard: SourceShard, drops: Counter[str]
) -> Iterator[tuple[CorpusDocument, list[str]]]:
    """Documents of a shard with their tokens."""
    for file, data, base in contents(source, shard.files):
        if source.kind in OF_ROWS:
            yield from _rows(plan, shard.source, file, data, drops)
            continue
        text = decoded(data)
        if text is None:
            drops["not UTF-8"] += 1
            continue
        language = language_of_text(file.path, text)
        words = words_of(text)
        if (reason := refusal(text, language, words, own=source.kind == "own")) is not None:
            drops[reason] += 1
            continue
        if file.base and not (text := changed_text(decoded(base) or "", text, language)).strip():
            continue  # lines were deleted alone
        document = CorpusDocument(
            source=shard.source,
            path=file.path,
            text=text,
            language=language,
            date=file.date,
            held_out=file.held_out,
            imports=imports_of(text, language),
        )
        yield document, words


def changed_text(before: str, after: str, language: str) -> str:
    """The new parts of a text, in order: the smallest definitions that hold its changed lines, or these lines alone."""
    lines = lines_of(after, ends=True)
    starts = [0, *accumulate(map(len, lines))]
    nodes = syntax_nodes(after, language)
    spans: list[tuple[int, int]] = []
    matcher = SequenceMatcher(None, lines_of(before, ends=True), lines, autojunk=False)
    for tag, _, _, low, high in matcher.get_opcodes():
        if tag == "equal" or low == high:
            continue
        held = nodes.definition(starts[low], starts[high] - 1) if nodes is not None else None
        start, end = held or (starts[low], starts[high])
        if spans and start <= spans[-1][1]:
            spans[-1] = (min(start, spans[-1][0]), max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return "\n".join(textwrap.dedent(after[start:end]) for start, end in spans)


def _rows(
    plan: DocumentPlan, number: int, file: SourceFile, data: bytes, drops: Counter[str]
) -> Iterator[tuple[CorpusDocument, list[str]]]:
    """The texts and conversations of a file of rows. Conversations of one's own are held out by their dates."""
    source = plan.sources[number]
    path = file.path or Path(source.root).name
    if not file.end:
        text = decoded(data)
        if text is None or not text.strip():
            drops["not UTF-8" if text is None else "too short"] += 1
        else:
            yield CorpusDocument(source=number, path=path, text=text, language="text"), words_of(text)
        return
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        row = _row(line)
        if row is None:
            drops["neither a text nor a conversation"] += 1
        elif len(line) > _MAX_CONVERSATION:
            drops["too long"] += 1
        else:
            origin = row["origin"] if isinstance(row.get("origin"), dict) else {}
            date = str(origin.get("date") or "")
            where = {
                "source": number,
                "path": str(origin.get("path") or path),
                "date": date,
                "licence": str(row.get("licence") or row.get("license") or origin.get("licence") or ""),
                "held_out": bool(plan.after) and source.kind == "conversations" and date > plan.after,
            }
            if "text" in row:
                yield CorpusDocument(text=row["text"], language="text", **where), words_of(row["text"])
            else:
                held = {"messages": row["messages"], "tools": row.get("tools") or None}
                yield CorpusDocument(**held, **where), words_of(line.decode())


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of replay data; None for another form."""
    try:
        row = json.loads(line)
        msgspec.json.encode(row)  # fails for half of a surrogate pair
    except (ValueError, RecursionError, TypeError):
        return None
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("text"), str):
        return row if row["text"].strip() else None
    messages, tools = row.get("messages"), row.get("tools")
    good = (
        isinstance(messages, list)
        and messages
        and all(isinstance(each, dict) and each.get("role") for each in messages)
    )
    return row if good and (tools is None or isinstance(tools, list)) else None
