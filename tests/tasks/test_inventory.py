"""A dataset holds what git tracks, says what was left out, and never a secret."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from etude.config import BuildConfig
from etude.errors import UserError
from etude.tasks import dataset, inventory, withheld
from etude.tasks.build import build_dataset
from tests.tasks.test_build import TINY, quiet

KEY = "-----BEGIN OPENSSH " + "PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU=\n"
TOKEN = "ghp_" + "Ab1" * 12


def git(folder: Path, *arguments: str) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    people = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    command = ["git", *people, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=environment).stdout


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def clone(root: Path, files: dict[str, str]) -> Path:
    write(root, files)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "All of it")
    return root


def test_what_git_tracks(tmp_path: Path) -> None:
    root = clone(tmp_path / "r", {"a.py": "x = 1\n", "b.py": "y = 1\n", "c.py": "", ".gitignore": ".env\nignored/\n"})
    write(root, {".env": "SECRET=abc", "ignored/big.txt": "x", "notes.txt": "private", "a.py": "x = 2\n"})
    (root / "c.py").unlink()
    assert inventory.take(root) == inventory.Inventory(
        files=(".gitignore", "a.py", "b.py"), tracked=True, untracked=(".env", "ignored/", "notes.txt"),
        changed=("a.py", "c.py"),
    )  # fmt: skip
    assert inventory.take(root, ["*.py", "docs"]).excluded == ("a.py", "b.py")


def test_a_folder_of_a_repository(tmp_path: Path) -> None:
    root = clone(tmp_path / "r", {"packages/one/a.py": "", "packages/two/b.py": "", ".gitignore": "out/"})
    assert inventory.take(root / "packages/one") == inventory.Inventory(files=("a.py",), tracked=True)
    # A release unpacked below a repository that ignores the folder is a release.
    assert inventory.take(write(root / "out/lib", {"m.py": ""})) == inventory.Inventory(files=("m.py",))


def test_runs_in_a_folder_that_git_does_not_track_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "outputs/run/config.json", "outputs/run/tasks/site/a.py", "outputs/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    taken = inventory.take(tmp_path)
    assert taken.files == ("a.py", "outputs/b.py")
    assert taken.excluded


def test_submodules(tmp_path: Path) -> None:
    clone(tmp_path / "inner", {"data.txt": "1", "tests/test_inner.py": ""})
    root = clone(tmp_path / "outer", {"m.py": ""})
    git(root, "submodule", "add", "-q", str(tmp_path / "inner"), "vendor/inner")
    git(root, "commit", "-q", "-m", "with a submodule")
    taken = inventory.take(root)
    assert taken.files == (".gitmodules", "m.py", "vendor/inner/data.txt", "vendor/inner/tests/test_inner.py")
    assert (taken.changed, taken.absent) == ((), ())
    subprocess.run(["git", "clone", "-q", str(root), str(tmp_path / "copy")], check=True)
    assert inventory.take(tmp_path / "copy").absent == ("vendor/inner",)


def test_no_program_of_a_clone_runs(tmp_path: Path) -> None:
    root = clone(tmp_path / "r", {"a.py": "x = 1\n", ".gitattributes": "*.py filter=evil diff=evil\n"})
    program = f"sh -c 'touch {tmp_path}/ran; cat'"
    for key in ("filter.evil.clean", "filter.evil.smudge", "core.fsmonitor", "diff.external", "diff.evil.textconv",
                "core.pager", "core.sshCommand", "core.askPass"):  # fmt: skip
        git(root, "config", key, program)
    write(root, {"a.py": "x = 2\n"})
    assert inventory.take(root).changed == ("a.py",)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        (".env", "A=1", "credentials by name: settings that often"), (".ENV.production", "A=1", "credentials by name"),
        ("keys/id_rsa", "", "credentials by name: a private key"), ("tests/server.pem", KEY, "secrets: private-key"),
        ("tests/test_conf.py", f'TOKEN = "{TOKEN}"', "token-form"), ("aws.ini", "id=AKIA" + "Q2W3" * 4, "token-form"),
        (".npmrc", "//r/:_authToken=abcdefghijklmnopqrstuv", "npmrc-token"),
        ("docs/conf.py", "k = 'sk-proj-" + "a1B2" * 12 + "'", "token-form"),
    ],
)  # fmt: skip
def test_secrets_beside_the_code_are_left_out(tmp_path: Path, name: str, text: str, what: str) -> None:
    write(tmp_path, {"m.py": "x = 1\n", "README.md": "a\n"})
    write(tmp_path, {name: text})
    taken = inventory.take(tmp_path)
    assert taken.files == ("README.md", "m.py")
    assert what in taken.withheld[name]
    assert inventory.take(tmp_path, [name]).withheld == {}


@pytest.mark.parametrize("name", ["m.py", "src/pkg/a.js", "pyproject.toml", "tests/conftest.py"])
def test_a_secret_in_the_code_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, {name: f'TOKEN = "{TOKEN}"\n', "b.py": ""})
    with pytest.raises(UserError, match=rf"{name} \(token-form\).*`gitleaks:allow`.*--exclude '{name}'"):
        inventory.take(tmp_path)
    assert name not in inventory.take(tmp_path, [name]).files
    write(tmp_path, {name: f'TOKEN = "{TOKEN}"  # gitleaks:allow\n'})
    assert name in inventory.take(tmp_path).files


def test_no_secrets(tmp_path: Path) -> None:
    write(tmp_path, {
        ".env.example": "A=", "doc.md": "-----BEGIN PRIVATE KEY-----", "id": "AKIAIOSFODNN7EXAMPLE",
        "style.css": ".task-" + "long-name-" * 6, "pub.pem": "-----BEGIN PUBLIC KEY-----\nAAAA\n",
        "a.toml": 'url = "postgres://user:password@localhost/db"', "b.md": "https://user:password@example.com",
    })  # fmt: skip
    assert len(inventory.take(tmp_path).files) == 7


def test_kinds_of_files(tmp_path: Path) -> None:
    """Of unlisted kinds only what tests and code may read stays; nothing is left out in silence."""
    write(tmp_path, dict.fromkeys(
        ("Makefile", "LICENSE", "a.py", "pkg/m.py", "pkg/words.odd", "tests/x.sqlite", "tests/y.odd", "docs/a.png"), "x"
    ))  # fmt: skip
    left = ("data/users.odd", "db.sqlite3", "pkg/dump.sqlite", "app.log", "big.json", "dist/a.js", "notes.zip")
    write(tmp_path, dict.fromkeys(left, "x") | {"big.json": "1" * (5 << 20)})
    taken = inventory.take(tmp_path)
    assert taken.files == ("LICENSE", "Makefile", "a.py", "docs/a.png", "pkg/m.py", "pkg/words.odd", "tests/x.sqlite",
                           "tests/y.odd")  # fmt: skip
    assert taken.withheld == dict.fromkeys(left[:4], withheld.KIND) | {
        "big.json": withheld.LARGE, "dist/": withheld.JUNK, "notes.zip": withheld.JUNK,
    }  # fmt: skip


def test_names_and_encodings(tmp_path: Path) -> None:
    """What a dataset cannot name is named; what etude does not break stays as it is."""
    root = tmp_path / "r"
    write(root, {"a.py": "", "Read.md": "", "read.md": ""})
    (root / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nNAME = 'é'\n".encode("latin-1"))
    (root / "marked.py").write_bytes("\ufeffx = 1\n".encode())
    (root / "old.py").write_bytes(b"x = 1\ry = 2\n")
    (root / "windows.py").write_bytes(b"x = 1\r\n")
    (root / "test_old.py").write_bytes(b"x = 1\r")
    (root / "m.js").write_bytes(b"// \xe9\n")
    (root / "m.test.js").write_bytes(b"// \xe9\n")
    (root / "test_latin.py").write_bytes("# coding: latin-1\ndef test_a(): 'é'\n".encode("latin-1"))
    (root / "tests").mkdir()
    (root / "tests/data.txt").write_bytes("größe\n".encode("utf-16"))
    (root / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"")
    files = ("Read.md", "a.py", "latin.py", "m.js", "marked.py", "old.py", "read.md", "tests/data.txt", "windows.py")
    for tracked in (False, True):
        clone(root, {}) if tracked else None
        taken = inventory.take(root)
        assert taken.files == files
        assert taken.withheld == {
            "caf\\xe9.txt": withheld.NAME, "test_latin.py": f"{withheld.UNCUT}: iso-8859-1",
            "test_old.py": f'{withheld.UNCUT}: lines that "\\r" ends', "m.test.js": f"{withheld.UNCUT}: unknown",
        }  # fmt: skip
        assert taken.encoded == ("latin.py", "m.js", "marked.py", "old.py")
        assert taken.clashing == ("Read.md", "read.md")


def test_links_to_what_is_left_out(tmp_path: Path) -> None:
    root = write(tmp_path / "r", {"a.py": "", ".env": "PASSWORD=hunter2", "data/x.txt": "1"})
    (root / "settings.txt").symlink_to(".env")
    (root / ".netrc").symlink_to("data/x.txt")
    taken = inventory.take(clone(root, {}))
    assert taken.files == ("a.py", "data/x.txt")
    assert taken.links == ("settings.txt",)
    assert set(taken.withheld) == {".env", ".netrc"}


def test_pointers_of_git_lfs(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5\n"
    write(tmp_path, {"a.py": "", "tests/big.bin": pointer})
    assert inventory.take(tmp_path).pointers == ("tests/big.bin",)
    write(tmp_path, {"a.py": pointer})
    with pytest.raises(UserError, match=r"a\.py of .* is a pointer of Git LFS"):
        inventory.take(tmp_path)


def test_git_that_cannot_list(tmp_path: Path) -> None:
    root = clone(tmp_path / "r", {"a.py": ""})
    (root / ".git/HEAD").write_text("nonsense")
    with pytest.raises(UserError, match=r"git cannot read .*HEAD is broken"):
        inventory.take(root)


def test_a_dataset_of_a_clone_with_private_files(tmp_path: Path) -> None:
    """Neither the tree, nor the hidden tests, nor the history: a token that was committed once and taken out again."""
    files = {p.relative_to(TINY).as_posix(): p.read_text() for p in TINY.rglob("*") if p.is_file()}
    files = {path: text for path, text in files.items() if "__pycache__" not in path}
    root = clone(tmp_path / "tiny", files | {"settings.ini": f"token = {TOKEN}\n"})
    write(root, {"settings.ini": "token =\n"})
    git(root, "commit", "-q", "-a", "-m", f"Take out {TOKEN}")
    write(root, {"notes-private.txt": "private notes"})
    write(root, {"README": "changed after the commit\n"})
    git(root, "add", "README")
    options = BuildConfig(max_tasks=4, kinds=("mutation",))
    data = build_dataset(root, tmp_path / "out", options, quiet)
    assert (data.repository / "README").is_file()
    for path in (p for p in data.root.rglob("*") if p.is_file()):
        assert b"private notes" not in path.read_bytes(), path
        assert TOKEN.encode() not in path.read_bytes(), path
    write_git(tmp_path / "box", dict(data.image(data.tasks[0]).history))
    assert git(tmp_path / "box", "log", "--all", "--format=%s") == "Update\nAll of it\n"
    assert TOKEN not in git(tmp_path / "box", "log", "-p", "--all")
    card = (data.root / "DATACARD.md").read_text()
    assert "Left out, since git does not track them (1): `notes-private.txt`." in card
    assert "With changes since the last commit (1): `README`." in card
    assert dataset.load_dataset(data.root).tasks == data.tasks


def write_git(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
