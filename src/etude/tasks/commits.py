"""Commit reversal: the change of a commit to the sources is reversed in today's tree, and the commit's tests decide.

The difference between a commit and its parent is applied backwards by a three-way merge; only commits that reverse
cleanly, and bring no likely secret back, are used. So one repository, one set of dependencies and one suite serve all
of them.
"""

import ast
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from types import MappingProxyType

from etude.code import ByteEdit, Clone, Mutant, MutationCandidate, clone_around, lines_of, parsed_lines, secret_in
from etude.code.functions import Function, is_test
from etude.errors import UserError
from etude.grading import answer_fingerprint

MAX_COMMITS = 300  # looked at, newest first
MAX_FILES = 8
MAX_LINES = 200  # that a reversal changes
_WISH = 800  # characters of a commit's message after its first line
_CHANGES = re.compile(r"(^|/)(change|history|news|release)[\w.-]*(/[^/]*)?$", re.IGNORECASE)
_TRAILER = re.compile(
    r"^(Co-authored-by|Signed-off-by|Reviewed-by|Change-Id|git-svn-id|\(cherry picked)", re.IGNORECASE
)
_NOISE = (
    r"\s*\(#\d+\)",
    r"\s*#\d+\b",
    r"^(?:feat|fix|chore|refactor|perf|bug|bugfix)(?:\([^)]*\))?!?:\s*",
    r"^Merge (?:pull request|branch|remote-tracking|tag|commit)\b.*$",
    r"\bhttps?://\S+",
    r"(?i)^(?:issue|gh|pr|bpo)[ -]?\d+\s*[:.-]?\s*",
    r"(?i)\b(?:issue|gh|pr) ?-?\d+\b\s*",
)


# A reversed commit, the test files that the commit touched, and the functions that change.
Reversal = tuple[MutationCandidate, frozenset[str], list[str]]


def users_requests(path: Path) -> dict[str, str]:
    """The requests of users by commit, of a file with a line {"commit", "request"} each; other keys are ignored. Raises
    UserError."""
    words: dict[str, str] = {}
    try:
        for number, line in enumerate(filter(str.strip, path.read_text("utf-8").split("\n")), 1):
            row = json.loads(line)
            if not isinstance(row["commit"], str) or not str(row["request"]).strip():
                raise ValueError(f"line {number} has no commit, or an empty request")
            words[row["commit"]] = str(row["request"]).strip()
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"requests = {path}: {e}; give the file that `etude live requests` wrote") from None
    return words


def reversals(
    repository: Path,
    sources: Mapping[str, str],
    functions: Sequence[Function],
    modules: Iterable[str],
    requests: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Reversal]:
    """Reversible commits of a git clone, newest first; none for a folder without history. `modules` are the test files.
    The task of a commit in `requests` has these words of a user, in place of the commit's message. Raises UserError if
    git objects are missing."""
    clone = clone_around(repository) if (repository / ".git").exists() else None
    if clone is None or not (head := clone.id_of("HEAD")):
        return
    tested = frozenset(modules)
    listed = clone.demand("rev-list", "--first-parent", f"--max-count={MAX_COMMITS}", head, "--")
    for commit in listed.decode().split():
        reversal = _reversal(clone, commit, sources, functions, tested, requests.get(commit, ""))
        if reversal is not None:
            yield reversal


