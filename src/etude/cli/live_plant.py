"""`etude live plant CONFIG`: strings that no version may know."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from etude.cli.live_privacy import add_config, opened


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live plant`."""
    add_config(parser)
    parser.add_argument("--count", type=int, default=3, help="strings to make (default: 3)")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Prints the strings. Raises UserError."""
    from etude.live.log.privacy import plant

    with opened(arguments.config) as (_, _, _, folder):
        strings = plant(folder, arguments.count)
    print("Let a test account with consent send these sentences through the gateway, e.g. in a file that its agent "
          "reads. The gate asks every version to complete them:\n")  # fmt: skip
    for string in strings:
        print(string.text)
