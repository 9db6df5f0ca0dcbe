"""Wrong edits that a model made itself.

A model that is to try again after a failed test must have learned what is left once its own favourite is ruled out;
edits that are wrong at random do not teach that, because it would not have made them (DAgger, arXiv:1011.0686).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from etude.corpus import dialect
from etude.corpus.dialect import IDS, Piece, message, prompt, special
from etude.corpus.episodes import Broken, Edit


@dataclass(frozen=True)
class Tried:
    """A broken function and the wrong edits that were made to it, all different."""

    broken: Broken
    wrong: tuple[Edit, ...]


def opening(broken: Broken, tokenizer: Tokenizer) -> list[int]:
    """The ids after which a model says its first edit's arguments: the prompt, the turn's beginning, the call."""
    document = (
        *message("user", prompt(broken.function.name, broken.path, broken.source)),
        special("<|assistant|>"), special("<|call|>"), Piece("edit"), special("<|arg|>"),
    )  # fmt: skip
    ((ids, _),) = dialect.encode(tokenizer, [document])
    return ids.tolist()


def edit_said(ids: Sequence[int], tokenizer: Tokenizer) -> Edit | None:
    """The edit whose arguments these ids are, up to the next call or the turn's end; None if they are not an edit's."""
    said = np.array(ids)
    if len(said) == 0 or said[-1] not in (IDS["<|call|>"], IDS["<|end|>"]):
        return None
    (between,) = np.nonzero(said == IDS["<|arg|>"])
    if len(between) != 1 or (said[:-1] < len(IDS)).sum() != 1:
        return None
    at = int(between[0])
    return Edit(tokenizer.decode(said[:at].tolist()), tokenizer.decode(said[at + 1 : -1].tolist()))


def tried(broken: Broken, edits: Sequence[Edit | None]) -> Tried:
    """What was made to a broken function, less the malformed, the repeated and the right ones."""
    wrong: dict[Edit, None] = {}
    for edit in edits:
        if edit is None:
            continue
        if edit.refusal(broken.source) or edit.apply(broken.source) != broken.function.source:
            wrong[edit] = None
    return Tried(broken, tuple(wrong))


def save(tries: Sequence[Tried], path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(tries))
    partial.replace(path)


def load(path: Path) -> list[Tried]:
    """Raises FileNotFoundError, or ValueError (msgspec) for a file that is not of `save`."""
    return msgspec.json.decode(path.read_bytes(), type=list[Tried])
