"""The languages of files, and the rules by which a text is left out for what it is: a reason, or None.

The bounds are those of NeMo Curator's filters of code and of StarCoder's: 10 to 20,000 lines, a quarter of letters, 1
to 85 % comments. The user's own files may be short and without comments: they are what the model is to learn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from etude.code import credential_name, language_of, lines_of
from etude.corpus.edits.repositories import LOCKS, VENDORED
from etude.corpus.filters import generated

MAX_LINES, MIN_LINES, OWN_LINES = 20_000, 10, 3
MAX_LINE, MEAN_LINE = 1000, 100  # characters of a line of code
MIN_LETTERS, MIN_COMMENTS, MAX_COMMENTS = 0.25, 0.01, 0.85
MIN_DENSITY = 2.0  # characters per token: a word or a sign; tokenizers join signs, so that 2.5 would be too much
PROSE = frozenset({"markdown", "text", "html"})  # may have long lines
_DATA = frozenset({"json", "yaml", "toml", "css", "make", "docker"})  # without comments, often
# Languages without a parser here, and the endings of their files.
_MORE = """
rust rs, ruby rb, php php, csharp cs, cpp cpp cc cxx hpp hh hxx cu, swift swift, kotlin kt kts, scala scala, sql sql,
shell sh bash zsh ps1, proto proto, lua lua, r r, julia jl, elixir ex exs, erlang erl, haskell hs, ocaml ml mli,
clojure clj, dart dart, vue vue, svelte svelte, css css scss less, html html, toml toml, yaml yaml yml,
text rst txt adoc, make cmake mk, groovy gradle groovy, terraform tf, graphql graphql, perl pl pm, objc m mm, zig zig,
nim nim, fortran f90, verilog v
"""
_BY_SUFFIX = {suffix: words[0] for row in _MORE.split(",") for words in [row.split()] for suffix in words[1:]}
_NAMES = {"makefile": "make", "dockerfile": "docker", "rakefile": "ruby", "gemfile": "ruby"}
_CPP = re.compile(r"^\s*(?:namespace|template\s*<|class\s+\w+|using\s+\w+|public:|private:)|\w::\w", re.M)
_ODD = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f]")
_COMMENT = re.compile(r"^[ \t]*(?:#|//|/\*|\*|--|%|;|<!--|\"\"\"|''').*$", re.M)
_DOCSTRING = re.compile(r"^[ \t]*[rR]?(\"\"\"|''')(?:.*?)\1", re.M | re.S)
_LETTER = re.compile(r"[^\W\d_]+")


def language_of_file(path: str) -> str | None:
    """The language of a file by its name; None for files that are not read."""
    name = PurePosixPath(path).name.lower()
    return language_of(path) or _BY_SUFFIX.get(name.rpartition(".")[2] if "." in name else "") or _NAMES.get(name)


def language_of_text(path: str, text: str) -> str:
    """The language of a file that is read: headers may be C++, which the parser of C would refuse."""
    language = language_of_file(path) or ""
    return "cpp" if language == "c" and path.endswith(".h") and _CPP.search(text) else language


def passed_over(path: str) -> str | None:
    """The reason for which a file is left out by its path alone."""
    if {*PurePosixPath(path).parts[:-1]} & (VENDORED | {"site-packages", "dist-packages"}):
        return "vendored"
    if LOCKS.search(path):
        return "lock file or minified"
    code = language_of_file(path) not in _DATA | PROSE
    return "credentials" if not code and credential_name(path) is not None else None


def decoded(data: bytes) -> str | None:
    """The text of a file; None for another encoding than UTF-8."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None


def refusal(text: str, language: str, words: Sequence[str], *, own: bool) -> str | None:
    """The reason for which a text is left out; `words` are its tokens."""
    lines = lines_of(text)
    if _ODD.search(text):
        return "binary"
    if len(lines) < (OWN_LINES if own else MIN_LINES) or not text.strip():
        return "too short"
    if len(lines) > MAX_LINES:
        return "too long"
    if generated(text):
        return "generated"
    longest, mean = max(map(len, lines)), len(text) / len(lines)
    if language not in PROSE and (longest > MAX_LINE or mean > MEAN_LINE):
        return "long lines"
    if sum(map(len, _LETTER.findall(text))) < MIN_LETTERS * len(text):
        return "few letters"
    if len(text) < MIN_DENSITY * len(words):
        return "short tokens"
    if language in PROSE or language in _DATA:
        return None
    share = comment_share(text, language)
    if share > MAX_COMMENTS:
        return "many comments"
    return "few comments" if share < MIN_COMMENTS and not own else None


def comment_share(text: str, language: str) -> float:
    """The share of a text's characters in lines of comments; docstrings count in Python."""
    size = sum(len(match[0]) for match in _COMMENT.finditer(_DOCSTRING.sub("", text) if language == "python" else text))
    if language == "python":
        size += sum(len(match[0]) for match in _DOCSTRING.finditer(text))
    return size / max(1, len(text))
