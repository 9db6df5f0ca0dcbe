"""Clones whose settings, hooks and attributes name programs: what the host starts to make tasks of them, and what comes
of it.

Every program that a clone names writes a file, and none may be there afterwards. Besides, every process is listed: the
command's own by an audit hook of Python, git's by its trace.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from etude.code import functions
from etude.corpus.edits import repositories
from etude.errors import UserError
from etude.grading import leaks
from etude.live.observe.worktree import TextRepository
from etude.tasks import commits, environment, histories, inventory
from tests.tasks.test_inventory import git, write

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

LIB = """def total(items, start=0):
    result = start
    for item in items:
        if item > 0:
            result = result + item
    return result
"""
FILES = {
    "LICENSE": "MIT License\n", "pyproject.toml": '[project]\nname = "lib"\ndynamic = ["version"]\n',
    "lib/__init__.py": LIB.replace("        if item > 0:\n            result", "        result"),
    "tests/test_lib.py": "from lib import total\n\n\ndef test_sum():\n    assert total([1, 2]) == 3\n",
    "data.bin": "data\n", "CHANGES.md": "# Changes\n",
}  # fmt: skip
TEST = "\n\ndef test_positive():\n    assert total([1, -2]) == 1\n"
READING = {"cat-file", "config", "describe", "diff-tree", "log", "ls-files", "ls-tree", "merge-file", "rev-list",
           "rev-parse", "symbolic-ref"}  # fmt: skip
HOOKS = ("post-checkout", "post-index-change", "pre-auto-gc", "reference-transaction", "post-commit",
         "fsmonitor-watchman", "proc-receive", "pre-push")  # fmt: skip
PROGRAMS = (
    "core.pager", "core.editor", "core.sshCommand", "core.askPass", "core.gitProxy", "core.alternateRefsCommand",
    "gpg.program", "gpg.x509.program", "credential.helper", "sequence.editor", "pager.log", "pager.ls-files",
    "interactive.diffFilter", "uploadpack.packObjectsHook", "gc.recentObjectsHook", "trailer.x.command",
    "browser.x.cmd", "man.x.cmd", "difftool.x.cmd", "mergetool.x.cmd",
)  # fmt: skip
# The command, which writes down what it starts and which modules it has loaded at its end.
AUDITED = """
import atexit, json, os, sys
log = open(sys.argv.pop(1), "a")
def hook(event, given):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.startfile", "pty.spawn"):
        argv = given[1] if len(given) > 1 else given[0]
        argv = [argv] if isinstance(argv, (str, bytes)) else argv
        environment = given[3] if event == "subprocess.Popen" else {}
        entry = [event, [os.fsdecode(word) for word in argv], (environment or {}).get("GIT_DIR", "")]
        print(json.dumps(entry), file=log, flush=True)
sys.addaudithook(hook)
def modules():
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    print(json.dumps(["modules", files, ""]), file=log, flush=True)
atexit.register(modules)
from etude.cli.main import main
main(sys.argv[1:])
"""


@dataclass(frozen=True)
class Hostile:
    """A clone, and the program that its settings name: it writes the file `ran`, and passes its input on."""

    folder: Path
    root: Path
    program: str
    ran: Path

    def set(self, settings: Mapping[str, str], file: Path | None = None) -> None:
        """Settings of the clone, or in another file."""
        with (file or self.root / ".git/config").open("a") as config:
            for name, value in settings.items():
                outer, _, key = name.rpartition(".")
                section, _, part = outer.partition(".")
                head = f'[{section} "{part}"]' if part else f"[{section}]"
                config.write(f'{head}\n\t{key} = "{value}"\n')


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with a commit that can be taken back, and with code that would be noticed if the host imported it."""
    root = tmp_path_factory.mktemp("template")
    place = "__import__('os').path.dirname(__file__) + '/../ran'"
    noticed = f"try:\n    open({place}, 'a').write(__file__)\nexcept OSError:\n    pass\n"
    imported = ("conftest", "setup", "sitecustomize", "usercustomize", "numpy", "pydantic", "etude")
    write(root, FILES | {f"{name}.py": noticed for name in imported})
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "Begin a library")
    write(root, {"lib/__init__.py": LIB, "tests/test_lib.py": FILES["tests/test_lib.py"] + TEST,
                 "CHANGES.md": "# Changes\n\n- Items below zero do not count in a total.\n"})  # fmt: skip
    git(root, "commit", "-q", "-a", "-m", "Leave out what is below zero")
    return root


@pytest.fixture
def clone(template: Path, tmp_path: Path) -> Hostile:
    """A copy, and a program."""
    root, ran, program = tmp_path / "clone", tmp_path / "ran", tmp_path / "program"
    shutil.copytree(template, root)
    program.write_text(f'#!/bin/sh\necho "$0 $@" >> {ran}\ncat\n')
    program.chmod(0o755)
    return Hostile(tmp_path, root, str(program), ran)


