"""Pull requests of a clone as turns of an agent: the request, then search, read and edit, with the run's own tools.

    clone, archive of the forge -> pull requests -> trees before and after -> calls -> results of the tools -> a row

The order of a pull request's changes is not recorded, nor how its author found the places: the calls are chosen here,
and end with exactly the tree of the pull request. Results are the tools' own, on the files of the commit before.
Commands and tests are not run. With review comments in the archive, the comments on a commit are a message of the user
behind the edits up to that commit.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain
from pathlib import Path
from typing import Any, cast

import blake3

from etude.code import Clone, language_of, lines_of
from etude.corpus import edit_between
from etude.errors import UserError
from etude.harness import FullTools
from etude.records import Task, ToolCall
from etude.renderers import Tool, printable
from etude.sandbox import BoxError, ExecResult, NotFound, NotRegular, TestReport

REQUEST_SYSTEM = (
    "You are a coding agent. You work in a repository with the tools you are given; paths are relative to its root. "
    "Find the places that the request is about, change the code with `edit`, and call `finish` when you are done."
)
PULL_REQUEST_TOOLS = ("list", "read", "grep", "search", "edit", "finish")
_MAX_FILES, _MAX_HUNKS, _MAX_LINES = 8, 16, 240  # of a pull request
_MAX_PAIRS = 1 << 19  # of equal lines, where two files differ: comparing them takes as many steps, or some times more
_MAX_FILE = 1 << 18  # bytes of a changed file; larger files of a tree are not in it
_MAX_TEXT = 4000  # characters of a request or of a review
_LINES = 20  # around a hunk, in a read
_NUMBER = re.compile(r"(?:\(#|[Pp]ull [Rr]equest #|[Mm]erge request \S*!|\(!)([0-9]{1,18})\b")
_MERGE = re.compile(r"Merge (?:pull request|branch|remote-tracking branch|tag) ")
_TRAILER = re.compile(r"(?i)^(?:signed-off-by|co-authored-by|reviewed-by|change-id|see merge request)\b.*$", re.M)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")
_HEADER = re.compile(
    r"\s*(?:export\s+)?(?:async\s+)?(?:def|class|func|function|fn|interface|struct)\s+(?:\([^)]*\)\s*)?(\w+)"
)


@dataclass(frozen=True)
class Review:
    """Comments on one commit of a pull request."""

    commit: str
    text: str


@dataclass(frozen=True)
class PullRequest:
    """A pull request, or a commit without one, whose tree was `base` before and is `head` after. `number` is 0 for a
    commit; `reviews` are in order of time, each of a commit between."""

    number: int
    title: str
    body: str
    base: str
    head: str
    date: str
    reviews: tuple[Review, ...] = ()


# Reading --------------------------------------------------------------------------------------------------------------


def read_pull_requests(clone: Clone, archive: Path | None = None, *, commits: bool = True) -> list[PullRequest]:
    """The pull requests on the first-parent line of HEAD, oldest first; with `commits`, other commits, too. `archive`
    is a folder of the forge's REST answers (JSON or JSON lines: pulls, comments, reviews). Raises UserError."""
    pulls, reviews = _archive(archive) if archive is not None else ({}, {})
    # A message holds any byte but NUL.
    log = clone.demand("log", "-z", "--first-parent", "--reverse", "--format=%H%x00%P%x00%cI%x00%B")
    fields = log.decode(errors="replace").split("\0")
    requests: list[PullRequest] = []
    for head, parents, date, message in zip(*(fields[at::4] for at in range(4)), strict=False):
        number = int(match[1]) if (match := _NUMBER.search(message)) else 0
        pull = pulls.get(head) or pulls.get(str(number)) or {}
        number = _number_of(pull) or number
        title, body = _texts(message)
        if pull:
            title, body = str(pull.get("title") or title), str(pull.get("body") or pull.get("description") or body)
        title, body = printable(title), printable(body)
        if not parents or not title or not (number or commits):
            continue
        base = parents.split()[0]
        requests.append(PullRequest(number, title, body[:_MAX_TEXT], base, head, date[:10], reviews.get(number, ())))
    return requests


def _texts(message: str) -> tuple[str, str]:
    """Title and body of a commit's message; those of the pull request, if it is that of a merge."""
    lines = lines_of(_TRAILER.sub("", message).strip())
    if lines and _MERGE.match(lines[0]):
        lines = lines_of("\n".join(lines[1:]).strip())
    title = re.sub(r"\s*\([#!]\d+\)\s*$", "", lines[0]).strip() if lines else ""
    return title, "\n".join(lines[1:]).strip()


