"""Synthetic edits: a few lines of a file are changed in ways that work in any language.

Real commits under a permissive licence are few, so most training pairs are synthetic. A synthetic edit need not make
sense. It must parse, look like its surroundings, and have the size of real edits.
"""

import keyword
import random
import re
from collections.abc import Callable, Sequence

from etude.code import shown_lines

_NAME = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]{2,}\b")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_STRING = re.compile(r"""(["'])([A-Za-z][^"'\\\n]{2,40})\1""")
_OPERATORS = {"==": "!=", "!=": "==", "<=": "<", ">=": ">", "<": "<=", ">": ">=", " + ": " - ", " - ": " + ",
              " and ": " or ", " or ": " and ", "&&": "||", "||": "&&"}  # fmt: skip
_OPERATOR = re.compile("|".join(re.escape(o) for o in sorted(_OPERATORS, key=len, reverse=True)))
WORDS = frozenset(keyword.kwlist) | frozenset(
    (
        "var",
        "let",
        "const",
        "function",
        "return",
        "this",
        "new",
        "null",
        "undefined",
        "true",
        "false",
        "typeof",
        "instanceof",
        "export",
        "default",
        "import",
        "from",
        "class",
        "extends",
        "async",
        "await",
        "public",
        "private",
        "protected",
        "static",
        "final",
        "void",
        "int",
        "char",
        "long",
        "double",
        "float",
        "boolean",
        "string",
        "package",
        "throws",
        "throw",
        "try",
        "catch",
        "finally",
        "switch",
        "case",
        "break",
        "continue",
        "struct",
        "typedef",
        "unsigned",
        "sizeof",
        "func",
        "type",
        "interface",
        "map",
        "range",
        "defer",
        "chan",
        "nil",
        "self",
        "cls",
        "super",
        "print",
        "include",
        "define",
        "ifdef",
        "endif",
    )
)
_PARTS = (
    "value", "item", "index", "count", "result", "options", "name", "state", "buffer", "entry", "offset", "limit",
    "handler", "target", "context", "config", "data", "key", "node", "length", "total", "source", "message",
)  # fmt: skip

Lines = list[str]
_Change = Callable[[Lines, Sequence[str], random.Random], Lines | None]


def edit(text: str, others: Sequence[str], changes: int, rng: random.Random) -> str | None:
    """`text` (ending in a newline) with up to `changes` changes, or None without a change; `others` are lines of the
    same language to insert. Every change is of one place, or a name in all its places."""
    lines, end = shown_lines(text), "\r\n" if text.endswith("\r\n") else "\n"
    made = 0
    for _ in range(4 * changes):
        if made == changes:
            break
        change = rng.choices(list(CHANGES), list(CHANGES.values()))[0]
        changed = change(lines, others, rng)
        if changed is not None and changed != lines:
            lines, made = changed, made + 1
    result = "".join(line + end for line in lines)
    return result if made and result != text else None


def _pick(lines: Lines, rng: random.Random, min_length: int = 4) -> int | None:
    places = [i for i, line in enumerate(lines) if len(line.strip()) >= min_length]
    return rng.choice(places) if places else None


def _margin(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _names(text: str) -> list[str]:
    return [name for name in _NAME.findall(text) if name not in WORDS]


def _fresh(rng: random.Random, like: str) -> str:
    """A new name in the style of another."""
    first, second = rng.sample(_PARTS, 2)
    if like.isupper():
        return f"{first}_{second}".upper()
    if like[0].isupper():
        return first.capitalize() + second.capitalize()
    camel = any(c.isupper() for c in like)
    return rng.choice((first, first + second.capitalize() if camel else f"{first}_{second}"))


def _rename(lines: Lines, _: Sequence[str], rng: random.Random) -> Lines | None:
    """Rename one name in the whole file."""
    names = _names("\n".join(lines))
    if not names:
        return None
    old = rng.choice(names)
    new, pattern = _fresh(rng, old), re.compile(rf"\b{re.escape(old)}\b")
    return [pattern.sub(new, line) for line in lines]


def _swap_name(lines: Lines, _: Sequence[str], rng: random.Random) -> Lines | None:
    """Replace one name in one line."""
    at = _pick(lines, rng)
    names = _names(lines[at]) if at is not None else []
    if at is None or not names:
        return None
    old = rng.choice(names)
    pool = _names("\n".join(lines)) if rng.random() < 0.5 else []
    new = rng.choice(pool) if pool else _fresh(rng, old)
    return [*lines[:at], re.sub(rf"\b{re.escape(old)}\b", new, lines[at], count=1), *lines[at + 1 :]]


def _literal(lines: Lines, _: Sequence[str], rng: random.Random) -> Lines | None:
    """Change a number, an operator or a string in one line."""
    places = [i for i, line in enumerate(lines) if any(p.search(line) for p in (_NUMBER, _OPERATOR, _STRING))]
    if not places:
        return None
    at = rng.choice(places)
    line = lines[at]
    pattern = rng.choice([p for p in (_NUMBER, _OPERATOR, _STRING) if p.search(line)])
    match = rng.choice(list(pattern.finditer(line)))
    if pattern is _NUMBER:
        new = str(rng.choice((0, 1, 2, 3, 5, 8, 10, 16, 24, 30, 60, 64, 100, 128, 255, 1000, rng.randrange(1000))))
    elif pattern is _OPERATOR:
        new = _OPERATORS[match.group()]
    else:
        words = match.group(2).split(" ")
        words[rng.randrange(len(words))] = rng.choice(_PARTS)
        new = match.group(1) + " ".join(words) + match.group(1)
    return [*lines[:at], line[: match.start()] + new + line[match.end() :], *lines[at + 1 :]]


def _delete(lines: Lines, _: Sequence[str], rng: random.Random) -> Lines | None:
    at = _pick(lines, rng, 1)
    if at is None or len(lines) < 4:
        return None
    return [*lines[:at], *lines[at + rng.choices((1, 2, 3), (6, 2, 1))[0] :]]


def _insert(lines: Lines, others: Sequence[str], rng: random.Random) -> Lines | None:
    """Insert lines of another file after a line, at its indentation."""
    at = _pick(lines, rng)
    if at is None or not others:
        return None
    start = rng.randrange(len(others))
    new = [x for x in others[start : start + rng.choices((1, 2, 3, 5), (6, 3, 2, 1))[0]] if x.strip()]
    if not new:
        return None
    deeper = lines[at + 1] if at + 1 < len(lines) and lines[at + 1].strip() else lines[at]
    margin, own = _margin(deeper), min((_margin(x) for x in new), key=len)
    return [*lines[: at + 1], *(margin + x[len(own) :] for x in new), *lines[at + 1 :]]


def _replace(lines: Lines, others: Sequence[str], rng: random.Random) -> Lines | None:
    at = _pick(lines, rng)
    if at is None or not others:
        return None
    new = rng.choice(others).strip()
    return [*lines[:at], _margin(lines[at]) + new, *lines[at + 1 :]] if new else None


def _argument(lines: Lines, _: Sequence[str], rng: random.Random) -> Lines | None:
    """Add an argument to a call or a definition."""
    places = [i for i, line in enumerate(lines) if re.search(r"\w\([^()]*\)", line)]
    if not places:
        return None
    at = rng.choice(places)
    match = rng.choice(list(re.finditer(r"(\w\()([^()]*)\)", lines[at])))
    new = rng.choice((_fresh(rng, "a"), str(rng.randrange(10))))
    inside = f"{match.group(2)}, {new}" if match.group(2).strip() else new
    return [
        *lines[:at],
        lines[at][: match.start()] + match.group(1) + inside + ")" + lines[at][match.end() :],
        *lines[at + 1 :],
    ]


def _wrap(lines: Lines, _: Sequence[str], rng: random.Random) -> Lines | None:
    """Indent some lines one level deeper, below a condition."""
    at = _pick(lines, rng)
    if at is None:
        return None
    margin, size = _margin(lines[at]), rng.choice((1, 2))
    block = lines[at : at + size]
    if any(not line.startswith(margin) for line in block):
        return None
    step = "\t" if margin.startswith("\t") else "    " if len(margin) % 4 == 0 else "  "
    name = rng.choice(_PARTS)
    python = not any(line.rstrip().endswith(("{", "}", ";")) for line in lines)
    head, tail = (f"if {name}:", []) if python else (f"if ({name}) {{", [margin + "}"])
    return [*lines[:at], margin + head, *(step + line for line in block), *tail, *lines[at + size :]]


def _move(lines: Lines, _: Sequence[str], rng: random.Random) -> Lines | None:
    at = _pick(lines, rng)
    if at is None or at + 1 >= len(lines) or _margin(lines[at]) != _margin(lines[at + 1]):
        return None
    return [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]


def _comment(lines: Lines, _: Sequence[str], rng: random.Random) -> Lines | None:
    """Insert a comment above a line, in the style of the file."""
    at = _pick(lines, rng)
    marks = [m.group(1) for line in lines if (m := re.match(r"\s*(#|//)\s", line))]
    if at is None or not marks:
        return None
    words = " ".join(rng.sample(_PARTS, rng.randint(2, 5)))
    return [*lines[:at], f"{_margin(lines[at])}{marks[0]} {words}", *lines[at:]]


CHANGES: dict[_Change, float] = {
    _rename: 1.0, _swap_name: 3.0, _literal: 3.0, _delete: 2.0, _insert: 4.0, _replace: 2.0, _argument: 2.0, _wrap: 1.0,
    _move: 0.7, _comment: 0.7,
}  # fmt: skip
