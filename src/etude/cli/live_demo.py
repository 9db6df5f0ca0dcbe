"""`etude live demo`: simulated users teach the nano model through the live loop, on two CPU cores."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from etude.cli.demo import set_aside
from etude.errors import UserError

_FOLDER = Path("outputs/live-demo")


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live demo`."""
    parser.add_argument("--seed", type=int, default=1, help="of users, requests and the planted version (default: 1)")
    parser.add_argument("--windows", type=int, default=3, metavar="N", help="windows to learn from (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Writes outputs/live-demo/report.md; 1 if no version was released, or the planted one was. Raises UserError or
    RunFailed."""
    if not 1 <= arguments.windows <= 100:
        raise UserError(f"--windows {arguments.windows}: give a number from 1 to 100")
    if importlib.util.find_spec("openai") is None:
        raise UserError("the users of the demo ask with OpenAI's client library: pip install openai")
    from etude.live.simulate.demo import as_json, report
    from etude.live.simulate.demo import run as run_demo

    folder = _FOLDER.absolute()
    if folder.exists():
        print(f"the earlier demo was moved to {set_aside(folder)}")
    folder.mkdir(parents=True, mode=0o700)
    arguments.interrupted = f"what it did lies in {folder}"
    done = run_demo(folder, arguments.seed, arguments.windows, lambda text: print(text, flush=True))
    text = report(done)
    (folder / "report.md").write_text(text, "utf-8")
    print(f"\n{text}\n{folder}/report.md")
    if arguments.json:
        print(json.dumps(as_json(done)))
    return int(not (done.released and done.planted_stopped))
