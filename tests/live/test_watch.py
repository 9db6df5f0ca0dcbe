"""What `etude live watch` tells: real repositories, edits made with a clock of the test, and git itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import UserError
from etude.live.observe import spool
from etude.live.observe.agents import AgentFile, AgentStep, mini_steps
from etude.live.observe.hooks import install_hooks, log_of, remove_hooks
from etude.live.observe.watch import HORIZONS, Watcher, open_watcher
from etude.live.observe.worktree import TextRepository, excluded

BEGIN = 1_800_000_000.0  # seconds; the clock of the tests
BASE = [f"value_{n} = compute({n}, 'of {n}')" for n in range(30)]
EDIT = [
    "def added(first, second):", '    """Adds both."""', "    total = first + second", "    return total * f(first)",
]  # fmt: skip
OTHER = ["class Stack:", "    def push(self, item):", "        self.items.append(item)", "        self.depth += 1"]


def git(root: Path, *arguments: str, at: float = BEGIN) -> str:
    names = ("user.name=Ann", "user.email=a@example.com", "protocol.file.allow=always")
    settings = [part for name in names for part in ("-c", name)]
    dates = {"GIT_AUTHOR_DATE": f"{at:.0f} +0000", "GIT_COMMITTER_DATE": f"{at:.0f} +0000"}
    command = ["git", "-C", str(root), *settings, *arguments]
    environment = os.environ | dates | {"GIT_CONFIG_GLOBAL": "/dev/null"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=60).stdout


class Desk:
    """A developer's repository with a watcher and an agent that tells by JSON lines."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        self.root, self.agent, self.time = folder / "repo", folder / "agent.jsonl", BEGIN
        self.root.mkdir()
        git(self.root, "init", "-q", "-b", "main")
        self.write("a.py", BASE)
        self.write(".etude/consent.toml", ["share = true", 'exclude = ["private", "*.pem"]'])
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "-m", "Begin")
        self.watcher = self.open()

    def open(self) -> Watcher:
        return open_watcher(self.root, [self.agent], lambda: self.time)

    def reopen(self) -> None:
        self.watcher.state.close()
        self.watcher = self.open()

    def write(self, path: str, lines: list[str]) -> None:
        place = self.root / path
        place.parent.mkdir(exist_ok=True)
        place.write_text("\n".join(lines) + "\n")
        os.utime(place, (self.time, self.time))

    def lines(self, path: str = "a.py") -> list[str]:
        return (self.root / path).read_text().splitlines()

    def tell(self, **entry: Any) -> None:
        with self.agent.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def turn(self, name: str, work: Callable[[], object]) -> list[dict[str, Any]]:
        """A turn whose actions are `work`, and what is told of it."""
        self.time += 5
        started = self.time
        self.time += 1
        work()
        self.time += 1
        self.tell(turn=name, started=started, ended=self.time, model="etude/7")
        return self.look()

    def look(self, seconds: float = 1.0) -> list[dict[str, Any]]:
        """What is told newly after so many seconds."""
        self.time += seconds
        self.watcher.look()
        return self.sent()

    def sent(self) -> list[dict[str, Any]]:
        bodies = self.watcher.state.waiting(1000)
        for number, _ in bodies:
            self.watcher.state.acknowledged(number)
        return [body for _, body in bodies]

    def commit(self, message: str = "Work") -> None:
        git(self.root, "add", "-A", at=self.time)
        git(self.root, "commit", "-q", "-m", message, at=self.time)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


def kinds(bodies: list[dict[str, Any]]) -> list[str]:
    return [body["kind"] for body in bodies]


def test_an_edit_of_a_turn_is_followed_to_its_horizons(desk: Desk) -> None:
    shown, applied = desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    assert kinds([shown, applied]) == ["shown", "applied"]
    assert shown["suggestion"] | {"id": "", "base": "", "new": ""} == {
        "id": "",
        "turn": "T1",
        "path": "a.py",
        "base": "",
        "new": "",
        "old_lines": [10, 0],
        "characters": sum(len("".join(line.split())) for line in EDIT),
    }
    assert {body["subject"] for body in (shown, applied)} == {shown["suggestion"]["id"]}
    assert shown["observed_at"] == round((BEGIN + 6) * 1e9)
    assert desk.look(100) == []
    (early,) = desk.look(20)
    assert (early["kind"], early["value"], early["horizon"]) == ("survived", 1.0, 120.0)
    desk.time += 600
    desk.write("a.py", [*BASE[:10], *EDIT[:2], *BASE[10:]])
    assert desk.look() == [], "half of an edit is not undone, and who changed it is known when the agent goes on"
    (middle,) = desk.look(1100)
    halves = [sum(len("".join(line.split())) for line in part) for part in (EDIT[:2], EDIT)]
    assert (middle["kind"], middle["value"]) == ("survived", round(halves[0] / halves[1], 6))
    (late,) = desk.look(86_400)
    assert (late["kind"], late["horizon"], late["value"]) == ("survived", 86_400.0, middle["value"])
    assert len({body["event"] for body in (shown, applied, early, middle, late)}) == 5


