"""Hooks of a repository that run `etude live watch --once` in the background after a commit, merge, amend or rebase.

If a watcher runs already and holds the repository's lock, the hook's watcher ends at once, in silence. A hook never
delays git and never fails: its errors go to a file, which the next hook prints on stderr.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from etude.errors import UserError
from etude.live.observe.worktree import TextRepository
from etude.protocol import TOKEN_VARIABLE

HOOKS = ("post-commit", "post-merge", "post-rewrite")
_MARK = "# Written by `etude live hook install`."


def log_of(repository: TextRepository) -> Path:
    """The file with stderr of the last hook's watcher; empty after a success."""
    return repository.common / "etude-live-hook.log"


def install_hooks(repository: TextRepository, gateway: str, agents: Sequence[Path]) -> list[Path]:
    """Writes the hooks, and returns their paths. Raises UserError, with none written, if there is a foreign hook or
    core.hooksPath is set."""
    elsewhere = repository.setting("core.hooksPath")
    if elsewhere:
        raise UserError(
            f"git looks for the hooks of {repository.root} in {elsewhere} (core.hooksPath): add this "
            f"line there: {_line(repository, gateway, agents)}"
        )
    places = [repository.common / "hooks" / name for name in HOOKS]
    for place in places:
        if place.exists() and _MARK not in place.read_text(errors="replace"):
            raise UserError(f"{place} is another's hook; add this line to it: {_line(repository, gateway, agents)}")
    if places[0].parent.is_symlink():
        raise UserError(f"{places[0].parent} is a link, and git's own is a folder: make it one")
    for place in places:
        place.parent.mkdir(exist_ok=True)
        temporary = place.with_name(f".{place.name}.etude")
        temporary.unlink(missing_ok=True)  # it may be a link
        temporary.write_text(f"#!/bin/sh\n{_MARK}\n{_line(repository, gateway, agents)}\n")
        temporary.chmod(0o755)
        os.replace(temporary, place)
    return places


def remove_hooks(repository: TextRepository) -> list[Path]:
    """Removes etude's hooks, and returns their paths."""
    hooks = [repository.common / "hooks" / name for name in HOOKS]
    ours = [place for place in hooks if place.exists() and _MARK in place.read_text(errors="replace")]
    for place in ours:
        place.unlink()
    log_of(repository).unlink(missing_ok=True)
    return ours


def _line(repository: TextRepository, gateway: str, agents: Sequence[Path]) -> str:
    command = [
        sys.executable,
        "-P",  # git runs it in the work tree, whose modules are not to be imported
        "-m",
        "etude.cli.main",
        "live",
        "watch",
        str(repository.root),
        "--gateway",
        gateway,
        "--once",
    ]
    for agent in agents:
        command += ["--agent", str(agent.absolute())]
    log = shlex.quote(str(log_of(repository)))
    return (
        f'[ -n "${TOKEN_VARIABLE}" ] || echo "etude live hook: {TOKEN_VARIABLE} is not set, so the gateway is told '
        f'nothing of this" >&2; [ ! -s {log} ] || sed "s/^/etude live hook, the last time: /" {log} >&2; '
        f"{{ {shlex.join(command)} 2>{log}.$$; mv {log}.$$ {log}; }} </dev/null >/dev/null 2>&1 &"
    )