def _archive(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[int, tuple[Review, ...]]]:
    """Pull requests by number and by commit, and reviews by number, from REST answers of GitHub, Gitea or GitLab."""
    pulls: dict[str, dict[str, Any]] = {}
    comments: dict[int, list[tuple[str, str, str]]] = defaultdict(list)
    files = (
        sorted(file for kind in ("*.json", "*.jsonl") for file in folder.rglob(kind) if file.is_file())
        if folder.is_dir()
        else []
    )
    if not files:
        raise UserError(f"{folder} is no folder with the forge's answers: save its pulls, comments and reviews as JSON")
    for entry in chain.from_iterable(map(_objects, files)):
        if "merge_commit_sha" in entry:
            names = [entry["merge_commit_sha"], entry.get("squash_commit_sha"), str(_number_of(entry))]
            pulls |= {name: entry for name in names if isinstance(name, str) and name != "0"}
        elif entry.get("body") and (number := _number_in(str(entry.get("pull_request_url")).rpartition("/")[2])):
            commit = str(entry.get("original_commit_id") or entry.get("commit_id") or "")
            where = f"{entry['path']}: " if entry.get("path") else ""
            at = str(entry.get("created_at") or entry.get("submitted_at") or "")
            comments[number].append((at, commit, printable(f"{where}{entry['body']}")))
    reviews: dict[int, tuple[Review, ...]] = {}
    for number, rows in comments.items():
        by_commit: dict[str, list[str]] = {}
        for _, commit, text in sorted(rows):
            by_commit.setdefault(commit, []).append(text)
        reviews[number] = tuple(Review(commit, "\n".join(texts)[:_MAX_TEXT]) for commit, texts in by_commit.items())
    return pulls, reviews


def _number_of(pull: Mapping[str, Any]) -> int:
    """The number of a pull request; 0 without one."""
    return _number_in(str(pull.get("number") or pull.get("iid")))


def _number_in(text: str) -> int:
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else 0


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    try:
        text = file.read_text("utf-8")
        values = map(json.loads, filter(str.strip, text.split("\n"))) if file.suffix == ".jsonl" else [json.loads(text)]
        for value in values:
            entries = cast(list[Any], value) if isinstance(value, list) else [value]
            yield from (entry for entry in entries if isinstance(entry, dict))
    except OSError as e:
        raise UserError(f"{file} cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is not JSON ({e}): save the forge's answer as it came") from None


# Trees ----------------------------------------------------------------------------------------------------------------


class _Trees:
    """Files of commits. The contents of the last tree are kept: the next one differs in a few."""

    def __init__(self, clone: Clone) -> None:
        self._clone = clone
        self._contents: dict[str, bytes | None] = {}  # None: too large

    def files(self, commit: str) -> dict[str, bytes]:
        """Regular files of a commit up to a size, without those that git names by bytes that are not UTF-8."""
        tree = {path: blob for path, (mode, blob) in self._clone.tree(commit).items() if mode[:3] == "100"}
        missing = [blob for blob in tree.values() if blob not in self._contents]
        known = self._contents | self._clone.contents(missing, longest=_MAX_FILE)
        self._contents = {blob: known.get(blob) for blob in tree.values()}
        return {path: data for path, blob in tree.items() if (data := self._contents[blob]) is not None}


