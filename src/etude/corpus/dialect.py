"""The compact tool dialect of the nano model (`renderers/compact.py`), as training text.

Special tokens are pieces of their own: text is never parsed for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIALS: tuple[str, ...] = (
    "<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|call|>", "<|arg|>",
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file|>", *(f"<|reserved_{i}|>" for i in range(19)),
)  # fmt: skip
SPECIAL_IDS = {token: index for index, token in enumerate(SPECIALS)}


@dataclass(frozen=True)
class TextPiece:
    """Plain text, or one special token when `special`; `labelled` pieces are trained on."""

    text: str
    labelled: bool = True
    special: bool = False


@dataclass(frozen=True)
class Call:
    """One tool call. A call that is not `labelled` is context only (a wrong attempt)."""

    name: str
    arguments: tuple[str, ...] = ()
    labelled: bool = True


Document = tuple[TextPiece, ...]


def special_piece(token: str, labelled: bool = True) -> TextPiece:
    """A special token as a piece."""
    return TextPiece(token, labelled, special=True)


def message(role: str, content: str) -> Document:
    """A system, user or tool message: context, so never labelled."""
    return special_piece(f"<|{role}|>", False), TextPiece(content, False), special_piece("<|end|>", False)


def turn(calls: Sequence[Call]) -> Document:
    """An assistant turn. The role token is part of the prompt, the closing <|end|> is a token that the model must
    sample."""
    pieces = [special_piece("<|assistant|>", False)]
    for call in calls:
        pieces += [special_piece("<|call|>", call.labelled), TextPiece(call.name, call.labelled)]
        for argument in call.arguments:
            pieces += [special_piece("<|arg|>", call.labelled), TextPiece(argument, call.labelled)]
    return (*pieces, special_piece("<|end|>"))


def prompt(name: str, path: str, source: str) -> str:
    """The user's message: the task, and the current text of the function."""
    return f"Fix `{name}` in {path}\n{source}"


def read_prompt(content: str) -> tuple[str, str]:
    """The path and the source in the text of `prompt`."""
    first, _, source = content.partition("\n")
    return first.rpartition("` in ")[2], source


def label_all(document: Document) -> Document:
    """The same document with every piece labelled, as in mid-training."""
    return tuple(TextPiece(p.text, True, p.special) for p in document)


def text(document: Document) -> str:
    """The document as one string, specials spelled out."""
    return "".join(p.text for p in document)


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids (uint32) and label mask (uint8), each of shape [T], for every document. Text that happens to spell a
    special token becomes ordinary tokens (`encode_special_tokens`), so source code cannot forge a role or a call."""
    plain = [p.text for d in documents for p in d if not p.special]
    tokenizer.encode_special_tokens = True
    encoded = iter(tokenizer.encode_batch(plain, add_special_tokens=False))
    known = {token: tokenizer.token_to_id(token) for token in SPECIALS}
    special_ids = {token: i for token, i in known.items() if i is not None}
    out = []
    for document in documents:
        ids: list[int] = []
        mask: list[int] = []
        for piece in document:
            new = [special_ids[piece.text]] if piece.special else next(encoded).ids
            ids += new
            mask += [int(piece.labelled)] * len(new)
        out.append((np.array(ids, dtype=np.uint32), np.array(mask, dtype=np.uint8)))
    return out
