"""`etude corpus build`: the passes in order, the record of a corpus, and what a killed build left.

OUTPUT.building/  plan.json, plan/ (shards), suite.npz, read/, kept/, groups/, rows/, parts/: see the passes
OUTPUT/           train/NNNNN.jsonl, held_out/NNNNN.jsonl, corpus.json, card.md
"""

from __future__ import annotations

import calendar
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from etude.code import has_syntax
from etude.config import DocumentBuildConfig
from etude.corpus.documents import work
from etude.corpus.documents.card import card
from etude.corpus.documents.copies import drop_copies, lay_out
from etude.corpus.documents.parts import gather, plan_parts, write_part
from etude.corpus.documents.read import read_shard
from etude.corpus.documents.rows import make_rows
from etude.corpus.documents.sources import check_dates, corpus_sources, divided, iso, listed
from etude.corpus.documents.structs import CorpusSource, DocumentPlan, SourceFile, SourceShard
from etude.corpus.documents.suites import check_suite, index_of_suites, load_index, save_index
from etude.errors import UserError

VERSION = 1
PASSES = 2  # version of the passes: a build that another version began is not continued
SHARD_BYTES, PART_BYTES = 8 << 20, 64_000_000
SHARD_FILES = 1000
_PARSED = ("python", "javascript", "typescript", "tsx", "go", "java", "c", "json", "markdown")
Drops = dict[str, Counter[str]]  # source -> reason -> documents


def build_documents(
    sources: Sequence[str],
    output: Path,
    options: DocumentBuildConfig,
    *,
    own: Sequence[str] = (),
    own_licence: str = "own code",
    conversations: Sequence[str] = (),
    replay: Sequence[str] = (),
    suites: Sequence[str] = (),
    progress: work.Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    part_bytes: int = PART_BYTES,
) -> dict[str, Any]:
    """Writes the corpus and returns the content of its corpus.json; a build that was killed is continued. Raises
    UserError for what cannot be used, before anything is read, and RunFailed if a worker dies."""
    report = progress or (lambda *_: None)
    if output.exists():
        raise UserError(f"{output} exists: give a folder that does not")
    for suite in suites:
        check_suite(Path(suite))
    report("sources", 0, 1)
    chosen = corpus_sources(sources, own, own_licence, conversations, replay)
    after = _after(chosen, options)
    chosen = tuple(divided(source, after) for source in chosen) if after else chosen
    plan = DocumentPlan(
        sources=chosen,
        suites=tuple(str(Path(suite).absolute()) for suite in suites),
        seed=options.seed,
        fim=options.fim,
        windows=options.windows,
        window_characters=options.window_characters,
        fim_characters=options.fim_characters,
        after=after,
        syntax=tuple(name for name in _PARSED if name == "markdown" or has_syntax(name)),
        shard_bytes=shard_bytes,
        part_bytes=part_bytes,
    )
    folder = output.with_name(f"{output.name}.building")
    _check_apart(folder, chosen)
    with _held(folder):
        plan, drops = _planned(folder, plan)
        work.plan_of.cache_clear()
        load_index.cache_clear()
        made = _passes(folder, plan, drops, options.workers, report)
        (folder / "out").rename(output)
    shutil.rmtree(folder, ignore_errors=True)
    return made


