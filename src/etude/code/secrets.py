"""Finds likely secrets in texts, and judges names of files: the rules for datasets, corpora and logs of conversations.

The rules are data: those of Gitleaks (gitleaks.toml), and what it lacks (secrets.toml, in the same format, with names
of credential files). A rule applies where one of its keywords occurs: its expression matches, the match has enough
entropy, and no allowlist names it. Expressions see windows around keywords, so the time is linear in the text.
"""

import base64
import binascii
import json
import math
import re
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from etude.code.go_regex import compile_go

SECONDS = 20.0  # of a processor, for one text
UNREADABLE = "too many likely secrets to look through"
ALLOWED_LINE = b"gitleaks:allow"
_BEFORE, _AFTER, _WINDOW = 256, 4096, 16 << 10  # bytes around keywords that an expression sees
_GENERIC = "generic-api-key"  # the last rule, so that others name what they find
_LEAD = r"[\w.-]{0,50}?"  # of many expressions, without effect on their secret
_BASE64 = re.compile(
    rb"[A-Za-z0-9+/_-]{24,}+(?:\\?\r?\n[ \t]{0,40}+[A-Za-z0-9+/_-]{24,}+)*+"
    rb"(?:\\?\r?\n[ \t]{0,40}+[A-Za-z0-9+/_-]{1,75})?"
)
_COPY = re.compile(rb"(?:\.(?:bak|old|orig|save|backup|copy|swp|\d{1,3})|~)+$")  # of a file, by its name
_PRINTED = bytes(range(32, 127)) + b"\t\r\n"


@dataclass(frozen=True)
class _Allowlist:
    """A list of what is no secret: paths, expressions that match the `target` ("secret", "match", "line"), words.
    `every`: all of its parts must hold."""

    paths: tuple[re.Pattern[bytes], ...]
    expressions: tuple[re.Pattern[bytes], ...]
    words: tuple[bytes, ...]
    target: str
    every: bool

    def allows(self, path: bytes, texts: Mapping[str, bytes]) -> bool:
        """Whether a match with these texts, by target, in the file `path` is allowed."""
        lowered = texts["secret"].lower()
        parts = [
            *([any(each.search(path) for each in self.paths)] if self.paths else []),
            *([any(each.search(texts[self.target]) for each in self.expressions)] if self.expressions else []),
            *([any(word in lowered for word in self.words)] if self.words else []),
        ]
        return all(parts) if self.every else any(parts)


@dataclass(frozen=True, eq=False)
class SecretRule:
    """A rule of the tables, compiled."""

    id: str
    expression: re.Pattern[bytes]
    keywords: tuple[bytes, ...]  # in lower case
    group: int  # that holds the secret; 0: the first that is not empty
    entropy: float  # bits per character that a secret exceeds
    path: re.Pattern[bytes] | None  # of the files that it is about
    allowlists: tuple[_Allowlist, ...]


@dataclass(frozen=True)
class SecretMatch:
    """A likely secret: the rule that found it, and its place in the bytes."""

    rule: str
    start: int
    end: int


def secret_in(data: bytes, path: str = "", *, marked: bool = False) -> str | None:
    """The rule of a likely secret in the content of the file `path`; None if there is none. Texts in UTF-16 and runs of
    base64 are read as well. `marked`: lines that say `gitleaks:allow` are allowed."""
    deadline = time.thread_time() + SECONDS
    for text in _readings(data):
        for match in _matches(text, path, deadline):
            if not (marked and ALLOWED_LINE in _line(text, match.start, match.end)):
                return match.rule
    return None


def find_secrets(data: bytes, path: str = "") -> Iterator[SecretMatch]:
    """All likely secrets in a text, by rule. The places of two may overlap."""
    return _matches(data, path, time.thread_time() + SECONDS)


def redacted(text: str, path: str = "") -> tuple[str, Counter[str]]:
    """The text with `<RULE>` in place of each likely secret, and their number by rule. Secrets without a place in the
    text, in base64 or UTF-16, stay: `secret_in` finds them."""
    counts: Counter[str] = Counter()
    data = text.encode("utf-8", "surrogatepass")
    parts, end = list[bytes](), 0
    for match in sorted(find_secrets(data, path), key=lambda each: (each.start, -each.end)):
        if match.start >= end:
            parts += [data[end : match.start], f"<{match.rule}>".encode()]
            counts[match.rule] += 1
        end = max(end, match.end)
    return b"".join([*parts, data[end:]]).decode("utf-8", "surrogatepass"), counts


