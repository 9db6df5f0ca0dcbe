"""The sources of a user's rows, what they are encoded with, and how many tokens they have. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path

import msgspec
from blake3 import blake3

from etude.corpus import (
    Encoded,
    FunctionText,
    LearnedRow,
    RowEncoders,
    chat_files,
    check_corpus,
    is_corpus,
    middle_of,
)
from etude.corpus.streams import FileStretch, RowSource, SourceReader, StreamFile, changed, scan
from etude.errors import UserError
from etude.renderers import read_json, renderer_for
from etude.runfolder import write
from etude.trainer.finetune.config import DataConfig, MidtrainConfig, SftConfig
from etude.trainer.finetune.texts import TextEncoder

HELD_OUT_TOKENS = 2**19
HELD_OUT, FILES = "held_out", "files"
_SAMPLE_TOKENS = 200_000  # of a source, from which its tokens are estimated


def check(config: MidtrainConfig | SftConfig) -> None:
    """Raises UserError if a path of a user's files, or a folder of repositories, does not exist."""
    data = config.data
    for path in () if data is None else (*data.files, *(source.path for source in data.sources), *data.held_out):
        chat_files(path)
    if isinstance(config, SftConfig) and config.documents is not None:
        for key in ("repositories", "held_out"):
            for folder in getattr(config.documents, key):
                if not folder.is_dir():
                    raise UserError(f"documents.{key}: {folder} is not a folder")


@dataclass(frozen=True)
class StreamData:
    """The sources of a run, those of its held-out rows, in order, and what their rows are encoded with. Rows may be
    `cut` in mid-training. `separator` stands behind a document."""

    sources: tuple[RowSource, ...]
    held_out: tuple[RowSource, ...]
    encoders: RowEncoders
    cut: bool
    separator: int | None
    length: int
    seed: int

    @classmethod
    def of(cls, config: MidtrainConfig | SftConfig) -> StreamData:
        """That of a configuration with data; reads all its files once. Raises UserError for files that cannot be used,
        and for rows that the tokenizer cannot express."""
        data, model = config.data, config.model
        assert data is not None
        for path in {*data.files, *(source.path for source in data.sources), *data.held_out}:
            if is_corpus(path):
                check_corpus(path)
        renderer = cache(partial(renderer_for, model.path, tools=False))
        if isinstance(config, SftConfig):
            encoders, separator, look = RowEncoders(renderer), None, None
        else:
            words = TextEncoder(model.path)
            separator, look = words.separator, None
            encoders = RowEncoders(renderer, words.text, _middle(words, data.fim))
            if data.fim == "tokens" and not words.has_middle:
                look = partial(_refuse_middle, model.path)
        encoders = replace(encoders, min_reward=data.min_reward, vocabulary=_vocabulary(model.path))
        sources = tuple(_sources(data, look))
        held_out = [*data.held_out, *_held_out_of(data)]
        tests = [RowSource(HELD_OUT, _stretches([path], HELD_OUT, look), shuffled=False) for path in held_out]
        cut = not isinstance(config, SftConfig)
        return cls(sources, tuple(tests), encoders, cut, separator, config.trainer.length, config.seed)

    def readers(self, *, held_out: bool = False) -> list[SourceReader]:
        """Readers of all sources from their beginnings."""
        sources = self.held_out if held_out else self.sources
        return [
            SourceReader(source, self.encoders, self.length, self.cut, (self.seed, number))
            for number, source in enumerate(sources)
        ]

    @property
    def files(self) -> list[StreamFile]:
        """All files."""
        stretches = chain.from_iterable(source.stretches for source in (*self.sources, *self.held_out))
        return list({stretch.file.path: stretch.file for stretch in stretches}.values())


def keep_files(files: Sequence[StreamFile], path: Path) -> None:
    """Records the files of a run that begins. If it goes on, raises UserError unless they have the same bytes."""
    if not path.is_file():
        write(path, msgspec.json.format(msgspec.json.encode(files), indent=1))
        return
    before = {one.path: one for one in msgspec.json.decode(path.read_bytes(), type=list[StreamFile])}
    now = {one.path: one for one in files}
    for name in sorted({*before, *now}):
        if name not in now or name not in before or now[name].digest != before[name].digest:
            raise UserError(changed(name))


def _vocabulary(model: Path) -> int:
    """The number of token ids of a model, which may be more than its tokenizer has."""
    config = read_json(model / "config.json")
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 2**32