def test_a_person_undoes_and_a_later_turn_overwrites(desk: Desk) -> None:
    first, _ = desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    second = desk.turn("T2", lambda: desk.write("a.py", [*BASE[:10], *OTHER, *BASE[10:]]))
    assert kinds(second) == ["overwritten", "shown", "applied"]
    assert (second[0]["subject"], second[0]["value"]) == (first["subject"], 1.0)
    desk.time += 30
    desk.write("a.py", BASE)
    assert desk.look() == []
    (undone,) = desk.turn("T3", lambda: None)
    assert (undone["kind"], undone["subject"], undone["value"]) == ("undone", second[1]["subject"], 1.0)


def test_a_change_that_no_agent_explains_is_a_persons_after_a_while(desk: Desk) -> None:
    desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    desk.time += 2
    desk.write("a.py", BASE)
    assert kinds(desk.look(1)) == []
    assert kinds(desk.look(120)) == ["survived"]
    assert kinds(desk.look(600)) == ["undone"]


def test_two_turns_that_may_both_have_made_an_edit(desk: Desk) -> None:
    desk.time += 1
    desk.write("a.py", [*BASE, *EDIT])
    for name in ("T1", "T2"):
        desk.tell(turn=name, started=desk.time - 1, ended=desk.time + 1)
    shown, _ = desk.look()
    assert (shown["suggestion"]["turn"], shown["confidence"]) == ("T2", 0.5)


def test_commit_push_and_revert(desk: Desk, tmp_path: Path) -> None:
    desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    desk.commit()
    (committed,) = desk.look()
    assert (committed["kind"], committed["value"], committed["source"]) == ("committed", 1.0, "git")
    git(tmp_path, "clone", "-q", "--bare", str(desk.root), "origin.git")
    git(desk.root, "remote", "add", "origin", str(tmp_path / "origin.git"))
    git(desk.root, "fetch", "-q", "origin")
    (merged,) = desk.look()
    assert (merged["kind"], merged["value"]) == ("merged", 1.0)
    head = git(desk.root, "log", "--format=%H", "--grep=Work").strip()
    desk.time += 10
    git(desk.root, "revert", "--no-edit", head, at=desk.time)
    assert "reverted" in kinds(desk.look())


def test_an_edit_that_its_turn_commits_itself_is_both(desk: Desk) -> None:
    """The files and HEAD change between two looks, and the agent tells of it only afterwards."""

    def work() -> None:
        desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]])
        desk.commit()
        assert desk.look(0.5) == []

    assert kinds(desk.turn("T1", work)) == ["shown", "applied", "committed"]


def test_an_edit_and_its_commit_while_nobody_watched(desk: Desk) -> None:
    """As a hook's own watcher finds them, which begins after the commit."""

    def work() -> None:
        desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]])
        desk.commit()
        desk.time += 20
        desk.reopen()

    assert kinds(desk.turn("T1", work)) == ["shown", "applied", "committed"]


def test_what_git_changes_is_no_edit(desk: Desk) -> None:
    """Another branch, a stash: nothing is undone by them, and the edit counts where its branch is."""
    desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    git(desk.root, "stash", "-q", at=desk.time)
    assert kinds(desk.look()) == []
    git(desk.root, "stash", "pop", "-q", at=desk.time)
    assert kinds(desk.look()) == []
    desk.commit()
    assert kinds(desk.look()) == ["committed"]
    desk.time += 20
    git(desk.root, "checkout", "-q", "-b", "other", "HEAD^", at=desk.time)
    assert kinds(desk.look()) == []
    told = desk.look(100)
    assert [(body["kind"], body["value"]) for body in told] == [("survived", 1.0)]


def test_a_renamed_file_is_followed(desk: Desk) -> None:
    desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    (desk.root / "package").mkdir()
    git(desk.root, "mv", "a.py", "package/b.py")
    assert desk.look() == []
    (survived,) = desk.look(120)
    assert (survived["kind"], survived["value"]) == ("survived", 1.0)


