"""Secrets: every text of a document is looked through here, before rows are cut from it. Nothing else makes rows.

A secret becomes `<rule>`, a document that holds more than five is dropped, and so is one whose secrets have no place of
their own (within base64 or UTF-16), or that names one in its path. Documents are whole here: a cut through a secret
would hide it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from etude.code import redacted, secret_in
from etude.corpus.documents.structs import CorpusDocument

MOST = 5  # secrets of a document that is kept


def sealed(document: CorpusDocument) -> tuple[CorpusDocument | None, int]:
    """The document without secrets, and how many were replaced; None if it is dropped."""
    labels = "\n".join([document.path, document.date, document.licence]).encode("utf-8", "surrogatepass")
    if secret_in(b"\n".join([labels, *_texts(document)]), document.path) is None:
        return document, 0
    if secret_in(labels) is not None:
        return None, 0
    counts = [0]
    text = _scrubbed(document.text, document.path, counts)
    try:
        messages, tools = (_walked(value, document.path, counts) for value in (document.messages, document.tools))
    except RecursionError:
        return None, 0
    made = msgspec.structs.replace(document, text=text, messages=messages, tools=tools)
    left = secret_in(b"\n".join(_texts(made)), document.path)
    return (None, 0) if counts[0] > MOST or left is not None else (made, counts[0])


def _texts(document: CorpusDocument) -> list[bytes]:
    """The text, and every string of a conversation."""
    out, left = [document.text.encode("utf-8", "surrogatepass")], [document.messages, document.tools]
    while left:
        value = left.pop()
        if isinstance(value, str):
            out.append(value.encode("utf-8", "surrogatepass"))
            left.append(_within(value))
        elif isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            left += value
    return out


def _within(text: str) -> Any:
    """The value of a string of JSON, such as a call's arguments, in which escapes hide secrets; None for others."""
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _walked(value: Any, path: str, counts: list[int]) -> Any:
    if isinstance(value, str):
        inner = _within(value)
        clean = _walked(inner, path, counts)
        return _scrubbed(value if clean == inner else json.dumps(clean, ensure_ascii=False), path, counts)
    if isinstance(value, dict):
        return {_scrubbed(key, path, counts): _walked(each, path, counts) for key, each in value.items()}
    return [_walked(each, path, counts) for each in value] if isinstance(value, list) else value


def _scrubbed(text: str, path: str, counts: list[int]) -> str:
    replaced, rules = redacted(text, path)
    counts[0] += rules.total()
    return replaced