class TreeBox:
    """The box of an agent that runs nothing: files in memory, by path."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self._paths: list[str] = []  # sorted, as far as they are known

    async def read(self, path: str, max_bytes: int = 65536) -> bytes:
        """See `sandbox.Box`."""
        if path not in self.files:
            raise NotFound(path)
        return self.files[path]

    async def write(self, path: str, data: bytes) -> None:
        """See `sandbox.Box`."""
        self.files[path] = data

    async def list(self, path: str) -> list[str]:
        """See `sandbox.Box`."""
        if path in self.files:
            raise NotRegular(path)
        prefix = f"{path.strip('/')}/" if path.strip("/.") else ""
        if len(self._paths) != len(self.files):
            self._paths = sorted(self.files)
        names: list[str] = []
        at = bisect_left(self._paths, prefix)
        while at < len(self._paths) and self._paths[at].startswith(prefix):
            name, slash, _ = self._paths[at][len(prefix) :].partition("/")
            names.append(name + slash)
            # The files below a folder are passed over: "0" is the sign behind "/".
            at = bisect_left(self._paths, f"{prefix}{name}0", at) if slash else at + 1
        if prefix and not names:
            raise NotFound(path)
        return sorted(names)

    async def delete(self, path: str) -> None:
        """See `sandbox.Box`."""
        self.files.pop(path, None)
        self._paths = []

    async def exec(self, line: str, timeout: float) -> ExecResult:
        """Raises BoxError: nothing runs here."""
        raise BoxError("no command runs here")

    async def interrupt(self) -> None:
        """See `sandbox.Box`."""

    async def run_tests(self, tests: Sequence[str], timeout: float) -> TestReport:
        """Raises BoxError: nothing runs here."""
        raise BoxError("no test runs here")

    async def changes(self, roots: Sequence[str] = ()) -> dict[str, bytes | None]:
        """None: the tree has no image."""
        return {}

    def requests(self) -> None:
        """None: there is no way out."""

    async def close(self) -> None:
        """See `sandbox.Box`."""


# Turns ----------------------------------------------------------------------------------------------------------------


class _Untold(Exception):
    """A pull request makes no row, for a reason."""


def pull_request_rows(
    clone: Clone, requests: Iterable[PullRequest], left_out: Counter[str], *, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A row for each pull request that can be told: {"messages", "tools", "id", "origin"}. `left_out` counts the others
    by reason. The rows of a commit do not depend on the other commits."""
    trees = _Trees(clone)
    for request in requests:
        try:
            messages, tools = asyncio.run(_tell(trees, clone, request, seed))
        except _Untold as e:
            left_out[str(e)] += 1
            continue
        name = blake3.blake3(f"{request.head}/{seed}".encode()).hexdigest(length=16)
        origin = {"revision": request.head, "pull_request": request.number, "date": request.date}
        yield {"messages": messages, "tools": tools, "id": name, "origin": origin}


async def _tell(
    trees: _Trees, clone: Clone, request: PullRequest, seed: int
) -> tuple[list[dict[str, Any]], list[Tool]]:
    after = trees.files(request.head)
    stages = [
        (trees.files(review.commit), review.text)
        for review in request.reviews
        if review.commit and review.commit != request.head and clone.id_of(f"{review.commit}^{{commit}}")
    ]
    before = trees.files(request.base)
    _check(before, after)
    box = TreeBox(before)
    name = blake3.blake3(request.head.encode()).hexdigest(length=8)
    text = f"{request.title}\n\n{request.body}".strip()
    talk = _RequestTurns(FullTools(box, Task(id=name, prompt=text), names=PULL_REQUEST_TOOLS), text)
    rng = random.Random(f"{seed}/{request.head}")
    for tree, review in stages:
        _check(box.files, tree)
        await talk.change(box, tree, rng)
        talk.messages.append({"role": "user", "content": review})
        talk.request = review
    await talk.change(box, after, rng)
    if box.files != after:
        raise _Untold("its edits do not give its tree")
    await talk.act(("finish", {}))
    return talk.messages[:-1], list(talk.tools.schemas)


