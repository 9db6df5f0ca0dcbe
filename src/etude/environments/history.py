"""A git history for a box in which no ancestor holds the answer.

The ancestors of a base commit are written anew, oldest first: same authors, dates and messages, but of every tree only
the files that the box has, and in the place of any version that holds the answer, the version that the agent sees.
Nothing else of the original repository is copied, so there is no unreachable object, reflog, stash, note or tag.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from etude.environments.leaks import Answer
from etude.errors import UserError

SECONDS = 300.0
_QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "gc.auto=0")


def rewrite(source: Path, base: str, target: Path, files: Mapping[str, bytes], wanted: Answer, depth: int = 50) -> str:
    """Make `target`, a `.git` folder whose last commit holds exactly `files`; the id of that commit.

    `source` is the original repository, `base` a commit of it, `depth` the number of ancestors kept (the first-parent
    line). A message that holds the answer becomes "Update". Raises UserError if `base` is no commit.
    """
    listed = git(source, "rev-list", "--first-parent", "--reverse", f"--max-count={depth}", base, "--")
    if listed is None:
        raise UserError(f"{base!r} is no commit of {source}; name one that `git log` shows.")
    commits = listed.decode().split()
    stream = bytearray()
    for i, commit in enumerate(commits):
        tree = files if i + 1 == len(commits) else _tree(source, commit, files, wanted)
        stream += _commit(source, commit, tree, wanted, mark=i + 1)
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "init", "-q", "--bare", "--template=", str(target)], check=True, timeout=SECONDS)
    command = ["git", *_QUIET, "--git-dir", str(target), "fast-import", "--quiet", "--date-format=raw-permissive"]
    subprocess.run(command, input=bytes(stream), check=True, capture_output=True, timeout=SECONDS)
    for setting in (("core.bare", "false"), ("core.logAllRefUpdates", "true")):
        subprocess.run(["git", "--git-dir", str(target), "config", *setting], check=True, timeout=SECONDS)
    (target / "HEAD").write_text("ref: refs/heads/main\n")
    head = git(target, "rev-parse", "refs/heads/main")
    assert head is not None
    return head.decode().strip()


def git(repository: Path, *arguments: str) -> bytes | None:
    """Output of a plumbing command; None if it fails."""
    command = ["git", *_QUIET, "-C", str(repository), *arguments]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS)
    return done.stdout if done.returncode == 0 else None


def _tree(source: Path, commit: str, files: Mapping[str, bytes], wanted: Answer) -> dict[str, bytes]:
    """What an ancestor may show: files that the box has, in versions without the answer."""
    listing = git(source, "ls-tree", "-r", "-z", commit)
    assert listing is not None
    tree = {}
    for entry in filter(None, listing.split(b"\0")):
        head, _, name = entry.partition(b"\t")
        mode, _, blob = head.decode().split()
        path = name.decode("utf-8", "surrogateescape")
        if mode.startswith("100") and path in files:
            content = git(source, "cat-file", "blob", blob)
            assert content is not None
            tree[path] = files[path] if wanted.in_data(content) else content
    return tree


def _commit(source: Path, commit: str, tree: Mapping[str, bytes], wanted: Answer, mark: int) -> bytes:
    """One commit for `git fast-import`."""
    raw = git(source, "cat-file", "commit", commit)
    assert raw is not None
    head, _, message = raw.partition(b"\n\n")
    people = [line for line in head.split(b"\n") if line.startswith((b"author ", b"committer "))]
    if wanted.in_data(message):
        message = b"Update\n"
    lines = [b"commit refs/heads/main", b"mark :%d" % mark, *people, b"data %d\n%s" % (len(message), message)]
    if mark > 1:
        lines.append(b"from :%d" % (mark - 1))
    lines.append(b"deleteall")
    for path, content in sorted(tree.items()):
        quoted = (
            path.encode("utf-8", "surrogateescape").replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
        )
        lines.append(b'M 100644 inline "%s"\ndata %d\n%s' % (quoted, len(content), content))
    return b"\n".join(lines) + b"\n\n"
