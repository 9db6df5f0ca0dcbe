"""The git history of a dataset's repository, and the part of it that each task's box may see.

DIR/history.msgpack holds the last commits of the repository that the dataset was built from, cut to the files that the
agent sees. Each box gets a `.git` folder of its own, made from this file (`tasks/git_history.py`):

- a file that the task breaks: each earlier version shows the same damage if the damaged lines occur in it word for
  word, and else is replaced by the agent's version;
- files of tests: only today's version is shown;
- other files: a version that holds the answer, or defines the broken function, is replaced by today's;
- a commit that brought the answer loses its message, and a commit that becomes empty is left out.

A release has no history. It gets the history that an import makes: one commit, with the author and date of the release.
"""

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.parser import Parser
from functools import cached_property
from itertools import pairwise, takewhile
from operator import eq
from pathlib import Path

import msgspec

from etude.code import GitTree, functions, lines_of, secret_in
from etude.errors import UserError
from etude.grading import LEAK_SHARE, answer_runs
from etude.records import CodeTask
from etude.tasks import git_history, inventory
from etude.tasks.git_history import Commit, Files, Past
from etude.tasks.leaks import answers_of

FILE = "history.msgpack"
DEPTH = 20  # commits, as continuous integration and hosted agents clone
CONTEXT = 3  # lines around a change that an earlier version must hold as well
CACHED = 64  # tasks whose .git is kept in memory
_Holders = dict[str, set[str]]  # blob -> tasks
_DEFINED = re.compile(rb"\b(?:def|class|function)\s+(\w+)")


class Secrets(msgspec.Struct, frozen=True):
    """The parts of the history that a task's box must not show: versions (path, blob), and messages by the index of
    their commit. For a broken file these are the versions that cannot be shown with the same damage."""

    versions: tuple[tuple[str, str], ...] = ()
    messages: tuple[int, ...] = ()


class _Stored(msgspec.Struct, frozen=True):
    """The stored history. `trees` hold the differences from the tree before: path -> [mode, blob], or nothing for a
    deleted file."""

    people: tuple[bytes, ...]
    messages: tuple[bytes, ...]
    trees: tuple[dict[str, tuple[str, str] | None], ...]
    entries: dict[str, bytes]
    branch: str
    origin: str
    secrets: dict[str, Secrets]


@dataclass(eq=False)
class Histories:
    """The histories for the boxes of one dataset; the files of the repository are read once."""

    past: Past
    secrets: Mapping[str, Secrets]
    repository: Path
    _made: OrderedDict[str, dict[str, bytes]] = field(default_factory=OrderedDict)

    @cached_property
    def _files(self) -> dict[str, bytes]:
        return _files(self.repository)

    @cached_property
    def _whole(self) -> Past:
        """The history with the files of the repository, so that these are compressed once."""
        return replace(self.past, entries=git_history.packed(self._files) | dict(self.past.entries))

    def of(self, task: CodeTask) -> dict[str, bytes]:
        """The `.git` folder of a task's box: path -> content."""
        if task.id not in self._made:
            self._made[task.id] = self._make(task)
        self._made.move_to_end(task.id)
        while len(self._made) > CACHED:
            self._made.popitem(last=False)
        return self._made[task.id]

    def _make(self, task: CodeTask) -> dict[str, bytes]:
        secrets = self.secrets.get(task.id, Secrets())
        versions = set(secrets.versions)
        files = self._files | {path: text.encode() for path, text in task.changes.items()}
        breaks = _damages(task)

        def shown(path: str, blob: str) -> bytes | None:
            if (path, blob) in versions:
                return files[path]
            return breaks[path].done_to(self._whole.text(blob)) if path in breaks else None

        return git_history.folder(self._whole, files, shown, secrets.messages)


@dataclass(frozen=True)
class Damage:
    """The way in which a task breaks a file: the lines from the first to the last that differ, and some around them."""

    right: str
    wrong: str

    @staticmethod
    def of(solution: str, broken: str) -> "Damage":
        """The damage between the original text and the broken text of the agent."""
        old, new = lines_of(solution, ends=True), lines_of(broken, ends=True)
        head = sum(takewhile(bool, map(eq, old, new)))  # lines that are equal at the beginning, and at the end
        tail = sum(takewhile(bool, map(eq, reversed(old[head:]), reversed(new[head:]))))
        head, tail = max(0, head - CONTEXT), max(0, tail - CONTEXT)
        return Damage("".join(old[head : len(old) - tail]), "".join(new[head : len(new) - tail]))

    def done_to(self, version: bytes) -> bytes | None:
        """An earlier version with the same damage; None unless the damaged lines occur in it exactly once, word for
        word."""
        right = self.right.encode()
        place = version.find(right)
        if place < 0 or version.find(right, place + 1) >= 0 or (place and version[place - 1] != ord("\n")):
            return None
        return version[:place] + self.wrong.encode() + version[place + len(right) :]


