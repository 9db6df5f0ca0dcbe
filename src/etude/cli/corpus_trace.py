"""`etude corpus trace`: the documents in the rows of a training step, with their tokens."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.errors import UserError


def add_to(actions: Any) -> None:
    """Adds the action and its arguments."""
    what = "say which documents a step of midtrain or sft on [data] was trained on"
    parser = actions.add_parser("trace", help=what, description=what, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="run folder")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="optimizer step, counted from 1")
    parser.add_argument("--json", action="store_true", help="a JSON object for each piece of a row")


def trace(arguments: argparse.Namespace) -> None:
    """Prints the pieces of the step's rows. Raises UserError if the run has no such step."""
    from etude.trainer.finetune import provenance

    if arguments.step < 1:
        raise UserError(f"--step {arguments.step}: steps are counted from 1")
    for piece in provenance.trace(arguments.folder, arguments.step):
        if arguments.json:
            print(json.dumps(asdict(piece)))
            continue
        place = f"{piece.file}:{piece.line}" if piece.line else piece.file
        tokens = f"tokens {piece.first} to {piece.first + piece.count - 1}"
        print(f"row {piece.row}: {tokens} of {piece.id} ({place}{', ' + piece.source if piece.source else ''})")