def _check(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    """Raises _Untold for a change that edits cannot tell, or that is too large."""
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    if before.keys() - after.keys():
        raise _Untold("it deletes or moves files")
    if not any(language_of(path) for path in changed):
        raise _Untold("it changes no source files")
    if len(changed) > _MAX_FILES:
        raise _Untold(f"it changes more than {_MAX_FILES} files")
    for path in changed:
        for data in (before.get(path, b""), after[path]):
            if b"\0" in data or b"\r" in data:
                raise _Untold("it changes binary files, or files with carriage returns")
            try:
                data.decode()
            except UnicodeDecodeError:
                raise _Untold("it changes files that are not UTF-8") from None


class _RequestTurns:
    """A conversation in progress."""

    def __init__(self, tools: FullTools, text: str) -> None:
        self.tools, self.request = tools, text
        self.tools.grep_seconds = math.inf  # the results of a name's search depend on nothing but the files
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": REQUEST_SYSTEM},
            {"role": "user", "content": text},
        ]

    async def act(self, *calls: tuple[str, dict[str, Any]]) -> list[str]:
        """A turn of calls, and their results."""
        results, _ = await self.tools.call_all([ToolCall(name=name, arguments=values) for name, values in calls])
        ids = [f"call_{len(self.messages)}_{number}" for number in range(len(calls))]
        made = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
            for id, (name, values) in zip(ids, calls, strict=True)
        ]
        self.messages.append({"role": "assistant", "content": "", "tool_calls": made})
        self.messages += [
            {"role": "tool", "tool_call_id": id, "content": text} for id, text in zip(ids, results, strict=True)
        ]
        return results

    async def change(self, box: TreeBox, after: Mapping[str, bytes], rng: random.Random) -> None:
        """The turns that make the tree `after` of the box's. Raises _Untold."""
        changed = sorted(path for path in after if box.files.get(path) != after[path])
        changed.sort(key=lambda path: "test" in path.lower())  # the tests last, otherwise by name
        hunks, looked = 0, False
        for path in changed:
            target = after[path].decode()
            if path not in box.files:
                if target.count("\n") > _MAX_LINES:
                    raise _Untold(f"it adds files of more than {_MAX_LINES} lines")
                await self._edit(path, "", target)
                continue
            if not looked:
                await self._look(path, box.files[path].decode(), target)
                looked = True
            await self._read(path, box.files[path].decode(), target, rng)
            while (text := box.files[path].decode()) != target:
                hunks += 1
                if hunks > _MAX_HUNKS:
                    raise _Untold(f"it has more than {_MAX_HUNKS} hunks")
                try:
                    edit = edit_between(text, _first_hunk(text, target), most=_MAX_LINES)
                except ValueError:
                    raise _Untold(f"it has hunks of more than {_MAX_LINES} lines") from None
                await self._edit(path, edit.old, edit.new)

    async def _edit(self, path: str, old: str, new: str) -> None:
        (result,) = await self.act(("edit", {"path": path, "old": old, "new": new}))
        if result != "ok":
            raise _Untold("the tool refuses one of its edits")

    async def _look(self, path: str, text: str, target: str) -> None:
        """The search that leads to a file: by a name of the request that stands in it, by the function that changes, or
        by the request's words."""
        names = [name for name in _NAME.findall(self.request) if "_" in name or name[1:] != name[1:].lower()]
        name = next((name for name in names if re.search(rf"\b{name}\b", text)), None) or _header(text, target)
        if name is not None:
            (result,) = await self.act(("grep", {"pattern": rf"\b{name}\b"}))
            if path in result:
                return
            del self.messages[-2:]
        await self.act(("search", {"question": lines_of(self.request)[0][:200]}))

    async def _read(self, path: str, text: str, target: str, rng: random.Random) -> None:
        first, last = _span(text, target)
        offset = max(1, first - rng.randint(_LINES // 4, _LINES))
        await self.act(("read", {"path": path, "offset": offset, "limit": last - offset + _LINES}))


def _blocks(text: str, target: str) -> list[tuple[int, int, int, int]]:
    """Lines [i, j) of `text` that lines [k, n) of `target` replace. Raises _Untold where that takes too long."""
    a, b = lines_of(text, ends=True), lines_of(target, ends=True)
    most = min(len(a), len(b))
    head = next((i for i in range(most) if a[i] != b[i]), most)
    tail = next((i for i in range(most - head) if a[-1 - i] != b[-1 - i]), most - head)
    a, b = a[head : len(a) - tail], b[head : len(b) - tail]
    counts = Counter(b)
    if sum(map(counts.__getitem__, a)) > _MAX_PAIRS:
        raise _Untold("its files have too many equal lines to compare")
    codes = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return [(i + head, j + head, k + head, n + head) for kind, i, j, k, n in codes if kind != "equal"]


def _first_hunk(text: str, target: str) -> str:
    """The text with the first of its differences from `target` made."""
    i, j, k, n = _blocks(text, target)[0]
    lines, new = lines_of(text, ends=True), lines_of(target, ends=True)
    return "".join([*lines[:i], *new[k:n], *lines[j:]])


def _span(text: str, target: str) -> tuple[int, int]:
    """First and last line of `text` that change, from 1."""
    blocks = _blocks(text, target)
    return blocks[0][0] + 1, max(blocks[-1][1], blocks[-1][0] + 1)


def _header(text: str, target: str) -> str | None:
    """The name of the function or class above the first difference."""
    lines = lines_of(text)[: _span(text, target)[0]]
    return next((match[1] for line in reversed(lines) if (match := _HEADER.match(line))), None)
