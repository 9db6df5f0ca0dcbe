"""`etude demo --real`: a pretrained model of 135M parameters learns a library, in steps that are commands of their own.

    tasks traces   gold answers of tasks of other libraries, as calls of the agent's tools
    train          fine-tuning on these traces
    train          RL on the library, measured before and after
    eval           the pretrained model itself, on the same held-out tasks

A step whose output exists is skipped, so the same command goes on after a stop. Another library (`--tasks.repository
NAME==VERSION --tasks.sha256 DIGEST --name NAME`) shares the outputs of the first two steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from etude import runfolder
from etude.cli.overlays import read_toml
from etude.cli.train import OUTPUTS
from etude.config import RLConfig, bundled, validate
from etude.dashboard import duration
from etude.errors import RunFailed, UserError, last_line
from etude.evals import EvalResult, compare
from etude.trainer.finetune.config import SftConfig

TRACES, SFT, RL = (f"recipes/smollm2-{name}.toml" for name in ("traces", "sft", "rl"))


@dataclass(frozen=True)
class Step:
    """A command of etude, and the path that exists when it has ended."""

    what: str
    words: tuple[str, ...]
    made: Path


def run(overrides: list[str]) -> None:
    """Runs the missing steps, and prints the rate after each stage of training. `overrides` are of
    recipes/smollm2-rl.toml. Raises UserError or RunFailed."""
    config = validate(RLConfig, read_toml(_recipe(RL), overrides), RL)
    folder = OUTPUTS / config.name
    steps = _steps(config, folder, overrides)
    for number, step in enumerate(steps, 1):
        if step.made.exists():
            print(f"{number} of {len(steps)}, {step.what}: done before ({step.made})")
            continue
        print(f"{number} of {len(steps)}, {step.what}: etude {' '.join(step.words)}", flush=True)
        begun = time.monotonic()
        _run(step)
        print(f"{number} of {len(steps)}, {step.what}: {duration(time.monotonic() - begun)}", flush=True)
    print("\n".join(_ladder(folder, steps[-1].made)))


def _steps(config: RLConfig, folder: Path, overrides: list[str]) -> list[Step]:
    sft = validate(SftConfig, read_toml(_recipe(SFT)), SFT)
    traces, tuned = Path(sft.data.files[0]) if sft.data else Path(), OUTPUTS / sft.name
    rollout, base = config.rollout, folder / "eval-base.json"
    tell = ("tasks", "traces", _recipe(TRACES), "-o", traces, "--per-task", 4, "--tools", *rollout.tools)
    learn = ("train", _recipe(RL), *overrides, *_resume(folder))  # --resume refuses overrides that the run lacks
    measure = (
        "eval",
        read_toml(_recipe(SFT))["model"]["path"],  # its name: the folder may not have been made yet
        "--chat-template",
        sft.model.chat_template,
        "--suite",
        folder,
        "--seed",
        config.seed,
        "--samples",
        config.eval.samples,
        "--turns",
        rollout.turns,
        "--tokens",
        rollout.tokens,
        "--context",
        rollout.context,
        "--dtype",
        config.inference.dtype,
        "--threads",
        2,
        "--tools",
        *rollout.tools,
        "-o",
        folder / "base",
        "--json",
    )
    return [
        Step("told answers", tuple(map(str, tell)), traces),
        Step("fine-tuning", ("train", str(_recipe(SFT)), *_resume(tuned)), tuned / "checkpoint"),
        Step("RL", tuple(map(str, learn)), folder / "report.html"),
        Step("the pretrained model", tuple(map(str, measure)), base),
    ]


def _resume(folder: Path) -> tuple[str, ...]:
    return ("--resume",) if folder.exists() else ()


def _recipe(path: str) -> Path:
    recipe = bundled(path)
    if recipe is None:
        raise UserError(f"this installation has no {path}: install etude's wheel, or work in its repository")
    return recipe


def _run(step: Step) -> None:
    """Runs the command of a step. Raises UserError if the command refuses its input, RunFailed if it fails."""
    command = [sys.executable, "-m", "etude.cli.main", *step.words]
    result = subprocess.run(command, check=False, stdout=subprocess.PIPE if "--json" in step.words else None, text=True)
    if result.returncode == 2:
        raise UserError(f"{step.what} could not begin; its reason is above. The same command goes on from there")
    if result.returncode:
        raise RunFailed(f"{step.what} ended with {result.returncode}; the same command goes on from there")
    if result.stdout:
        (measured,) = json.loads(last_line(result.stdout))["results"]
        runfolder.write(step.made, json.dumps(measured).encode())


def _ladder(folder: Path, base: Path) -> Iterable[str]:
    """A line for each model: its rate, and its paired difference from the best model before it."""
    paths = {"pretrained": base, "fine-tuned": folder / "eval-before.json", "after RL": folder / "eval-after.json"}
    results = {
        name: msgspec.json.decode(path.read_bytes(), type=EvalResult, strict=False) for name, path in paths.items()
    }
    best: EvalResult | None = None
    for name, result in results.items():
        difference = compare(best, result).difference if best is not None else None
        kept = difference is None or difference.low > 0
        judged = "" if difference is None else f", {difference.points} {'' if kept else 'not '}above the best before it"
        yield f"{name:12} {result.pass_1.percent}{judged}"
        best = result if kept else best
    tasks = next(iter(results.values())).tasks
    yield f"{len(tasks)} held-out tasks of {len({task.function for task in tasks})} functions; {folder / 'report.html'}"
