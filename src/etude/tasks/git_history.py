"""A git history for a box in which no ancestor holds the answer, written without git.

Ancestors are written anew, oldest first: with the same authors, dates and messages, but of every tree only the files
that the box has, and other versions where a version holds the answer. Nothing else of the original repository is
copied, so there is no unreachable object, stash, note or tag. `code/git.py` reads the original.
Formats: gitformat-pack(5), gitformat-index(5).
"""

import hashlib
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from etude.code import Clone, GitTree, clone_around
from etude.errors import UserError

SILENT = b"Update\n"  # in place of a message that gives the answer away
_KINDS = {"commit": 1, "tree": 2, "blob": 3}
_FILE = "100644"


@dataclass(frozen=True)
class Commit:
    """A commit. `people` are the lines of author and committer."""

    people: bytes
    message: bytes
    tree: GitTree


@dataclass(frozen=True)
class Past:
    """Commits, oldest first; the tree of the last one stands for the files that a box begins with.

    `entries` are blobs as a pack holds them, by id. `origin` is the URL of a remote, or empty.
    """

    commits: tuple[Commit, ...]
    entries: Mapping[str, bytes]
    branch: str = "main"
    origin: str = ""

    def text(self, blob: str) -> bytes:
        """Content of a blob."""
        entry = self.entries[blob]
        start = next(i for i, byte in enumerate(entry) if byte < 0x80) + 1
        return zlib.decompress(entry[start:])


Shown = Callable[[str, str], bytes | None]  # path, blob -> the content that a box may see; None: all


def read(source: Path, base: str, paths: Iterable[str], depth: int) -> Past:
    """Up to `depth` first-parent commits to `base`, with their versions of `paths`. Raises UserError if the commit
    or objects are missing."""
    wanted = set(paths)
    clone = clone_around(source)
    tip = clone.id_of(base) if clone is not None else ""
    if clone is None or not tip:
        raise UserError(f"{base!r} is no commit of {source}; name one that `git log` shows.")
    listed = clone.demand("rev-list", "--first-parent", "--reverse", f"--max-count={depth}", tip, "--")
    names = listed.decode().split()
    raw = clone.contents(names)
    commits = []
    for name in names:
        head, _, message = raw[name].partition(b"\n\n")
        people = [line for line in head.split(b"\n") if line.startswith((b"author ", b"committer "))]
        tree = {path: at for path, at in clone.tree(name).items() if at[0].startswith("100") and path in wanted}
        commits.append(Commit(b"\n".join(people) + b"\n", message, tree))
    contents = clone.contents(sorted({blob for commit in commits for _, blob in commit.tree.values()}))
    branch = (clone.output("symbolic-ref", "--short", "-q", "HEAD") or b"main").decode().strip()
    entries = {blob: _entry("blob", data) for blob, data in contents.items()}
    return Past(tuple(commits), entries, branch, _origin(clone))


def single(people: bytes, message: bytes) -> Past:
    """The past of a release: one commit."""
    return Past((Commit(people, message, {}),), {})


def folder(
    past: Past, files: Mapping[str, bytes], shown: Shown = lambda *_: None, silent: Collection[int] = ()
) -> dict[str, bytes]:
    """The files of a `.git` folder, by their paths in the box; the work tree is clean if it holds `files`.

    `shown` gives the content of versions in a box, `silent` the commits (by place) that lose their message. Empty
    commits are left out.
    """
    pack = _Pack(past.entries)
    parent, before = "", ""
    seen: dict[tuple[str, str], str] = {}  # (path, blob) -> blob in the box
    last = len(past.commits) - 1
    modes = {path: mode for path, (mode, _) in past.commits[-1].tree.items()}
    tree: GitTree = {}
    for place, commit in enumerate(past.commits):
        if place == last:
            tree = {path: (modes.get(path, _FILE), pack.add("blob", data)) for path, data in files.items()}
        else:
            for path, (_, blob) in commit.tree.items():
                if (path, blob) not in seen:
                    data = shown(path, blob)
                    seen[path, blob] = pack.keep(blob) if data is None else pack.add("blob", data)
            tree = {path: (mode, seen[path, blob]) for path, (mode, blob) in commit.tree.items()}
        root = pack.tree(tree)
        if root == before and place != last:
            continue
        head = f"tree {root}\n" + (f"parent {parent}\n" if parent else "")
        message = SILENT if place in silent else commit.message
        parent, before = pack.add("commit", head.encode() + commit.people + b"\n" + message), root
    files_of_git = _settings(past, parent) | pack.files() | {"index": _index(tree)}
    return {f".git/{name}": data for name, data in files_of_git.items()}


def object_id(data: bytes, kind: str = "blob") -> str:
    """Id that git gives to an object, such as a file with that content."""
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data).hexdigest()


def packed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files as `Past.entries` holds them."""
    return {object_id(data): _entry("blob", data) for data in files.values()}


def _origin(clone: Clone) -> str:
    """The remote's address, without a password in it; "" for a folder of this machine."""
    url = re.sub(r"^(\w+://)[^/@]*@", r"\1", clone.settings.get("remote.origin.url", "").strip())
    return url if re.match(r"(?:https?|ssh|git)://|[\w.-]+@[\w.-]+:", url) else ""


