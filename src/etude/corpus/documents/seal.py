"""Secrets: every text of a document is looked through here, before rows are cut from it. Nothing else makes rows.

A secret becomes `<rule>`, a document that holds more than five is dropped, and so is one whose secrets have no place of
their own (within base64 or UTF-16), or that names one in its path. Documents are whole here: a cut through a secret
would hide it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from etude.code import redacted, redacted_json, secret_in, secret_in_json
from etude.corpus.documents.structs import CorpusDocument

MOST = 5  # secrets of a document that is kept


def sealed(document: CorpusDocument) -> tuple[CorpusDocument | None, int]:
    """The document without secrets, and how many were replaced; None if it is dropped."""
    labels = "\n".join([document.path, document.date, document.licence])
    if secret_in_json([labels, document.text, *_values(document)], document.path) is None:
        return document, 0
    if secret_in(labels.encode("utf-8", "surrogatepass")) is not None:
        return None, 0
    try:
        text, counts = redacted(document.text, document.path)
        (messages, tools), more = redacted_json(_values(document), document.path)
    except RecursionError:
        return None, 0
    made = msgspec.structs.replace(document, text=text, messages=messages, tools=tools)
    count = counts.total() + more.total()
    left = secret_in_json([made.text, *_values(made)], made.path)
    return (None, 0) if count > MOST or left is not None else (made, count)


def _values(document: CorpusDocument) -> list[Any]:
    return [document.messages, document.tools]
