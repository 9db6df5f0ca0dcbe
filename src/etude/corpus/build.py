"""Makes packed training rows for the mid-training and supervised stages, from pinned sources."""

import hashlib
import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.corpus import dialect, fim, packing
from etude.corpus.dedup import contamination, exact, near
from etude.corpus.dialect import Document, TextPiece, special_piece
from etude.corpus.filters import FunctionText, function_texts, keep_function, kept_files
from etude.corpus.repair_episodes import OPERATOR_WEIGHTS, break_function, episode, inferable
from etude.corpus.sources import PackageSource, collect, fetch_source, files, provenance
from etude.corpus.vocabulary import Vocabulary
from etude.errors import UserError

log = logging.getLogger(__name__)
_TOO_LONG = 200  # examples in a row that do not fit
_FINDER = 4  # version of the search and the filters of functions: a cached corpus of another version is not used


@dataclass(frozen=True)
class Corpus:
    """Functions to train on and functions to evaluate on, with a report of the functions that were kept or dropped
    (JSON-ready)."""

    train: tuple[FunctionText, ...]
    evaluation: tuple[FunctionText, ...]
    report: dict[str, object]


def extract(source: PackageSource) -> list[FunctionText]:
    """Every function of a source that passes the filters."""
    return [function for file in kept_files(source) for function in function_texts(file) if keep_function(function)]


def build_corpus(
    packages: Sequence[str],
    held_out: Sequence[str],
    evaluation: Sequence[str],
    cache: Path,
    *,
    standard: bool,
    per_package: int,
    seed: int,
) -> Corpus:
    """Fetch, filter and deduplicate the functions, and drop those that overlap the held-out and evaluation packages.
    The result is cached by its arguments below `cache`. Raises ValueError when a package is both trained on and held
    out."""
    name = {requirement.split("==")[0].lower().replace("-", "_") for requirement in packages}
    clash = name & {requirement.split("==")[0].lower().replace("-", "_") for requirement in [*held_out, *evaluation]}
    if clash:
        raise ValueError(
            f"{', '.join(sorted(clash))} is both trained on and held out; remove it from [corpus] packages"
        )
    key = json.dumps([_FINDER, list(packages), list(held_out), list(evaluation), standard, per_package, seed])
    path = cache / f"functions-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.json"
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        train, evaluated = (tuple(FunctionText(**row) for row in stored[part]) for part in ("train", "evaluation"))
        return Corpus(train, evaluated, stored["report"])
    sources = collect(packages, cache, standard=standard)
    rng = random.Random(seed)
    extracted: list[FunctionText] = []
    counts: dict[str, int] = {}
    for source in sources:
        every = exact(extract(source), lambda f: f.source)
        rng.shuffle(every)
        counts[source.name] = min(len(every), per_package)
        extracted += every[:per_package]
    unique = near(exact(extracted, lambda f: f.source), lambda f: f.source)
    tested: list[FunctionText] = []
    excluded: dict[str, dict[str, float]] = {}
    flagged: set[int] = set()
    for requirement in dict.fromkeys([*held_out, *evaluation]):
        source = fetch_source(requirement, cache)
        result = contamination((f.source for f in unique), (file.text for file in files(source)))
        flagged |= set(result.flagged)
        excluded[requirement] = {
            "overlapping": result.overlapping,
            "worst": result.worst,
            "dropped": len(result.flagged),
        }
        if requirement in evaluation:
            tested += exact(extract(source), lambda f: f.source)
    kept = [function for index, function in enumerate(unique) if index not in flagged]
    for requirement in excluded:
        source = fetch_source(requirement, cache)
        after = contamination((f.source for f in kept), (file.text for file in files(source)))
        excluded[requirement] |= {"worst_after": after.worst, "overlapping_after": after.overlapping}
    report: dict[str, object] = {
        "functions": {"extracted": len(extracted), "unique": len(unique), "kept": len(kept), "evaluation": len(tested)},
        "per_source": counts,
        "held_out": excluded,
        "sources": json.loads(provenance(sources)),
    }
    cache.mkdir(parents=True, exist_ok=True)
    stored = {"train": [asdict(f) for f in kept], "evaluation": [asdict(f) for f in tested], "report": report}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(stored), encoding="utf-8")
    partial.rename(path)
    return Corpus(tuple(kept), tuple(tested), report)


