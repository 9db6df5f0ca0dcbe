"""The records of a build of documents: sources, files, documents and rows. They cross processes as JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Kind = Literal["own", "repository", "package", "conversations", "replay"]
OF_ROWS = ("conversations", "replay")
"""The kinds of sources whose files hold rows, in no order, rather than code."""


class CorpusSource(msgspec.Struct, frozen=True, kw_only=True):
    """A source of documents. `revision` is a commit or a version; empty for folders without one."""

    name: str
    kind: Kind
    root: str  # folder, or file of replay
    licence: str
    stated: str  # where the licence stands
    revision: str = ""
    history: bool = False  # the files are those of a git commit
    base: str = ""  # the commit that is trained on, where a date divides; "" if there is none
    inside: str = ""  # the folder of the clone that is the source, "" for all of it
    last: str = ""  # date of the newest commit


class SourceFile(msgspec.Struct, frozen=True):
    """A file of a source, or the lines of a JSON-lines file that begin between two bytes."""

    path: str
    size: int  # bytes
    blob: str = ""  # id of the git object; of a file on the disk, the time of its change
    date: str = ""  # of its last change, ISO 8601 in UTC; empty where no history tells
    start: int = 0
    end: int = 0  # 0: a whole file
    held_out: bool = False  # it was added or changed after the date that divides
    base: str = ""  # of a changed file, the blob that is trained on


class SourceShard(msgspec.Struct, frozen=True):
    """A share of a source's files, which one worker reads at once."""

    source: int
    files: tuple[SourceFile, ...]


class CorpusDocument(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A text with its origin, or a conversation (`messages` and `tools`, with an empty text)."""

    source: int
    path: str
    text: str = ""
    language: str = ""
    date: str = ""
    licence: str = ""  # "": that of the source
    held_out: bool = False
    imports: tuple[str, ...] = ()
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class DocumentPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a document in the files of the work folder."""

    shard: int
    offset: int
    length: int


class DocumentGroup(msgspec.Struct, frozen=True):
    """Neighbouring documents of a source in import order: one window, or a row or more for each."""

    window: bool
    places: tuple[DocumentPlace, ...]


class DocumentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that the workers need to know. `suites` are the paths of --suite; `after` is the date that divides training
    files from held-out ones, "" for none."""

    sources: tuple[CorpusSource, ...]
    suites: tuple[str, ...]
    seed: int
    fim: float
    windows: float
    window_characters: int
    fim_characters: int
    after: str
    syntax: tuple[str, ...]  # languages with a parser here
    shard_bytes: int
    part_bytes: int
    shards: int = 0
    files: str = ""  # digest of the list of files
