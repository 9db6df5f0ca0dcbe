"""What a task's box sees of the past: a real history, and no way to the answer in it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from etude.audit.attacks.library import BROKEN, CORE, EARLIER, EXPECTED, FIXED, PATH, SECRET, TASK, prepare
from etude.errors import UserError
from etude.grading import leaks
from etude.grading.runner import open_sandbox
from etude.sandbox.base import Image, Limits
from etude.tasks import git_history, histories
from etude.tasks.histories import Damage

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
OTHER = "src/lib/other.py"
TEST = "tests/test_core.py"
MOVED = CORE.replace(FIXED, EARLIER)
REPOSITORY = {PATH: CORE, OTHER: "VALUE = 2\n", TEST: "def test_seen(): pass\n", "README.md": "Lists.\n"}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=Ada", "-c", "user.email=ada@example.com", "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60,
                          env=os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null"})  # fmt: skip
    return done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The function moved between files, changed its words, and got a neighbour; a test is hidden now."""
    folder = tmp_path / "source"
    commits = (
        ("Begin", {OTHER: MOVED, "README.md": "Lists.\n", PATH: '"""Lists."""\n', "gone.py": "x = 1\n"}),
        ("Move chunk", {OTHER: "VALUE = 1\n", PATH: MOVED}),
        ("Reword", {PATH: MOVED.replace("pieces", "parts")}),
        (f"Refuse {SECRET}", {PATH: CORE.replace("-th", ".")}),
        ("Test more", {TEST: f"def test_hidden(): assert {EXPECTED!r}\n"}),
        ("Name positions", REPOSITORY),
    )
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "remote", "add", "origin", "https://robot:password@git.example.com/lib.git")
    for message, files in commits:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", message)
    return folder


def box_of(source: Path, root: Path, files: dict[str, str] = REPOSITORY, task=TASK) -> Path:
    """A work tree as a box has it, with what `histories` makes of `source`."""
    repository = root / "repository"
    for path, text in files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    histories.build(histories.read(source, "lib-1", files), repository, (), [task], root)
    found = histories.load(root, repository)
    assert found is not None
    shutil.copytree(repository, root / "box")
    for path, data in {**{p: t.encode() for p, t in task.changes.items()}, **found.of(task)}.items():
        (root / "box" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "box" / path).write_bytes(data)
    return root / "box"


@needs_git
def test_git_takes_it_for_its_own_and_finds_no_answer(source: Path, tmp_path: Path) -> None:
    box = box_of(source, tmp_path / "out")
    assert git(box, "fsck", "--full", "--strict", "--unreachable") == ""
    assert git(box, "status", "--porcelain") == ""
    assert git(box, "diff", "HEAD") == ""
    assert list(leaks.scan(box, leaks.answer_fingerprint(CORE, BROKEN))) == []
    every = git(box, "log", "-p", "--all", "--reflog")
    for secret in (SECRET, EXPECTED, "-len(items)", "math.ceil(len", "robot", "password", "gone.py"):
        assert secret not in every + git(box, "config", "--list"), secret
    assert git(box, "for-each-ref", "--format=%(refname)").split() == [
        "refs/heads/trunk", "refs/remotes/origin/HEAD", "refs/remotes/origin/trunk",
    ]  # fmt: skip
    assert git(box, "remote", "get-url", "origin").strip() == "https://git.example.com/lib.git"


@needs_git
def test_what_holds_no_answer_is_told_as_it_was(source: Path, tmp_path: Path) -> None:
    box = box_of(source, tmp_path / "out")
    subjects = git(box, "log", "--reverse", "--format=%s").splitlines()
    # "Reword" was about nothing but the answer, and the name of the commit that brought it said too much.
    assert subjects == ["Begin", "Move chunk", "Update", "Test more", "Name positions"]
    assert "def chunk" not in git(box, "log", "-p", "--", OTHER), "it stood there before"
    assert "-VALUE = 1" in git(box, "log", "-p", "--", OTHER)
    label = git(box, "log", "-p", "-1", "--", PATH)
    assert '-    return f"{number}."' in label
    assert '+    return f"{number}-th"' in label
    assert git(box, "log", "--format=%an").split() == ["Ada"] * 5
    assert git(box, "show", f"HEAD~1:{TEST}") == REPOSITORY[TEST]


