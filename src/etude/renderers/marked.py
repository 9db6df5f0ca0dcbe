"""Text with special tokens to ids and back, so that text which only spells a special token stays text.

Rendered text is cut at special tokens, and the runs between them are encoded as ordinary text. If content spells a
token, it gets a `mark` before it is rendered, a character of a private use area, which is removed afterwards. Sampled
ids are read the same way: in `seen`, only a sampled token spells its name without the mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from etude.renderers.base import TextCodec

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


class MarkedCodec(TextCodec):
    """Encodes and decodes text with marks; see the module."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._contents = {i: token.content for i, token in added.items()}
        self._ids = {content: i for i, content in self._contents.items()}
        self._tokens = token_pattern(added.values(), swallow=True)
        self._names = token_pattern(added.values(), swallow=False)
        self._special_names = token_pattern((t for t in added.values() if t.special), swallow=False)

    def id_of(self, name: str) -> int | None:
        """Id of an added token."""
        return self._ids.get(name)

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of rendered text: added tokens for complete names, ordinary ids for the rest."""
        ids: list[int] = []
        start = 0
        for match in self._tokens.finditer(text):
            ids += self.plain(text[start : match.start()].replace(mark, ""))
            name = self._names.search(match.group())
            assert name is not None, "a token with white space around it holds the token"
            ids.append(self._ids[name.group()])
            start = match.end()
        return ids + self.plain(text[start:].replace(mark, ""))

    def escape(self, text: str, mark: str, *, special: bool = False) -> str:
        """`text` with `mark` inside every name of an added token; with `special`, only of a special token."""
        names = self._special_names if special else self._names
        while names.search(text):
            text = names.sub(lambda m: m.group()[0] + mark + m.group()[1:], text)
        return text

    def seen(self, ids: Sequence[int]) -> tuple[str, str]:
        """The text of sampled ids, and the mark in it."""
        text = self.text(ids)
        if self._names.findall(text) == [self._contents[i] for i in ids if i in self._contents]:
            return text, ""
        mark = mark_for(text)
        parts: list[str] = []
        run: list[int] = []
        for token in (*ids, None):
            if token is not None and token not in self._contents:
                run.append(token)
                continue
            # Alone, some tokenizers drop the space before the first word.
            anchor, name = next(iter(self._contents.items()))
            parts.append(self.escape(self.text([anchor, *run]).removeprefix(name), mark) if run else "")
            parts.append("" if token is None else self._contents[token])
            run = []
        return "".join(parts), mark


def mark_for(*values: Any) -> str:
    """A character of a private use area that none of the texts contains."""
    held = json.dumps(values, ensure_ascii=False, default=str)
    return next(c for c in map(chr, range(0xE000, 0xF900)) if c not in held)


def map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """`value` with `function` applied to all its strings, including keys."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {function(key): map_strings(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, function) for item in value]
    return value


def token_pattern(tokens: Iterable[AddedToken], swallow: bool) -> re.Pattern[str]:
    """A pattern of added tokens in a text, longest first; with `swallow`, also of the white space that they absorb."""
    parts = []
    for token in sorted(tokens, key=lambda token: -len(token.content)):
        before, after = (r"\s*" if swallow and side else "" for side in (token.lstrip, token.rstrip))
        parts.append(before + re.escape(token.content) + after)
    return re.compile("|".join(parts) or r"(?!)")
