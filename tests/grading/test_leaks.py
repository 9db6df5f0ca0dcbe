"""Answers are found wherever they were left, and a rewritten history holds none."""

from __future__ import annotations

import io
import os
import py_compile
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from etude.audit.attacks.library import BROKEN, CORE, PATH
from etude.errors import UserError
from etude.grading import leaks
from etude.tasks import git_history
from tests.helpers.histories import rewrite

WANTED = leaks.answer_fingerprint(CORE, BROKEN)
DATES = {"GIT_AUTHOR_DATE": "2024-05-01T10:00:00+0200", "GIT_COMMITTER_DATE": "2024-05-01T10:00:00+0200"}
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=Ada", "-c", "user.email=ada@example.com", "-C", str(repository), *arguments]
    environment = os.environ | DATES | {"GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=60)
    return done.stdout


def commit(repository: Path, text: str, message: str) -> None:
    (repository / PATH).parent.mkdir(parents=True, exist_ok=True)
    (repository / PATH).write_text(text)
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", message)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits with the answer, a tag, a stash, a note, and an orphan that only its object remembers."""
    folder = tmp_path / "source"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "secret_tests.py").write_text(CORE)
    commit(folder, CORE.replace("Lists", "Pieces of lists"), "first")
    commit(folder, CORE, "second")
    git(folder, "tag", "later")
    git(folder, "notes", "add", "-m", CORE)
    (folder / PATH).write_text(CORE + "\n")
    git(folder, "stash")
    return folder


def test_answers_are_found_in_every_kind_of_place(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "copy.txt").write_text(f"# moved\n{CORE}")
    (root / "module.py").write_text(CORE)
    py_compile.compile(str(root / "module.py"), cfile=str(root / "renamed.bin"))
    (root / "module.py").write_text(BROKEN)
    with zipfile.ZipFile(root / "wheel.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("lib/core.py", CORE)
        wheel.writestr("lib/other.py", BROKEN)
    with tarfile.open(root / "sdist.tar.gz", "w:gz") as sdist:
        info = tarfile.TarInfo("core.py")
        info.size = len(CORE)
        sdist.addfile(info, io.BytesIO(CORE.encode()))
    (root / "broken.zip").write_bytes(b"PK\x03\x04 no archive")
    assert list(leaks.scan(root, WANTED)) == [
        "copy.txt",
        "renamed.bin",
        "sdist.tar.gz!core.py",
        "wheel.whl!lib/core.py",
    ]


@needs_git
def test_unreachable_git_objects_are_found(repository: Path) -> None:
    git(repository, "checkout", "-q", "--orphan", "clean")
    commit(repository, BROKEN, "clean")
    for name in ("main", "clean"):
        if name == "main":
            git(repository, "branch", "-D", name)
    found = list(leaks.scan(repository, WANTED))
    assert "secret_tests.py" in found
    assert len([place for place in found if place.startswith(".git: object ")]) >= 2


@needs_git
def test_a_git_directory_that_cannot_be_searched_is_said(tmp_path: Path) -> None:
    command = ["git", "init", "-q", "--bare", "--object-format=sha256", str(tmp_path / "data/kept.git")]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(UserError, match=r"leave it out with `--exclude data/kept.git` .*sha256"):
        list(leaks.scan(tmp_path, WANTED))


@needs_git
def test_a_rewritten_history_holds_no_answer(repository: Path, tmp_path: Path) -> None:
    files = {PATH: BROKEN.encode(), "README.md": b"new\n"}
    target = tmp_path / "box" / ".git"
    head = rewrite(repository, "main", target, files, WANTED)
    assert list(leaks.scan(tmp_path / "box", WANTED)) == []
    shown = git(tmp_path / "box", "log", "--format=%H %an %aI %s").splitlines()
    assert [line.split(" ", 1)[1] for line in shown] == [
        "Ada 2024-05-01T10:00:00+02:00 second",
        "Ada 2024-05-01T10:00:00+02:00 first",
    ]
    assert shown[0].startswith(head)
    assert git(tmp_path / "box", "ls-tree", "-r", "--name-only", head).split() == ["README.md", PATH]
    assert git(tmp_path / "box", "show", f"{head}:{PATH}") == BROKEN
    assert git(tmp_path / "box", "ls-tree", "-r", "--name-only", f"{head}~1").split() == [PATH]
    assert git(tmp_path / "box", "for-each-ref", "--format=%(refname)").split() == ["refs/heads/main"]
    with pytest.raises(UserError, match="no commit"):
        git_history.read(repository, "absent", files, 50)
