"""The page about a corpus: its commands run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from etude.cli import main
from etude.corpus.documents.card import RULES
from tests.corpus.documents.sources import folder, module, repository, rows
from tests.corpus.documents.test_suites import dataset, definition
from tests.corpus.sessions.test_sessions import claude_code, openai_chat

PAGE = (Path(__file__).parents[3] / "docs" / "corpus.md").read_text()
MIT = "Permission is hereby granted, free of charge, to any person"


def test_commands_of_the_page(tmp_path, monkeypatch, capsys):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    new = {"new.py": module(3)}
    repository(tmp_path / "shop", ("2025-01-01", {f"m{n}.py": module(n) for n in (1, 2)}), ("2026-01-01", new))
    folder(tmp_path / "billing", {"b.py": module(4)})
    folder(tmp_path / "library", {"l.py": module(5, 9), "LICENSE": MIT})
    folder(here, {"chats.jsonl": json.dumps({"messages": [{"role": "user", "content": "Hello."}]}) + "\n"})
    dataset(here / "tasks", [definition(6)])
    # As `fetch_wheel` keeps a package that was fetched before.
    metadata = "Metadata-Version: 2.1\nName: click\nVersion: 8.1.8\nLicense-Expression: BSD-3-Clause\n"
    package = {"click/core.py": module(7, 9), "click-8.1.8.dist-info/METADATA": metadata}
    folder(tmp_path / "cache/etude/corpus/click-8.1.8", package)
    text = "".join(json.dumps(line) + "\n" for line in claude_code()).replace("claude-x", "own-1")
    folder(tmp_path / "home/.claude/projects", {"p/s.jsonl": text})
    folder(here / "logs", {"chat.jsonl": "".join(json.dumps(pair) + "\n" for pair in openai_chat())})
    folder(here / "forge", {"pulls.json": json.dumps([{"number": 1, "title": "x", "merge_commit_sha": "0" * 40}])})
    commands = re.findall(r"^etude (corpus (?!rollouts|.*--live).+)$", PAGE, re.M)  # those have tests of their own
    assert len(commands) == 6
    for command in commands:
        words = shlex.split(command.replace("~", str(tmp_path / "home")))
        with pytest.raises(SystemExit) as end:
            main.main([*words, *(["--workers", "1"] if words[1] == "build" else [])])
        assert end.value.code == 0, capsys.readouterr().err
    assert {row["source"] for row in rows(here / "all")} == {"shop", "sessions", "pulls"}
    assert {row["origin"]["licence"] for row in rows(here / "corpus")} == {"Shop Inc., internal"}
    assert {row["source"] for row in rows(here / "mixed")} == {"click-8.1.8", "library", "shop", "chats"}
    assert {row["origin"]["path"] for row in rows(here / "measured", "held_out")} == {"new.py"}
    folders = re.search(r"^(DIR/train.*)$", PAGE, re.M)
    assert folders is not None
    for name in folders[1].replace("NNNNN", "00000").split():
        assert (here / name.replace("DIR", "measured")).is_file(), name
    assert len(PAGE.split()) <= 1310


def test_every_reason_has_a_rule(tmp_path):
    source = "".join(
        path.read_text() for path in (Path(__file__).parents[3] / "src/etude/corpus/documents").glob("*.py")
    )
    named = {*re.findall(r'drops\["([^"]+)"\]', source), *re.findall(r'return "([a-z][\w ]+)"\n', source)}
    named |= {*re.findall(r'counter\["drop ([\w ]+)"\]', source)}
    assert named - {"text"} <= RULES.keys()
    assert len(named) > 15