def tokenizer_texts(train: Sequence[FunctionText], rng: random.Random) -> Iterator[str]:
    """The text on which the tokenizer is trained: prompts and functions, in the proportions of the model's training
    text."""
    for function in train:
        yield dialect.prompt(function.name, function.path, function.source if rng.random() < 0.7 else function.document)
    # The fixed words of the dialect, often enough that each becomes one token.
    words = ("edit", "test", "finish", "undo", "read", "list", "grep", "run", "ok", "passed", "undone", "failed")
    results = ("ok\npassed", "undone\nok\npassed", "error: no match", "AssertionError", "TypeError", "doctest")
    for _ in range(max(1, len(train) // 10)):
        yield from words
        yield from results


def code_documents(train: Sequence[FunctionText], rng: random.Random) -> Iterator[Document]:
    """One to four neighbouring functions of a file under a `<|file|>` header, with the docstring cut to a line or
    removed."""
    by_file: dict[tuple[str, str], list[FunctionText]] = {}
    for function in train:
        by_file.setdefault((function.package, function.path), []).append(function)
    groups: list[tuple[str, list[FunctionText]]] = []
    for (_, path), members in by_file.items():
        at = 0
        while at < len(members):
            size = rng.randint(1, 4)
            groups.append((path, members[at : at + size]))
            at += size
    rng.shuffle(groups)
    for path, members in groups:
        body = "\n\n\n".join(f.document if rng.random() < 0.5 else f.source for f in members)
        yield special_piece("<|file|>"), TextPiece(f"{path}\n{body}\n")


def fim_documents(train: Sequence[FunctionText], rng: random.Random) -> Iterator[Document]:
    """One fill-in-the-middle example per function, in random order."""
    for function in rng.sample(train, len(train)):
        prefix, middle, suffix = fim.split(function.source, rng)
        yield (
            special_piece("<|fim_prefix|>"),
            TextPiece(prefix),
            special_piece("<|fim_suffix|>"),
            TextPiece(suffix),
            special_piece("<|fim_middle|>"),
            TextPiece(middle),
        )


def repair_documents(
    train: Sequence[FunctionText], shapes: Mapping[str, float], operators: Mapping[str, float], rng: random.Random
) -> Iterator[Document]:
    """Endless repair episodes, each over a new mutation, with the functions in turn. `shapes` are shares of episode
    shapes, `operators` weights of mutation operators."""
    names, weights = list(shapes), list(shapes.values())
    while True:
        made = False
        for function in rng.sample(train, len(train)):
            broken = break_function(function, rng, operators)
            # A repair with a name that does not occur in the function teaches guessing; keep only some of these.
            if broken is not None and not inferable(broken) and rng.random() < 0.65:
                continue
            document = episode(broken, rng.choices(names, weights)[0], rng, operators) if broken else None
            if document is not None:
                made = True
                yield document
        if not made:
            raise ValueError("no function of the corpus can be mutated; give the corpus more code")


def take(
    documents: Iterable[Document], words: Vocabulary, tokens: int, max_length: int | None
) -> list[packing.Encoded]:
    """Encoded documents until their tokens reach `tokens`. Documents longer than `max_length` are left out. Raises
    UserError after hundreds of long ones in a row, for the streams are endless."""
    out: list[packing.Encoded] = []
    total = longer = 0
    chunk: list[Document] = []

    def flush() -> None:
        nonlocal total, longer
        for ids, mask in words.encode(chunk):
            longer = longer + 1 if max_length is not None and len(ids) > max_length else 0
            if longer == _TOO_LONG:
                raise UserError(
                    f"{longer} examples of the corpus on end, the last one of {len(ids)} tokens, are longer than "
                    f"trainer.length = {max_length}: raise it"
                )
            if total < tokens and not longer:
                out.append((ids, mask))
                total += len(ids)
        chunk.clear()

    for document in documents:
        chunk.append(document)
        if len(chunk) == words.together:
            flush()
            if total >= tokens:
                return out
    flush()
    return out


def midtrain_rows(
    train: Sequence[FunctionText], words: Vocabulary, mix: dict[str, float], tokens: int, length: int, seed: int
) -> tuple[packing.Rows, dict[str, int]]:
    """Rows of about `tokens` tokens in the shares of `mix` (code, fim, repair), all labelled, and the tokens of each
    part. Repair episodes hold no wrong edits here, because every token is learned."""
    rng = random.Random(seed)
    repairs = repair_documents(train, {"blind": 0.5, "tested": 0.5}, OPERATOR_WEIGHTS, rng)
    streams: dict[str, Iterable[Document]] = {
        "code": code_documents(train, rng),
        "fim": fim_documents(train, rng),
        "repair": (dialect.label_all(document) for document in repairs),
    }
    encoded: list[packing.Encoded] = []
    counts: dict[str, int] = {}
    for part, stream in streams.items():
        if not mix[part]:
            continue
        some = take(stream, words, int(mix[part] * tokens), length if part == "repair" else None)
        counts[part] = sum(len(ids) for ids, _ in some)
        encoded += some
    rows = packing.pack_rows(encoded, length, pad=words.pad, separator=words.separator, label_separator=True)
    return packing.shuffle_rows(rows, seed), counts


def sft_rows(
    train: Sequence[FunctionText],
    words: Vocabulary,
    shapes: Mapping[str, float],
    operators: Mapping[str, float],
    tokens: int,
    length: int,
    seed: int,
) -> packing.Rows:
    """Rows of about `tokens` tokens of repair episodes; only the tokens of the assistant are labelled."""
    stream = repair_documents(train, shapes, operators, random.Random(seed))
    encoded = take(stream, words, tokens, length)
    rows = packing.pack_rows(encoded, length, pad=words.pad, separator=words.separator, label_separator=False)
    return packing.shuffle_rows(rows, seed)
