"""Reads the commits, files and refs of a git clone without running any program that the clone names.

A clone may come from anywhere, and its settings, hooks and attributes may name programs. So git never runs in it. It
runs in a git directory of ours, which has settings of its own, no remote and no hook, and links to the clone's objects
and refs. References in the clone's metadata to other places on this machine are not followed: alternates, includes,
links, a work tree elsewhere. Format: gitrepository-layout(5).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

from etude.errors import UserError, last_line

SECONDS = 300.0  # for one command
_SETTINGS = """[core]
	repositoryformatversion = 0
	bare = true
	hooksPath = /dev/null
	fsmonitor = false
	untrackedCache = false
	commitGraph = false
	multiPackIndex = false
	precomposeUnicode = true
[gc]
	auto = 0
[maintenance]
	auto = false
[protocol]
	allow = never
"""
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_ATTR_NOSYSTEM": "1", "GIT_ALLOW_PROTOCOL": "",
    "GIT_NO_LAZY_FETCH": "1", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}  # fmt: skip
_HEAD = re.compile(rb"(ref: refs/[^\0\r\n]+|[0-9a-f]{40})\s*")
_IDS = re.compile(rb"([0-9a-f]{40}\s*)*")
_PARTIAL = re.compile(r"remote\..*\.(promisor|partialclonefilter)|extensions\.partialclone", re.DOTALL)
SUBMODULE = "160000"

GitTree = Mapping[str, tuple[str, str]]  # path -> mode, id


class Clone:
    """The clone with the work tree `root` and the git directory `directory`. Raises UserError if it cannot be read.

    `common` is the git directory that it shares with its worktrees. `settings` is the text of its configuration, which
    has no effect on git here. The settings are read once, all other files again with each command.
    """

    def __init__(self, root: Path, directory: Path) -> None:
        self.root, self.directory = root, directory
        self.common = _common(root, directory)
        program = shutil.which("git", path=os.pathsep.join(filter(os.path.isabs, os.get_exec_path())))
        if program is None:
            raise UserError(f"{root} has a history, which takes git to read; install git, or remove {root}/.git.")
        self._program = program
        for place in ("objects", "refs"):
            _check_folder(root, self.common / place)
        for file in (directory / "index", *(self.common / name for name in ("config", "packed-refs", "info/exclude"))):
            _is_file(root, file)
        self._own = Path(tempfile.mkdtemp(prefix="etude-git-"))
        self._end = weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)
        self._lay_out()
        self.settings = self._read_settings()
        form = self.settings.get("extensions.objectformat", "sha1").lower()
        refs = self.settings.get("extensions.refstorage", "files").lower()
        if form != "sha1":
            raise UserError(f"{root} names its objects by {form}, and etude reads SHA-1 alone: give another clone.")
        if refs != "files":
            raise UserError(f"{root} keeps its refs as a {refs}: run `git refs migrate --ref-format=files` in it.")

    def run(
        self, *arguments: str, stdin: bytes = b"", within: Path | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one git command, in the folder `within` of the work tree if it needs that, and return it whatever its
        exit code. Raises UserError if it takes too long."""
        places = {"GIT_DIR": str(self._own), "GIT_INDEX_FILE": str(self.directory / "index")}
        if within is not None:
            places["GIT_WORK_TREE"] = str(self.root)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        self._refresh()
        try:
            return subprocess.run(
                [self._program, "--no-pager", *arguments],
                input=stdin,
                capture_output=True,
                timeout=SECONDS,
                cwd=within or self._own,
                env=inherited | _ENVIRONMENT | places,
            )
        except subprocess.TimeoutExpired:
            took = f"git {arguments[0]} took over {SECONDS:.0f} s in {self.root}"
            raise UserError(f"{took}; give a smaller clone.") from None

    def output(self, *arguments: str) -> bytes | None:
        """The output of a git command; None if it fails."""
        done = self.run(*arguments)
        return done.stdout if done.returncode == 0 else None

    def demand(self, *arguments: str, stdin: bytes = b"", within: Path | None = None) -> bytes:
        """The output of a git command. Raises UserError if it fails."""
        done = self.run(*arguments, stdin=stdin, within=within)
        if done.returncode == 0:
            return done.stdout
        raise self._lacking(last_line(done.stderr.decode(errors="replace"), f"git {arguments[0]} failed"))

    def id_of(self, name: str) -> str:
        """The id of the object that a name stands for, even if the object is missing; empty for an unknown name."""
        return (self.output("rev-parse", "--verify", "-q", name) or b"").decode().strip()

    def tree(self, commit: str) -> GitTree:
        """Files and submodules of a commit; bytes of names that are not UTF-8 are escaped. Raises UserError."""
        return _entries(self.demand("ls-tree", "-r", "-z", commit), 2)

    def staged(self) -> GitTree:
        """Files and submodules of the index, with names as in `tree`."""
        return _entries(self.demand("ls-files", "-z", "-s"), 1)

    def contents(self, ids: Iterable[str], longest: int | None = None) -> dict[str, bytes]:
        """Objects by id, without those of more than `longest` bytes. Raises UserError if one is missing."""
        wanted = list(dict.fromkeys(ids))
        if longest is not None and wanted:
            listed = "".join(f"{one}\n" for one in wanted).encode()
            sizes = self.demand("cat-file", "--batch-check=%(objectsize)", stdin=listed).decode().split("\n")
            for one, size in zip(wanted, sizes, strict=False):
                if not size.isdecimal():
                    raise self._lacking(f"no object {one}")
            wanted = [one for one, size in zip(wanted, sizes, strict=False) if int(size) <= longest]
        out = (
            self.demand("cat-file", "--batch", stdin="".join(f"{one}\n" for one in wanted).encode()) if wanted else b""
        )
        contents, at = {}, 0
        for one in wanted:
            end = out.index(b"\n", at)
            words = out[at:end].split()
            if len(words) != 3:
                raise self._lacking(f"no object {one}")
            contents[one] = out[end + 1 : end + 1 + int(words[2])]
            at = end + int(words[2]) + 2
        return contents

    def every_object(self) -> Iterable[tuple[str, bytes]]:
        """(id, content) of all objects, reachable or not. Raises UserError."""
        listed = self.demand("cat-file", "--batch-all-objects", "--batch-check=%(objectname)").decode().split()
        return self.contents(listed).items()

    def _lacking(self, reason: str) -> UserError:
        if (self.common / "objects/info/alternates").exists():
            return UserError(
                f"objects of {self.root} lie in another repository (objects/info/alternates), which etude does not "
                f"read ({reason}): give a clone that was made without --shared or --reference, or with --dissociate."
            )
        marked = next((self.common / "objects/pack").glob("*.promisor"), None)
        if marked or any(_PARTIAL.fullmatch(name) for name in self.settings):
            return UserError(
                f"objects of {self.root} are missing, since it is a partial clone ({reason}): fetch them with "
                "`git fetch --refetch --no-filter` or `git backfill`, or clone without --filter."
            )
        return UserError(f"git cannot read {self.root} ({reason}): give a fresh clone of it.")

    def _lay_out(self) -> None:
        """Link the object folders one by one: git would follow the clone's own alternates if the clone were an
        alternate of ours."""
        (self._own / "objects").mkdir()
        (self._own / "config").write_text(_SETTINGS)
        for name in ("pack", *(f"{number:02x}" for number in range(256))):
            (self._own / "objects" / name).symlink_to(self.common / "objects" / name)
        if (self.common / "refs").is_dir():
            (self._own / "refs").symlink_to(self.common / "refs")
        else:
            (self._own / "refs").mkdir()
        (self._own / "packed-refs").symlink_to(self.common / "packed-refs")
        (self._own / "info").mkdir()
        (self._own / "info/exclude").symlink_to(self.common / "info/exclude")

    def _refresh(self) -> None:
        """Copy the current state of the files that git does not read through links."""
        for source, form in ((self.directory / "HEAD", _HEAD), (self.common / "shallow", _IDS)):
            target = self._own / source.name
            there = _is_file(self.root, source)
            if not there and form is _IDS:
                target.unlink(missing_ok=True)
                continue
            data = source.read_bytes() if there else b""
            if not form.fullmatch(data):
                raise UserError(f"git cannot read {self.root} ({source} is broken): give a fresh clone of it.")
            target.write_bytes(data)
        for shared in self.directory.glob("sharedindex.*"):  # the larger part of a split index
            if _is_file(self.root, shared) and not (self._own / shared.name).is_symlink():
                (self._own / shared.name).symlink_to(shared)

    def _read_settings(self) -> dict[str, str]:
        """The values of the configuration file alone, the last of each name; names are in lower case."""
        if not (self.common / "config").exists():
            return {}
        listed = self.run("config", "--file", str(self.common / "config"), "--no-includes", "--list", "-z")
        if listed.returncode:
            raise UserError(f"git cannot read the settings of {self.root} (.git/config): give a fresh clone of it.")
        pairs = (entry.partition("\n") for entry in os.fsdecode(listed.stdout).split("\0") if entry)
        return {name: value for name, _, value in pairs}