def _damages(task: CodeTask) -> dict[str, Damage]:
    return {path: Damage.of(task.solution[path], text) for path, text in task.changes.items()}


def read(source: Path, name: str, paths: Iterable[str]) -> Past:
    """Read the last commits of `source`, restricted to `paths`; for a release, the one commit that imports it. Raises
    UserError if `source` has a history that cannot be read."""
    if (source / ".git").exists():
        return git_history.read(source, "HEAD", paths, DEPTH)
    return git_history.single(*_imported(source, name))


def build(past: Past, repository: Path, tests: Collection[str], tasks: Sequence[CodeTask], out: Path) -> int:
    """Write `out`/history.msgpack for `tasks` of the repository whose history is `past`, and whose test files are
    `tests`. Returns the number of commits."""
    present = _files(repository)
    past = _without_credentials(_without_tests(past, present, tests), present)
    secrets = _secrets(past, tasks, present)
    changes = [
        {path: None for path in before if path not in tree}
        | {path: at for path, at in tree.items() if before.get(path) != at}
        for before, tree in pairwise([{}, *(commit.tree for commit in past.commits)])
    ]
    stored = _Stored(
        people=tuple(commit.people for commit in past.commits),
        messages=tuple(commit.message for commit in past.commits),
        trees=tuple(changes),
        entries=dict(past.entries),
        branch=past.branch,
        origin=past.origin,
        secrets=secrets,
    )
    (out / FILE).write_bytes(msgspec.msgpack.encode(stored))
    return len(past.commits)


def _files(repository: Path) -> dict[str, bytes]:
    return {path: file.read_bytes() for path, file in inventory.files_below(repository) if not file.is_symlink()}


def _without_tests(past: Past, present: Files, tests: Collection[str]) -> Past:
    """The history of the files that are `present`, with only today's version of each test file, since earlier versions
    may hold tests that are hidden now."""
    own = frozenset(tests)
    today = {p: data for p, data in present.items() if functions.is_test(p) or p in own}
    commits = _with_versions(past, present, lambda path, _: path in today)
    kept = {blob for commit in commits for _, blob in commit.tree.values()}
    entries = git_history.packed(today) | dict(past.entries)
    return replace(past, commits=commits, entries={blob: entry for blob, entry in entries.items() if blob in kept})


def _without_credentials(past: Past, present: Files) -> Past:
    """The history without versions and messages that look like secrets where today's files do not; today's version
    replaces them."""
    places = {blob: path for commit in past.commits for path, (_, blob) in commit.tree.items()}
    bad = {blob for blob in past.entries if secret_in(past.text(blob), places.get(blob, ""), marked=True)}
    commits = tuple(
        replace(commit, message=git_history.SILENT) if secret_in(commit.message) else commit
        for commit in _with_versions(past, present, lambda _, blob: blob in bad)
    )
    entries = {**past.entries, **(git_history.packed(present) if bad else {})}
    return replace(past, commits=commits, entries={b: entry for b, entry in entries.items() if b not in bad})


def _with_versions(past: Past, present: Files, replaced: Callable[[str, str], bool]) -> tuple[Commit, ...]:
    """The commits, cut to the files that are `present`, with today's version in place of those (path, blob) that are
    `replaced`."""
    now = {path: git_history.object_id(data) for path, data in present.items()}
    return tuple(
        replace(
            commit,
            tree={
                path: (mode, now[path] if replaced(path, blob) else blob)
                for path, (mode, blob) in commit.tree.items()
                if path in present
            },
        )
        for commit in past.commits
    )


def load(root: Path, repository: Path) -> Histories | None:
    """Load the histories of a dataset; None if it has none. Raises UserError if the file cannot be read."""
    path = root / FILE
    if not path.is_file():
        return None
    try:
        stored = msgspec.msgpack.decode(path.read_bytes(), type=_Stored)
    except msgspec.MsgspecError as e:
        raise UserError(f"{path} cannot be read ({e}); build the dataset again.") from None
    commits, tree = [], {}
    for people, message, changed in zip(stored.people, stored.messages, stored.trees, strict=True):
        tree = {path: at for path, at in {**tree, **changed}.items() if at is not None}
        commits.append(Commit(people, message, tree))
    return Histories(Past(tuple(commits), stored.entries, stored.branch, stored.origin), stored.secrets, repository)