def _reversal(
    clone: Clone,
    commit: str,
    sources: Mapping[str, str],
    functions: Sequence[Function],
    modules: frozenset[str],
    wording: str,
) -> Reversal | None:
    parent = clone.id_of(f"{commit}^1")
    if not parent:  # the first commit
        return None
    raw = clone.demand("diff-tree", "-r", "--no-renames", "--raw", "--no-abbrev", "-z", parent, commit, "--")
    words = raw.decode("utf-8", "replace").split("\0")[:-1]
    entries = {path: entry.split()[2:] for entry, path in zip(words[::2], words[1::2], strict=True)}
    tests = frozenset(path for path, (_, _, status) in entries.items() if path in modules and status in "AM")
    code = sorted(p for p in entries if p.endswith(".py") and not (is_test(p) or p in modules) and p != "setup.py")
    if not tests or not 1 <= len(code) <= MAX_FILES or any(p not in sources or entries[p][2] != "M" for p in code):
        return None
    changed: dict[str, Mutant] = {}
    members: list[str] = []
    for path in code:
        before, after, _ = entries[path]
        text = _taken_back(clone, before, after, sources[path])
        if text is None:
            return None
        if text != sources[path]:
            changed[path], lines = _mutant(sources[path], text)
            inside = (f for f in functions if f.path == path)
            members += [f.id for f in inside if any(f.first_line <= line <= f.last_line for line in lines)]
    if not changed or not members or sum(m.original.count("\n") for m in changed.values()) > MAX_LINES:
        return None
    message = clone.demand("log", "-1", "--format=%s%n%n%b", commit, "--").decode("utf-8", "replace")
    request = wording or _request(message)
    answers = [answer_fingerprint(mutant.source, mutant.text) for mutant in changed.values()]
    if not request or any(answer.in_data(wording.encode()) for answer in answers):
        return None
    notes = [_body(message, request), *(_noted(clone, parent, commit, p) for p in entries if _CHANGES.search(p))]
    wish = "\n".join(note for note in notes if note and not any(answer.in_data(note.encode()) for answer in answers))
    wish = "" if wording else wish
    texts = {"": f"{request}\n{wish}", **{path: mutant.text for path, mutant in changed.items()}}
    if any(secret_in(text.encode(), path, marked=True) for path, text in texts.items()):
        return None
    where = ", ".join(changed)
    mutant = changed.pop(members[0].split("::")[0])
    text = wording or f"{request} ({where})" + (f"\n\n{wish}" if wish else "")
    program = MutationCandidate("commit", mutant, tuple(changed.items()), text, sites=len(members))
    return program, tests, members


def _taken_back(clone: Clone, before: str, after: str, now: str) -> str | None:
    """The current text `now` of a source file with the change between two blobs undone; None if later changes
    conflict."""
    blobs = clone.contents([before, after])
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for name, data in (("now", now.encode()), ("after", blobs[after]), ("before", blobs[before])):
            names.append(str(Path(folder, name)))
            Path(folder, name).write_bytes(data)
        done = clone.run("merge-file", "-p", "-q", *names)
    if done.returncode != 0:
        return None
    try:
        text = done.stdout.decode()
        ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    return text


def _mutant(source: str, text: str) -> tuple[Mutant, list[int]]:
    """The change as one edit per block of lines, and the lines of `source` that it touches."""
    old, new = parsed_lines(source), parsed_lines(text)
    offsets = [0]
    for line in old:
        offsets.append(offsets[-1] + len(line.encode()))
    blocks = [op for op in SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if op[0] != "equal"]
    edits = tuple(ByteEdit(offsets[i], offsets[j], "".join(new[k:n]).encode()) for _, i, j, k, n in reversed(blocks))
    lines = [line for _, i, j, _, _ in blocks for line in range(i + 1, max(j, i + 1) + 1)]
    first = blocks[0][3] + 1
    mutant = Mutant(
        operator="commit",
        source=source,
        edits=edits,
        original="".join("".join(old[i:j]) for _, i, j, _, _ in blocks),
        snippet="".join("".join(new[k:n]) for _, _, _, k, n in blocks),
        first_line=first,
        last_line=max(blocks[-1][4], first),
        body_line=first,
    )
    return mutant, lines


def _request(message: str) -> str:
    """The first informative line of a commit message, without prefixes and issue numbers."""
    lines = map(_without_noise, lines_of(message))
    return next((line.strip() for line in lines if len(line.split()) >= 3), "")


def _without_noise(line: str) -> str:
    for noise in _NOISE:
        line = re.sub(noise, "", line)
    return line


def _body(message: str, request: str) -> str:
    """The rest of a commit message after `request`, without signatures and references; cut to _WISH characters."""
    lines = [_without_noise(line.rstrip()) for line in lines_of(message) if not _TRAILER.match(line)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines).replace(request, "", 2)).strip()
    return text[:_WISH].strip() if len(text.split()) >= 3 else ""


def _noted(clone: Clone, parent: str, commit: str, path: str) -> str:
    """The lines that a commit added to a list of changes."""
    diff = clone.demand("diff-tree", "-p", "-U0", "--no-ext-diff", "--no-textconv", parent, commit, "--", path)
    added = [line[1:].strip() for line in lines_of(diff.decode("utf-8", "replace")) if line[:1] == "+"]
    kept = [line for line in added if len(line.split()) >= 3 and not line.startswith(("++", "==", "--"))]
    return "\n".join(re.sub(r"\s*[:(]?#\d+\)?", "", line) for line in kept)[:_WISH].strip()