def _entry(kind: str, data: bytes) -> bytes:
    """An object as a pack holds it: kind and size, compressed content."""
    size = len(data)
    first = _KINDS[kind] << 4 | size & 15
    size >>= 4
    head = bytearray()
    while size:
        head.append(first | 0x80)
        first, size = size & 0x7F, size >> 7
    return bytes([*head, first]) + zlib.compress(data)


@dataclass
class _Pack:
    """Objects to be packed. `known` are finished entries of blobs, by id."""

    known: Mapping[str, bytes]
    objects: dict[str, bytes] = field(default_factory=dict)

    def add(self, kind: str, data: bytes) -> str:
        name = object_id(data, kind)
        if name not in self.objects:
            self.objects[name] = self.known.get(name) or _entry(kind, data)
        return name

    def keep(self, blob: str) -> str:
        self.objects[blob] = self.known[blob]
        return blob

    def tree(self, files: GitTree) -> str:
        """Id of the tree object with `files` below it."""
        below: dict[str, list[tuple[str, str, str]]] = {"": []}  # folder -> name, mode, id
        for path, (mode, blob) in files.items():
            parent, _, name = path.rpartition("/")
            below.setdefault(parent, []).append((name, mode, blob))
            while parent and parent.rpartition("/")[0] not in below:
                parent = parent.rpartition("/")[0]
                below[parent] = []
        name = ""
        for place in sorted(below, key=lambda place: -place.count("/") if place else 1):
            name = self._folder(below[place])
            if place:
                parent, _, own = place.rpartition("/")
                below[parent].append((own, "40000", name))
        return name  # of the root, which comes last

    def _folder(self, listed: Iterable[tuple[str, str, str]]) -> str:
        entries = sorted(listed, key=lambda e: e[0] + "/" * (e[1] == "40000"))
        lines = (
            f"{mode} {name}\0".encode("utf-8", "surrogateescape") + bytes.fromhex(at) for name, mode, at in entries
        )
        return self.add("tree", b"".join(lines))

    def files(self) -> dict[str, bytes]:
        """A pack and its index."""
        names = sorted(self.objects)
        pack, places = bytearray(struct.pack(">4sII", b"PACK", 2, len(names))), []
        for name in names:
            places.append(len(pack))
            pack += self.objects[name]
        pack += hashlib.sha1(pack).digest()
        ids = [bytes.fromhex(name) for name in names]
        first = Counter(name[0] for name in ids)
        fan = accumulate(first[byte] for byte in range(256))
        sums = [zlib.crc32(self.objects[name]) for name in names]
        index = b"\xfftOc" + struct.pack(">I256I", 2, *fan) + b"".join(ids)
        index += struct.pack(f">{2 * len(ids)}I", *sums, *places) + pack[-20:]
        stem = f"objects/pack/pack-{hashlib.sha1(b''.join(ids)).hexdigest()}"
        return {f"{stem}.pack": bytes(pack), f"{stem}.idx": index + hashlib.sha1(index).digest()}


def _index(tree: GitTree) -> bytes:
    """The staging area of a clean work tree; git looks at each file once to learn its dates."""
    parts = [struct.pack(">4sII", b"DIRC", 2, len(tree))]
    for path in sorted(tree, key=lambda path: path.encode("utf-8", "surrogateescape")):
        mode, blob = tree[path]
        name = path.encode("utf-8", "surrogateescape")
        entry = struct.pack(">10I", 0, 0, 0, 0, 0, 0, int(mode, 8), 0, 0, 0) + bytes.fromhex(blob)
        entry += struct.pack(">H", min(len(name), 0xFFF)) + name
        parts.append(entry + b"\0" * (8 - len(entry) % 8))
    data = b"".join(parts)
    return data + hashlib.sha1(data).digest()


def _settings(past: Past, head: str) -> dict[str, bytes]:
    """The files that `git clone` writes besides objects; those of `git init` without an origin."""
    branch, line = past.branch, past.commits[-1].people.split(b"\n")[-2].removeprefix(b"committer ").decode()
    config = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\tlogallrefupdates = true\n"
    how = "commit (initial)" if len(past.commits) == 1 else "commit"
    texts = {"HEAD": f"ref: refs/heads/{branch}\n", f"refs/heads/{branch}": f"{head}\n"}
    if past.origin:
        how = f"clone: from {past.origin}"
        config += f'[remote "origin"]\n\turl = {past.origin}\n\tfetch = +refs/heads/*:refs/remotes/origin/*\n'
        config += f'[branch "{branch}"]\n\tremote = origin\n\tmerge = refs/heads/{branch}\n'
        texts["packed-refs"] = f"# pack-refs with: peeled fully-peeled sorted \n{head} refs/remotes/origin/{branch}\n"
        texts["refs/remotes/origin/HEAD"] = f"ref: refs/remotes/origin/{branch}\n"
    log = f"{'0' * 40} {head} {line}\t{how}\n"
    texts |= {"config": config, "logs/HEAD": log, f"logs/refs/heads/{branch}": log}
    texts["description"] = "Unnamed repository; edit this file 'description' to name the repository.\n"
    texts["info/exclude"] = "# git ls-files --others --exclude-from=.git/info/exclude\n"
    return {name: text.encode() for name, text in texts.items()}