def _secrets(past: Past, tasks: Sequence[CodeTask], present: Files) -> dict[str, Secrets]:
    """The secrets of every task, found in one pass over all versions."""
    holders, twice = _holders(past, tasks)
    named: dict[bytes, list[str]] = defaultdict(list)
    for task in tasks:
        named[re.split(r"[.:]", task.function)[-1].encode()].append(task.id)
    defined = {path: set(_DEFINED.findall(data)) for path, data in present.items()}
    versions = {(path, blob) for commit in past.commits for path, (_, blob) in commit.tree.items()}
    telling: dict[str, set[tuple[str, str]]] = defaultdict(set)  # task -> versions
    for path, blob in versions:
        gone = set(_DEFINED.findall(past.text(blob))) - defined[path]
        for task in holders[blob].union(*(named[name] for name in gone if name in named)):
            telling[task].add((path, blob))
    secrets = {}
    for task in tasks:
        breaks = _damages(task)
        hidden = {(path, blob) for path, blob in telling[task.id] if path not in breaks}
        hidden |= {
            (path, blob)
            for path, blob in versions
            if path in breaks and (task.id in twice[blob] or breaks[path].done_to(past.text(blob)) is None)
        }
        secrets[task.id] = Secrets(tuple(sorted(hidden)), tuple(_telling(past, task, holders)))
    return secrets


def _telling(past: Past, task: CodeTask, holders: _Holders) -> Iterator[int]:
    """The indices of commits that brought the answer, or name it in their messages."""
    answers = answers_of(task)
    before: GitTree = {}
    for place, commit in enumerate(past.commits):
        pairs = [(commit.tree.get(path), before.get(path)) for path in task.changes]
        brought = any(
            now and task.id in holders[now[1]] and not (old and task.id in holders[old[1]]) for now, old in pairs
        )
        if (place and brought) or any(answer.in_data(commit.message) for answer in answers):
            yield place
        before = commit.tree


def _holders(past: Past, tasks: Sequence[CodeTask]) -> tuple[_Holders, _Holders]:
    """Blob -> the tasks whose answer it holds, as `AnswerFingerprint.in_data` decides, and blob -> those whose answer
    it holds twice."""
    answers = [(task.id, answer) for task in tasks for answer in answers_of(task)]
    table: dict[tuple[str, ...], list[int]] = defaultdict(list)
    constants: dict[bytes, list[int]] = defaultdict(list)
    for number, (_, answer) in enumerate(answers):
        for shingle in answer.shingles:
            table[shingle].append(number)
        for constant in answer.constants:
            constants[constant].append(number)
    once, twice = _Holders(), _Holders()
    for blob in past.entries:
        data = past.text(blob)
        seen = Counter({constant: data.count(constant) for constant in constants})
        runs: Counter[tuple[str, ...]] = Counter()
        if b"\0" not in data[:4096]:
            runs.update(run for run in answer_runs(data.decode("utf-8", "replace")) if run in table)
        for times, holding in enumerate((once, twice), 1):
            hits = {n for constant, count in seen.items() if count >= times for n in constants[constant]}
            counts = Counter(n for run, count in runs.items() if count >= times for n in table[run])
            hits |= {n for n, count in counts.items() if count >= LEAK_SHARE * len(answers[n][1].shingles)}
            holding[blob] = {answers[n][0] for n in hits}
    return once, twice


def _imported(source: Path, name: str) -> tuple[bytes, bytes]:
    """(lines of author and committer, message) of the commit that imports a release."""
    info = source / "PKG-INFO"
    about = Parser().parsestr(info.read_text("utf-8", "replace")) if info.is_file() else {}
    project = name.rpartition("-")[0] or name
    author = re.sub(r"[<>\n]", "", str(about.get("Author") or project))
    mail = re.search(r"[\w.+-]+@[\w.-]+", str(about.get("Author-email") or ""))
    newest = max((path.stat().st_mtime for path in source.rglob("*") if path.is_file()), default=0.0)
    who = f"{author} <{mail[0] if mail else project}> {int(newest)} +0000"
    return f"author {who}\ncommitter {who}\n".encode(), f"Import {name}\n".encode()