def hooks(clone: Hostile) -> Hostile:
    for folder in (clone.root / ".git/hooks", clone.folder / "hooks"):
        folder.mkdir(exist_ok=True)
        for name in HOOKS:
            shutil.copy(clone.program, folder / name)
    clone.set({"core.hooksPath": str(clone.folder / "hooks")})
    return clone


def filters(clone: Hostile) -> Hostile:
    clone.set({"filter.x.clean": clone.program, "filter.x.smudge": clone.program, "filter.x.required": "true"})
    clone.set({"filter.y.process": clone.program})
    write(clone.root, {".gitattributes": "*.py filter=x\n*.md filter=y\n", "lib/__init__.py": LIB + "\n"})
    return clone


def monitor(clone: Hostile) -> Hostile:
    git(clone.root, "update-index", "--untracked-cache")
    clone.set({"core.fsmonitor": clone.program, "core.untrackedCache": "true"})
    return clone


def alternates(clone: Hostile) -> Hostile:
    other = clone.folder / "other"
    git(clone.folder, "clone", "-q", "--bare", str(clone.root), str(other))
    shutil.rmtree(clone.root / ".git/objects")
    write(clone.root, {".git/objects/info/alternates": f"{other}/objects\n"})
    clone.set({"core.alternateRefsCommand": clone.program})
    return clone


def partial(clone: Hostile) -> Hostile:
    """Without the blob that the last commit replaced."""
    blob = git(clone.root, "rev-parse", "HEAD~1:lib/__init__.py").strip()
    (clone.root / ".git/objects" / blob[:2] / blob[2:]).unlink()
    clone.set(
        {
            "remote.origin.url": str(clone.folder),
            "remote.origin.promisor": "true",
            "protocol.allow": "always",
            "remote.origin.uploadpack": clone.program,
            "core.repositoryFormatVersion": "1",
            "extensions.partialClone": "origin",
        }
    )
    return clone


def submodules(clone: Hostile) -> Hostile:
    inner = clone.folder / "inner"
    write(inner, {"inner.txt": "1\n"})
    git(inner, "init", "-q", "-b", "main")
    git(inner, "add", "-A")
    git(inner, "commit", "-q", "-m", "inner")
    git(clone.root, "submodule", "add", "-q", str(inner), "vendor/inner")
    git(clone.root, "commit", "-q", "-a", "-m", "with a submodule")
    clone.set({"submodule.vendor/inner.update": f"!{clone.program}"})
    names = ("core.fsmonitor", "core.sshCommand", "filter.x.clean", "alias.ls-files")
    clone.set(dict.fromkeys(names, clone.program), clone.root / ".git/modules/vendor/inner/config")
    return clone


def submodule_elsewhere(clone: Hostile) -> Hostile:
    submodules(clone)
    git(clone.folder, "clone", "-q", str(clone.root), "private")
    write(clone.root, {"vendor/inner/.git": f"gitdir: {clone.folder}/private/.git\n"})
    return clone


