"""A small library in two releases, and the same as a git clone with a commit between them."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

LICENCE = "MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining a copy\n"


WORDS = ("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle",
         "ladder", "meadow", "needle", "orchid", "pepper", "quartz", "ribbon", "saddle", "timber")  # fmt: skip


def module(i: int, new: bool) -> str:
    """A module of three functions in words of its own; the new one's second differs, and there is a fourth."""
    a, b, c, d, e = random.Random(i).sample(WORDS, 5)
    step = f"{c} += {d} * {i + 2}" if new else f"{c} += {d}"
    text = (
        f'"""The {a} of the {b}: {c}, {d} and {e}."""\n\nimport {e}\n\n\ndef {a}({b}):\n    for {c} in {b}:\n'
        f"        if {c} is not {d}:\n            return {c}\n    return {i}\n\n\n"
        f"def {b}_{a}({e}, {a}={i}):\n    {c} = 0\n    for {d} in {e}:\n        if {d} > {a}:\n"
        f"            {step}\n    return {c} - {a}\n\n\ndef {e}_{d}({c}):\n    if {c} < {i}:\n"
        f"        raise ValueError('{d}_{i} is negative')\n    return {e}.{b}({c} + {i * 7})\n"
    )
    if new:
        text += f"\n\ndef last_{d}({b}):\n    return list({b})[-1] if {b} else {a}({b})\n"
    return text


def write(root: Path, name: str, new: bool, files: int = 6, odd: int = 0) -> Path:
    """One release of the library as a folder; `odd` shifts what it is about."""
    folder = root / name
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    (folder / "LICENSE").write_text(LICENCE)
    for i in range(odd, odd + files):
        (folder / "lib" / f"part{i}.py").write_text(module(i, new))
    (folder / "README.md").write_text(f"# {name}\n\nSome words.\n\nMore words {odd}.\n\n- one\n- two\n- {odd}\n")
    (folder / "data.json").write_text('{\n "one": 1,\n "two": 2,\n "three": [1, 2, 3],\n "four": 4\n}\n')
    return folder


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture
def releases(tmp_path: Path) -> str:
    """OLD..NEW of one library."""
    return f"{write(tmp_path, 'lib-1.0', False)}..{write(tmp_path, 'lib-2.0', True)}"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A git clone of another library, whose second commit edits every module."""
    folder = write(tmp_path, "other", False, odd=100)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "Begin")
    write(tmp_path, "other", True, odd=100)
    git(folder, "commit", "-qam", "Double the items")
    return folder
