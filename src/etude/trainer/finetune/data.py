"""Rows of tokens from a user's files, with a report of every row that could not be used: output/data.json."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from etude.corpus import (
    Encoded,
    LearnedRow,
    RefusedRow,
    Rows,
    TextPiece,
    chat_files,
    chat_rows,
    join_rows,
    pack_rows,
    shuffle_rows,
)
from etude.corpus.vocabulary import Vocabulary
from etude.errors import UserError
from etude.renderers import Renderer
from etude.trainer.finetune.config import DataConfig, OptimConfig

log = logging.getLogger(__name__)

_NAMED = 10  # number of refused rows in the log; the report has all


def check(data: DataConfig | None) -> None:
    """Raises UserError if a path of a user's files does not exist."""
    for path in () if data is None else (*data.files, *data.held_out):
        chat_files(path)


def conversations(
    data: DataConfig, renderer: Callable[[], Renderer], optim: OptimConfig, output: Path, seed: int, *, pad: int
) -> tuple[Rows, Rows | None]:
    """Rows to train on, `epochs` times in different orders, and held-out ones. Conversations longer than a row are
    refused. Raises UserError if none is left."""
    return _rows(data, renderer, optim, output, seed, pad, None, None)


def texts(
    data: DataConfig,
    renderer: Callable[[], Renderer],
    optim: OptimConfig,
    output: Path,
    seed: int,
    *,
    words: Vocabulary,
) -> tuple[Rows, Rows | None]:
    """Like `conversations`, also with rows of text, which are cut at the length of a row. Every token is learned."""

    def encode(text: str) -> Encoded:
        return words.encode([(TextPiece(text),)])[0]

    return _rows(data, renderer, optim, output, seed, words.pad, words.separator, encode)


def _rows(
    data: DataConfig,
    renderer: Callable[[], Renderer],
    optim: OptimConfig,
    output: Path,
    seed: int,
    pad: int,
    separator: int | None,
    text: Callable[[str], Encoded] | None,
) -> tuple[Rows, Rows | None]:
    report: dict[str, object] = {}
    kept: list[list[Encoded]] = []
    for part, files in (("files", data.files), ("held_out", data.held_out)):
        encoded: list[Encoded] = []
        refused: list[RefusedRow] = []
        for row in chat_rows(files, renderer, text=text, min_reward=data.min_reward):
            if isinstance(row, LearnedRow) and (text is not None or len(row.tokens[0]) <= optim.length):
                ids, mask = row.tokens
                encoded.append((ids, mask if text is None else np.ones_like(mask)))
            elif isinstance(row, LearnedRow):
                why = f"it has {len(row.tokens[0]):,} tokens, more than trainer.length = {optim.length:,}"
                refused.append(RefusedRow(row.name, why))
            else:
                refused.append(row)
        _log(part, encoded, refused)
        report[part] = {
            "rows": len(encoded),
            "tokens": sum(len(ids) for ids, _ in encoded),
            "learned": sum(int(mask.sum()) for _, mask in encoded),
            "refused": [{"row": one.name, "why": one.why} for one in refused],
        }
        kept.append(encoded)
    (output / "data.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    train, held_out = (
        pack_rows(some, optim.length, pad=pad, separator=separator, label_separator=True) if some else None
        for some in kept
    )
    if train is None:
        raise UserError(f"no row of data.files can be learned from; {output / 'data.json'} says why")
    orders = [shuffle_rows(train, seed + epoch) for epoch in range(data.epochs)]
    return join_rows(orders), held_out


def _log(part: str, encoded: Sequence[Encoded], refused: Sequence[RefusedRow]) -> None:
    log.info("data.%s: %d rows to learn from, %d refused", part, len(encoded), len(refused))
    for one in refused[:_NAMED]:
        log.warning("refused: %s: %s", one.name, one.why)
    if len(refused) > _NAMED:
        often = Counter(one.why for one in refused).most_common(1)[0]
        log.warning("and %d more, all in data.json; most often: %s (%d)", len(refused) - _NAMED, *often)
