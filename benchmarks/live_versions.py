"""Whether versions that learn from simulated users stay good: `make live-versions`, hours, and can be resumed.

    python -m benchmarks.live_versions [--model nano] [--windows 10] [--seed 1] [--json]
    python -m benchmarks.live_versions --model smollm2 --windows 2

The demo of docs/live.md with many windows, in outputs/live-versions-MODEL; the same command goes on after a stop. For
smollm2 it first makes the model that its users ask (recipes/smollm2-live.toml): `etude tasks traces`, requests of
users of three other libraries with the right answers, and `etude train`. Code 1 unless, of the last release against
the first,

    preference    the share of held-out answers that keep the house rule rose by 15 points, its interval above 0
    correctness   the pass rate on the gate's frozen suite fell by no more than the margin that the suite defends
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from etude import runfolder
from etude.cli.overlays import read_toml
from etude.code import fetch_library
from etude.config import RLConfig, validate
from etude.errors import RunFailed, UserError
from etude.live.simulate import figures
from etude.live.simulate.clients import CONDITION, FunctionRequest, answered, requests
from etude.live.simulate.demo import run
from etude.live.simulate.figures import LiveDemo
from etude.live.simulate.sizes import SIZES, SMOLLM2
from etude.live.simulate.users import properties_of

POINTS = 0.15  # that the preference has to rise by
OUTPUTS = Path("outputs")
_TRACES, _SFT = "recipes/smollm2-traces.toml", "recipes/smollm2-live.toml"
_TOOLS = ("read", "grep", "edit", "undo", "test", "finish")  # of recipes/live-train-smollm2.toml


def main(argv: Sequence[str] | None = None) -> int:
    """Prints report and verdict; 2 for what a user can fix, 3 for a run that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_versions", description=__doc__)
    parser.add_argument("--model", choices=sorted(SIZES), default="nano", help="default: nano")
    parser.add_argument("--windows", type=int, help="default: 10; 2 of smollm2")
    parser.add_argument("--seed", type=int, help="default: 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    try:
        folder = (OUTPUTS / f"live-versions-{arguments.model}").absolute()
        done = begun(folder, arguments.model, arguments.windows, arguments.seed)
        if arguments.model == SMOLLM2.model.name:
            make_model(_say)
        done = run(folder, done, _say)
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    except RunFailed as e:
        print(f"{e}\nThe same command goes on.", file=sys.stderr)
        return 3
    print(figures.report(done))
    faults = verdict(done)
    print("\n".join(faults) or "Preference rose, and correctness was kept.")
    if arguments.json:
        print(json.dumps({**figures.as_json(done), "faults": faults}))
    return int(bool(faults))


def _say(text: str) -> None:
    print(text, flush=True)


def begun(folder: Path, model: str, windows: int | None, seed: int | None) -> LiveDemo:
    """The figures so far, in a folder that is made if it is missing. Raises UserError for other numbers than those of
    the earlier part."""
    if folder.exists():
        done = figures.load(folder)
        if windows not in (None, done.wanted) or seed not in (None, done.seed):
            has = f"{done.wanted} windows of seed {done.seed}"
            raise UserError(f"{folder} holds {has}: give these numbers, or move it away for others")
        return done
    done = LiveDemo(model, 1 if seed is None else seed, windows or (2 if model == SMOLLM2.model.name else 10))
    runfolder.make(folder.parent)
    folder.mkdir(mode=0o700)
    figures.keep(folder, done)
    return done


def verdict(done: LiveDemo) -> list[str]:
    """What is missing from the promise, a sentence each."""
    faults: list[str] = []
    rise, suite = done.rise("house"), done.suite
    if rise.mean < POINTS or rise.low <= 0:
        faults.append(
            f"The preference rose by {100 * rise.mean:+.1f} points [{100 * rise.low:+.1f}, {100 * rise.high:+.1f}]: "
            f"less than {100 * POINTS:.0f}, or not shown."
        )
    if suite is None:
        faults.append("No version that learned was released.")
    elif suite.difference < -suite.margin:
        faults.append(f"Correctness fell below the margin: {figures.suite_sentence(suite)}.")
    return faults


# The model of smollm2's users -----------------------------------------------------------------------------------------


def make_model(say: Callable[[str], None]) -> None:
    """Makes outputs/smollm2-live, step by step, and skips what is there. Raises RunFailed."""
    traces, rows, tuned = (
        OUTPUTS / name for name in ("smollm2-traces.jsonl", "smollm2-requests.jsonl", "smollm2-live")
    )
    if not rows.exists():
        chosen = balanced([request for library in _libraries() for request in requests(library, 1, 0.0)[0]])
        runfolder.write(rows, "".join(json.dumps(answered(request)) + "\n" for request in chosen).encode())
        say(f"{len(chosen)} requests with answers in {rows}")
    if not traces.exists():
        _etude("tasks", "traces", _TRACES, "-o", str(traces), "--per-task", "4", "--tools", *_TOOLS)
    if not (tuned / "checkpoint").exists():
        _etude("train", _SFT, *(["--resume"] if tuned.exists() else []))


def _libraries() -> list[Path]:
    """The libraries of the traces: none of them is that of the users."""
    config = validate(RLConfig, read_toml(Path(_TRACES)), _TRACES)
    out: list[Path] = []
    for source in config.tasks.sources:
        name, _, version = source.repository.partition("==")
        out.append(fetch_library(name, version, source.sha256 or "", OUTPUTS / "libraries"))
    return out


def balanced(requests_N: Sequence[FunctionRequest]) -> list[FunctionRequest]:
    """Of requests whose right answer keeps the house rule as many as of others: then the rule is there to be learned
    from users."""
    rule_N = [bool(properties_of(r.source, r.right, house=CONDITION, generic=r"(?!)", lines=2)[0]) for r in requests_N]
    rng = np.random.default_rng(1)
    halves = [[r for r, own in zip(requests_N, rule_N, strict=True) if own == wanted] for wanted in (False, True)]
    size = min(map(len, halves))
    chosen = [half[int(n)] for half in halves for n in rng.permutation(len(half))[:size]]
    return [chosen[int(n)] for n in rng.permutation(len(chosen))]


def _etude(*words: str) -> None:
    _say(f"etude {' '.join(words)}")
    result = subprocess.run([sys.executable, "-m", "etude.cli.main", *words], check=False)
    if result.returncode:
        raise RunFailed(f"`etude {' '.join(words)}` ended with {result.returncode}")


if __name__ == "__main__":
    sys.exit(main())
