"""Regular expressions in Go's syntax (RE2), rewritten for Python's `re`.

What differs in rules of scanners: flags in the middle of an expression, which hold to the end of their group and past
its alternatives; POSIX classes; `\\z`; and `$`, which in Go is the end of the text alone unless the flag m is set.
"""

import re
from collections.abc import Iterator

_POSIX = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "digit": "0-9",
    "lower": "a-z",
    "upper": "A-Z",
    "space": r"\t\n\v\f\r ",
    "word": r"\w",
    "xdigit": "0-9A-Fa-f",
    "punct": r"!-/:-@\[-`{-~",
}
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|\(\?(?P<flags>[imsU-]+)\)|\((?:\?(?:P?<\w+>|[ims-]*:))?|[\s\S]"
)


def compile_go(expression: str) -> re.Pattern[bytes]:
    """The compiled expression, for bytes. Raises re.error for one that Python does not have."""
    return re.compile("".join(_parts(expression)).encode("latin-1"))


def _parts(expression: str) -> Iterator[str]:
    open_flags: list[list[str]] = [[]]  # of each open group: its flags, from their place to its end
    for match in _TOKEN.finditer(expression):
        token = match[0]
        if match["flags"]:
            open_flags[-1].append(f"(?{match['flags']}:")
            yield open_flags[-1][-1]
        elif token == "|":
            yield f"{')' * len(open_flags[-1])}|{''.join(open_flags[-1])}"
        elif token == ")":
            yield ")" * len(open_flags.pop()) + ")"
        elif token == r"\z" or (token == "$" and not any("m" in flags for group in open_flags for flags in group)):
            yield r"\Z"
        elif token.startswith("["):
            yield _class(token)
        else:
            if token.startswith("("):
                open_flags.append([])
            yield token
    yield ")" * len(open_flags.pop())


def _class(token: str) -> str:
    """A class of characters without POSIX names; an opening bracket in it is escaped, as Python warns of it."""
    named = re.sub(r"\[:(\w+):\]", lambda match: _POSIX[match[1]], token[1:-1])
    return "[" + re.sub(r"\\.|\[", lambda match: match[0] if len(match[0]) > 1 else r"\[", named) + "]"
