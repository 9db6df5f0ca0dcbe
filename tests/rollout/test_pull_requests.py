"""Pull requests as turns: the calls end with exactly the tree of the pull request, and results are the tools' own."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from etude.code import clone_around
from etude.errors import UserError
from etude.harness import FullTools
from etude.records import Task, ToolCall
from etude.rollout.pull_requests import PULL_REQUEST_TOOLS, TreeBox, pull_request_rows, read_pull_requests

ENVIRONMENT = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": "/usr/bin:/bin", "HOME": "/"}
CODE = "".join(f"def part_{i}(x):\n    y = x + {i}\n    return y\n\n\n" for i in range(20))


class History:
    """A repository that grows by commits and merges."""

    def __init__(self, root: Path) -> None:
        self.root, self.day = root, 0
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.commit("Begin", {"pkg/parts.py": CODE, "README.md": "Parts.\n", "logo.bin": b"\0\1"})

    def git(self, *words: str) -> str:
        date = f"2026-03-{self.day + 1:02}T12:00:00Z"
        names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b.example", "GIT_AUTHOR_DATE": date}
        names |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b.example", "GIT_COMMITTER_DATE": date}
        return subprocess.run(
            ["git", *words], cwd=self.root, env=ENVIRONMENT | names, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, message: str, files: dict[str, str | bytes | None]) -> str:
        self.day += 1
        for path, text in files.items():
            place = self.root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                place.unlink()
            else:
                place.write_bytes(text if isinstance(text, bytes) else text.encode())
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
        return self.git("rev-parse", "HEAD")

    def merged(self, message: str, *stages: dict[str, str | bytes | None]) -> list[str]:
        """A branch of a commit for each stage, merged; the ids of its commits and of the merge."""
        self.git("switch", "-q", "-c", f"branch-{self.day}")
        ids = [self.commit("work", stage) for stage in stages]
        self.git("switch", "-q", "main")
        self.git("merge", "-q", "--no-ff", "-m", message, "-")
        return [*ids, self.git("rev-parse", "HEAD")]

    def rows(self, archive: Path | None = None, **options: Any) -> tuple[list[dict[str, Any]], Counter[str]]:
        clone = clone_around(self.root)
        assert clone is not None
        left_out: Counter[str] = Counter()
        requests = read_pull_requests(clone, archive, **options)
        return list(pull_request_rows(clone, requests, left_out)), left_out


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "repository")


async def played(row: dict[str, Any], files: dict[str, bytes]) -> dict[str, bytes]:
    """The tree after the calls of a row; every result is that of the tool."""
    box = TreeBox(files)
    tools = FullTools(box, Task(id="t", prompt=""), names=PULL_REQUEST_TOOLS)
    results = {m["tool_call_id"]: m["content"] for m in row["messages"] if m["role"] == "tool"}
    for message in row["messages"]:
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            result = await tools.call(ToolCall(name=call["function"]["name"], arguments=arguments))
            assert call["function"]["name"] == "finish" or result == results[call["id"]]
    return box.files


def calls(row: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for m in row["messages"] for call in m.get("tool_calls", ())]


def test_the_calls_make_the_tree_of_the_pull_request(history: History) -> None:
    changed = CODE.replace("x + 3\n", "x + 33\n").replace("def part_9(x):", "def part_nine(x):").replace("x + 17", "x")
    _, merge = history.merged(
        "Merge pull request #7 from a/branch\n\nMake part_3 right\n\nIt was wrong.\n\nSigned-off-by: a",
        {"pkg/parts.py": changed, "pkg/fresh.py": "NEW = 1\n", "tests/test_parts.py": "def test(): pass\n"},
    )
    (row,), left_out = history.rows()
    assert left_out == {}
    assert row["origin"] == {"revision": merge, "pull_request": 7, "date": "2026-03-03"}
    assert row["messages"][1] == {"role": "user", "content": "Make part_3 right\n\nIt was wrong."}
    assert calls(row) == ["edit", "grep", "read", "edit", "edit", "edit", "edit", "finish"]
    assert "pkg/parts.py:" in row["messages"][5]["content"], "the search finds the file"
    before = {"pkg/parts.py": CODE.encode(), "README.md": b"Parts.\n", "logo.bin": b"\0\1"}
    after = asyncio.run(played(row, before))
    assert after["pkg/parts.py"].decode() == changed
    assert after["pkg/fresh.py"] == b"NEW = 1\n"
    assert list(after)[-1] == "tests/test_parts.py", "tests come last"
    assert [schema["function"]["name"] for schema in row["tools"]] == list(PULL_REQUEST_TOOLS)


def test_squashed_ones_and_commits(history: History) -> None:
    history.commit("Speed up the parts (#12)\n\nBy a table.", {"pkg/parts.py": CODE + "TABLE = {}\n"})
    history.commit("Undo it", {"pkg/parts.py": CODE})
    rows, _ = history.rows()
    shown = [(row["origin"]["pull_request"], row["messages"][1]["content"]) for row in rows]
    assert shown == [(12, "Speed up the parts\n\nBy a table."), (0, "Undo it")]
    assert calls(rows[0])[0] == "grep" or calls(rows[0])[0] == "search"
    rows, _ = history.rows(commits=False)
    assert [row["origin"]["pull_request"] for row in rows] == [12]
    assert [row["id"] for row in history.rows()[0]] == [row["id"] for row in history.rows()[0]]


def test_the_archive_of_the_forge_has_texts_and_reviews(history: History, tmp_path: Path) -> None:
    first, second = CODE.replace("x + 3\n", "x + 33\n"), CODE.replace("x + 3\n", "x + 333\n")
    middle, _, merge = history.merged("Merge branch 'b'", {"pkg/parts.py": first}, {"pkg/parts.py": second})
    archive = tmp_path / "archive"
    archive.mkdir()
    pull = {"number": 9, "title": "A better part", "body": "Please.", "merge_commit_sha": merge}
    (archive / "pulls.json").write_text(json.dumps([pull]))
    url = "https://forge.example/repos/a/b/pulls/9"
    comment = {"pull_request_url": url, "body": "Make it 333.", "path": "pkg/parts.py", "original_commit_id": middle}
    late = {"pull_request_url": url, "body": "Thanks!", "commit_id": merge, "submitted_at": "2027-01-01", "state": "x"}
    lines = [comment | {"created_at": "2026-03-02"}, late, {"issue_url": "https://x/9", "body": "hello"}]
    (archive / "comments.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,), _ = history.rows(archive)
    users = [message["content"] for message in row["messages"] if message["role"] == "user"]
    assert users == ["A better part\n\nPlease.", "pkg/parts.py: Make it 333."]
    assert calls(row) == ["grep", "read", "edit", "grep", "read", "edit", "finish"]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"pkg/parts.py": None}, "deletes or moves"),
        ({"logo.bin": b"\0\2", "pkg/parts.py": "x = 1\n"}, "binary"),
        ({"pkg/parts.py": CODE.replace("\n", "\r\n")}, "carriage returns"),
        ({"pkg/parts.py": b"\xff = 1\n"}, "not UTF-8"),
        ({"LICENSE": "Only words.\n"}, "no source files"),
        ({f"pkg/m{i}.py": "x = 1\n" for i in range(9)}, "more than 8 files"),
        ({"pkg/parts.py": CODE.replace("x + ", "x - ")}, "more than 16 hunks"),
        ({"pkg/big.py": "x = 1\n" * 500}, "more than 240 lines"),
    ],
)
def test_what_edits_cannot_tell_is_left_out_by_name(history: History, files: dict[str, Any], why: str) -> None:
    history.commit("Change it", files)
    rows, left_out = history.rows()
    assert rows == []
    ((reason, count),) = left_out.items()
    assert why in reason
    assert count == 1


def test_an_archive_that_is_none_is_refused(history: History, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder with the forge's answers"):
        history.rows(tmp_path / "nothing")
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive/pulls.json").write_text("<html>")
    with pytest.raises(UserError, match="is not JSON"):
        history.rows(tmp_path / "archive")


# Hostile clones and archives ------------------------------------------------------------------------------------------


def test_no_message_of_a_commit_breaks_the_log(tmp_path: Path) -> None:
    history = History(tmp_path / "clone")
    base = history.git("rev-parse", "HEAD")
    forged = f"Mend it\x1e--help\x1f{base}\x1f2026-01-01\x1fforged (#{'9' * 5000})"
    history.commit(forged, {"pkg/parts.py": CODE + "one = 1\n"})
    clone = clone_around(history.root)
    assert clone is not None
    (request,) = read_pull_requests(clone)
    assert (request.number, request.base, request.head) == (0, base, history.git("rev-parse", "HEAD"))


@pytest.mark.parametrize(
    "entry",
    [
        {"merge_commit_sha": ["x"], "number": "x", "title": 5},
        {"merge_commit_sha": "x", "number": {}, "iid": []},
        {"pull_request_url": "https://forge.example/pulls/none", "body": "x"},
        {"pull_request_url": 5, "body": ["x"]},
        {"merge_commit_sha": None, "number": 10**30},
    ],
)
def test_wrong_types_of_an_archive_are_passed_over(tmp_path: Path, entry: dict[str, Any]) -> None:
    history = History(tmp_path / "clone")
    history.commit("Mend it (#7)", {"pkg/parts.py": CODE + "one = 1\n"})
    clone = clone_around(history.root)
    assert clone is not None
    (tmp_path / "forge" / "folder.json").mkdir(parents=True)
    pull = {"merge_commit_sha": None, "number": 7, "title": "\ud800 is mended"}
    (tmp_path / "forge" / "pulls.json").write_text(json.dumps([entry, pull]))
    (request,) = read_pull_requests(clone, tmp_path / "forge")
    assert (request.number, request.title) == (7, "? is mended")


@pytest.mark.parametrize("text", ["[" * 100_000, "{"])
def test_an_archive_that_is_not_json_is_named(tmp_path: Path, text: str) -> None:
    clone = clone_around(History(tmp_path / "clone").root)
    assert clone is not None
    (tmp_path / "pulls.json").write_text(text)
    with pytest.raises(UserError, match=r"pulls.json is not JSON"):
        read_pull_requests(clone, tmp_path)


def test_files_of_equal_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    history = History(tmp_path / "clone")
    history.commit("Fill it", {"pkg/blank.py": "\n" * 100_000})
    history.commit("Mend it", {"pkg/blank.py": "x\n" + "\n" * 99_999 + "y\n" + "\n" * 3})
    history.commit("Middle", {"pkg/blank.py": "x\n" + "\n" * 50_000 + "z\n" + "\n" * 49_998 + "y\n" + "\n" * 3})
    clone = clone_around(history.root)
    assert clone is not None
    left_out: Counter[str] = Counter()
    assert not list(pull_request_rows(clone, read_pull_requests(clone), left_out))
    assert left_out == {
        "it adds files of more than 240 lines": 1,
        "its files have too many equal lines to compare": 1,
        "it has hunks of more than 240 lines": 1,
    }


def test_a_box_lists_its_files_as_folders() -> None:
    files = ["a.py", "a/b/c.py", "a/b.py", "a0", "a/b/c/d.py", "a-b/x", "é/ü.py", "a/b 0"]
    box = TreeBox(dict.fromkeys(files, b""))
    every = {"a": ["b 0", "b.py", "b/"], "a/b/": ["c.py", "c/"], "é": ["ü.py"]}
    for path, names in every.items():
        assert asyncio.run(box.list(path)) == names
    assert asyncio.run(box.list("")) == ["a-b/", "a.py", "a/", "a0", "é/"]
    asyncio.run(box.write("a/new.py", b""))
    asyncio.run(box.delete("a/b.py"))
    assert asyncio.run(box.list("a")) == ["b 0", "b/", "new.py"]