def secret_in_json(value: Any, path: str = "") -> str | None:
    """The rule of a likely secret in a JSON value: where keys stand beside values, in one of its texts, or in the texts
    of JSON within a text, such as a call's arguments, whose escapes hide secrets."""
    try:
        return secret_in(b"\n".join(_texts(value)), path)
    except RecursionError:
        return UNREADABLE


def redacted_json(value: Any, path: str = "") -> tuple[Any, Counter[str]]:
    """The JSON value with `<RULE>` in place of each likely secret in its texts, as `secret_in_json` reads them, and
    their number by rule. Raises RecursionError for a value that is nested too deeply."""
    if isinstance(value, dict | list) and secret_in_json(value, path) is None:
        return value, Counter[str]()
    if isinstance(value, str):
        within = _within(value)
        clean, counts = (within, Counter[str]()) if within is None else redacted_json(within, path)
        text, more = redacted(json.dumps(clean, ensure_ascii=False) if counts else value, path)
        return text, counts + more
    if isinstance(value, dict):
        pairs = [(redacted(key, path), redacted_json(each, path)) for key, each in value.items()]
        return {key: each for (key, _), (each, _) in pairs}, sum((a + b for (_, a), (_, b) in pairs), Counter[str]())
    if isinstance(value, list):
        items = [redacted_json(each, path) for each in value]
        return [each for each, _ in items], sum((counts for _, counts in items), Counter[str]())
    return value, Counter[str]()


def _texts(value: Any) -> Iterator[bytes]:
    left = [value]
    if isinstance(value, dict | list):
        yield json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value.encode("utf-8", "surrogatepass")
            left.append(_within(value))
        elif isinstance(value, dict | list | tuple):
            left += [*value, *value.values()] if isinstance(value, dict) else value


def _within(text: str) -> Any:
    """The value of a text of JSON; None for other texts."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def secret_rules() -> frozenset[str]:
    """The names of all rules of texts."""
    return frozenset({*(rule.id for rule in _rules()), UNREADABLE})


def credential_name(path: str) -> str | None:
    """The kind of credentials that files of this name hold ("a private key"); None for other names."""
    lowered = _COPY.sub(b"", path.lower().encode("utf-8", "surrogateescape"))
    for what, expression, examples in _names():
        if expression.search(lowered):
            return None if examples and _examples().search(lowered) else what
    return None


def _readings(data: bytes) -> Iterator[bytes]:
    yield data
    if b"\0" in data:
        data = data.replace(b"\0", b"")  # UTF-16 and UTF-32
        yield data
    if decoded := b"\n".join(_decoded(data)):
        yield decoded


def _decoded(data: bytes) -> Iterator[bytes]:
    """The texts that runs of base64 stand for."""
    for match in _BASE64.finditer(data):
        run = re.sub(rb"[\s\\]", b"", match[0]).translate(bytes.maketrans(b"-_", b"+/"))
        try:
            text = base64.b64decode(run[: len(run) - (len(run) % 4 == 1)] + b"==")  # more "=" than needed is allowed
        except binascii.Error:
            continue
        if len(text) >= 16 and not text[:64].translate(None, _PRINTED):
            yield text


def _matches(data: bytes, path: str, deadline: float) -> Iterator[SecretMatch]:
    lowered, place = data.lower(), path.encode("utf-8", "surrogateescape")
    for rule in _rules():
        present = [word for word in rule.keywords if word in lowered]
        if not present or (rule.path is not None and not rule.path.search(place)):
            continue
        end = 0
        for low, high in _windows(lowered, present):
            if time.thread_time() > deadline:
                yield SecretMatch(UNREADABLE, 0, len(data))
                return
            for match in rule.expression.finditer(data, low, high):
                start, stop = _secret_span(match, rule.group)
                if start >= end and _counts(rule, data, place, match, start, stop):
                    end = stop
                    yield SecretMatch(rule.id, start, stop)


def _windows(lowered: bytes, words: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Stretches of a text, in order, that hold all places of the words and what stands around them."""
    low, high = -1, 0
    for match in re.finditer(b"|".join(map(re.escape, words)), lowered):
        if low < 0 or match.end() + _AFTER - low > _WINDOW:
            if low >= 0:
                yield low, min(high, len(lowered))
            low = max(0, match.start() - _BEFORE)
        high = match.end() + _AFTER
    if low >= 0:
        yield low, min(high, len(lowered))


