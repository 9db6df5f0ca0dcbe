"""`etude live expire CONFIG`: contents older than their tenants keep them are deleted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from etude.cli.live_privacy import add_config as add
from etude.cli.live_privacy import opened

__all__ = ["add", "run"]


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Prints how many. Raises UserError."""
    from etude.live.log.privacy import expire

    with opened(arguments.config) as (engine, store, _, _):
        print(f"{expire(engine, store)} contents were older than their tenants keep them, and are deleted")
