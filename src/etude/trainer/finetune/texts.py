"""Encodes texts and fill-in-the-middle with the tokenizer of any Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from etude.corpus import Encoded
from etude.errors import UserError
from etude.renderers import PlainEncoder, load_tokenizer, middle_prompt, read_json, tokens_before

_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>")


class TextEncoder:
    """Encodes training texts, of which every token is learned. Texts never become special tokens. `separator` is the
    token that ends a text; it may differ from the one that ends a turn. Raises UserError if there is none."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._plain = PlainEncoder(self._tokenizer)
        self.separator = _text_end(self._tokenizer, folder)
        self._before = tokens_before(self._tokenizer)
        self._prompt = middle_prompt(self._tokenizer)

    @property
    def has_middle(self) -> bool:
        """Whether the tokenizer has tokens for fill-in-the-middle."""
        return self._prompt is not None

    def text(self, text: str) -> Encoded:
        """A text, as the tokenizer begins texts."""
        return _learned([*self._before, *self._plain.encode(text)])

    def middle(self, prefix: str, suffix: str, middle: str) -> Encoded:
        """Prefix, suffix and middle in the tokenizer's own tokens and order for them; see `has_middle`."""
        assert self._prompt is not None
        prompt = self._prompt.ids(self._plain.encode(prefix), self._plain.encode(suffix))
        return _learned([*self._before, *prompt, *self._plain.encode(middle)])


def _learned(ids: list[int]) -> Encoded:
    return np.array(ids, dtype=np.uint32), np.ones(len(ids), dtype=np.uint8)


def _text_end(tokenizer: Tokenizer, folder: Path) -> int:
    own = read_json(folder / "tokenizer_config.json").get("eos_token")
    names = (*_TEXT_ENDS, own["content"] if isinstance(own, dict) else own)
    ids = [tokenizer.token_to_id(name) for name in names if name]
    end = next((i for i in ids if i is not None), None)
    if end is None:
        raise UserError(f"the tokenizer of {folder} has no token that ends a text (`eos_token`)")
    return end
