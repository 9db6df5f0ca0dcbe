"""Plays the episodes of a run again and prints the differences, for `etude doctor replay`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from etude.audit.replay import replay_run


def show_replay(run: Path, names: Sequence[str], *, as_json: bool) -> int:
    """Print how many episodes are token-exact, and where the others differ first; exit code 0 if all are exact."""
    replays = replay_run(run, names)
    exact = sum(not r.difference for r in replays)
    if as_json:
        print(json.dumps({"episodes": len(replays), "exact": exact, "replayed": [asdict(r) for r in replays]}))
    else:
        for r in replays:
            if r.difference:
                print(f"{r.episode}: {r.difference}")
        turns, tokens = sum(r.turns for r in replays), sum(r.tokens for r in replays)
        segments, forked = sum(r.segments for r in replays), sum(r.forked for r in replays)
        print(
            f"{exact} of {len(replays)} episodes are token-exact ({turns:,} turns, {tokens:,} tokens, "
            f"{segments:,} segments; {forked} forked)"
        )
    return 0 if exact == len(replays) else 1