def test_a_kill_at_any_moment_loses_nothing_and_repeats_events_only(desk: Desk) -> None:
    """Ten looks, each begun by a new process from the file; none of what waits is ever changed by it."""
    desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    desk.time += 5
    desk.write("a.py", BASE)
    seen: dict[str, dict[str, Any]] = {}
    for _ in range(10):
        desk.time += 70
        desk.watcher.look()
        for _, body in desk.watcher.state.waiting():  # sent, and killed before the acknowledgement is written
            assert seen.setdefault(body["event"], body) == body
        desk.reopen()
    assert sorted(kinds(list(seen.values()))) == ["survived", "undone"]
    assert len(desk.watcher.state.waiting()) == 2


def test_what_was_missed_while_nobody_watched_is_gone(desk: Desk) -> None:
    desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    last = desk.time
    desk.time += 4000
    desk.reopen()
    told = desk.look()
    assert [(body["kind"], body["observed_at"]) for body in told] == [("gone", round(last * 1e9))] * 2
    desk.turn("T2", lambda: desk.write("b.py", OTHER))
    desk.watcher.stop()
    assert kinds(desk.sent()) == ["gone"], "of the open attribution window"


def test_a_fresh_clone_takes_edits_up_from_agent_traces(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown, _) = desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    desk.commit()
    desk.look()
    record = json.loads((desk.root / ".agent-trace/traces.jsonl").read_text())
    assert record["version"] == "0.1.0"
    assert record["vcs"] == {"type": "git", "revision": git(desk.root, "rev-parse", "HEAD").strip()}
    (file,) = record["files"]
    (conversation,) = file["conversations"]
    assert conversation["ranges"] == [{"start_line": 11, "end_line": 14}]
    assert conversation["contributor"] == {"type": "ai", "model_id": "etude/7"}
    git(desk.root, "add", "-A")
    git(desk.root, "commit", "-q", "-m", "Traces", at=desk.time)
    git(tmp_path, "clone", "-q", str(desk.root), "clone")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "ci"))
    elsewhere = open_watcher(tmp_path / "clone", [], lambda: desk.time + 1000)
    elsewhere.look()
    ((_, merged),) = elsewhere.state.waiting()
    assert (merged["kind"], merged["subject"], merged["value"]) == ("merged", shown["subject"], 1.0)


def test_what_is_excluded_is_never_read(desk: Desk) -> None:
    def work() -> None:
        desk.write("private/a.py", EDIT)
        desk.write("key.pem", EDIT)
        desk.write("b.py", OTHER)

    assert {body["suggestion"]["path"] for body in desk.turn("T1", work) if "suggestion" in body} == {"b.py"}
    kept = (desk.watcher.state.folder / "state.db").read_bytes() + b"".join(
        path.read_bytes() for path in desk.watcher.state.folder.glob("state.db-wal")
    )
    assert b"def push" in kept
    assert b"def added" not in kept
    assert excluded("x/private/y/z.py", ["private"])
    assert not excluded("privately.py", ["private"])


def test_told_signals_and_lines_that_are_not_understood(desk: Desk) -> None:
    desk.tell(turn="T1", signal="tests", value=-0.25)
    desk.tell(turn="T1", signal="undone", value=1)
    desk.tell(anything=1)
    (told,) = desk.look()
    assert (told["subject"], told["kind"], told["value"]) == ("T1", "tests", -0.25)
    assert desk.watcher.counts.lines_refused == 2


