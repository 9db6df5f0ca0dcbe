"""Content parts of chat messages other than plain text: predictions, and documents.

    {"type": "document", "title": "src/m.py", "text": "def f(): ..."}
    {"type": "document", "title": "src/m.py", "source": {"type": "text", "media_type": "text/plain", "data": "..."}}

The second is Anthropic's format. Other keys of such a part (`citations`, `cache_control`, `context`) are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from etude.renderers import document_text

_READABLE = ("text", "document", "refusal")


class ContentPart(msgspec.Struct, tag_field="type", tag="text"):
    """Plain text."""

    text: str


class Prediction(msgspec.Struct, tag_field="type", tag="content"):
    """Text that much of the answer is expected to repeat."""

    content: str | list[ContentPart]

    def plain(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def take_documents(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The messages without their document parts, and the documents as text for the model, in order. Raises ValueError
    for a document part without text, and for a part that the model cannot read, such as an image."""
    rest: list[Mapping[str, Any]] = []
    documents: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            _check_types(content)
        if isinstance(content, list) and any(map(_is_document, content)):
            documents += [_read(part) for part in content if _is_document(part)]
            message = dict(message) | {"content": [part for part in content if not _is_document(part)]}
        rest.append(message)
    return rest, documents


def _check_types(parts: Sequence[object]) -> None:
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in _READABLE:
            raise ValueError(f"a content part of type {kind!r} is not supported: send text or documents")


def _is_document(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "document"


def _read(part: Mapping[str, Any]) -> str:
    text, title = part.get("text"), part.get("title")
    source = part.get("source")
    if text is None and isinstance(source, Mapping):
        if source.get("type") != "text":
            raise ValueError(f"a document's source is of type {source.get('type')!r}: send its text, as type 'text'")
        text = source.get("data")
    if not isinstance(text, str) or not isinstance(title, str | None):
        raise ValueError("a document part needs its text, and may have a title: both are strings")
    return document_text(title or "", text)