@needs_git
def test_a_history_is_as_deep_as_asked_and_must_be_readable(source: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(source, repository, ignore=shutil.ignore_patterns(".git"))
    past = git_history.read(source, "HEAD", REPOSITORY, 2)
    assert histories.build(past, repository, (), [TASK], tmp_path) == 2
    (tmp_path / histories.FILE).write_bytes(b"no")
    with pytest.raises(UserError, match="build the dataset again"):
        histories.load(tmp_path, repository)
    assert histories.load(source, repository) is None
    shutil.rmtree(source / ".git/objects")
    with pytest.raises(UserError, match=r"git cannot read .*: give a fresh clone"):
        histories.read(source, "lib-1", REPOSITORY)


@needs_git
def test_a_release_is_one_commit_of_its_author_and_date(tmp_path: Path) -> None:
    release = tmp_path / "lib-1"
    for path, text in REPOSITORY.items():
        (release / path).parent.mkdir(parents=True, exist_ok=True)
        (release / path).write_text(text)
    (release / "PKG-INFO").write_text("Name: lib\nAuthor: Ada\nAuthor-email: Ada <ada@example.com>\n")
    for path in release.rglob("*"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    box = box_of(release, tmp_path / "out")
    assert git(box, "log", "--format=%an %ae %ct %s") == "Ada ada@example.com 1600000000 Import lib-1\n"
    assert git(box, "status", "--porcelain") == ""
    assert git(box, "show", f"HEAD:{PATH}") == BROKEN


def test_damage_is_done_only_where_its_lines_stand_once() -> None:
    damage = Damage.of(CORE, BROKEN)
    assert damage.done_to(CORE.encode()) == BROKEN.encode()
    later = f"# more\n{CORE}def more():\n    pass\n"
    assert damage.done_to(later.encode()) == f"# more\n{BROKEN}def more():\n    pass\n".encode()
    assert damage.done_to(MOVED.encode()) is None
    assert damage.done_to((CORE + CORE).encode()) is None


@needs_git
def test_an_agent_works_with_git_and_only_its_work_is_handed_in(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    image = prepare(tmp_path / "library").data.image(TASK)
    assert image.history
    lines = (
        "git log --oneline | wc -l", "git status --short", "echo '# x' >> src/lib/core.py && git diff --stat | tail -1",
        "git stash -q && git stash pop -q && git commit -qam mine && git log -1 --format='%an: %s'",
        "git gc -q; ls .git",
    )  # fmt: skip

    async def work() -> tuple[list[str], dict[str, bytes | None], list[str]]:
        async with open_sandbox(memo=0) as sandbox:
            box = await sandbox.create(image, Limits())
            listed = await box.list("")
            said = [(await box.exec(line, 30.0)).output.strip() for line in lines]
            changes = await box.changes()
            assert (await sandbox.run_tests(image, changes, TASK.visible_tests, None, Limits())).outcomes
            await box.close()
            return said, changes, listed

    said, changes, listed = asyncio.run(work())
    assert (said[0], said[1]) == ("3", "")
    assert "1 insertion" in said[2]
    assert said[3].endswith(": mine")
    assert changes == {PATH: BROKEN.encode() + b"# x\n"}
    assert ".git/" in listed, "also before the box is live"


def test_an_impossible_task_has_the_history_of_its_task(tmp_path: Path) -> None:
    found = prepare(tmp_path / "library").data
    other = replace(found, root=tmp_path, tasks=(msgspec.structs.replace(TASK, fail_to_pass=()),))
    assert isinstance(found.image(TASK), Image)
    assert other.image(other.tasks[0]) == found.image(TASK)
