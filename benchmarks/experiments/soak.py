"""What a long run shows of memory, groups and reward: `python -m benchmarks.experiments.soak outputs/long FIGURE.svg`.

Reads the folder of a finished run (recipes/long.toml), prints one JSON object, and draws the figure of docs/async.md.

growth/PROCESS     resident bytes in the last tenth of the steps / at the middle of the run, medians, less one
groups             admitted, trained on once, and whether the ledger's conservation holds against the manifests
reward             mean reward of the steps of each quarter
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.experiments.figure import Panel, smoothed, svg
from etude import runfolder
from etude.dashboard.view import Point, load_view
from etude.ledger.ledger import Ledger
from etude.store import open_store
from etude.weights.manifest import manifests

GB = 1e9


def growth(points: Sequence[Point]) -> float:
    """Over the second half: in the first, remembered verdicts and the allocators' arenas fill up."""
    last = points[-1].step
    early = [p.value for p in points if 0.5 * last <= p.step < 0.6 * last]
    late = [p.value for p in points if p.step >= 0.9 * last]
    return median(late) / median(early) - 1


def report(run: Path) -> dict[str, object]:
    view = load_view(run)
    published = manifests(open_store(f"{run}/weights"))
    ledger = Ledger.open(f"sqlite:///{run}/ledger.db")
    conservation = ledger.conservation(published)
    trained, generated = ledger.represented()
    ledger.close()
    times = Counter(group for manifest in published for group in manifest.groups)
    rewards = [p.value for p in view.series("reward/all/mean")]
    quarter = len(rewards) // 4
    return {
        "steps": len(view.steps),
        "hours": (view.steps[-1]["time"] - view.steps[0]["time"]) / 3600,
        "growth": {name: round(growth(points), 4) for name, points in view.held().items()},
        "groups": {"trained": len(times), "twice": sum(n > 1 for n in times.values()), "conserved": conservation.ok},
        "episodes": {"trained": trained.episodes, "ended": generated.episodes},
        "reward": [round(mean(rewards[i * quarter : (i + 1) * quarter]), 3) for i in range(4)],
        "guards": Counter(event["guard"] for step in view.steps for event in step.get("guard/events", ())),
        "longest_wait": max(step["time/wait_for_batch"] for step in view.steps[1:]),
    }


def draw(run: Path) -> str:
    view = load_view(run)

    def curve(name: str, reach: int = 50) -> list[tuple[float, float]]:
        return smoothed([(p.step, p.value) for p in view.series(name)], reach)

    held = {name: [(float(p.step), p.value / GB) for p in points] for name, points in view.held().items()}
    return svg(
        [
            Panel("Pass rate of the episodes trained on, mean of 50 steps", {"pass rate": curve("rollout/pass_rate")}),
            Panel("Reward, mean of 50 steps", {"reward": curve("reward/all/mean")}),
            Panel("Staleness, versions", {"mean": curve("off_policy/mean", 1), "largest": curve("off_policy/max", 1)}),
            Panel(
                "Trainer against engine, k2",
                {"same version": curve("mismatch/k2"), "all": curve("off_policy/k2")},
                log=True,
            ),
            Panel("Resident memory, GB", held),
        ]
    )


def main() -> None:
    run, figure = Path(sys.argv[1]), Path(sys.argv[2])
    config = runfolder.load_config(run)
    print(json.dumps({"run": config.name, **report(run)}))
    figure.write_text(draw(run))


if __name__ == "__main__":
    main()