def _secret_span(match: re.Match[bytes], group: int) -> tuple[int, int]:
    """The place of the secret in a match: the group, or the first that is not empty, or the whole."""
    if not group:
        group = next((number for number, text in enumerate(match.groups(), 1) if text), 0)
    return match.span(group)


def _counts(rule: SecretRule, data: bytes, path: bytes, match: re.Match[bytes], start: int, stop: int) -> bool:
    """Whether a match has the entropy of a secret, and no allowlist names it."""
    if rule.entropy and _entropy(data[start:stop]) <= rule.entropy:
        return False
    texts = {"secret": data[start:stop], "match": match[0].strip(b"\n"), "line": _line(data, *match.span())}
    return not any(each.allows(path, texts) for each in (*rule.allowlists, _everywhere()))


def _line(data: bytes, start: int, end: int) -> bytes:
    """The lines around a place, without what is further than 4 KiB away."""
    low, high = max(0, start - _AFTER), min(len(data), end + _AFTER)
    after = data.find(b"\n", max(start, end - 1), high)
    return data[data.rfind(b"\n", low, start) + 1 or low : high if after < 0 else after]


def _entropy(data: bytes) -> float:
    """Shannon entropy of the bytes, bits each."""
    return -sum(n / len(data) * math.log2(n / len(data)) for n in Counter(data).values())


@cache
def _tables(name: str) -> dict[str, Any]:
    return tomllib.loads(files("etude.code").joinpath(name).read_text("utf-8"))


@cache
def _rules() -> tuple[SecretRule, ...]:
    rows = [row for name in ("gitleaks.toml", "secrets.toml") for row in _tables(name)["rules"]]
    return tuple(map(_rule, sorted(rows, key=lambda row: row["id"] == _GENERIC)))


@cache
def _everywhere() -> _Allowlist:
    """The allowlist of all rules."""
    return _allowlist(_tables("gitleaks.toml")["allowlist"])


def _rule(row: Mapping[str, Any]) -> SecretRule:
    shared = (each for each in _tables("secrets.toml")["allowlists"] if row["id"] in each["targetRules"])
    allowlists = tuple(map(_allowlist, (*row.get("allowlists", ()), *shared)))
    text: str = row["regex"]
    if all(each.target != "match" for each in allowlists):
        text = "(?i)" + text.removeprefix(lead) if text.startswith(lead := "(?i)" + _LEAD) else text
    path = row.get("path")
    return SecretRule(
        id=row["id"],
        expression=compile_go(text),
        keywords=tuple(word.encode("latin-1").lower() for word in row["keywords"]),
        group=row.get("secretGroup", 0),
        entropy=float(row.get("entropy", 0)),
        path=None if path is None else compile_go(path),
        allowlists=allowlists,
    )


def _allowlist(row: Mapping[str, Any]) -> _Allowlist:
    return _Allowlist(
        paths=tuple(map(compile_go, row.get("paths", ()))),
        expressions=tuple(map(compile_go, row.get("regexes", ()))),
        words=tuple(word.lower().encode() for word in row.get("stopwords", ())),
        target=row.get("regexTarget", "secret"),
        every=row.get("condition", "OR") == "AND",
    )


@cache
def _names() -> tuple[tuple[str, re.Pattern[bytes], bool], ...]:
    """Kind, expression of a path in lower case, and whether names of examples are honest."""
    rows = _tables("secrets.toml")["names"]
    return tuple((row["what"], compile_go("|".join(row["paths"])), row.get("examples", False)) for row in rows)


@cache
def _examples() -> re.Pattern[bytes]:
    return compile_go(_tables("secrets.toml")["examples"])
