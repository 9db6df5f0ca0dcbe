"""TOML files and the command line as one configuration: `base.toml @ mine.toml --trainer.lr 2e-4 --rollout.group 8`.

Later files and flags override earlier ones: tables are merged key by key, arrays and values are replaced. A table whose
`type` changes is replaced whole, because its other keys belong to the former type. A key of [tasks] that names the
origin of tasks replaces all earlier origins; its other keys override those of every entry of tasks.sources.
"""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.config import load_toml
from etude.errors import UserError

OF_RANKS = ("mesh", "launcher", "collective_seconds")  # keys of [trainer] that a resumed run may change
_FLAGS = ("--resume", "--deterministic", "--dry-run", "--keys")  # of `etude train`, which have no value


def split_overlays(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files after `@`, and all other words. Raises UserError for an `@` without a file."""
    files: list[Path] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("@"):
            others.append(word)
            continue
        name = word[1:] or next(rest, "")
        if not name or name.startswith("-"):
            raise UserError("@ needs a TOML file after it, as in `etude train base.toml @ mine.toml`")
        files.append(Path(name))
    return files, others


def read_toml(path: Path, overrides: Sequence[str] = (), overlays: Sequence[Path] = ()) -> dict[str, Any]:
    """The tables of `path`, overridden by those of `overlays` in order, then by `--a.b value` pairs. Raises
    UserError."""
    data: dict[str, Any] = {}
    for tables in (*map(load_toml, (path, *overlays)), _tables(overrides)):
        data = _merged(data, tables)
    return data


def with_ranks(stored: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A stored configuration with overrides of the keys that a resumed run may change. Raises UserError for others."""
    tables = _tables(overrides)
    if tables.keys() - {"trainer"} or tables.get("trainer", {}).keys() - set(OF_RANKS):
        *some, last = (f"trainer.{key}" for key in OF_RANKS)
        raise UserError(f"a resumed run keeps its configuration, but for {', '.join(some)} and {last}")
    return _merged(stored, tables)


def configuration_text(files: Sequence[Path], overrides: Sequence[str]) -> str:
    """The text of a run's configuration, for people: the files one after the other, and the overrides as a comment."""
    parts = [path.read_text("utf-8").rstrip("\n") for path in files]
    if len(files) > 1:
        parts = [f"# ---- {path}\n{text}" for path, text in zip(files, parts, strict=True)]
    if overrides:
        parts.append(f"# ---- command line\n# {shlex.join(overrides)}")
    return "\n\n".join(parts) + "\n"


_ORIGINS = {"repository", "dataset", "harbor", "edits", "environment", "sources"}  # keys of [tasks]
_OF_ORIGINS = {"sha256", "arguments"}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Tables merged key by key; a table of another `type` replaces the whole table below."""
    merged = dict(below)
    for key, value in above.items():
        former = merged.get(key)
        if isinstance(value, dict) and former is not None:
            if not isinstance(former, dict):
                raise UserError(f"{key} is a value, not a table: its keys cannot be set")
            if key == "tasks" and value.keys() & _ORIGINS:
                former = {name: one for name, one in former.items() if name not in _ORIGINS | _OF_ORIGINS}
            elif key == "tasks" and isinstance(former.get("sources"), list):
                own = [{name: one for name, one in source.items() if name not in value} for source in former["sources"]]
                former = former | {"sources": own}
            if value.get("type", former.get("type")) == former.get("type"):
                value = _merged(former, value)
        merged[key] = value
    return merged


def _tables(overrides: Sequence[str]) -> dict[str, Any]:
    """`--a.b value` and `--a.b=value` as nested tables."""
    data: dict[str, Any] = {}
    rest = list(overrides)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise UserError(f"unexpected argument {flag!r}; overrides are written --table.key value")
        key, equals, text = flag[2:].partition("=")
        if not equals:
            if not rest:
                meant = difflib.get_close_matches(flag, _FLAGS, 1, 0.7)
                raise UserError(f"{flag} needs a value" + (f"; did you mean {meant[0]}?" if meant else ""))
            text = rest.pop(0)
        *tables, leaf = key.split(".")
        node = data
        for table in tables:
            node = node.setdefault(table, {})
            if not isinstance(node, dict):
                raise UserError(f"--{key}: {table} is a value, not a table")
        node[leaf] = _toml_value(text)
    return data


def _toml_value(text: str) -> Any:
    """The value of a TOML literal, else the text itself, so that paths need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