def clone_around(folder: Path) -> Clone | None:
    """The clone at or around a folder; None if there is none. Raises UserError if it cannot be read."""
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        dot = place / ".git"
        if os.path.lexists(dot) and (place == folder or dot.is_file() or (dot / "HEAD").is_file()):
            return Clone(place, _directory(place))
    return None


def clone_of_directory(directory: Path) -> Clone:
    """The clone of a bare git directory. Raises UserError if it cannot be read."""
    return Clone(directory, directory.resolve())


def is_git_directory(folder: Path) -> bool:
    """Whether a folder looks like a git directory."""
    return (folder / "objects").is_dir() and (folder / "HEAD").is_file()


def _directory(root: Path) -> Path:
    """The git directory of a work tree: its folder `.git`, or the target of a file `.git` if the target names the work
    tree."""
    dot = root / ".git"
    if dot.is_dir() and not dot.is_symlink():
        return dot
    if _is_file(root, dot) and (named := re.fullmatch(r"gitdir: (.+?)\s*", _line(dot))):
        directory = (root / named[1]).resolve()
        back = directory / "gitdir"  # of a worktree
        if _is_file(root, back) and (directory / _line(back).strip()).resolve() == dot:
            return directory
        outer = next((place for place in root.parents if os.path.lexists(place / ".git")), None)  # of a submodule
        if outer is not None and directory.is_relative_to(_directory(outer).resolve() / "modules"):
            return directory
    raise UserError(
        f"{dot} leads to a git directory elsewhere that does not name this folder: run `git worktree repair` if it is "
        "a worktree, or give a clone whose .git is a folder."
    )


