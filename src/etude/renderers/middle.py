"""Fill-in-the-middle in the tokens of a model's family, as it was trained to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PREFIX, _SUFFIX = "{prefix}", "{suffix}"
_FAMILIES = (
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),  # Qwen, CodeGemma, StarCoder 2
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", _PREFIX, "<｜fim▁hole｜>", _SUFFIX, "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_suffix|>", _SUFFIX, "<|code_prefix|>", _PREFIX, "<|code_middle|>"),  # GLM, as CodeGeeX 4 documents it
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),  # Codestral: the middle follows the prefix
    ("▁<PRE>", _PREFIX, "▁<SUF>", _SUFFIX, "▁<MID>"),  # CodeLlama
)


@dataclass(frozen=True)
class MiddlePrompt:
    """The prompt that a middle follows: ids of special tokens, and the places of prefix and suffix, in order. `before`
    are the tokens that the tokenizer puts before a text."""

    parts: tuple[int | str, ...]
    before: tuple[int, ...]

    def ids(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """The prompt of these ids, without `before`."""
        texts = {_PREFIX: prefix, _SUFFIX: suffix}
        return [i for part in self.parts for i in ((part,) if isinstance(part, int) else texts[part])]


def middle_prompt(tokenizer: Tokenizer) -> MiddlePrompt | None:
    """That of a tokenizer; None if it has no tokens for fill-in-the-middle."""
    for family in _FAMILIES:
        parts = [part if part in (_PREFIX, _SUFFIX) else tokenizer.token_to_id(part) for part in family]
        if None not in parts:
            return MiddlePrompt(tuple(part for part in parts if part is not None), tuple(tokens_before(tokenizer)))
    return None


def tokens_before(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before a text, such as the one that begins a text."""
    alone, begun = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    return begun[: begun.index(alone[0])] if alone and alone[0] in begun else []
