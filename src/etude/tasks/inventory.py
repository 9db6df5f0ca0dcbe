"""Lists the files of a repository that go into a dataset: the files that git tracks, as they stand in the working tree.

Agents read a dataset and users pass it on, so files that git ignores or does not track are left out, and so are
likely secrets and kinds of files that are not listed (`withheld.py`). A folder without tracked files (a release) is
taken whole otherwise. `code/git.py` lists the files: no program that a clone's settings name is run.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from etude.code import SUBMODULE, Clone, GitTree, clone_around, functions
from etude.errors import UserError
from etude.tasks import git_history
from etude.tasks.withheld import JUNK, NAME, Reasons, clashes, is_code, is_pointer, judged

_HISTORIES = (".git/", ".git", ".hg/", ".svn/")


@dataclass(frozen=True)
class Inventory:
    """`files` go into the dataset. The other fields list files that are left out, or mentioned in its card. Paths are
    posix, sorted."""

    files: tuple[str, ...]
    tracked: bool = False  # whether the list of files is git's
    untracked: tuple[str, ...] = ()  # files, and folders ("venv/"), that git does not track
    changed: tuple[str, ...] = ()  # tracked files that differ from the last commit: taken as they are
    absent: tuple[str, ...] = ()  # submodules that were not fetched
    excluded: tuple[str, ...] = ()  # by the option `exclude`
    pointers: tuple[str, ...] = ()  # files that Git LFS did not fetch; they hold an address
    links: tuple[str, ...] = ()  # symbolic links that are not followed, see `_followed`
    withheld: Reasons = field(default_factory=dict)  # path, or folder ("build/") -> why it is left out
    encoded: tuple[str, ...] = ()  # sources that are not in plain UTF-8: taken, and not broken
    clashing: tuple[str, ...] = ()  # paths that are equal but for case: taken, and one on some file systems


def take(repository: Path, exclude: Sequence[str] = ()) -> Inventory:
    """List the files of `repository` that go into a dataset. `exclude` are paths, folders or patterns (`*.pem`). Raises
    UserError if git cannot list the files, if code of the library holds a likely secret, or if a pointer of Git LFS
    stands in place of code."""
    inventory = _listed(repository, exclude)
    pointers = tuple(path for path in inventory.files if is_pointer(repository / path))
    if code := [path for path in pointers if is_code(path)]:
        raise UserError(
            f"{code[0]} of {repository} is a pointer of Git LFS, not the file: fetch it with `git lfs pull`, or leave "
            f"it out with `--exclude {code[0]!r}`."
        )
    return replace(inventory, pointers=pointers, clashing=clashes(inventory.files))


def _listed(repository: Path, exclude: Sequence[str]) -> Inventory:
    clone = clone_around(repository)
    place = repository.resolve().relative_to(clone.root).as_posix() if clone is not None else "."
    below = "" if place == "." else f"{place}/"
    staged = _staged(clone, below) if clone is not None else {}
    names, strange = _named(staged)
    if clone is None or not names:
        return _untracked(repository, exclude)
    tracked = sorted(path for path in names if not functions.is_junk(path) and _is_plain(repository, path))
    excluded = {path for path in names if excludes(path, exclude)}
    plain = [path for path in tracked if path not in excluded]
    withheld, encoded = judged(repository, plain)
    kept = [path for path in plain if path not in withheld]
    links, followed = [path for path in sorted(names) if (repository / path).is_symlink()], dict[str, list[str]]()
    for link in links:
        behind = [path for path in _followed(repository, link, kept) if not excludes(path, exclude)]
        if behind and sum(map(len, followed.values())) + len(behind) <= len(plain):
            followed[link] = behind
    behind = sorted({path for paths in followed.values() for path in paths})
    linked, _ = judged(repository, behind)
    junk = {path: JUNK for path in names if functions.is_junk(path) and path not in excluded}
    modules = [path for path in names if staged[path][0] == SUBMODULE]
    options = ("ls-files", "-z", "--others", "--directory", "--no-empty-directory")
    others = clone.demand(*options, within=repository.resolve()).split(b"\0")
    return Inventory(
        files=tuple(sorted({*kept, *behind} - linked.keys())),
        tracked=True,
        untracked=tuple(sorted(_shown(name.decode("utf-8", "surrogateescape")) for name in others if name)),
        changed=_changed(repository, clone, below, names),
        absent=tuple(sorted(modules)),
        excluded=tuple(sorted(excluded.intersection(tracked))),
        links=tuple(link for link in links if link not in followed),
        withheld=withheld | linked | junk | strange,
        encoded=encoded,
    )


def _untracked(repository: Path, exclude: Sequence[str]) -> Inventory:
    """A folder of which git tracks nothing: all of it, less caches, builds, archives and runs of etude."""
    names, strange = _named(functions.clean_files(repository))
    runs = [f"outputs/{path.parent.name}" for path in repository.glob("outputs/*/config.json")]
    excluded = {path for path in names if excludes(path, (*exclude, *runs))}
    plain = sorted({*names} - excluded)
    withheld, encoded = judged(repository, plain)
    junk = {f"{each.name}{'/' * each.is_dir()}": JUNK for each in repository.iterdir()}
    junk = {path: why for path, why in junk.items() if functions.is_junk(path.rstrip("/")) and path not in _HISTORIES}
    return Inventory(
        tuple(path for path in plain if path not in withheld),
        excluded=tuple(sorted(excluded)),
        withheld=withheld | strange | junk,
        encoded=encoded,
    )


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """(path below the folder, path) of all files, sorted."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _staged(clone: Clone, below: str) -> GitTree:
    """The git index below a folder, by paths relative to it, with the files of submodules that were fetched. Raises
    UserError."""
    entries: dict[str, tuple[str, str]] = {}
    for path, (mode, name) in clone.staged().items():
        if not path.startswith(below):
            continue
        folder = clone.root / path
        if mode != SUBMODULE or folder.resolve() != folder or not (folder / ".git").exists():
            entries[path.removeprefix(below)] = mode, name
        elif (inner := clone_around(folder)) is not None:
            entries |= {f"{path}/{one}".removeprefix(below): entry for one, entry in _staged(inner, "").items()}
    return entries


