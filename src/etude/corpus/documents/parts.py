"""The last pass: the rows of all lists, in an order that their ids and the seed decide, in parts.

The order is a range of 64-bit numbers. A task takes the rows of one range, sorts them, and writes them to
parts/NNNNN-TRAIN-KK.jsonl, a file or several of at most `part_bytes`; the parts of the corpus are links to these.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from etude.corpus.corpus_folder import SIDES, corpus_parts
from etude.corpus.documents import work
from etude.errors import UserError

HELD_OUT, ORDER, OFFSET, LENGTH = 0, 1, 2, 3  # columns of rows/NNNNN.npy
_SHARE = 2  # a range's mean size is the part of a part's: few ranges fill a second file


def plan_parts(folder: Path, lists: int, part_bytes: int) -> int:
    """Writes ranges.json: (side, first, last) for each task of this pass. Returns their number."""
    ranges: list[tuple[int, int, int]] = []
    for side in (0, 1):
        total = 0
        for n in range(lists):
            rows = np.load(work.file(folder, "rows", n, "npy"), mmap_mode="r")
            total += int(rows[rows[:, HELD_OUT] == side, LENGTH].sum())
        count = -(-total * _SHARE // part_bytes)
        edges = [(1 << 64) * i // count for i in range(count + 1)] if count else []
        ranges += [(side, low, high - 1) for low, high in pairwise(edges)]
    work.write(folder / "ranges.json", json.dumps([lists, part_bytes, ranges]).encode())
    return len(ranges)


def _ranges(folder: Path) -> tuple[int, int, list[tuple[int, int, int]]]:
    return tuple(json.loads((folder / "ranges.json").read_bytes()))


def write_part(folder: Path, number: int) -> bytes:
    """Writes the rows of one range; the answer names the files."""
    lists, part_bytes, ranges = _ranges(folder)
    side, low, high = ranges[number]
    picked: list[np.ndarray] = []
    for n in range(lists):
        rows = np.load(work.file(folder, "rows", n, "npy"), mmap_mode="r")
        order = rows[:, ORDER]
        mine = rows[(rows[:, HELD_OUT] == side) & (order >= np.uint64(low)) & (order <= np.uint64(high))]
        picked.append(np.column_stack([np.full(len(mine), n, dtype=np.uint64), mine]))
    every = np.concatenate(picked)
    every = every[np.lexsort((every[:, 1 + OFFSET], every[:, 0], every[:, 1 + ORDER]))]
    names: list[str] = []
    for k, chunk in enumerate(_chunks(folder, every, part_bytes)):
        name = f"{number:05}-{SIDES[side]}-{k:02}.jsonl"
        work.write(folder / "parts" / name, chunk)
        names.append(name)
    return json.dumps(names).encode()


def _chunks(folder: Path, rows: np.ndarray, part_bytes: int) -> Iterator[bytes]:
    """The lines of rows in order, joined to chunks of at most `part_bytes`. Lists are read one after the other."""
    lines: list[bytes] = [b""] * len(rows)
    for n in np.unique(rows[:, 0]).tolist():
        with work.file(folder, "rows", n, "jsonl").open("rb") as file:
            for place in np.flatnonzero(rows[:, 0] == n).tolist():
                file.seek(int(rows[place, 1 + OFFSET]))
                lines[place] = file.read(int(rows[place, 1 + LENGTH]))
    held, size = list[bytes](), 0
    for line in lines:
        if held and size + len(line) > part_bytes:
            yield b"".join(held)
            held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield b"".join(held)


def gather(folder: Path, ranges: int, output: Path) -> tuple[dict[str, int], str]:
    """Puts the parts below `output`, numbered in order. Returns the parts of each side, and the digest of all: blake3
    over name and content of each. Raises UserError."""
    shutil.rmtree(output, ignore_errors=True)
    counts: dict[str, int] = dict.fromkeys(SIDES, 0)
    for side in SIDES:
        (output / side).mkdir(parents=True)
    for number in range(ranges):
        for name in json.loads(work.file(folder, "parts", number, "json").read_bytes()):
            side = name.split("-")[1]
            target = output / side / f"{counts[side]:05}.jsonl"
            counts[side] += 1
            _link(folder / "parts" / name, target)
    return corpus_parts(output)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        try:
            shutil.copyfile(source, target)
        except OSError as e:
            raise UserError(f"{target} cannot be written: {e.strerror}; make room on the disk") from None
