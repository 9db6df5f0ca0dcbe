"""`etude live serve CONFIG`: the gateway that users' clients talk to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from etude.cli.live import read_config
from etude.config.live import LiveConfig
from etude.errors import UserError
from etude.protocol.access import access_of, add_access_flags


def add(serve: argparse.ArgumentParser) -> None:
    """Flags of `etude live serve`."""
    serve.add_argument("config", type=Path, help="TOML configuration of the live loop (docs/live.md)")
    serve.add_argument("--ready-file", type=Path, help="file that is written, with URL and pid, once it answers")
    add_access_flags(serve.add_argument_group("access", "of the operator: /health and /metrics (docs/serving.md)"))


def _missing(config: LiveConfig) -> dict[str, str]:
    """Weight stores without a version, and why; none of them is made."""
    from etude.store import open_store
    from etude.weights.manifest import newest

    found: dict[str, str] = {}
    stores = {s for c in config.clusters for s in (c.store, c.canary_store, c.holdback_store) if s != "none"}
    for store in sorted(stores):
        if "://" not in store and not Path(store).is_dir():
            found[store] = "is not there"
            continue
        try:
            if newest(open_store(store)) is None:
                found[store] = "holds no version"
        except (UserError, ValueError) as e:
            found[store] = f"cannot be read ({e})"
    return found


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Serves until interrupted. Raises UserError."""
    config = read_config(arguments.config)
    arguments.host = config.gateway.host
    access = access_of(arguments)
    from etude.live.gateway.gateway import serve

    for store, why in _missing(config).items():
        print(f"etude live serve: the weight store {store} {why}: answers go on, but nothing can be released to it",
              file=sys.stderr, flush=True)  # fmt: skip
    serve(config, access, arguments.ready_file)