def test_nothing_is_looked_at_while_the_spool_is_full(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.turn("T1", lambda: None)
    monkeypatch.setattr("etude.live.observe.watch.MAX_WAITING", 0)
    assert desk.turn("T2", lambda: desk.write("a.py", [*BASE, *EDIT])) == []
    monkeypatch.undo()
    assert kinds(desk.look()) == ["shown", "applied"]


def test_a_hostile_clone_runs_nothing(desk: Desk, tmp_path: Path) -> None:
    """Hooks, filters, text conversions, monitors, pagers, signers and transports that its settings name."""
    marker = tmp_path / "ran"
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {marker}\ncat\n")
    script.chmod(0o755)
    for name in (
        "core.fsmonitor",
        "core.pager",
        "core.sshCommand",
        "diff.external",
        "diff.x.textconv",
        "gpg.program",
        "filter.x.clean",
        "filter.x.smudge",
        "filter.x.process",
        "alias.ls-files",
        "core.editor",
    ):
        git(desk.root, "config", name, str(script))
    git(desk.root, "config", "log.showSignature", "true")
    git(desk.root, "config", "core.hooksPath", str(tmp_path))
    git(desk.root, "config", "remote.origin.url", "ssh://host/none")
    git(desk.root, "config", "remote.origin.promisor", "true")
    (desk.root / ".git/info/attributes").write_text("* filter=x diff=x\n")
    for hook in ("post-commit", "post-index-change", "reference-transaction", "post-checkout"):
        (tmp_path / hook).write_bytes(script.read_bytes())
        (tmp_path / hook).chmod(0o755)
    marker.unlink(missing_ok=True)
    desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    repository = TextRepository(desk.root)
    repository.changes("HEAD")
    assert repository.blob("0123456789012345678901234567890123456789") is None
    (desk.root / "link.py").symlink_to("/etc/passwd")
    assert repository.read("link.py") is None
    assert kinds(desk.look(130)) == ["survived"]
    assert not marker.exists()


def test_what_goes_wrong_in_a_hook_is_seen_and_stops_no_commit(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETUDE_API_KEY", raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    repository = TextRepository(desk.root)
    install_hooks(repository, "http://127.0.0.1:9", [])
    desk.watcher.state.close()
    log = log_of(repository)

    def commit() -> str:
        names = ["-c", "user.name=Ann", "-c", "user.email=a@example.com"]
        command = ["git", "-C", str(desk.root), *names, "commit", "-q", "--allow-empty", "-m", "More"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stderr

    assert commit() == "etude live hook: ETUDE_API_KEY is not set, so the gateway is told nothing of this\n"
    deadline = time.monotonic() + 60
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    monkeypatch.setenv("ETUDE_API_KEY", "key")
    assert "etude live hook, the last time: etude: the gateway asks for an API key: set ETUDE_API_KEY" in commit()
    remove_hooks(repository)
    assert not log.exists()


def test_hooks_are_written_through_no_link(desk: Desk, tmp_path: Path) -> None:
    repository, place = TextRepository(desk.root), tmp_path / "outside"
    place.write_text("mine")
    (desk.root / ".git/hooks").mkdir(exist_ok=True)
    (desk.root / ".git/hooks/.post-commit.etude").symlink_to(place)
    install_hooks(repository, "http://127.0.0.1:9", [])
    assert place.read_text() == "mine"
    remove_hooks(repository)
    shutil.rmtree(desk.root / ".git/hooks")
    (tmp_path / "elsewhere").mkdir()
    (desk.root / ".git/hooks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="hooks is a link"):
        install_hooks(repository, "http://127.0.0.1:9", [])
    assert not list((tmp_path / "elsewhere").iterdir())


def test_only_a_project_that_agreed_is_watched(desk: Desk, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is watched by another"):
        desk.open()
    desk.watcher.state.close()
    for text, message in (("share = false", "share = false"), ("share = 1", "has the keys"), ("x", "is not TOML")):
        desk.write(".etude/consent.toml", [text])
        with pytest.raises(UserError, match=message):
            desk.open()
    desk.write(".etude/consent.toml", ["share = true"])
    git(desk.root, "rm", "-q", "--cached", ".etude/consent.toml")
    with pytest.raises(UserError, match="not checked in"):
        desk.open()
    (desk.root / ".etude/consent.toml").unlink()
    with pytest.raises(UserError, match="takes no part"):
        desk.open()
    with pytest.raises(UserError, match="not a git repository"):
        open_watcher(tmp_path, [])
    with pytest.raises(UserError, match="give its root"):
        open_watcher(desk.root / ".etude", [])
    assert HORIZONS == (120.0, 1800.0, 86_400.0)
    assert spool.state_folder(desk.root).stat().st_mode & 0o077 == 0


def test_a_form_feed_ends_no_line(desk: Desk) -> None:
    """`str.splitlines` takes it for one; then the edit's own lines were those before it."""
    desk.write("a.py", ["first", "\x0c", ""])
    desk.look()
    desk.turn("T1", lambda: desk.write("a.py", ["first", "\x0c", "", *EDIT]))
    (edit,) = desk.watcher.state.edits()
    assert edit.hunk.new == tuple(EDIT)
    desk.write("a.py", ["first", "\x0c", ""])
    (undone,) = desk.turn("T2", lambda: None)
    assert undone["kind"] == "undone"


def test_files_that_are_no_text_are_read_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.turn("T1", lambda: desk.write("a.py", [*BASE[:10], *EDIT, *BASE[10:]]))
    desk.sent()
    reads: list[str] = []
    read = TextRepository.read
    monkeypatch.setattr(TextRepository, "read", lambda self, path: reads.append(path) or read(self, path))
    desk.time += 10
    for path, data in (("a.py", b"\0"), ("b.bin", b"\0\1"), ("c.txt", b"caf\xe9")):
        (desk.root / path).write_bytes(data)
        os.utime(desk.root / path, (desk.time, desk.time))
    for _ in range(3):
        desk.look()
    assert sorted(reads) == ["a.py", "b.bin", "c.txt"]
    assert kinds(desk.look(120)) == ["gone"], "whether the edit is alive cannot be seen"
    desk.write("b.bin", OTHER)
    assert desk.look() == desk.look(700) == [], "text that was there before is nobody's edit"


def test_a_file_from_the_future_is_seen(desk: Desk) -> None:
    desk.time += 5

    def work() -> None:
        desk.write("a.py", [*BASE, *EDIT])
        os.utime(desk.root / "a.py", (desk.time + 9999, desk.time + 9999))

    desk.turn("T1", work)
    assert "added" in (desk.watcher._files.text("a.py") or "")


def test_consent_that_is_taken_back_ends_the_watch(desk: Desk) -> None:
    desk.write(".etude/consent.toml", ["share = true", 'exclude = ["b.py"]'])
    assert desk.turn("T1", lambda: desk.write("b.py", OTHER)) == []
    desk.write(".etude/consent.toml", ["share = false"])
    with pytest.raises(UserError, match="nothing is watched"):
        desk.look()


def test_traces_of_a_hostile_clone_are_not_taken_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    head, name = git(desk.root, "rev-parse", "HEAD").strip(), "01J00000000000000000000000"
    seen: list[str] = []
    text_at = TextRepository.text_at
    monkeypatch.setattr(TextRepository, "text_at", lambda self, c, p: seen.append(c) or text_at(self, c, p))
    records = []
    for revision, suggestion in (("--textconv", name), (head, "\x1b[2J"), (head + "^{/x}", name), (head, name)):
        ours = {"suggestion": suggestion, "turn": "T", "shown": 1.0, "path": "a.py", "start_line": 1}
        spans = [{"start_line": 1, "end_line": 2}]
        talk = {"url": "urn:etude:turn:T", "contributor": {"type": "ai"}, "ranges": spans}
        records.append(
            {
                "version": "0.1.0",
                "id": "x",
                "vcs": {"type": "git", "revision": revision},
                "files": [{"path": "a.py", "conversations": [talk]}],
                "metadata": {"dev.etude": {"edits": [ours]}},
            }
        )
    desk.write(".agent-trace/traces.jsonl", [json.dumps(record) for record in records])
    desk.reopen()
    assert [edit.id for edit in desk.watcher.state.edits()] == [name]
    assert {commit.removesuffix("^") for commit in seen} == {head}


def test_edits_that_hold_too_much_text_are_counted_and_not_followed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.live.observe.watch.MAX_CHARACTERS", 5000)
    changed = [f"{line}  # {n}" if n % 5 == 0 else line for n, line in enumerate(BASE)]
    desk.turn("T1", lambda: desk.write("a.py", changed))
    held = sum(len(edit.before) + len(edit.applied) for edit in desk.watcher.state.edits())
    assert 0 < held <= 5000
    assert desk.watcher.counts.edits + desk.watcher.counts.unfollowed == 6


def test_the_last_command_of_a_trajectory_has_a_minute_and_an_answer_without_one_has_none() -> None:
    """An agent that its own command ends writes no observation, only an exit without a time."""
    names = [f"01J{letter * 23}" for letter in "ABC"]

    def answer(name: str, at: float, *actions: str) -> dict[str, Any]:
        response = {"id": f"chatcmpl-{name}", "model": "etude"}
        return {"role": "assistant", "extra": {"response": response, "timestamp": at, "actions": list(actions)}}

    messages = [answer(names[0], 10.0, "ls"), {"role": "user", "extra": {"timestamp": 12.0}}]
    messages += [answer(names[1], 20.0), answer(names[2], 30.0, "submit")]
    steps = mini_steps([*messages, {"role": "exit", "extra": {"exit_status": "done"}}])
    spans = [(10.0, 12.0), (20.0, 20.0), (30.0, 90.0)]
    assert steps == [AgentStep(name, *span, "etude") for name, span in zip(names, spans, strict=True)]


def test_a_trajectory_without_messages_is_waited_for(desk: Desk) -> None:
    path = desk.root.parent / "trajectory.json"
    for messages in ([], None, ["x", {"role": "exit"}]):
        path.write_text(json.dumps({"trajectory_format": "mini-swe-agent-1.1", "messages": messages}))
        assert AgentFile(path).read() == []
