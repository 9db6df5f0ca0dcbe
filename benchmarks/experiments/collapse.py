"""The same RL run twice at a rate that is too high: without and with what guards numerics.

    python -m benchmarks.experiments.collapse FOLDER [--steps 300] [--lr 4e-4] [--figure FILE.svg]

plain      no router replay, no correction of staleness, no mask; guards watch and do not act
guarded    router replay, importance weights outside [.5, 2] zeroed, `ipo` masks, guards act

All else is recipes/demo.toml with smaller steps, and equal: model, tasks, seed, rate, staleness bound. Prints one JSON
object: per arm the pass rate in training over the last 50 steps, and what the guards did.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.experiments.figure import Panel, smoothed, svg
from etude.config import RLConfig
from etude.dashboard.view import RunView, load_view
from etude.run import launch

ROOT = Path(__file__).parents[2]
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"guards": {"act": False}},
    "guarded": {
        "guards": {"act": True, "halt_after": 100},
        "trainer": {"router_replay": True},
        "loss": {"correction": "band", "cap_low": 0.5, "cap_high": 2.0, "masks": ["ipo"]},
    },
}
LAST = 50


def config(arm: str, steps: int, lr: float, dataset: Path | None) -> RLConfig:
    values = tomllib.loads((ROOT / "recipes" / "demo.toml").read_text())
    common: dict[str, dict[str, Any]] = {
        "model": {"path": str(ROOT / "models" / "nano")},
        "tasks": {"dataset": str(dataset)} if dataset else {},
        "rollout": {"prompts": 2, "group": 8, "staleness": 4, "max_in_flight": "auto", "turns": 6, "tokens": 256},
        "trainer": {"steps": steps, "minutes": None, "lr": lr, "decay": 0.0},
        "inference": {"max_batch": 32},
        "eval": {"before": False, "after": False},
        "loss": {},
        "guards": {},
    }
    library = values["tasks"].pop("sources")[0]  # the other one is for training alone
    values["tasks"] |= {} if dataset else library
    merged = {name: values.get(name, {}) | changed | ARMS[arm].get(name, {}) for name, changed in common.items()}
    return RLConfig.model_validate(values | merged | {"name": f"collapse-{arm}"})


def figures(view: RunView) -> dict[str, Any]:
    rates = [p.value for p in view.series("rollout/pass_rate")]
    return {
        "steps": len(rates),
        "first": round(mean(rates[:LAST]), 3),
        "last": round(mean(rates[-LAST:]), 3),
        "entropy": round(mean(p.value for p in view.series("entropy/mean")[-LAST:]), 3),
        "actions": Counter(int(step["guard/action"]) for step in view.steps),
        "events": Counter(event["guard"] for step in view.steps for event in step.get("guard/events", ())),
    }


def draw(views: dict[str, RunView]) -> str:
    def curves(name: str, reach: int = 15) -> dict[str, list[tuple[float, float]]]:
        return {arm: smoothed([(p.step, p.value) for p in view.series(name)], reach) for arm, view in views.items()}

    return svg(
        [
            Panel("Pass rate of the episodes trained on, mean of 15 steps", curves("rollout/pass_rate")),
            Panel("Reward, mean of 15 steps", curves("reward/all/mean")),
            Panel("Entropy, nats", curves("entropy/mean")),
            Panel("Trainer against engine, same version, k2", curves("mismatch/k2"), log=True),
            Panel("The same with staleness, k2", curves("off_policy/k2"), log=True),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the run folders go")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--dataset", type=Path, help="tasks that were built before; default: those of the demo")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    dataset = options.dataset
    views: dict[str, RunView] = {}
    for arm in ARMS:
        folder = options.folder / arm
        launch.train_rl(config(arm, options.steps, options.lr, dataset), folder, resume=folder.exists(), toml=None)
        dataset = dataset or folder / "tasks"
        views[arm] = load_view(folder)
    print(json.dumps({"lr": options.lr, **{arm: figures(view) for arm, view in views.items()}}))
    if options.figure:
        options.figure.write_text(draw(views))


if __name__ == "__main__":
    main()
