"""Turns training text into the tokens of a model: of the nano model here, of any other model in `foreign.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tokenizers import Tokenizer

from etude.corpus import dialect
from etude.corpus.dialect import Document
from etude.corpus.packing import Encoded


@dataclass(frozen=True)
class Vocabulary:
    """The encoder of a model. `encode` gives ids and masks of documents, best of `together` at a time; `separator`
    stands between documents, `pad` behind the last one."""

    encode: Callable[[Sequence[Document]], list[Encoded]]
    pad: int
    separator: int
    together: int = 1000


def compact(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer that holds the tokens of the compact dialect."""
    pad, separator = tokenizer.token_to_id("<|pad|>"), tokenizer.token_to_id("<|endoftext|>")
    assert pad is not None, "the tokenizer holds the compact dialect"
    assert separator is not None
    return Vocabulary(partial(dialect.encode, tokenizer), pad, separator)