def excludes(path: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns (a path, a folder, or a shell pattern) matches a file."""
    name = PurePosixPath(path).name
    return any(
        fnmatchcase(path, p) or fnmatchcase(name, p) or path.startswith(p.removesuffix("/") + "/") for p in patterns
    )


def _changed(repository: Path, clone: Clone, below: str, names: Sequence[str]) -> tuple[str, ...]:
    """Tracked files that differ from the last commit, compared by ids of blobs: git's own comparison would run the
    conversions that attributes name."""
    head = clone.id_of("HEAD")
    tree = clone.tree(head) if head else {}
    listed = {path.removeprefix(below): entry for path, entry in tree.items() if path.startswith(below)}
    known = {path: name for path, (mode, name) in listed.items() if mode.startswith("100")}
    modules = [path for path, (mode, _) in listed.items() if mode == SUBMODULE]

    def differs(path: str) -> bool:
        file = repository / path
        of_submodule = path not in known and any(path.startswith(f"{name}/") for name in modules)
        if of_submodule or file.is_dir() or file.is_symlink():
            return False
        return not file.is_file() or git_history.object_id(file.read_bytes()) != known.get(path)

    return tuple(sorted(filter(differs, {*names, *known})))


def _named(paths: Iterable[str]) -> tuple[list[str], Reasons]:
    """The paths that are valid UTF-8, and the others as they are shown: a dataset cannot name them."""
    every = list(paths)
    valid = [path for path in every if path == _shown(path)]
    return valid, {_shown(path): NAME for path in {*every}.difference(valid)}


def _shown(path: str) -> str:
    """A path in which bytes that are not UTF-8 are written out."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _followed(repository: Path, link: str, plain: Sequence[str]) -> list[str]:
    """The paths behind a symbolic link: its own, or those below a folder. Empty if the link leads to no file of
    `plain`, which is sorted, or to a folder around itself. Empty as well for a test and for a folder with code: a
    second copy would show hidden tests, or hold all answers."""
    if functions.is_junk(link):
        return []
    try:
        target = (repository / link).resolve(strict=True).relative_to(repository.resolve()).as_posix()
    except (OSError, RuntimeError, ValueError):  # nothing, a loop, or outside
        return []
    below = plain[bisect_left(plain, target) : bisect_left(plain, f"{target}0")]  # "0" comes after "/"
    code = [path for path in below if is_code(path)]
    if target in below:
        return [] if target in code and functions.is_test(target) else [link]
    if target == "." or link.startswith(f"{target}/") or code:
        return []
    return [f"{link}{path.removeprefix(target)}" for path in below if path.startswith(f"{target}/")]


def _is_plain(repository: Path, path: str) -> bool:
    """Whether a path is a file without a link on the way to it or in its place."""
    *above, _ = PurePosixPath(path).parents
    return (repository / path).is_file() and not any((repository / part).is_symlink() for part in (path, *above))
