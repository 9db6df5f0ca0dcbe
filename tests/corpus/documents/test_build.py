"""A corpus as a whole: the same bytes by any number of workers and after any kill, its dates, sources and refusals."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
from blake3 import blake3

from etude.cli import main
from etude.errors import RunFailed, UserError
from tests.corpus.documents.sources import build, folder, git, module, repository, rows, whole

MIT = "MIT License\n\nPermission is hereby granted, free of charge, to any person\n"


@pytest.fixture
def shop(tmp_path):
    """A clone whose files 8 to 11 changed last in June."""
    first = {f"shop/m{n:02}.py": module(n) for n in range(12)} | {
        "shop/__init__.py": "",
        "README.md": "# Shop\n\nSells.\n\nx\n",
    }
    later = {f"shop/m{n:02}.py": module(n) + module(n + 100, 1) for n in range(8, 12)}
    return repository(tmp_path / "shop", ("2026-01-05", first), ("2026-06-10", later))


def everything(output):
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_any_number_of_workers_gives_the_same_bytes(shop, tmp_path):
    chats = [{"messages": [{"role": "user", "content": f"{n} {random.Random(n).random()}"}]} for n in range(300)]
    replay = folder(tmp_path / "replay", {"a.jsonl": "".join(json.dumps(chat) + "\n" for chat in chats)})
    named = {"own": [shop], "replay": [replay], "small": True, "hold_out_after": "2026-03-01"}
    one = build(tmp_path / "one", **named)
    two = build(tmp_path / "two", workers=2, **named)
    assert one == two
    assert everything(tmp_path / "one") == everything(tmp_path / "two")
    parts = sorted(tmp_path.glob("one/train/*.jsonl"))
    assert [part.name for part in parts] == [f"{n:05}.jsonl" for n in range(len(parts))]
    assert len(parts) > 2
    assert all(part.stat().st_size <= 30_000 for part in parts)
    hasher = blake3()
    for side in ("train", "held_out"):
        for part in sorted((tmp_path / "one" / side).iterdir()):
            hasher.update(f"{side}/{part.name}\0".encode() + part.read_bytes())
    assert one["digest"] == hasher.hexdigest()
    assert not (tmp_path / "one.building").exists()
    other = build(tmp_path / "other", seed=2, **named)
    assert other["digest"] != one["digest"]


COMMAND = "import sys; from etude.cli.main import main; main(sys.argv[1:])"


@pytest.mark.parametrize("place", ["read:2", "rows:1", "parts:1"])
def test_a_killed_build_is_continued_with_the_same_bytes(shop, tmp_path, place):
    more = folder(tmp_path / "more", {f"n{n}.py": module(n + 500, 60) for n in range(20)} | {"LICENSE": MIT})
    words = ["corpus", "build", str(more), "--own", str(shop), "--hold-out-after", "2026-03-01"]
    command = [sys.executable, "-c", COMMAND, *words, "--workers", "1", "-o", str(tmp_path / "killed")]
    killed = subprocess.run(
        command, env=os.environ | {"ETUDE_FAILPOINT": f"corpus.{place}"}, capture_output=True, timeout=100
    )
    assert killed.returncode == -9
    assert not (tmp_path / "killed").exists()
    assert (tmp_path / "killed.building").stat().st_mode & 0o77 == 0
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed.building" / "read").glob("*.json")}
    assert kept
    with pytest.raises(UserError, match="other sources or options"):
        build(tmp_path / "killed", more, own=[shop], hold_out_after="2026-03-02")
    build(tmp_path / "killed", more, own=[shop], hold_out_after="2026-03-01")
    build(tmp_path / "whole", more, own=[shop], hold_out_after="2026-03-01")
    assert everything(tmp_path / "killed") == everything(tmp_path / "whole")


def test_a_killed_worker_loses_nothing(shop, tmp_path, monkeypatch):
    named = {"own": [shop], "small": True}
    monkeypatch.setenv("ETUDE_FAILPOINT", "corpus.read:1")
    with pytest.raises(RunFailed, match="give the same command again"):
        build(
            tmp_path / "corpus",
            workers=2,
            **named | {"replay": [folder(tmp_path / "r", {"a.md": "text\n" * 9000, "b.md": "more\n" * 9000})]},
        )
    monkeypatch.delenv("ETUDE_FAILPOINT")
    build(tmp_path / "corpus", workers=2, **named | {"replay": [tmp_path / "r"]})
    build(tmp_path / "whole", **named | {"replay": [tmp_path / "r"]})
    assert everything(tmp_path / "corpus") == everything(tmp_path / "whole")


def test_the_tree_as_of_a_date_is_trained_on_and_what_came_since_is_held_out(shop, tmp_path):
    made = build(tmp_path / "corpus", own=[shop], hold_out_months=2, windows=0, fim=0)
    held = {row["origin"]["path"]: row for row in rows(tmp_path / "corpus", "held_out")}
    assert held.keys() == {f"shop/m{n:02}.py" for n in range(8, 12)}
    assert {row["origin"]["date"] for row in held.values()} == {"2026-06-10T12:00:00Z"}
    assert all(held[f"shop/m{n:02}.py"]["text"].strip() == module(n + 100, 1).strip() for n in range(8, 12))
    trained = {row["origin"]["path"]: row["text"] for row in rows(tmp_path / "corpus", "train")}
    assert trained == {f"shop/m{n:02}.py": module(n) for n in range(12)} | {"README.md": "# Shop\n\nSells.\n\nx\n"}
    assert made["options"]["hold_out_after"] == "2026-04-10T12:00:00Z"
    commits = git(shop, "rev-list", "--reverse", "HEAD").split()
    for side, commit in zip(("train", "held_out"), commits, strict=True):
        assert {row["origin"]["revision"] for row in rows(tmp_path / "corpus", side)} == {commit}
    copy = folder(tmp_path / "old", {"LICENSE": MIT, "m08.py": (shop / "shop/m08.py").read_text() + "# an old copy\n"})
    build(tmp_path / "both", copy, own=[shop], hold_out_months=2)
    assert {row["source"] for row in rows(tmp_path / "both")} == {"shop"}, "a copy of a held-out file is learned"
    with pytest.raises(UserError, match="no source has a git history"):
        build(tmp_path / "none", own=[copy], hold_out_months=2)
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{shop}", str(shallow))
    with pytest.raises(UserError, match="shallow"):
        build(tmp_path / "none", own=[shallow], hold_out_months=2)


def test_rows_name_their_origin(shop, tmp_path):
    head = git(shop, "rev-parse", "HEAD").strip()
    (shop / "shop/m00.py").write_text("uncommitted = 1\n" * 20)
    build(tmp_path / "corpus", own=[shop], own_licence="Shop Inc., all rights reserved", window_characters=1000)
    made = rows(tmp_path / "corpus")
    assert len({row["id"] for row in made}) == len(made)
    texts: dict[str, list[tuple[int, str]]] = {}
    for row in made:
        origin = row["origin"]
        assert (origin["revision"], origin["licence"]) == (head, "Shop Inc., all rights reserved")
        for part in origin.get("files", [origin]):
            content = git(shop, "show", f"HEAD:{part['path']}")
            lines = "".join(content.splitlines(keepends=True)[part["lines"][0] - 1 : part["lines"][1]])
            text = whole(row)[part.get("at", 0) :]
            assert (lines.startswith(text) or text in lines) if "at" not in part else text.startswith(content)
            texts.setdefault(part["path"], []).append((part["lines"][0], whole(row)))
    alone = {path: "".join(text for _, text in sorted(parts)) for path, parts in texts.items() if path == "shop/m09.py"}
    assert alone == {"shop/m09.py": git(shop, "show", "HEAD:shop/m09.py")}
    assert (
        "| shop | own | Shop Inc., all rights reserved | --own-licence |" in (tmp_path / "corpus/card.md").read_text()
    )


def test_what_cannot_be_used_is_refused_before_anything_is_written(shop, tmp_path):
    gpl = folder(tmp_path / "gpl", {"LICENSE": "GNU GENERAL PUBLIC LICENSE\nVersion 3\n", "a.py": module(1)})
    bare = folder(tmp_path / "bare", {"a.py": module(1)})
    git(folder(tmp_path / "empty", {"a.py": module(1)}), "init", "-q")
    (tmp_path / "there").mkdir()
    good = {"own": [shop]}
    for named, message in (
        ({}, "needs sources"),
        ({"own": [tmp_path / "absent"]}, "not a folder"),
        ({"own": [tmp_path / "empty"]}, "has no commit"),
        ({"own": [shop, shop]}, "named twice"),
        ({"replay": [tmp_path / "absent.jsonl"]}, "does not exist"),
        ({"replay": [gpl / "a.py"]}, "none of .jsonl"),
        (good | {"suites": [bare]}, "neither a dataset"),
    ):
        with pytest.raises(UserError, match=message):
            build(tmp_path / "corpus", **named)
    for source, message in (
        (gpl, "GPL-3.0.*not permissive"),
        (bare, "unknown.*not permissive"),
        (bare / "a.py", "is a file"),
        ("click", "neither a folder nor"),
    ):
        with pytest.raises(UserError, match=message):
            build(tmp_path / "corpus", source)
    with pytest.raises(UserError, match="exists"):
        build(tmp_path / "there", **good)
    with pytest.raises(UserError, match="lies in"):
        build(bare / "corpus", own=[bare])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "empty", "gpl", "shop", "there"]
    with pytest.raises(UserError, match=r"nothing is left.*too short 1"):
        build(tmp_path / "corpus", own=[folder(tmp_path / "tiny", {"a.py": "x = 1\n"})])
    with pytest.raises(UserError, match="holds no answer"):
        build(tmp_path / "corpus", own=[shop], suites=[folder(tmp_path / "suite", {"tasks/a/task.toml": ""})])
    assert not (tmp_path / "corpus.building").exists()


def test_odd_files_are_counted(tmp_path):
    rng = random.Random(1)
    words = module(7)
    files = {
        "good.py": words,
        "latin.py": "# caf\xe9\n".encode("latin-1") * 30,
        "nul.py": words.replace("return", "ret\0urn"),
        "huge_line.js": "var a = 1;\n" * 20 + f"x = '{'ab c' * 1000}';\n",
        "lib.min.js": "function f(){return 1}\n" * 20,
        "gen_pb2.py": "# Generated by the protocol buffer compiler.  DO NOT EDIT!\n" + module(8),
        "vendor/six.py": module(9),
        "table.py": "DATA = [\n" + "".join(f"    {rng.randrange(9)},{rng.randrange(9)},\n" for _ in range(200)) + "]\n",
        "broken.py": module(10) + "def f(:\n",
        "broken.js": "function a() { return 1; }\n" * 20 + "function ((( {{{ ;;\n" * 10,
        "almost.js": "".join(f"function name{n}(value) {{ return value + {n}; }}\n" for n in range(400)) + "let = ;\n",
        "copy.py": words.replace("\n", "\r\n"),
        "near.py": words + "# a line more\n",
        "logo.png": b"\x89PNG",
        "prod.env.json": "{}",
        "id_rsa.txt": "key\n" * 20,
        "big.py": "# a word of a comment\nx = call(1)\n" * 40_000,
        "lib/shop.h": "#pragma once\n\nnamespace shop {\n" + "template <class T> T f(T a) { return a; }\n" * 9 + "}\n",
        "sub/README.md": "# A title\n\n" + "one very long line of prose " * 80 + "\n\nEnd.\n",
        "café/naïve.go": "package main\n\n" + "".join(f"func F{n}(a int) int {{\n\treturn a\n}}\n" for n in range(9)),
    }  # fmt: skip
    root = repository(tmp_path / "odd", ("2026-01-01", files))
    (root / "link.py").symlink_to("good.py")
    (root / "away").symlink_to("/etc")
    inner = repository(tmp_path / "inner", ("2026-01-01", {"x.py": module(11)}))
    git(root, "submodule", "add", "-q", str(inner), "inner")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "links")
    made = build(tmp_path / "corpus", own=[root], windows=0, fim=0)
    paths = {row["origin"]["path"] for row in rows(tmp_path / "corpus")}
    assert {"sub/README.md", "café/naïve.go", "almost.js", "lib/shop.h"} < paths
    assert len(paths & {"good.py", "copy.py", "near.py"}) == 1
    assert len(paths) == 5
    dropped = made["sources"][0]["dropped"]
    expected = {
        "not UTF-8": 1, "binary": 1, "long lines": 1, "lock file or minified": 1, "generated": 1, "vendored": 1,
        "syntax": 2, "copy": 1, "near copy": 1, "link": 2, "submodule": 1, "too long": 1, "credentials": 1,
    }  # fmt: skip
    assert {reason: dropped.get(reason) for reason in expected} == expected
    assert dropped.keys() - expected.keys() <= {"few letters", "short tokens", "too short", "other kinds of files"}
    card = (tmp_path / "corpus/card.md").read_text()
    assert all(f"| {reason} | " in card for reason in dropped)


def test_a_folder_below_a_clone_is_a_source(shop, tmp_path):
    build(tmp_path / "corpus", own=[shop / "shop"], hold_out_after="2026-03-01", windows=0)
    assert len(rows(tmp_path / "corpus", "held_out")) == 4
    assert {row["origin"]["path"] for row in rows(tmp_path / "corpus")} == {f"shop/m{n:02}.py" for n in range(12)}


def test_replay_keeps_texts_and_conversations(tmp_path):
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}."}],
                    "tools": [{"type": "function", "function": {"name": "f"}}]}) for n in range(40)
    ] + [json.dumps({"text": f"Story {n} of {module(n)}", "licence": "CC0-1.0"}) for n in range(40)]  # fmt: skip
    bad = ["{", "[]", '{"text": 3}', '{"messages": []}', '{"text": "\\ud800"}', '{"messages": [{"content": "x"}]}']
    root = folder(
        tmp_path / "general", {"a.jsonl": "\n".join(lines + bad) + "\n", "b.txt": "A tale.\n", "c.bin": b"\0"}
    )
    made = build(tmp_path / "corpus", replay=[root], small=True)
    every = rows(tmp_path / "corpus")
    assert sorted(json.dumps([row["messages"], row["tools"]]) for row in every if "messages" in row) == sorted(
        json.dumps([row["messages"], row["tools"]]) for row in map(json.loads, lines[:40])
    )
    assert {row["text"] for row in every if "text" in row} == {json.loads(line)["text"] for line in lines[40:]} | {
        "A tale.\n"
    }
    assert not any("middle" in row for row in every)
    assert {row["origin"]["licence"] for row in every if row.get("text", "").startswith("Story")} == {"CC0-1.0"}
    assert made["sources"][0]["dropped"] == {"neither a text nor a conversation": 6}


def test_conversations_keep_their_origin_and_are_held_out_by_date(shop, tmp_path):
    lines = [
        {
            "messages": [{"role": "user", "content": f"Change {n}."}, {"role": "assistant", "content": f"{n}."}],
            "origin": {"path": f"session-{n}", "date": f"2026-0{n}-01"},
        }
        for n in (1, 5)
    ]
    file, undated = tmp_path / "sessions.jsonl", tmp_path / "log.jsonl"
    undated.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello."}]}) + "\n")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = build(tmp_path / "corpus", own=[shop], conversations=[file, undated], hold_out_after="2026-03-01")
    assert [source["without_a_date"] for source in made["sources"]] == [0, 0, 1]
    assert "1 rows of log have no date, and are trained on." in (tmp_path / "corpus" / "card.md").read_text()
    for side, n in (("train", 1), ("held_out", 5)):
        (row,) = [row for row in rows(tmp_path / "corpus", side) if row["source"] == "sessions"]
        assert row["messages"] == lines[n // 4]["messages"]
        assert row["origin"]["path"] == f"session-{n}"
        assert row["origin"]["licence"] == "own code"
    assert [source["kind"] for source in made["sources"]] == ["own", "conversations", "conversations"]
    with pytest.raises(UserError, match="is no file of rows"):
        build(tmp_path / "other", conversations=[shop])


def test_the_command(shop, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main.main(["corpus", "build", "--own", str(shop), "-o", "corpus", "--workers", "1"])
    assert end.value.code == 0
    assert "13 documents to train on and 0 held-out ones in corpus; see corpus/card.md" in capsys.readouterr().out
    for words, message in (
        (["--hold-out-after", "June"], "'June': give a day as YYYY-MM-DD"),
        (["--hold-out-after", "2026-13-01"], "'2026-13-01': give a day as YYYY-MM-DD"),
        (["--hold-out-after", "2026-01-01", "--hold-out-months", "2"], "exclude each other"),
        (["--hold-out-after", "20260101"], "give a day as YYYY-MM-DD"),
        (
            ["--hold-out-after", "2030-01-01"],
            "nothing that is left is newer than 2030-01-01T23:59:59Z: give an earlier",
        ),
        (["--hold-out-after", "2001-01-01"], "everything that is left is newer than 2001-01-01T23:59:59Z"),
        (["--fim", "2"], "fim"),
    ):
        with pytest.raises(SystemExit) as end:
            main.main(["corpus", "build", "--own", str(shop), "-o", "other", *words])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
