"""Repositories and texts for the tests of documents."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.config import DocumentBuildConfig
from etude.corpus.documents import build_documents

WORDS = (
    "amount",
    "basket",
    "cargo",
    "depot",
    "engine",
    "fleet",
    "gauge",
    "harbor",
    "index",
    "journal",
    "kernel",
    "ledger",
    "margin",
    "number",
    "order",
    "parcel",
    "quota",
    "route",
    "sector",
    "tariff",
    "unit",
    "vendor",
    "weight",
    "yard",
    "zone",
)


def _term(rng: random.Random, names: list[str], depth: int = 0) -> str:
    def inner() -> str:
        return _term(rng, names, depth + 1)

    match rng.randrange(7 if depth < 3 else 3):
        case 0:
            return str(rng.randrange(9999))
        case 1 | 2:
            return rng.choice(names)
        case 3:
            return f"{inner()} {rng.choice(['+', '-', '*', '//', '%'])} {inner()}"
        case 4:
            return f"{rng.choice(WORDS)}_{rng.randrange(99)}({', '.join(inner() for _ in range(rng.randint(1, 3)))})"
        case 5:
            return f"{rng.choice(names)}[{inner()}]"
        case _:
            return f"{rng.choice(names)}.{rng.choice(WORDS)}"


def _statement(rng: random.Random, names: list[str]) -> str:
    name, term = rng.choice(names), _term(rng, names)
    match rng.randrange(6):
        case 0:
            test = f"{_term(rng, names)} {rng.choice(['<', '>=', '==', '!=', 'in', 'is'])} {_term(rng, names)}"
            return f"    {rng.choice(['if', 'while', 'if not'])} {test}:\n        {name} = {term}\n"
        case 1:
            return (
                f"    for {name} in {term}:\n        {rng.choice(names)}.{rng.choice(WORDS)}({_term(rng, names, 1)})\n"
            )
        case _:
            return f"    {name} {rng.choice(['=', '=', '+=', '-='])} {term}\n"


def module(seed: int, functions: int = 4, imports: str = "") -> str:
    """A Python module of which no two seeds share much, neither words nor structure."""
    rng = random.Random(seed)
    parts = [f"# Module {seed}: {' '.join(rng.choices(WORDS, k=6))}.\n{imports}"]
    for number in range(functions):
        names = [f"{rng.choice(WORDS)}_{rng.choice(WORDS)}_{rng.randrange(999)}" for _ in range(4)]
        body = "".join(_statement(rng, names) for _ in range(rng.randint(6, 12)))
        head = f"def {names[3]}_{number}({names[0]}, {names[1]}):\n    # Of the {rng.choice(WORDS)}.\n"
        parts.append(f"{head}    {names[2]} = {names[1]}\n{body}    return {names[2]}\n")
    return "\n\n".join(parts)


def folder(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """A folder of files."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def git(root: Path, *words: str, date: str = "2026-01-01T00:00:00Z") -> str:
    """Runs git, as nobody, at a date."""
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date, "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", "-c", "user.name=n", "-c", "user.email=n@example.com", "-c", "protocol.file.allow=always", *words]
    done = subprocess.run(command, cwd=root, env=os.environ | dates, capture_output=True, text=True, check=True)
    return done.stdout


def repository(root: Path, *commits: tuple[str, Mapping[str, str | bytes]]) -> Path:
    """A clone with a commit of these files at each date."""
    root.mkdir(parents=True, exist_ok=True)
    git(root, "init", "-q", "-b", "main")
    for date, files in commits:
        folder(root, files)
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", f"at {date}", date=f"{date}T12:00:00Z")
    return root


def build(output: Path, *sources: str | Path, small: bool = False, **named: Any) -> dict[str, Any]:
    """A corpus by one worker, unless `workers` says otherwise; `small` makes many shards and parts."""
    fields = DocumentBuildConfig.model_fields
    options = DocumentBuildConfig(**{"workers": 1} | {name: named.pop(name) for name in [*named] if name in fields})
    if small:
        named |= {"shard_bytes": 20_000, "part_bytes": 30_000}
    lists = {key: [str(each) for each in value] for key, value in named.items() if isinstance(value, list)}
    return build_documents([*map(str, sources)], output, options, **named | lists)


def rows(output: Path, side: str = "") -> list[dict[str, Any]]:
    """The rows of a corpus."""
    parts = sorted(output.glob(f"{side or '*'}/*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_bytes().splitlines()]


def whole(row: Mapping[str, Any]) -> str:
    """The text of a row."""
    return row["text"] if "text" in row else row["prefix"] + row["middle"] + row["suffix"]
