"""`etude demo`: recipes/demo.toml with a seed. The folder of an earlier demo is kept under another name."""

from __future__ import annotations

import argparse
import shutil
from itertools import count
from pathlib import Path

from etude import runfolder
from etude.cli.overlays import configuration_text, read_toml
from etude.cli.train import OUTPUTS
from etude.config import RLConfig, bundled, validate
from etude.errors import UserError
from etude.weights import with_models


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude demo`; further words are overrides of the recipe."""
    parser.set_defaults(takes_overrides=True)
    parser.add_argument("--seed", type=int, help="of tasks, episodes and evaluation (default: 1)")
    parser.add_argument(
        "--real",
        action="store_true",
        help="a pretrained model of 135M parameters instead of nano, in two hours and a half (docs/real-model.md)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the demo of this name where it stopped")


def run(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Trains in outputs/demo below the current folder. Raises UserError or RunFailed."""
    if arguments.real:
        return _real(arguments, rest)
    recipe = bundled("recipes/demo.toml")
    if recipe is None:
        raise UserError("this installation has no recipes/demo.toml: install etude's wheel, or work in its repository")
    overrides = rest if arguments.seed is None else [*rest, "--seed", str(arguments.seed)]
    config = with_models(validate(RLConfig, read_toml(recipe, overrides), str(recipe)))
    folder = OUTPUTS / config.name
    arguments.interrupted = f"`etude train --resume {folder}` continues the run"
    if arguments.resume:
        if arguments.seed is not None or any(word.startswith("--") and word != "--name" for word in rest):
            raise UserError("a resumed run keeps its configuration; give --resume with --name alone")
        if not folder.exists():
            raise UserError(f"{folder} holds no run yet; start it without --resume")
        return _train(with_models(runfolder.load_config(folder)), folder, None)
    if folder.exists():
        with runfolder.lock(folder):
            print(f"the earlier demo was moved to {set_aside(folder)}")
    _train(config, folder, configuration_text([recipe], overrides))


def _real(arguments: argparse.Namespace, rest: list[str]) -> None:
    from etude.cli import demo_real

    arguments.interrupted = "the same command goes on from there"
    if arguments.resume:
        raise UserError("etude demo --real goes on by itself: leave --resume out")
    demo_real.run(rest if arguments.seed is None else [*rest, "--seed", str(arguments.seed)])


def _train(config: RLConfig, folder: Path, toml: str | None) -> None:
    from etude.run.launch import train_rl

    train_rl(config, folder, resume=toml is None, toml=toml)


def set_aside(folder: Path) -> Path:
    """Renames a run folder by the first free number; returns its new path."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    kept = next(name for name in names if not name.exists())
    shutil.move(folder, kept)
    return kept