def _common(root: Path, directory: Path) -> Path:
    """The git directory with objects and refs; for a worktree, that of the clone which lists it."""
    file = directory / "commondir"
    if not _is_file(root, file):
        return directory
    common = (directory / _line(file).strip()).resolve()
    if directory.resolve().parent != common / "worktrees":
        raise UserError(f"{file} leads to a git directory elsewhere: give a fresh clone.")
    return common


def _line(path: Path) -> str:
    with path.open("rb") as file:
        return os.fsdecode(file.read(4096))


def _is_file(root: Path, path: Path) -> bool:
    """Whether a path is a file. Raises UserError for a link, a pipe or a device."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is not a plain file, as git writes it: give a fresh clone of {root}.")
    return True


def _check_folder(root: Path, folder: Path) -> None:
    """Raises UserError if a folder holds anything but folders and plain files, so that no entry leads elsewhere."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} is not a plain folder, as git makes it: give a fresh clone of {root}.")
    left = [str(folder)]
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    _is_file(root, Path(entry.path))


def _entries(listed: bytes, place: int) -> dict[str, tuple[str, str]]:
    """Parse the output of `ls-tree` or `ls-files`: path -> (mode, id). The id is the word number `place` before the
    path."""
    entries: dict[str, tuple[str, str]] = {}
    for entry in filter(None, listed.split(b"\0")):
        head, _, path = entry.partition(b"\t")
        words = head.decode().split()
        entries[path.decode("utf-8", "surrogateescape")] = words[0], words[place]
    return entries
