"""Documents to train on, made of the standard library's sources: speed, memory, and the share of near copies found.

documents/vs-plain-pipeline   seconds of one process that does the same to one file after another, by the obvious code
                              (a set of hashed shingles, a Python loop over the hash functions of each), over the
                              seconds of `etude corpus build` with two workers
dedup/recall-at-0.8           of the pairs of files whose 5-token shingles have an exact Jaccard similarity of 0.8 or
                              more, the share of which one file goes
packing/waste                 padding over all tokens of the rows of 2,048 tokens that midtrain makes of it for nano;
                              beside it that of rows which take documents in their order
memory/share                  largest resident memory of all processes of the build / 1.5 GB

Planted: tokens of six kinds, functions of a suite (word for word and renamed). Killed: kill -9 after the first task of
the third pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import Table
from etude.code import error_share, secret_in, syntax_nodes, text_shingles, words_of
from etude.config import DocumentBuildConfig
from etude.corpus.dedup import bands_of
from etude.corpus.documents import build_documents
from etude.corpus.documents.read import BAND_ROWS, BANDS, SHINGLE
from etude.corpus.documents.texts import decoded, passed_over, refusal
from etude.corpus.fim import split
from etude.corpus.windows import WindowMaker
from etude.processes import resident_bytes
from etude.trainer.finetune.config import MidtrainConfig
from etude.trainer.finetune.data import StreamData

LIMIT = 1.5e9  # bytes of resident memory
RECALL, WASTE = 0.9, 0.01
LENGTH = 2048  # tokens of a packed row
PACKED = 10**6  # tokens
_COMMAND = "import sys; from etude.cli.main import main; main(sys.argv[1:])"
_SECONDS = 3000.0  # for one build


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks; `quick` takes 3 MB of sources instead of 30."""
    table = Table("corpus")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        own, size = _sources(root / "own", 3_000_000 if quick else 30_000_000)
        start = time.perf_counter()
        peak = _measured([*_words(own, root / "two"), "--workers", "2"])
        ours = time.perf_counter() - start
        start = time.perf_counter()
        _plain(own, root / "plain.jsonl")
        plain = time.perf_counter() - start
        table.add("documents/vs-plain-pipeline", plain / ours, "x", f"{plain:.1f} s alone, {size / 1e6:.0f} MB")
        share, pairs = _recall(random.Random(1), 200 if quick else 2000)
        table.add("dedup/recall-at-0.8", share, "share", f"{pairs} pairs by exact Jaccard")
        waste, plain = _waste(root / "two")
        table.add("packing/waste", waste, "share", f"{plain:.3f} of rows in the documents' order")
        table.add("memory/share", peak / LIMIT, "share", f"1.5 GB; {size / 1e6:.0f} MB of sources")
        table.checks.update(_checks(root, own))
    table.checks["at least 90 of 100 pairs at 0.8 are found"] = share >= RECALL
    table.checks["less than 1 % of the packed rows is padding"] = waste < WASTE
    table.checks["memory stays below 1.5 GB"] = peak <= LIMIT
    return table.result()