def large_files(clone: Hostile) -> Hostile:
    """A data file and its history are pointers."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n"
    write(clone.root, {"data.bin": pointer, ".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n"})
    git(clone.root, "add", "-A")
    git(clone.root, "commit", "-q", "-m", "Large files")
    clone.set(
        {
            "filter.lfs.clean": clone.program,
            "filter.lfs.smudge": clone.program,
            "filter.lfs.process": clone.program,
            "lfs.customtransfer.x.path": clone.program,
            "lfs.url": "https://localhost:1",
        }
    )
    return clone


def large_sources(clone: Hostile) -> Hostile:
    large_files(clone)
    write(clone.root, {"lib/__init__.py": (clone.root / "data.bin").read_text()})
    return clone


def attributes(clone: Hostile) -> Hostile:
    lines = "* filter=x diff=x merge=x text eol=crlf ident working-tree-encoding=UTF-16\n"
    write(clone.root, {".gitattributes": lines, ".git/info/attributes": lines})
    write(clone.folder, {"attributes": lines})
    clone.set(
        {
            "core.attributesFile": str(clone.folder / "attributes"),
            "diff.x.textconv": clone.program,
            "diff.x.command": clone.program,
            "diff.x.cachetextconv": "true",
            "diff.external": clone.program,
            "merge.x.driver": clone.program,
            "merge.default": "x",
            "filter.x.clean": clone.program,
        }
    )
    return clone


def includes(clone: Hostile) -> Hostile:
    named = "".join(f"[{section}]\n\t{key} = {clone.program}\n" for section, key in (
        ("core", "fsmonitor"), ("core", "pager"), ("core", "sshCommand"), ('filter "x"', "clean"), ("diff", "external"),
        ('alias', "log"),
    ))  # fmt: skip
    write(clone.folder, {"included": named})
    write(clone.root, {".gitattributes": "* filter=x\n", "lib/__init__.py": LIB + "\n"})
    names = ("include.path", f"includeIf.gitdir:{clone.folder}/.path", "includeIf.onbranch:main.path")
    clone.set(dict.fromkeys(names, str(clone.folder / "included")))
    return clone


def worktree(clone: Hostile) -> Hostile:
    git(clone.root, "branch", "other")
    root = clone.folder / "clone-2"
    git(clone.root, "worktree", "add", "-q", str(root), "other")
    clone.set({"extensions.worktreeConfig": "true"})
    names = ("core.fsmonitor", "core.sshCommand", "filter.x.clean", "diff.external")
    clone.set(dict.fromkeys(names, clone.program), clone.root / ".git/worktrees/clone-2/config.worktree")
    return Hostile(clone.folder, root, clone.program, clone.ran)


def worktree_elsewhere(clone: Hostile) -> Hostile:
    """The git directory of another repository of the same machine."""
    private = clone.folder / "private"
    shutil.move(clone.root / ".git", private)
    (clone.root / ".git").write_text(f"gitdir: {private}\n")
    return clone


def others(clone: Hostile) -> Hostile:
    clone.set(dict.fromkeys(PROGRAMS, clone.program) | {f"alias.{name}": f"!{clone.program}" for name in READING})
    clone.set(
        {"log.showSignature": "true", "core.worktree": str(clone.folder), "remote.origin.url": "ext::" + clone.program}
    )
    clone.set({f"url.ext::{clone.program}.insteadOf": "https://"})
    git(clone.root, "init", "-q", "untracked")
    write(clone.root, {"untracked/a.py": ""})
    clone.set({"core.fsmonitor": clone.program, "filter.x.clean": clone.program}, clone.root / "untracked/.git/config")
    return clone


def everything(clone: Hostile) -> Hostile:
    for plant in (submodules, hooks, filters, monitor, attributes, includes, others):
        plant(clone)
    return clone


BUILT: dict[str, Callable[[Hostile], Hostile]] = {
    "hooks": hooks, "filters": filters, "fsmonitor": monitor, "attributes": attributes, "includes": includes,
    "worktree": worktree, "submodules": submodules, "LFS": large_files, "other-programs": others,
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[Hostile], Hostile], str]] = {
    "alternates": (alternates, "objects of .* lie in another repository"),
    "promisor": (partial, "objects of .* are missing, since it is a partial clone .* clone without --filter"),
    "submodule-elsewhere": (submodule_elsewhere, "vendor/inner/.git leads to a git directory elsewhere"),
    "LFS-source": (large_sources, "lib/__init__.py of .* is a pointer of Git LFS, not the file"),
    "worktree-elsewhere": (worktree_elsewhere, "clone/.git leads to a git directory elsewhere"),
}


@dataclass(frozen=True)
class Ran:
    """`etude tasks build`: how it ended, what it started (argv), what git started, and which modules it had loaded."""

    code: int
    said: str
    started: list[list[str]]
    started_by_git: list[list[str]]
    modules: list[str]


def traced_path(clone: Hostile) -> str:
    """A PATH on which git writes into the file `trace` what it does."""
    programs, trace = clone.folder / "bin", clone.folder / "trace"
    write(programs, {"git": f'#!/bin/sh\nGIT_TRACE2_EVENT={trace} exec {shutil.which("git")} "$@"\n'})
    (programs / "git").chmod(0o755)
    clone.ran.unlink(missing_ok=True)  # written when the clone was made
    return f"{programs}:{os.environ['PATH']}"


def read_trace(clone: Hostile) -> tuple[int, list[list[str]]]:
    """How many git processes ran, and what they started."""
    trace = clone.folder / "trace"
    events = [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []
    children = [event["argv"] for event in events if event["event"] in ("child_start", "exec")]
    return sum(event["event"] == "start" for event in events), children


def run_build(clone: Hostile) -> Ran:
    """From inside of the clone, as its owner would."""
    log = clone.folder / "log"
    command = [sys.executable, "-P", "-c", AUDITED, str(log), "tasks", "build", ".", "-o", str(clone.folder / "out"),
               "--kinds", "mutation", "commit", "--max-tasks", "2", "--repeats", "1"]  # fmt: skip
    done = subprocess.run(command, cwd=clone.root, capture_output=True, text=True, timeout=240,
                          env=os.environ | {"PATH": traced_path(clone)})  # fmt: skip
    started, modules = [], []
    for event, words, git_dir in map(json.loads, log.read_text().splitlines()):
        if event == "modules":
            modules = words
            continue
        if Path(words[0]).name == "git":
            assert Path(git_dir).name.startswith("etude-git-"), words
        started.append(words)
    count, children = read_trace(clone)
    assert count == sum(Path(words[0]).name == "git" for words in started)
    return Ran(done.returncode, done.stderr, started, children, modules)


def check_nothing_ran(clone: Hostile, ran: Ran) -> None:
    """Python for the boxes, and git's commands that read, are all that the host started."""
    for words in ran.started:
        if Path(words[0]).name == "git":
            assert words[1] == "--no-pager"
            assert words[2] in READING, words
        else:
            assert words[:6] == [sys._base_executable, "-S", "-s", "-P", "-B", "-c"], words
            assert "sandbox.guest.launch" in words[6]
    assert ran.started_by_git == []
    assert [file for file in ran.modules if file.startswith(f"{clone.folder}/")] == []
    assert not clone.ran.exists(), clone.ran.read_text()


