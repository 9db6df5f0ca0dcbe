"""Pages that quote the program: what they say is what it prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import etude
from etude.cli.main import COMMANDS
from etude.config import RLConfig, keys

SOURCE = Path(etude.__file__).parent
DOCS = SOURCE.parents[1] / "docs"


def texts() -> Iterator[str]:
    """The texts of the program; "..." stands for what a message fills in."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_of_the_troubleshooting_page_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(), re.M)
    assert len(rows) > 15
    program = "\n".join(texts())
    assert [message for message in rows if message not in program] == []


def test_commands_of_the_walk_through_exist() -> None:
    page = (DOCS / "your-repository.md").read_text()
    commands = re.findall(r"^etude ([a-z]+)", page, re.M)
    assert {"init", "tasks", "train", "eval", "serve", "doctor"} <= {*commands} <= {*COMMANDS}
    assert len(re.sub(r"^```.*?^```", "", page, flags=re.S | re.M).split()) <= 700
    quoted = re.findall(r"`((?:tasks|rollout|trainer|eval)\.\w+)`", page + (DOCS / "troubleshooting.md").read_text())
    known = {key.name for key in keys(RLConfig)}
    assert {*quoted} <= known


def test_files_that_pages_and_rooms_name_exist() -> None:
    root = DOCS.parent
    rooms = {page: page.parent for page in SOURCE.rglob("__init__.py")}
    pages = [*root.glob("*.md"), *(p for p in DOCS.rglob("*.md") if p.name != "results.md"), *rooms]
    foreign = {"src/m.py", "_torch/speculative/drafter.py"}  # of an example, of TensorRT-LLM
    missing = {
        f"{page.relative_to(root)}: {name}"
        for page in pages
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"(?<![\w./-])((?:\w+/)+\w+\.(?:py|cjs|mjs))", page.read_text())
        if not any((base / name).exists() for base in (root, SOURCE, page.parent)) and name not in foreign
    }
    assert missing == set()
