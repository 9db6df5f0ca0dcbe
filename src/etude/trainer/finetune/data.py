"""Rows of tokens from a user's files, with a report of every row that could not be used: output/data.json."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from etude.corpus import chats, packing
from etude.corpus.dialect import TextPiece
from etude.corpus.packing import Encoded, Rows
from etude.corpus.vocabulary import Vocabulary
from etude.errors import UserError
from etude.renderers import Renderer
from etude.trainer.finetune.config import DataConfig, OptimConfig

log = logging.getLogger(__name__)

_NAMED = 10  # refused rows in the log; all of them are in the report


def check(data: DataConfig | None) -> None:
    """Raises UserError for a path of a user's files that is not there."""
    for path in () if data is None else (*data.files, *data.held_out):
        chats.files_of(path)


def conversations(
    data: DataConfig, renderer: Callable[[], Renderer], optim: OptimConfig, output: Path, seed: int, *, pad: int
) -> tuple[Rows, Rows | None]:
    """Rows to train on, `epochs` times in other orders, and held-out ones. Conversations that are longer than a row are
    refused. Raises UserError if nothing is left."""
    return _rows(data, renderer, optim, output, seed, pad, None, None)


def texts(
    data: DataConfig, renderer: Callable[[], Renderer], optim: OptimConfig, output: Path, seed: int, *,
    words: Vocabulary,
) -> tuple[Rows, Rows | None]:  # fmt: skip
    """As `conversations`, with rows of text as well, cut where they are longer than a row. Every token is learned."""

    def encode(text: str) -> Encoded:
        return words.encode([(TextPiece(text),)])[0]

    return _rows(data, renderer, optim, output, seed, words.pad, words.separator, encode)


def _rows(
    data: DataConfig, renderer: Callable[[], Renderer], optim: OptimConfig, output: Path, seed: int, pad: int,
    separator: int | None, text: Callable[[str], Encoded] | None,
) -> tuple[Rows, Rows | None]:  # fmt: skip
    report: dict[str, object] = {}
    kept: list[list[Encoded]] = []
    for part, files in (("files", data.files), ("held_out", data.held_out)):
        found: list[Encoded] = []
        refused: list[chats.RefusedRow] = []
        for row in chats.rows(files, renderer, text=text, min_reward=data.min_reward):
            if isinstance(row, chats.LearnedRow) and (text is not None or len(row.tokens[0]) <= optim.length):
                ids, mask = row.tokens
                found.append((ids, mask if text is None else np.ones_like(mask)))
            elif isinstance(row, chats.LearnedRow):
                why = f"it has {len(row.tokens[0]):,} tokens, more than trainer.length = {optim.length:,}"
                refused.append(chats.RefusedRow(row.name, why))
            else:
                refused.append(row)
        _say(part, found, refused)
        report[part] = {
            "rows": len(found),
            "tokens": sum(len(ids) for ids, _ in found),
            "learned": sum(int(mask.sum()) for _, mask in found),
            "refused": [{"row": one.name, "why": one.why} for one in refused],
        }
        kept.append(found)
    (output / "data.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    train, held_out = (
        packing.pack(some, optim.length, pad=pad, separator=separator, label_separator=True) if some else None
        for some in kept
    )
    if train is None:
        raise UserError(f"no row of data.files can be learned from; {output / 'data.json'} says why")
    orders = [packing.shuffled(train, seed + epoch) for epoch in range(data.epochs)]
    return packing.joined(orders), held_out


def _say(part: str, found: Sequence[Encoded], refused: Sequence[chats.RefusedRow]) -> None:
    log.info("data.%s: %d rows to learn from, %d refused", part, len(found), len(refused))
    for one in refused[:_NAMED]:
        log.warning("refused: %s: %s", one.name, one.why)
    if len(refused) > _NAMED:
        often = Counter(one.why for one in refused).most_common(1)[0]
        log.warning("and %d more, all in data.json; most often: %s (%d)", len(refused) - _NAMED, *often)
