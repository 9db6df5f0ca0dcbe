"""The result of a run, for machines (`report.json`) and for people (`report.html`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from etude.dashboard.page import render
from etude.dashboard.view import RunView, load_view
from etude.evals.stats import Estimate
from etude.evals.suite import EvalResult, compare
from etude.ledger.flagged import FlaggedEpisode, ImpossibleCounts
from etude.records import Population, Record
from etude.rollout.drift import Shift


class Utilisation(Record):
    """Share of the training time that the process computed, 0 to 1."""

    trainer: float
    engine: float


class MismatchSummary(Record):
    """Trainer against engine log-probabilities: means of k2 and k3, and the largest difference. Null: not measured."""

    k2: float | None
    k3: float | None
    max_abs: float | None


class Cheating(Record):
    """What the detectors found in the training episodes; names are those of sandbox/cheats."""

    flags: dict[str, int]  # episodes by flag
    charged: int  # episodes with at least one charge
    rewarded: int  # of them, with a reward above zero; never any
    suspects: tuple[FlaggedEpisode, ...]  # the last of them
    twins: ImpossibleCounts
    twins_bound: float | None  # share of cheats that the twins leave possible at 95 %; null if some were passed
    shifts: tuple[Shift, ...]


class RunReport(Record):
    """`report.json`. Shares are 0 to 1, times in seconds; what was not measured is null or empty."""

    seed: int
    seconds: float
    pass_before: float | None  # pass@1 on the held-out tasks
    pass_after: float | None
    paired_diff: Estimate | None  # after minus before, 95 %, clustered by function
    steps: int
    episodes: dict[str, int]  # training episodes by outcome
    versions: int
    bytes_published: int
    utilisation: Utilisation
    mismatch: MismatchSummary
    checks: dict[str, bool]  # at least ledger_conserved, weights_digest_served, tokens_prefix_property

    name: str = ""
    model: str = ""
    dataset: str = ""
    hardware: str = ""
    trained: Population | None = None  # episodes of the groups that were trained on
    generated: Population | None = None  # all episodes that ended
    stages: dict[str, float] = msgspec.field(default_factory=dict)  # seconds by stage
    weights_bytes: int = 0  # of one whole version
    pauses: dict[int, float] = msgspec.field(default_factory=dict)  # ms that engines stood still, by version seen live
    cheating: Cheating | None = None
    pass_before_interval: Estimate | None = None
    pass_after_interval: Estimate | None = None
    pass_k_before: dict[int, float] = msgspec.field(default_factory=dict)
    pass_k_after: dict[int, float] = msgspec.field(default_factory=dict)
    behaviour_before: dict[str, float] = msgspec.field(default_factory=dict)  # means per held-out episode
    behaviour_after: dict[str, float] = msgspec.field(default_factory=dict)
    outcomes_before: dict[str, int] = msgspec.field(default_factory=dict)  # held-out episodes by outcome
    outcomes_after: dict[str, int] = msgspec.field(default_factory=dict)
    heldout_tasks: int = 0
    heldout_functions: int = 0
    samples_per_task: int = 0
    tasks_better: int = 0
    tasks_worse: int = 0


def held_out(before: EvalResult | None, after: EvalResult | None) -> dict[str, Any]:
    """The fields of `RunReport` that the two evaluations decide; either may have been left out."""
    fields: dict[str, Any] = {"pass_before": None, "pass_after": None, "paired_diff": None}
    for when, result in (("before", before), ("after", after)):
        if result is not None:
            fields |= {
                f"pass_{when}": result.pass_1.mean,
                f"pass_{when}_interval": result.pass_1,
                f"pass_k_{when}": result.pass_k,
                f"behaviour_{when}": result.behaviour,
                f"outcomes_{when}": result.outcomes,
                "heldout_tasks": len(result.tasks),
                "heldout_functions": len({task.function for task in result.tasks}),
                "samples_per_task": result.samples,
            }
    if before is not None and after is not None:
        comparison = compare(before, after)
        fields |= {
            "paired_diff": comparison.difference,
            "tasks_better": comparison.better,
            "tasks_worse": comparison.worse,
        }
    return fields


def write_report(run_dir: Path, report: RunReport | dict[str, Any], view: RunView | None = None) -> Path:
    """Write `report.json` and `report.html` into the run folder; return the path of the page.

    `report` may be a dictionary with the fields of `RunReport`. Without `view` the page shows what the folder holds,
    but no episodes. Raises ValueError if a field is missing or has the wrong type.
    """
    if isinstance(report, dict):
        report = _convert(report)
    page = render(report, view if view is not None else load_view(run_dir))
    (run_dir / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def read_report(run_dir: Path) -> RunReport:
    """The report of a run folder. Raises FileNotFoundError if there is none yet, ValueError if it is not one."""
    try:
        return msgspec.json.decode((run_dir / "report.json").read_bytes(), type=RunReport)
    except msgspec.MsgspecError as e:
        raise ValueError(f"{run_dir / 'report.json'} is not a report: {e}") from None


def _convert(fields: dict[str, Any]) -> RunReport:
    unknown = sorted(set(fields) - set(RunReport.__struct_fields__))
    if unknown:
        raise ValueError(f"a report has no field {unknown[0]}")
    try:
        return msgspec.convert(msgspec.to_builtins(fields), RunReport)
    except msgspec.MsgspecError as e:
        raise ValueError(f"not a report: {e}") from None