def _check_apart(folder: Path, sources: Sequence[CorpusSource]) -> None:
    """Raises UserError if the corpus would become a part of a source that is read from the disk."""
    for source in sources:
        if not source.history and folder.resolve().is_relative_to(Path(source.root).resolve()):
            raise UserError(f"the output lies in {source.root}, which is read: name a folder outside of it")


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Makes the work folder, for its owner alone: it holds texts whose secrets are not yet replaced. Raises UserError
    if another process builds in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise UserError(f"{folder} cannot be made: {e.strerror}; name another output") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"another process builds in {folder}: wait for it, or name another output") from None
    except BaseException:
        if not (folder / "plan.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _after(sources: Sequence[CorpusSource], options: DocumentBuildConfig) -> str:
    """The time after which files are held out; "" for none."""
    if options.hold_out_after is None and options.hold_out_months is None:
        return ""
    check_dates(sources)
    if options.hold_out_after is not None:
        return f"{options.hold_out_after}T23:59:59Z"
    newest = datetime.fromisoformat(max(source.last for source in sources))
    months = newest.year * 12 + newest.month - 1 - (options.hold_out_months or 0)
    year, month = months // 12, months % 12 + 1
    day = min(newest.day, calendar.monthrange(year, month)[1])
    return iso(int(newest.replace(year=year, month=month, day=day).timestamp()))


def _planned(folder: Path, plan: DocumentPlan) -> tuple[DocumentPlan, Drops]:
    """Writes the plan, or takes the one of a build that was killed. Raises UserError if that was another build."""
    files, drops = list[list[SourceFile]](), Drops()
    for source in plan.sources:
        drops[source.name] = Counter()
        files.append(listed(source, drops[source.name], plan.shard_bytes, plan.after))
    shards = [
        SourceShard(number, tuple(part))
        for number, each in enumerate(files)
        for part in _shares(each, plan.shard_bytes)
    ]
    digest = blake3(msgspec.json.encode((PASSES, files, _fingerprint(plan.suites)))).hexdigest()
    plan = msgspec.structs.replace(plan, shards=len(shards), files=digest)
    data = msgspec.json.encode(plan)
    if (folder / "plan.json").exists():
        if (folder / "plan.json").read_bytes() != data:
            raise UserError(f"{folder} holds a build of other sources or options: give those, or delete the folder")
        return plan, drops
    if any(folder.iterdir()):
        shutil.rmtree(folder / "plan", ignore_errors=True)
    (folder / "plan").mkdir(exist_ok=True)
    for number, shard in enumerate(shards):
        work.write(work.file(folder, "plan", number, "json"), msgspec.json.encode(shard))
    if plan.suites:
        save_index(index_of_suites(plan.suites), folder / "suite.npz")
    work.write(folder / "plan.json", data)
    return plan, drops


def _shares(files: Sequence[SourceFile], most: int) -> Iterator[list[SourceFile]]:
    share: list[SourceFile] = []
    size = 0
    for file in files:
        if share and (size + file.size > most or len(share) == SHARD_FILES):
            yield share
            share, size = [], 0
        share.append(file)
        size += file.size
    if share:
        yield share


def _fingerprint(suites: Sequence[str]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files of suites."""
    paths = [path for suite in suites for path in ([Path(suite)] if Path(suite).is_file() else _below(Path(suite)))]
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def _below(suite: Path) -> list[Path]:
    places = [*suite.glob("*.parquet"), *(suite / "tasks").rglob("*"), *(suite / "hidden").rglob("*")]
    return sorted(path for path in places if path.is_file())


def _passes(folder: Path, plan: DocumentPlan, drops: Drops, workers: int, report: work.Progress) -> dict[str, Any]:
    work.run_tasks(folder, "read", read_shard, plan.shards, workers, report)
    for number in range(plan.shards):
        shard = msgspec.json.decode(work.file(folder, "plan", number, "json").read_bytes(), type=SourceShard)
        drops[plan.sources[shard.source].name].update(
            json.loads(work.file(folder, "read", number, "json").read_bytes())
        )
    report("copies", 0, 1)
    for name, counter in drop_copies(folder, plan).items():
        drops[name].update(counter)
    lists = lay_out(folder, plan)
    work.run_tasks(folder, "rows", make_rows, lists, workers, report)
    figures: Drops = {source.name: Counter() for source in plan.sources}
    for number in range(lists):
        for name, counter in json.loads(work.file(folder, "rows", number, "json").read_bytes()).items():
            figures[name].update(counter)
    if not any(counter["documents"] for counter in figures.values()):
        reasons = Counter[str]()
        for name in figures:
            reasons.update(_drops(drops[name], figures[name]))
        why = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(4)) or "no files"
        (folder / "plan.json").unlink()  # nothing of this build is worth going on with
        raise UserError(f"nothing is left of these sources ({why}): give others")
    held = sum(counter["held-out documents"] for counter in figures.values())
    if plan.after and held in (0, sum(counter["documents"] for counter in figures.values())):
        (folder / "plan.json").unlink()
        what, other = ("nothing", "an earlier") if held == 0 else ("everything", "a later")
        raise UserError(f"{what} that is left is newer than {plan.after}: give {other} date for what is held out")
    ranges = plan_parts(folder, lists, plan.part_bytes)
    work.run_tasks(folder, "parts", write_part, ranges, workers, report)
    parts, digest = gather(folder, ranges, folder / "out")
    made = _record(plan, drops, figures, parts, digest)
    if (index := load_index(folder)) is not None:
        made["options"] |= {"suite_pieces": int(index.counts[0].size), "suite_pieces_too_short": index.short}
    work.write(folder / "out" / "corpus.json", json.dumps(made, indent=1, ensure_ascii=False).encode() + b"\n")
    work.write(folder / "out" / "card.md", card(made).encode())
    return made


def _drops(early: Counter[str], late: Counter[str]) -> dict[str, int]:
    """Documents left out by reason, the most frequent first."""
    both = early + Counter({name.removeprefix("drop "): n for name, n in late.items() if name.startswith("drop ")})
    return {reason: count for reason, count in sorted(both.items(), key=lambda item: (-item[1], item[0])) if count}


def _record(plan: DocumentPlan, drops: Drops, figures: Drops, parts: dict[str, int], digest: str) -> dict[str, Any]:
    """The content of corpus.json."""
    rows: list[dict[str, Any]] = []
    for source in plan.sources:
        counter = figures[source.name]
        named = (
            "documents",
            "characters",
            "held-out documents",
            "held-out characters",
            "windows",
            "fill in the middle",
            "secrets replaced",
            "definitions of suites cut",
            "without a parser",
            "without a date",
        )
        rows.append(
            {
                "name": source.name,
                "kind": source.kind,
                "licence": source.licence,
                "licence_source": source.stated,
                "revision": source.revision,
                "last_commit": source.last,
            }
            | {name.replace(" ", "_").replace("-", "_"): counter[name] for name in named}
            | {"dropped": _drops(drops[source.name], counter)}
        )
    options = {
        "seed": plan.seed,
        "fim": plan.fim,
        "windows": plan.windows,
        "window_characters": plan.window_characters,
        "fim_characters": plan.fim_characters,
        "hold_out_after": plan.after,
        "suites": [Path(suite).name for suite in plan.suites],
        "syntax": plan.syntax,
    }
    return {"version": VERSION, "sources": rows, "options": options, "parts": parts, "digest": digest}
