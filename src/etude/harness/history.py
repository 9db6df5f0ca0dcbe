"""The commits that led to the tree in a box, asked of git inside the box: its configuration is the agent's to change.

What may be seen is decided where the history is made (`sandbox/history.py`): nothing after the base commit is in
it, and no version that holds the answer.
"""

import re
import shlex
from collections.abc import Awaitable, Callable

from etude.renderers.text import ToolError
from etude.sandbox.base import WORKSPACE, ExecResult

MOST = 20  # commits
SECONDS = 10.0
_GIT = "GIT_OPTIONAL_LOCKS=0 git --no-pager -c core.fsmonitor=false -c core.quotePath=false -c safe.directory='*'"
_COMMIT = re.compile(r"[0-9a-f]{4,40}")

Exec = Callable[[str, float], Awaitable[ExecResult]]


async def history(execute: Exec, query: str, path: str, author: str, commit: str) -> str:
    """Commits whose message has `query`, that touch `path`, by `author`; or all of one commit. Raises ToolError."""
    if commit and not _COMMIT.fullmatch(commit):
        raise ToolError("give a commit as this tool names it")
    chosen = [f"--author={author}"] if author else []
    chosen += ["--regexp-ignore-case", "--fixed-strings", f"--grep={query}"] if query else []
    if commit:
        what, chosen = "show --no-ext-diff --no-textconv --date=short --stat --patch", [commit]
    else:
        what = f"log -{MOST} --date=short --format='%h %ad %an: %s'"
    words = " ".join(map(shlex.quote, [*chosen, "--", *([path] if path else [])]))
    done = await execute(f"( cd {WORKSPACE} && {{ [ -e .git ] || exit 77; {_GIT} {what} {words}; }} )", SECONDS)
    if done.rc == 77:
        raise ToolError("this repository has no history")
    if done.rc != 0:
        raise ToolError(f"git says: {done.output[-200:].strip()}")
    return done.output.strip() or "no commits"
