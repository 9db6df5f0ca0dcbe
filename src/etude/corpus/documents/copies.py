"""The second pass: exact and near copies go, and what is left is laid out in groups.

Of copies the one is kept that comes first: held-out files before others (what is to be measured must not be learned),
then the user's own, then the oldest, then by the order of sources and paths. Near copies share one of 14 bands of 8
MinHash values over 5-token shingles: of pairs with Jaccard similarity .5, .7, .8 and .85 that finds 5, 57, 92 and 99 %.
The fingerprints of one band are in memory at a time, and of the documents a few numbers each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from etude.corpus.documents import work
from etude.corpus.documents.imports import import_order
from etude.corpus.documents.read import BANDS, CHARACTERS, DIGEST, LENGTH, MINHASH, OFFSET
from etude.corpus.documents.structs import OF_ROWS, DocumentGroup, DocumentPlace, DocumentPlan

BAND_TEXT = "MinHash, 14 bands of 8 over 5-token shingles: Jaccard from about 0.8"
_TASK_BYTES = 8 << 20  # of documents, for one list of groups


class _DocumentHead(msgspec.Struct, frozen=True):
    """The fields of a document that decide its place."""

    source: int
    path: str
    language: str = ""
    date: str = ""
    held_out: bool = False
    imports: tuple[str, ...] = ()


def drop_copies(folder: Path, plan: DocumentPlan) -> dict[str, Counter[str]]:
    """Writes kept/NNNNN.npy for each shard, true for the documents that stay; returns the copies by source and
    reason."""
    arrays = [np.load(work.file(folder, "read", n, "npy"), mmap_mode="r") for n in range(plan.shards)]
    sizes = [len(array) for array in arrays]
    sources = np.repeat([_source_of(folder, n) for n in range(plan.shards)], sizes).astype(np.int64)
    rank, names = _ranks(folder, plan)
    exact = _later(arrays, rank, names, [DIGEST, DIGEST + 1])
    near = np.zeros(len(rank), dtype=bool)
    for band in range(BANDS):
        near |= _later(arrays, rank, names, [MINHASH + band], ~exact)
    near &= ~exact
    (folder / "kept").mkdir(exist_ok=True)
    start = 0
    for number, size in enumerate(sizes):
        keep = ~(exact | near)[start : start + size]
        work.write_array(work.file(folder, "kept", number, "npy"), keep)
        start += size
    drops: dict[str, Counter[str]] = {}
    for number, source in enumerate(plan.sources):
        own = sources == number
        drops[source.name] = Counter({"copy": int((exact & own).sum()), "near copy": int((near & own).sum())})
    return drops


def _source_of(folder: Path, number: int) -> int:
    return msgspec.json.decode(work.file(folder, "plan", number, "json").read_bytes())["source"]


def _heads(folder: Path, shards: Sequence[int]) -> Iterator[_DocumentHead]:
    for number in shards:
        with work.file(folder, "read", number, "jsonl").open("rb") as file:
            for line in file:
                yield msgspec.json.decode(line, type=_DocumentHead)


def _ranks(folder: Path, plan: DocumentPlan) -> tuple[np.ndarray, np.ndarray]:
    """The rank of each document: of copies the least is kept; and the number of its path, which the version that is
    trained on and the one that is held out share."""
    own = np.array([source.kind != "own" for source in plan.sources])
    held: list[bool] = []
    whose: list[bool] = []
    dates: list[str] = []
    names: list[int] = []
    last: tuple[int, str] | None = None
    for head in _heads(folder, range(plan.shards)):
        held.append(not head.held_out)
        whose.append(bool(own[head.source]))
        dates.append(head.date or "9999")
        names.append(names[-1] if last == (head.source, head.path) else len(names))
        last = head.source, head.path
    order = np.lexsort((np.arange(len(held)), np.array(dates, dtype="S20"), np.array(whose), np.array(held)))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank, np.array(names, dtype=np.int64)


def _later(
    arrays: Sequence[np.ndarray],
    rank: np.ndarray,
    names: np.ndarray,
    columns: Sequence[int],
    among: np.ndarray | None = None,
) -> np.ndarray:
    """Whether a document of another name and less rank has the same numbers in these columns; zeros count as no
    numbers. `among` are the documents that are compared."""
    keys = [np.concatenate([np.asarray(array[:, c]) for array in arrays] or [np.zeros(0, np.uint64)]) for c in columns]
    order = np.lexsort((rank, *keys))
    if among is not None:
        order = order[among[order]]
    same = np.ones(max(0, len(order) - 1), dtype=bool)
    for key in keys:
        same &= key[order][1:] == key[order][:-1]
    same &= np.logical_or.reduce([key[order][1:] != 0 for key in keys])
    later = np.zeros(len(rank), dtype=bool)
    first = np.maximum.accumulate(np.where(np.concatenate([[True], ~same])[: len(order)], np.arange(len(order)), 0))
    later[order[1:][same]] = True
    later[order] &= names[order] != names[order][first]
    return later


def lay_out(folder: Path, plan: DocumentPlan) -> int:
    """Writes groups/NNNNN.json: lists of groups for the third pass. Returns their number."""
    (folder / "groups").mkdir(exist_ok=True)
    count, size, groups = 0, 0, list[DocumentGroup]()
    of_source: dict[int, list[int]] = {}
    for number in range(plan.shards):
        of_source.setdefault(_source_of(folder, number), []).append(number)
    for source, shards in of_source.items():
        for group, characters in _groups(folder, plan, source, shards):
            groups.append(group)
            size += characters
            if size >= _TASK_BYTES:
                work.write(work.file(folder, "groups", count, "json"), msgspec.json.encode(groups))
                count, size, groups = count + 1, 0, []
    if groups:
        work.write(work.file(folder, "groups", count, "json"), msgspec.json.encode(groups))
        count += 1
    return count


def _groups(
    folder: Path, plan: DocumentPlan, source: int, shards: Sequence[int]
) -> Iterator[tuple[DocumentGroup, int]]:
    """The groups of a source and their characters: runs of files in import order, training files and held-out ones
    apart."""
    heads: list[tuple[_DocumentHead, DocumentPlace, int]] = []
    for shard in shards:
        keep, rows = (np.load(work.file(folder, name, shard, "npy")) for name in ("kept", "read"))
        for head, kept, row in zip(_heads(folder, [shard]), keep, rows, strict=True):
            if kept:
                place = DocumentPlace(shard, int(row[OFFSET]), int(row[LENGTH]))
                heads.append((head, place, int(row[CHARACTERS])))
    of_rows = plan.sources[source].kind in OF_ROWS
    for held_out in (False, True):
        side = [each for each in heads if each[0].held_out == held_out]
        files = [(head.path, head.language, head.imports) for head, _, _ in side]
        order = range(len(side)) if of_rows else import_order(files)
        run: list[tuple[_DocumentHead, DocumentPlace, int]] = []
        total = 0
        for place in order:
            if run and (of_rows or total + side[place][2] > plan.window_characters):
                yield _group(plan, source, run), total
                run, total = [], 0
            run.append(side[place])
            total += side[place][2]
        if run:
            yield _group(plan, source, run), total


def _group(plan: DocumentPlan, source: int, run: Sequence[tuple[_DocumentHead, DocumentPlace, int]]) -> DocumentGroup:
    draw = random.Random(f"{plan.seed}/{plan.sources[source].name}/{run[0][0].path}").random()
    return DocumentGroup(len(run) > 1 and draw < plan.windows, tuple(place for _, place, _ in run))
