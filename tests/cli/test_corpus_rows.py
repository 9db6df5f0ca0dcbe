"""`etude corpus sessions | pull-requests`: files of rows, reports, and mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.cli.main import main
from tests.corpus.sessions.test_sessions import CHAT, KEY, claude_code, openai_chat
from tests.rollout.test_pull_requests import CODE, History


def etude(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(["corpus", *map(str, words)])
    shown = capsys.readouterr()
    code = end.value.code
    return (code if isinstance(code, int) else 0), shown.out + shown.err


def written(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "claude.jsonl").write_text("".join(json.dumps(line) + "\n" for line in claude_code()))
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in openai_chat()) + "{]\n")
    return folder


def test_sessions_become_a_file_of_rows_with_a_report(tmp_path: Path, logs: Path, capsys) -> None:
    code, shown = etude(capsys, "sessions", logs, "-o", tmp_path / "out" / "rows.jsonl")
    assert code == 0
    assert "2 rows with 4 messages to learn from; files: 1 of claude-code, 1 of requests." in shown
    assert "models: claude-x (1), m (2)" in shown or "models: m (2), claude-x (1)" in shown
    assert "1 because it is not JSON (first: requests.jsonl:3)" in shown
    rows = written(tmp_path / "out" / "rows.jsonl")
    assert [row["source"] for row in rows] == ["claude-code", "sessions"]
    assert not (tmp_path / "out" / "rows.held_out.jsonl").exists()


def test_a_share_of_sessions_is_held_out(tmp_path: Path, capsys) -> None:
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": f"{i}"}, CHAT[4]]}) + "\n" for i in range(400))
    )
    code, _ = etude(capsys, "sessions", tmp_path / "log.jsonl", "-o", tmp_path / "rows.jsonl", "--held-out", "0.1")
    assert code == 0
    train, held_out = written(tmp_path / "rows.jsonl"), written(tmp_path / "rows.held_out.jsonl")
    assert len(train) + len(held_out) == 400
    assert 20 <= len(held_out) <= 60
    assert not {str(row["id"]) for row in train} & {str(row["id"]) for row in held_out}


def test_mistakes_of_sessions(tmp_path: Path, logs: Path, capsys) -> None:
    out = tmp_path / "rows.jsonl"
    cases: list[tuple[list[str | Path], str]] = [
        (["-o", out], "there is nothing to read"),
        ([tmp_path / "nothing", "-o", out], "is neither a file nor a folder"),
        ([logs, "-o", tmp_path / "rows"], "name a file that ends in .jsonl"),
        ([logs, "-o", out, "--held-out", "1"], "a share from 0 to below 1"),
        ([logs, "-o", out, "--model", "own-*"], "no row of these sessions can be learned from"),
        (["--live", tmp_path / "live.toml", "-o", out], "live.toml"),
    ]
    for words, why in cases:
        code, shown = etude(capsys, "sessions", *words)
        assert (code, why in shown) == (2, True), shown
        assert not out.exists()
    out.write_text("mine")
    code, shown = etude(capsys, "sessions", logs, "-o", out)
    assert (code, "exists" in shown, out.read_text()) == (2, True, "mine")


def test_pull_requests_become_a_file_of_rows(tmp_path: Path, capsys) -> None:
    history = History(tmp_path / "product")
    history.commit("Speed up the parts (#12)", {"pkg/parts.py": CODE + "TABLE = {}\n"})
    history.commit("Add a key", {"pkg/keys.py": f"TOKEN = '{KEY}'\n"})
    history.commit("Late: one more", {"pkg/parts.py": CODE})
    out = tmp_path / "pulls.jsonl"
    code, shown = etude(capsys, "pull-requests", history.root, "-o", out, "--hold-out-after", "2026-03-04")
    assert code == 0
    assert "2 of 3 pull requests and commits" in shown
    assert "1 because it holds a likely secret" in shown
    assert [row["origin"]["pull_request"] for row in written(out)] == [12]  # type: ignore[index]
    (late,) = written(tmp_path / "pulls.held_out.jsonl")
    assert late["source"] == "product"
    assert KEY not in out.read_text()


def test_mistakes_of_pull_requests(tmp_path: Path, capsys) -> None:
    history = History(tmp_path / "product")
    history.commit("Delete all", {"pkg/parts.py": None})
    out = tmp_path / "pulls.jsonl"
    for words, why in (
        ([tmp_path, "-o", out], "is no git clone"),
        ([history.root, "-o", out, "--hold-out-after", "May"], "give a date"),
        ([history.root, "-o", out, "--no-commits"], "has no pull request on its main line"),
        ([history.root, "-o", out, "--archive", tmp_path / "none"], "no folder with the forge's answers"),
        ([history.root, "-o", out], "can be told as edits: 1 because it deletes or moves files"),
    ):
        code, shown = etude(capsys, "pull-requests", *words)
        assert (code, why in shown) == (2, True), shown
        assert not out.exists()
