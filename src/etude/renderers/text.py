"""Helpers that make arbitrary text valid for records, tokenizers and single lines."""

TITLE = 200  # largest number of characters of a title


class ToolError(Exception):
    """A call that cannot be executed; the message is for the model."""


def one_line(text: str, limit: int) -> str:
    """`text` as one line of at most `limit` characters."""
    return " ".join(printable(text[: 4 * limit]).split())[:limit]


def printable(text: str) -> str:
    """`text` with invalid UTF-8 bytes replaced, since tokenizers and records accept only valid text."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def escaped(name: str) -> str:
    r"""A file name with its control characters, and with bytes that are no UTF-8, as `\xff`."""
    if name.isprintable():
        return name
    data = "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else ascii(c)[1:-1] for c in name)
    return data.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def document_text(title: str, text: str) -> str:
    """The text of a document for the model. Its header line gives attention tokens to rest on."""
    return f"<document>{one_line(title, TITLE)}\n{text}\n</document>\n"
