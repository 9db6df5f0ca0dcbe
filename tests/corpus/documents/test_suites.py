"""Pieces of suites, copied word for word, renamed or reflowed: none is in any part; like code stays."""

from __future__ import annotations

import keyword
import random
import re

import pytest

from etude.corpus.documents.suites import changed_pieces, copies_in, suite_index, suite_pieces
from etude.edits import Example, write_examples
from tests.corpus.documents.sources import WORDS, build, folder, module, repository, rows, whole

TASK = '[metadata.etude]\nsplit = "{split}"\n'


def definition(seed: int) -> str:
    """A function of a suite."""
    return module(seed, 1).split("\n\n\n")[1]


def renamed(text: str, rng: random.Random) -> str:
    """The text with other names in the places of all but keywords."""
    names = {name: f"n{rng.randrange(10**6)}" for name in {*re.findall(r"[A-Za-z_]\w*", text)} - {*keyword.kwlist}}
    return re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), text)


def reflowed(text: str) -> str:
    """The text as another formatter writes it: brackets, lines, commas and comments."""
    text = re.sub(r" = (.+)\n", r" = (\n        \1\n    )\n", text)
    text = re.sub(r"(\w)\(([^()\n]+)\)(?!:)", r"\1(\n            \2,\n        )", text)
    return text.replace("    # Of the", "    #  Of  the\n    #\n    #")


def dataset(root, pieces, splits=("heldout",)):
    """A dataset of tasks as `etude tasks build` writes it, of one function each."""
    for number, piece in enumerate(pieces):
        task = root / "tasks" / f"t{number}"
        body = f"import os\n\n\n{piece}"
        folder(task, {
            "task.toml": TASK.format(split=splits[number % len(splits)]),
            "solution/files/src/m.py": body, "environment/files/src/m.py": body.replace("return", "return not"),
        })  # fmt: skip
    return root


def test_none_of_100_planted_copies_is_in_any_part(tmp_path):
    rng = random.Random(3)
    pieces = [definition(seed) for seed in range(1000, 1100)]

    def check() -> str:
        return f"    assert {rng.choice(WORDS)}_{rng.choice(WORDS)}({rng.randrange(999)}) == {rng.randrange(999)}\n"

    tests = "\n\n".join(f"def test_{n}():\n{''.join(check() for _ in range(5))}" for n in range(10))
    hidden = {"hidden/tests/test_m.py": tests}
    suite = folder(dataset(tmp_path / "suite", pieces), hidden)
    files: dict[str, str] = {}
    for number, piece in enumerate(pieces):
        copy = (piece, renamed(piece, rng), reflowed(piece), reflowed(renamed(piece, rng)))[number % 4]
        files[f"m{number}.py"] = f"{module(number)}\n\n{copy}\n\n{module(number + 300)}"
    files["tests/test_copy.py"] = hidden["hidden/tests/test_m.py"] + "\n\n" + module(700)
    files["bare.md"] = "# Notes\n\nSee below.\n\n" + pieces[0] + "\n\nwords\n" * 10
    shop = repository(tmp_path / "shop", ("2026-01-01", files))
    made = build(tmp_path / "corpus", own=[shop], suites=[suite], window_characters=5000)
    index = suite_index(suite_pieces(suite))
    texts = [whole(row) for row in rows(tmp_path / "corpus")]
    assert index.short == 0
    assert [text for text in texts if copies_in(text, index)] == []
    everything = "\n".join(texts)
    lines = [max((line.strip() for line in piece.splitlines()), key=len) for piece in pieces]
    assert [line for line in lines if line in everything] == []
    # The rest of each file stays.
    source = made["sources"][0]
    assert source["dropped"] == {"suite": 1}
    assert source["definitions_of_suites_cut"] >= 110
    assert all(
        f"# Module {number}:" in everything and f"# Module {number + 300}:" in everything for number in range(100)
    )


def test_code_that_only_looks_alike_stays():
    index = suite_index([definition(seed) for seed in range(1000, 1200)])
    assert [seed for seed in range(300) if copies_in(module(seed), index)] == []


def test_held_out_tasks_are_the_suite_where_there_are_any(tmp_path):
    pieces = [definition(seed) for seed in (1, 2)]
    assert [*suite_pieces(dataset(tmp_path / "both", pieces, ("train", "heldout")))] == pieces[1:]
    assert [*suite_pieces(dataset(tmp_path / "train", pieces, ("train",)))] == pieces


def test_a_table_of_edits_is_a_suite(tmp_path):
    pytest.importorskip("pyarrow")
    before, piece = module(1), definition(1000)
    after = before + "\n\n" + piece
    row = Example("1", "r", "MIT", "files", "a.py", "python", "real", (), True, "", before, "", after, 9, 0.1)
    write_examples([row], tmp_path / "heldout.parquet")
    assert [*suite_pieces(tmp_path / "heldout.parquet")] == [piece]
    shop = folder(tmp_path / "shop", {"a.py": f"{module(5)}\n\n{renamed(piece, random.Random(1))}", "b.py": module(6)})
    made = build(tmp_path / "corpus", own=[shop], suites=[tmp_path / "heldout.parquet"])
    assert made["sources"][0]["definitions_of_suites_cut"] == 1
    assert made["options"]["suites"] == ["heldout.parquet"]


def test_pieces_are_the_changed_definitions():
    one = "import os\n\ndef a():\n    return 1\n\n@deco\ndef b():\n    return 2\n"
    assert [*changed_pieces(one.replace("return 2", "return 3"), one, "python")] == ["@deco\ndef b():\n    return 2\n"]
    assert [*changed_pieces("", one, "python")] == ["def a():\n    return 1\n", "@deco\ndef b():\n    return 2\n"]
    assert [*changed_pieces(one.replace("os", "re"), one, "markdown")] == ["".join(one.splitlines(True)[:6])]


def test_a_conversation_with_a_piece_is_dropped(tmp_path):
    import json

    piece = definition(1000)
    chats = [{"messages": [{"role": "user", "content": f"Write {n}."}, {"role": "assistant", "content": text}]}
             for n, text in enumerate((renamed(piece, random.Random(2)), definition(5)))]  # fmt: skip
    replay = folder(tmp_path / "r", {"c.jsonl": "".join(json.dumps(chat) + "\n" for chat in chats)})
    made = build(tmp_path / "corpus", replay=[replay], suites=[dataset(tmp_path / "suite", [piece])])
    assert [row["messages"] for row in rows(tmp_path / "corpus")] == [chats[1]["messages"]]
    assert made["sources"][0]["dropped"] == {"suite": 1}