def _sources(data: DataConfig, look: Callable[[bytes], None] | None) -> Iterable[RowSource]:
    if data.files:
        yield RowSource("data.files", _stretches(data.files, FILES, look), 1.0, data.epochs)
    for one in data.sources:
        if one.weights and not is_corpus(one.path):
            raise UserError(f"data.sources: {one.path} has weights, and is no corpus folder (corpus.json): drop them")
        stretches = _stretches([one.path], "sources", look, by_source=bool(one.weights))
        names = sorted({name for stretch in stretches for name in stretch.sizes}) if one.weights else []
        if missing := [name for name in names if name not in one.weights]:
            raise UserError(
                f"data.sources: {one.path} has rows of the source {missing[0]!r}, which its weights do not name: add "
                "it, with 0 to leave them out"
            )
        if missing := sorted(one.weights.keys() - set(names)):
            raise UserError(f"data.sources: {one.path} has no row of the source {missing[0]!r}; it has {names}")
        total = sum(one.weights.values())
        if not stretches:
            raise UserError(f"data.sources: {one.path} holds no row")
        for name in names:
            if share := one.weights[name] / total:
                own = [stretch for stretch in stretches if name in stretch.sizes]
                yield RowSource(f"{one.path}:{name}", own, one.weight * share, one.epochs, name)
        if not names:
            yield RowSource(str(one.path), stretches, one.weight, one.epochs)


def _held_out_of(data: DataConfig) -> list[Path]:
    """The corpus folders of the data with held-out rows."""
    paths = (*data.files, *(one.path for one in data.sources))
    return [path for path in paths if is_corpus(path) and any((path / HELD_OUT).rglob("*.jsonl"))]


def _stretches(
    paths: Sequence[Path], part: str, look: Callable[[bytes], None] | None, *, by_source: bool = False
) -> list[FileStretch]:
    files = chain.from_iterable(chat_files(path, HELD_OUT if part == HELD_OUT else "train") for path in paths)
    return [stretch for file in files for stretch in scan(file, by_source=by_source, look=look)]


def _middle(words: TextEncoder, fim: str) -> Callable[[str, str, str], LearnedRow]:
    """The encoder of prefix, suffix and middle."""

    def encode(prefix: str, suffix: str, middle: str) -> LearnedRow:
        if fim == "skip":
            raise ValueError('rows of fill-in-the-middle are left out (data.fim = "skip")')
        if fim == "text":
            return LearnedRow("", words.text(prefix + middle + suffix))
        return LearnedRow("", words.middle(prefix, suffix, middle), whole=True)

    return encode


def _refuse_middle(model: Path, line: bytes) -> None:
    """Raises UserError for a row of fill-in-the-middle."""
    if b'"middle"' not in line:
        return
    try:
        row = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return
    if isinstance(row, dict) and middle_of(row) is not None:
        raise UserError(
            f'the tokenizer of {model} has no tokens for fill-in-the-middle: set data.fim to "text" or "skip", or drop '
            "such rows"
        )


def first_rows(readers: Sequence[SourceReader], tokens: int) -> list[Encoded]:
    """Rows of all sources by their weights, of `tokens` tokens in all. Raises UserError if the data end before."""
    rows: list[Encoded] = []
    while (taken := sum(reader.cursor.taken for reader in readers)) < tokens:
        live = [reader for reader in readers if not reader.ended]
        if not live:
            raise UserError(f"data has {taken:,} tokens, and {tokens:,} are needed: raise its epochs")
        reader = min(live, key=lambda reader: reader.cursor.taken / reader.source.weight)
        rows += [(one.ids, one.mask) for one in reader.documents()]
    return rows


def repository_file(folder: Path, functions: Sequence[FunctionText]) -> StreamFile:
    """A repository whose functions are learned from, to be kept among the files of a run."""
    body = msgspec.json.encode([(one.path, one.name, one.source) for one in functions])
    return StreamFile(str(folder), len(body), 0, blake3(body).hexdigest())


@dataclass(frozen=True)
class SourceEstimate:
    """The tokens of a source's epoch, of a sample of it; its share of a run's tokens, and its epochs at most."""

    label: str
    size: int
    tokens: int
    share: float
    epochs: int


def estimates(data: StreamData) -> list[SourceEstimate]:
    """The sizes of all sources. Raises UserError if a source has no row to learn from."""
    total = sum(source.weight for source in data.sources)
    rows: list[SourceEstimate] = []
    for reader in data.readers():
        source, at = reader.source, reader.cursor
        while not reader.ended and at.epoch == 0 and at.taken < _SAMPLE_TOKENS:
            reader.documents()
        if not at.taken:
            raise UserError(f"no row of {source.label} can be learned from")
        tokens = round(at.taken * source.size / at.read)
        rows.append(SourceEstimate(source.label, source.size, tokens, source.weight / total, source.epochs))
    return rows


def described(rows: Sequence[SourceEstimate], wanted: int | None) -> list[str]:
    """Lines about the tokens of a run over these sources; `wanted` is trainer.tokens."""
    lines = [
        f"data: {one.label}: {one.size / 1e6:,.1f} MB, about {one.tokens:,} tokens, {one.share:.1%} of the run, "
        f"read at most {one.epochs} times"
        for one in rows
    ]
    first = min(rows, key=lambda one: one.tokens * one.epochs / one.share)
    most = round(first.tokens * first.epochs / first.share)
    ends = f"about {most:,} tokens, until {first.label} ends" if wanted is None else f"{wanted:,} tokens"
    return [*lines, f"data: a run of {ends}"]