def check_built(clone: Hostile) -> str:
    """An honest build: a task of each kind, and the history. Returns the card."""
    ran = run_build(clone)
    assert ran.code == 0, ran.said
    check_nothing_ran(clone, ran)
    manifest = json.loads((clone.folder / "out/dataset.json").read_text())
    assert manifest["counts"]["commits"] >= 2
    return (clone.folder / "out/DATACARD.md").read_text()


def check_other_readers(clone: Hostile) -> None:
    """Tables of edits, and the watcher of a developer's repository."""
    assert {change.path for change in repositories.read(str(clone.root)).changes} >= {"lib/__init__.py"}
    watched = TextRepository(clone.root)
    assert watched.files()["lib/__init__.py"]
    assert watched.changes(watched.commit("HEAD~1"))
    assert watched.committed_at(watched.state().head)
    assert not clone.ran.exists(), clone.ran.read_text()


@pytest.mark.parametrize("kind", BUILT)
def test_reading_a_hostile_clone_runs_nothing(clone: Hostile, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = BUILT[kind](clone).root
    monkeypatch.setenv("PATH", traced_path(clone))
    taken = inventory.take(root)
    assert taken.tracked
    assert len(histories.read(root, "lib", taken.files).commits) >= 2
    assert environment.version_of(root) == environment.UNKNOWN
    sources = {"lib/__init__.py": LIB}
    modules = ["tests/test_lib.py"]
    ((program, _, _),) = commits.reversals(root, sources, functions.functions("lib/__init__.py", LIB), modules)
    assert "- Items below zero do not count in a total." in program.instruction
    assert [place for place, _ in leaks.folder_texts(root)]
    check_other_readers(Hostile(clone.folder, root, clone.program, clone.ran))
    count, children = read_trace(clone)
    assert count > 10
    assert children == []


def test_no_program_of_a_clone_that_names_many_runs(clone: Hostile) -> None:
    hostile = everything(clone)
    card = check_built(hostile)
    assert "vendor/inner" not in card
    assert (clone.folder / "out/repository/vendor/inner/inner.txt").is_file()
    check_other_readers(hostile)
    git(clone.root, "status")
    assert clone.ran.exists()  # the programs work: git itself runs them


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUILT)
def test_a_hostile_clone_is_built(clone: Hostile, kind: str) -> None:
    hostile = BUILT[kind](clone)
    card = check_built(hostile)
    assert ("Pointers of Git LFS, whose files were not fetched: tests that read them fail (1): `data.bin`" in card) == (
        kind == "LFS"
    )
    check_other_readers(hostile)


@pytest.mark.parametrize("kind", REFUSED)
def test_reading_a_clone_that_cannot_be_built_says_why(clone: Hostile, kind: str) -> None:
    plant, sentence = REFUSED[kind]
    root = plant(clone).root
    clone.ran.unlink(missing_ok=True)
    with pytest.raises(UserError, match=sentence):
        histories.read(root, "lib", inventory.take(root).files)
    if kind in ("alternates", "promisor", "worktree-elsewhere"):
        with pytest.raises(UserError, match=sentence):
            repositories.read(str(root))
    assert not clone.ran.exists(), clone.ran.read_text()


@pytest.mark.parametrize("kind", [
    kind if kind == "promisor" else pytest.param(kind, marks=pytest.mark.slow) for kind in REFUSED
])  # fmt: skip
def test_a_hostile_clone_is_refused(clone: Hostile, kind: str) -> None:
    plant, sentence = REFUSED[kind]
    ran = run_build(plant(clone))
    assert ran.code == 2, ran.said
    assert re.fullmatch(f"etude: .*{sentence}.*\n", ran.said), ran.said
    check_nothing_ran(clone, ran)
    assert not (clone.folder / "out").exists()
    assert not (clone.folder / "out.incomplete").exists()
