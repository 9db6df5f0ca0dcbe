"""Clones of every form are read from a git directory of ours, or refused in one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from etude.code.git import Clone, clone_around, clone_of_directory
from etude.errors import UserError
from tests.tasks.test_inventory import clone, git, write

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three commits of one file."""
    root = clone(tmp_path / "r", {"a.txt": "0\n"})
    for number in "12":
        write(root, {"a.txt": f"{number}\n"})
        git(root, "commit", "-q", "-a", "-m", number)
    return root


def texts(clone: Clone | None) -> list[bytes]:
    """Every version of the file, the newest first."""
    assert clone is not None
    commits = clone.demand("rev-list", "HEAD").decode().split()
    blobs = [clone.tree(commit)["a.txt"][1] for commit in commits]
    found = clone.contents(blobs)
    return [found[blob] for blob in blobs]


def test_forms_of_a_clone(root: Path, tmp_path: Path) -> None:
    whole = [b"2\n", b"1\n", b"0\n"]
    assert texts(clone_around(root)) == whole
    assert texts(clone_around(root / "below")) == whole
    assert clone_around(tmp_path) is None
    git(root, "gc", "-q")
    git(root, "update-index", "--split-index")
    packed = clone_around(root)
    assert texts(packed) == whole
    assert packed is not None
    assert list(packed.staged()) == ["a.txt"]
    write(root, {"a.txt": "3\n"})
    git(root, "commit", "-q", "-a", "-m", "3")
    assert texts(packed) == [b"3\n", *whole], "what is new is seen"
    git(tmp_path, "clone", "-q", "--depth", "2", f"file://{root}", "shallow")
    assert texts(clone_around(tmp_path / "shallow")) == [b"3\n", b"2\n"]
    git(tmp_path, "clone", "-q", "--bare", str(root), "bare")
    assert len(list(clone_of_directory(tmp_path / "bare").every_object())) == 12
    git(root, "checkout", "-q", "HEAD~1")
    git(root, "worktree", "add", "-q", str(tmp_path / "tree"), "HEAD~1")
    assert texts(clone_around(tmp_path / "tree")) == [b"1\n", b"0\n"]
    shutil.move(tmp_path / "tree", tmp_path / "moved")
    with pytest.raises(UserError, match="run `git worktree repair` if it is a worktree"):
        clone_around(tmp_path / "moved")


def test_our_folder_goes_with_the_clone(root: Path) -> None:
    read = Clone(root, root / ".git")
    own = Path(os.fsdecode(read.demand("rev-parse", "--absolute-git-dir")).strip())
    assert own.is_dir()
    del read
    assert not own.exists()
    assert (root / ".git/objects").is_dir()


def test_a_partial_clone_is_mended_as_the_sentence_says(root: Path, tmp_path: Path) -> None:
    git(root, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "-q", "--filter=blob:none", f"file://{root}", "partial")
    partial = tmp_path / "partial"
    with pytest.raises(
        UserError, match=r"are missing, since it is a partial clone .* `git fetch --refetch --no-filter`"
    ):
        texts(clone_around(partial))
    git(partial, "fetch", "-q", "--refetch", "--no-filter")
    assert len(texts(clone_around(partial))) == 3


def test_a_clone_of_shared_objects_is_mended_likewise(root: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--shared", str(root), "shared")
    with pytest.raises(UserError, match=r"lie in another repository .* --dissociate"):
        texts(clone_around(tmp_path / "shared"))
    git(tmp_path, "clone", "-q", "--reference", str(root), "--dissociate", f"file://{root}", "own")
    assert len(texts(clone_around(tmp_path / "own"))) == 3


def _replaced(path: Path, by: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(by)


def _linked(path: Path, place: Path) -> None:
    path.rename(place)
    path.symlink_to(place)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda git: _replaced(git / "objects", git.parent), "objects is not a plain folder"),
        (lambda git: _replaced(git / "refs/heads/main", git / "HEAD"), "heads/main is not a plain file"),
        (lambda git: (git / "refs/x").symlink_to("/"), "refs/x is not a plain file"),
        (lambda git: os.mkfifo(git / "objects/pack/pack-1.idx"), "pack-1.idx is not a plain file"),
        (lambda git: (git / "index").unlink() or os.mkfifo(git / "index"), "index is not a plain file"),
        (lambda git: _replaced(git / "HEAD", git / "config"), "HEAD is not a plain file"),
        (lambda git: (git / "HEAD").unlink(), "HEAD is broken"),
        (lambda git: (git / "commondir").write_text("/"), "commondir leads to a git directory elsewhere"),
        (lambda git: (git / "shallow").write_text("x"), "shallow is broken"),
        (lambda git: (git / "config").write_text("[["), "cannot read the settings"),
        (lambda git: _linked(git, git.parent.parent / "moved"), "r/.git is not a plain file"),
    ],
)
def test_what_is_no_plain_clone_is_refused(root: Path, spoil, sentence: str) -> None:
    spoil(root / ".git")
    with pytest.raises(UserError, match=sentence):
        texts(clone_around(root))


def test_other_formats_are_refused_by_name(root: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "--object-format=sha256", "longer")
    with pytest.raises(UserError, match="names its objects by sha256"):
        clone_around(tmp_path / "longer")
    git(root, "config", "extensions.refStorage", "reftable")
    with pytest.raises(UserError, match="git refs migrate --ref-format=files"):
        clone_around(root)


def test_without_git(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "bin")  # a program of the current folder is none of ours
    write(root, {"bin/git": "#!/bin/sh\ntouch ../ran\n"})
    (root / "bin/git").chmod(0o755)
    monkeypatch.chdir(root)
    with pytest.raises(UserError, match="install git"):
        clone_around(root)


def test_an_inherited_setting_changes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "nonsense")
    assert len(texts(clone_around(root))) == 3
    assert subprocess.run(["git", "status"], cwd=root, capture_output=True).returncode, "git itself follows them"
