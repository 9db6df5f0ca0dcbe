"""The parts of a corpus folder, and whether they are those that its corpus.json records."""

from __future__ import annotations

from pathlib import Path

import msgspec
from blake3 import blake3

from etude.errors import UserError

SIDES = ("train", "held_out")


class _CorpusRecord(msgspec.Struct):
    parts: dict[str, int]
    digest: str


def is_corpus(path: Path) -> bool:
    """Whether the path is a corpus folder, with the parts train and held_out."""
    return (path / "corpus.json").is_file()


def corpus_parts(folder: Path) -> tuple[dict[str, int], str]:
    """The number of parts of each side, and the digest of all: blake3 over name and content of each, in order."""
    hasher = blake3()
    counts: dict[str, int] = dict.fromkeys(SIDES, 0)
    for side in SIDES:
        for part in sorted((folder / side).rglob("*.jsonl")):
            counts[side] += 1
            hasher.update(f"{part.relative_to(folder).as_posix()}\0".encode())
            hasher.update_mmap(part)
    return counts, hasher.hexdigest()


def check_corpus(folder: Path) -> None:
    """Raises UserError for a corpus folder whose record cannot be read, or whose parts are others than it records."""
    advice = "copy the folder anew or build it again"
    try:
        made = msgspec.json.decode((folder / "corpus.json").read_bytes(), type=_CorpusRecord)
        counts, digest = corpus_parts(folder)
    except msgspec.MsgspecError:
        raise UserError(f"{folder / 'corpus.json'} is not the record of `etude corpus build`: {advice}") from None
    except OSError as e:
        raise UserError(f"{folder} cannot be read: {e.strerror}; {advice}") from None
    for side, count in counts.items():
        if count != (wanted := made.parts.get(side, 0)):
            raise UserError(f"{folder / side} has {count} files of the {wanted} in corpus.json: {advice}")
    if digest != made.digest:
        raise UserError(
            f"the files of {folder} are not those in its corpus.json: {advice}, or remove corpus.json to read them as "
            "other rows"
        )
