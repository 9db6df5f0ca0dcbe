"""Lists the files of a repository that go into a dataset: the files that git tracks, as they stand in the working tree.

Agents read a dataset and users pass it on, so files that git ignores or does not track are left out, and files that
look like secrets are refused. A folder without tracked files (a release) is taken whole. `code/git.py` lists the files:
no program that a clone's settings name is run.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from etude.code import SUBMODULE, Clone, GitTree, clone_around, functions, language_of
from etude.errors import UserError
from etude.tasks import git_history

_SHOWN = 5
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_MAX_BYTES = 4 << 20  # of a file that is searched for secrets
_SECRET_NAMES = {
    ".env": "settings that often hold passwords", ".netrc": "passwords", ".pypirc": "passwords",
    ".git-credentials": "passwords", ".htpasswd": "passwords", "id_rsa": "a private key", "id_ed25519": "a private key",
    "id_ecdsa": "a private key", "id_dsa": "a private key",
}  # fmt: skip
_EXAMPLES = ("example", "sample", "template", "dist", "defaults", "test")
_SECRET_TEXTS = (
    (rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----\s+[A-Za-z0-9+/=:]", "a private key"),
    (rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b(?<!EXAMPLE)", "a key of AWS"),
    (rb"\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_[A-Za-z0-9_]{60,}\b", "a token of GitHub"),
    (rb"\bglpat-[A-Za-z0-9_-]{20,}", "a token of GitLab"),
    (rb"\bxox[abeoprs]-[0-9]{8,}-[A-Za-z0-9-]{10,}", "a token of Slack"),
    (rb"\bAIza[0-9A-Za-z_-]{35}\b", "a key of Google"),
    (rb"\bsk-(?:proj|svcacct|ant-[a-z0-9]+)-[A-Za-z0-9_-]{40,}|\bsk-[A-Za-z0-9]{40,}\b", "a key of a model's API"),
    (rb"\b[rs]k_live_[0-9A-Za-z]{20,}", "a key of Stripe"),
    (rb"\bpypi-AgE[A-Za-z0-9_-]{50,}", "a token of PyPI"),
    (rb"\bnpm_[A-Za-z0-9]{36}\b|_authToken\s*=\s*[A-Za-z0-9+/_-]{20,}", "a token of npm"),
    (rb"\bhf_[A-Za-z0-9]{34}\b", "a token of Hugging Face"),
    (rb"\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}\b", "a key of SendGrid"),
)
_ANY = re.compile(b"|".join(b"(%s)" % pattern for pattern, _ in _SECRET_TEXTS))


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


def take(repository: Path, exclude: Sequence[str] = ()) -> Inventory:
    """List the files of `repository` that go into a dataset. `exclude` are paths, folders or patterns (`*.pem`). Raises
    UserError if git cannot list the files, if a file looks like a secret, or if a pointer of Git LFS stands in place of
    code."""
    inventory = _listed(repository, exclude)
    pointers = tuple(path for path in inventory.files if _is_pointer(repository / path))
    if code := [path for path in pointers if _is_code(path)]:
        raise UserError(
            f"{code[0]} of {repository} is a pointer of Git LFS, not the file: fetch it with `git lfs pull`, or leave "
            f"it out with `--exclude {code[0]!r}`."
        )
    inventory = replace(inventory, pointers=pointers)
    secrets = {path: kind for path in inventory.files if (kind := _kind(repository / path)) is not None}
    if not secrets:
        return inventory
    shown = shortened([f"{path} ({what})" for path, what in secrets.items()], _SHOWN)
    option = " ".join(f"'{path}'" for path in secrets)
    raise UserError(
        f"{repository} holds likely secrets, which a dataset would pass on: {shown}; "
        f"remove them, or leave these files out with `--exclude {option}`."
    )


def _listed(repository: Path, exclude: Sequence[str]) -> Inventory:
    clone = clone_around(repository)
    place = repository.resolve().relative_to(clone.root).as_posix() if clone is not None else "."
    below = "" if place == "." else f"{place}/"
    staged = _staged(clone, below) if clone is not None else {}
    names = _named(staged)
    if clone is None or not names:
        files = functions.clean_files(repository)
        runs = [f"outputs/{path.parent.name}" for path in repository.glob("outputs/*/config.json")]  # of etude
        excluded = tuple(path for path in files if excludes(path, (*exclude, *runs)))
        return Inventory(tuple(sorted({*files} - {*excluded})), excluded=excluded)
    tracked = sorted(path for path in names if not functions.is_junk(path) and _is_plain(repository, path))
    excluded = tuple(path for path in tracked if excludes(path, exclude))
    plain = [path for path in tracked if path not in excluded]
    links, followed = [path for path in sorted(names) if (repository / path).is_symlink()], dict[str, list[str]]()
    for link in links:
        behind = [path for path in _followed(repository, link, plain) if not excludes(path, exclude)]
        if behind and sum(map(len, followed.values())) + len(behind) <= len(plain):
            followed[link] = behind
    modules = [path for path in names if staged[path][0] == SUBMODULE]
    options = ("ls-files", "-z", "--others", "--directory", "--no-empty-directory")
    others = clone.demand(*options, within=repository.resolve()).split(b"\0")
    return Inventory(
        files=tuple(sorted({*plain}.union(*followed.values()))),
        tracked=True,
        untracked=tuple(sorted(_named(name.decode("utf-8", "surrogateescape") for name in others if name))),
        changed=_changed(repository, clone, below, names),
        absent=tuple(sorted(modules)),
        excluded=excluded,
        links=tuple(link for link in links if link not in followed),
    )


def shortened(names: Sequence[str], most: int) -> str:
    """Up to `most` names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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


def secret(data: bytes) -> str | None:
    """The kind of secret that a file seems to hold ("a private key"); None if it seems to hold none."""
    match = _ANY.search(data, 0, _MAX_BYTES)
    return _SECRET_TEXTS[match.lastindex - 1][1] if match and match.lastindex else None


def _kind(file: Path) -> str | None:
    """The kind of secret that a file seems to be, by its name or its content."""
    kind = _SECRET_NAMES.get(file.name)
    if kind is None and file.name.startswith(".env.") and not file.name.endswith(_EXAMPLES):
        kind = _SECRET_NAMES[".env"]
    return kind or secret(file.read_bytes())


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


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as data:
        return data.read(len(_POINTER)) == _POINTER


def _named(paths: Iterable[str]) -> list[str]:
    """Paths that are valid UTF-8, since a dataset cannot name others."""
    return [path for path in paths if path == path.encode("utf-8", "replace").decode()]


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
    code = [path for path in below if _is_code(path)]
    if target in below:
        return [] if target in code and functions.is_test(target) else [link]
    if target == "." or link.startswith(f"{target}/") or code:
        return []
    return [f"{link}{path.removeprefix(target)}" for path in below if path.startswith(f"{target}/")]


def _is_code(path: str) -> bool:
    return language_of(path) not in (None, "json", "markdown")


def _is_plain(repository: Path, path: str) -> bool:
    """Whether a path is a file without a link on the way to it or in its place."""
    *above, _ = PurePosixPath(path).parents
    return (repository / path).is_file() and not any((repository / part).is_symlink() for part in (path, *above))
