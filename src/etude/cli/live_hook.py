"""`etude live hook install REPO`: git tells of commits at once, also while no `etude live watch` runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live hook`."""
    parser.add_argument("what", choices=("install", "remove"), help="write the hooks, or take them away")
    parser.add_argument(
        "repository", type=Path, metavar="REPO", help="root of a git repository with .etude/consent.toml"
    )
    parser.add_argument("--gateway", metavar="URL", help="as for `etude live watch`")
    parser.add_argument("--agent", type=Path, action="append", default=[], metavar="FILE", help="likewise")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Writes or removes post-commit, post-merge and post-rewrite. Raises UserError."""
    from etude.errors import UserError
    from etude.live.observe.hooks import install_hooks, log_of, remove_hooks
    from etude.live.observe.watch import read_consent
    from etude.live.observe.worktree import TextRepository
    from etude.protocol.access import TOKEN_VARIABLE

    repository = TextRepository(arguments.repository)
    if arguments.what == "remove":
        for path in remove_hooks(repository):
            print(f"removed {path}")
        return
    read_consent(repository)
    if arguments.gateway is None:
        raise UserError("a hook sends to a gateway: give --gateway URL")
    for path in install_hooks(repository, arguments.gateway, arguments.agent):
        print(f"wrote {path}")
    print(f"git needs {TOKEN_VARIABLE} in its environment; what goes wrong is printed by the next hook, from "
          f"{log_of(repository)}")  # fmt: skip