def _sources(folder: Path, most: int) -> tuple[Path, int]:
    """Files of the standard library, drawn until they reach a size."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts and p.stat().st_size < 200_000)
    random.Random(1).shuffle(paths)
    size = 0
    for path in paths:
        if size >= most:
            break
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        size += path.stat().st_size
    return folder, size


def _words(own: Path, output: Path) -> list[str]:
    return ["corpus", "build", "--own", str(own), "-o", str(output)]


def _measured(words: Sequence[str]) -> int:
    """Runs a build; the largest sum of the resident memory of its processes, in bytes. Raises RuntimeError."""
    process = subprocess.Popen([sys.executable, "-c", _COMMAND, *words], stdout=subprocess.DEVNULL)
    peak, ended = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not ended.wait(0.2):
            peak = max(peak, sum(resident_bytes(pid) or 0 for pid in [process.pid, *_children(process.pid)]))

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        code = process.wait(_SECONDS)
    finally:
        process.kill()
        ended.set()
        watch.join()
    if code:
        raise RuntimeError(f"etude {' '.join(words)} exited with code {code}")
    return peak


def _children(pid: int) -> list[int]:
    try:
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(word) for text in texts for word in text.split()]


def _plain(own: Path, output: Path) -> None:
    """The same steps by one process and plain code."""
    factors = [
        (random.Random(i).getrandbits(64) | 1, random.Random(-i).getrandbits(64)) for i in range(BANDS * BAND_ROWS)
    ]
    seen, bands = set[bytes](), set[tuple[int, tuple[int, ...]]]()
    rng = random.Random(1)
    with output.open("w") as out:
        for path in sorted(own.rglob("*.py")):
            text = decoded(path.read_bytes())
            name = path.relative_to(own).as_posix()
            if text is None or passed_over(name) or refusal(text, "python", words_of(text), own=True):
                continue
            digest = hashlib.blake2b(" ".join(text.split()).encode()).digest()
            shingles = {hash(run) & (1 << 64) - 1 for run in text_shingles(text, SHINGLE)}
            least = [min(((x * a + b) & (1 << 64) - 1 for x in shingles), default=0) for a, b in factors]
            keys = {(i, tuple(least[i * BAND_ROWS : (i + 1) * BAND_ROWS])) for i in range(BANDS)}
            if digest in seen or keys & bands or secret_in(text.encode(), name):
                continue
            seen.add(digest)
            bands |= keys
            if error_share(text, "python", syntax_nodes(text, "python")):
                continue
            prefix, middle, suffix = split(text, rng)
            row = {"prefix": prefix, "suffix": suffix, "middle": middle} if rng.random() < 0.5 else {"text": text}
            out.write(json.dumps(row) + "\n")


def _recall(rng: random.Random, count: int) -> tuple[float, int]:
    """Of pairs of texts with an exact Jaccard similarity from 0.8 to 1, the share that shares a band; and the pairs."""
    hits = pairs = 0
    while pairs < count:
        words = [f"w{rng.randrange(10**6)}" for _ in range(400)]
        other = [
            f"v{rng.randrange(10**6)}" if rng.random() < rng.choice((0.005, 0.01, 0.02)) else word for word in words
        ]
        one, two = (set(text_shingles(" ".join(each), SHINGLE)) for each in (words, other))
        if one == two or len(one & two) < 0.8 * len(one | two):
            continue
        pairs += 1
        first, second = (bands_of(" ".join(w), n=SHINGLE, bands=BANDS, rows=BAND_ROWS) for w in (words, other))
        hits += bool(first & second)
    return hits / pairs, pairs


def _waste(corpus: Path) -> tuple[float, float]:
    """The share of padding in the rows of a run over a corpus; and in rows that take documents in their order, where a
    document that does not fit begins a new row."""
    config = MidtrainConfig.model_validate(
        {"model": {"path": "nano"}, "data": {"sources": [{"path": str(corpus)}]}, "trainer": {"length": LENGTH}}
    )
    stream = StreamData.of(config)
    packing = {"pad": 0, "separator": stream.separator, "seed": stream.seed, "together": True}
    maker = WindowMaker(stream.readers(), stream.length, **packing)
    padding = tokens = 0
    while tokens < PACKED and (window := maker.window()) is not None:
        rows = window.packed.rows()
        padding += int((np.maximum.accumulate(rows.starts, axis=1) == 2).sum())
        tokens += rows.tokens
    used = rows_used = 0
    room = 0
    for reader in stream.readers():
        while reader.cursor.taken < tokens and not reader.ended:
            for document in reader.documents():
                left = len(document.ids) + 1
                used += left
                while left:
                    if left > room and room < min(left, LENGTH):
                        rows_used, room = rows_used + 1, LENGTH
                    left, room = left - min(left, room), room - min(left, room)
    return padding / tokens, 1 - used / (rows_used * LENGTH)


def _checks(root: Path, own: Path) -> dict[str, bool]:
    """Equal bytes, resuming, secrets and suites, on a small part of the sources."""
    rng = random.Random(2)
    small = root / "small"
    files = sorted(own.rglob("*.py"))[:12]
    letters = "abcdefghjkmnpqrstuvwxyzABCDEFGH23456789"
    forms = {"ghp_": 36, "glpat-": 20, "npm_": 36, "sk_live_": 28, "AIza": 35, "xoxb-123456789012-123456789012-": 24}
    tokens = [prefix + "".join(rng.choices(letters, k=size)) for prefix, size in forms.items()]
    lines = [
        f"    left{n} = right{n - 1 if n else ''} + left * {rng.randrange(10**4, 10**5)} - len(left) if right else {n}"
        for n in range(8)
    ]
    piece = "\n".join(["def blend(left, right):", *lines, "    return left7", ""])
    task = root / "suite" / "tasks" / "one"
    (task / "solution" / "files").mkdir(parents=True)
    (task / "task.toml").write_text('[metadata.etude]\nsplit = "heldout"\n')
    (task / "solution" / "files" / "a.py").write_text(piece)
    renamed = re.sub(r"\b(left|right|blend)(\d*)", lambda match: f"zz{match[1][::-1]}{match[2]}", piece)
    small.mkdir()
    for number, path in enumerate(files):
        planted = [f'\ntoken_{number} = "{tokens[number % 6]}"\n', f"\n\n{piece}", f"\n\n{renamed}"]
        (small / f"m{number}.py").write_text(path.read_text(errors="replace") + planted[number % 3])
    words = [*_words(small, root / "killed"), "--suite", str(root / "suite"), "--workers", "1"]
    environment = os.environ | {"ETUDE_FAILPOINT": "corpus.rows:1"}
    killed = subprocess.run([sys.executable, "-c", _COMMAND, *words], env=environment, timeout=_SECONDS, check=False)
    digests: list[Any] = []
    for name, workers in (("killed", 1), ("one", 1), ("pair", 2)):
        made = build_documents(
            [], root / name, DocumentBuildConfig(workers=workers), own=[str(small)], suites=[str(root / "suite")]
        )
        digests.append(made["digest"])
    parts = b"".join(path.read_bytes() for path in (root / "one").rglob("*.jsonl"))
    numbers = re.findall(rb"\* (\d{5})", piece.encode())
    return {
        "a killed build ends with the same bytes": killed.returncode == -9 and digests[0] == digests[1],
        "one and two workers give the same bytes": digests[1] == digests[2],
        "no planted secret is in a part": not any(token.encode() in parts for token in tokens),
        "no planted piece of a suite is in a part": not any(b"* " + number in parts for number in numbers),
    }
