"""The figures of the demo: kept in its folder as they are measured, and shown in its report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from etude import runfolder
from etude.errors import UserError
from etude.evals import Estimate, mean_difference
from etude.live.simulate.sizes import SIZES, DemoSizes

FILE = "demo.json"


@dataclass(frozen=True)
class HeldoutScore:
    """For each held-out request, the shares of answers that keep the house rule, and that are right."""

    house: list[float]
    right: list[float]


@dataclass(frozen=True)
class UsedWindow:
    """The turns of a window. `turns`: all turns of users before its cut; `utility`: the mean of those since the cut
    before, None without an answer."""

    turns: int
    utility: float | None


@dataclass(frozen=True)
class ReleaseOutcome:
    """The end of a release, and its time (seconds that the demo had run). `utility`: mean of the release's answers to
    users, None without any; `reasons`: the canary's, of each stage; `lift`: its last sentence on the share of kept
    edits."""

    release: int
    planted: bool
    released: bool
    reasons: tuple[str, ...]
    utility: float | None
    seconds: float
    lift: str = ""


@dataclass(frozen=True)
class SuiteChange:
    """The change of the pass rate on the gate's frozen suite, from the first release to the last that learned.
    `margin`: the loss that the suite can tell from none, as the gate prints it."""

    tasks: int
    functions: int
    difference: float
    margin: float


@dataclass
class LiveDemo:
    """The figures of the demo of `model`. `scores` are of the first release and of each later release to all accounts,
    `windows` by their numbers, scores and outcomes by those of the releases. A field is written again with the same
    value after a kill, so nothing is there twice."""

    model: str
    seed: int
    wanted: int  # windows
    functions: list[str] = field(default_factory=list[str])  # of the held-out requests
    windows: dict[int, UsedWindow] = field(default_factory=dict[int, UsedWindow])
    scores: dict[int, HeldoutScore] = field(default_factory=dict[int, HeldoutScore])
    outcomes: dict[int, ReleaseOutcome] = field(default_factory=dict[int, ReleaseOutcome])
    refused: list[str] = field(default_factory=list[str])  # by the gate, with its reasons
    suite: SuiteChange | None = None
    turns: int = 0
    failed: int = 0  # requests
    lost: int = 0  # signals
    seconds: float = 0.0

    @property
    def sizes(self) -> DemoSizes:
        """The sizes of the demo's model."""
        return SIZES[self.model]

    def rise(self, figure: str) -> Estimate:
        """The rise of a field of HeldoutScore from the first release to the last, with a bootstrap over functions."""
        scores = _in_order(self.scores)
        first, last = getattr(scores[0], figure), getattr(scores[-1], figure)
        return mean_difference(first, last, self.functions)

    @property
    def planted_stopped(self) -> bool:
        """Whether a planted version was tried, and none was released."""
        planted = [outcome for outcome in self.outcomes.values() if outcome.planted]
        return bool(planted) and not any(outcome.released for outcome in planted)

    @property
    def released(self) -> bool:
        """Whether a version that learned from users was released to all accounts."""
        return any(outcome.released and not outcome.planted for outcome in self.outcomes.values())


def keep(folder: Path, done: LiveDemo) -> None:
    """Writes the figures to the disk, as a whole. Raises UserError."""
    runfolder.write(folder / FILE, msgspec.json.encode(done) + b"\n", runfolder.PRIVATE)


def load(folder: Path) -> LiveDemo:
    """The figures of an earlier demo, which can go on. Raises UserError for a folder in which none can."""
    path = folder / FILE
    if not path.is_file():
        what = "no demo yet" if not folder.exists() else f"no demo that can go on (no {FILE})"
        raise UserError(f"{folder} holds {what}: start one without --resume")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} cannot be read: give yourself the right to")
    try:
        done = msgspec.json.decode(path.read_bytes(), type=LiveDemo)
    except (msgspec.DecodeError, ValueError) as e:
        raise UserError(f"{path} is damaged ({e}): start a demo without --resume") from None
    lengths = {len(values) for score in done.scores.values() for values in (score.house, score.right)}
    if done.seed < 0 or done.wanted < 1 or lengths - {len(done.functions)}:
        raise UserError(f"{path} is damaged (its numbers do not fit together): start a demo without --resume")
    if done.model not in SIZES:
        raise UserError(f"{path} is of the model {done.model!r}, which is not known: start without --resume")
    return done


def _in_order(numbered: dict[int, Any]) -> list[Any]:
    return [numbered[number] for number in sorted(numbered)]


# Report ---------------------------------------------------------------------------------------------------------------


def report(done: LiveDemo) -> str:
    """The figures of the demo as Markdown."""
    house, right = done.rise("house"), done.rise("right")
    utilities = ", ".join(f"{shown(window.utility)}" for window in _in_order(done.windows))
    lines = [
        "# Live loop",
        "",
        f"{done.turns:,} turns of {done.sizes.accounts} simulated users in {done.seconds / 60:.1f} minutes; "
        f"{done.failed} requests failed, {done.lost} signals were lost.",
        "",
        "| | before | after | change |",
        "|---|---|---|---|",
        _row("held-out answers that keep the house rule", done, "house", house),
        _row("held-out answers that are right", done, "right", right),
        "",
        f"{len(set(done.functions))} held-out functions, {len(done.functions)} requests, {done.sizes.samples} answers "
        "each; intervals are bootstraps over functions.",
        "",
        *([f"{suite_sentence(done.suite)}.", ""] if done.suite else []),
        "| release | outcome | at | hidden utility of its answers | against the control, by account |",
        "|---|---|---|---|---|",
        *map(_outcome, _in_order(done.outcomes)),
        "",
        *(f"- The gate refused a version: {reason}" for reason in done.refused),
        f"Mean hidden utility of the users' answers before each window: {utilities}.",
    ]
    return "\n".join(lines) + "\n"


def suite_sentence(change: SuiteChange) -> str:
    """The change on the frozen suite, in words."""
    return (
        f"Frozen suite of {change.tasks} tasks of {change.functions} functions, last learned release against the "
        f"first: {100 * change.difference:+.1f} points; it defends a margin of {100 * change.margin:.1f} points"
    )


def _outcome(o: ReleaseOutcome) -> str:
    name, what = f"{o.release}{' (planted)' if o.planted else ''}", "released" if o.released else "rolled back"
    at = f"{int(o.seconds) // 60}:{int(o.seconds) % 60:02}"
    return f"| {name} | {what}: {o.reasons[-1] if o.reasons else ''} | {at} | {shown(o.utility)} | {o.lift or '-'} |"


def shown(utility: float | None) -> str:
    """A mean utility in words."""
    return "-" if utility is None else f"{utility:.3f}"


def _row(what: str, done: LiveDemo, figure: str, rise: Estimate) -> str:
    means = _means(done, figure)
    return f"| {what} | {means[0]:.1%} | {means[-1]:.1%} | {rise.mean:+.1%} [{rise.low:+.1%}, {rise.high:+.1%}] |"


def _means(done: LiveDemo, figure: str) -> Sequence[float]:
    return [float(np.mean(getattr(score, figure))) for score in _in_order(done.scores)]


def as_json(done: LiveDemo) -> dict[str, Any]:
    """The figures of the demo as JSON."""
    return {
        "house": _means(done, "house"),
        "right": _means(done, "right"),
        **{f"{figure}_rise": [(e := done.rise(figure)).mean, e.low, e.high] for figure in ("house", "right")},
        "suite": msgspec.to_builtins(done.suite),
        "utility": [window.utility for window in _in_order(done.windows)],
        "outcomes": msgspec.to_builtins(_in_order(done.outcomes)),
        "refused": done.refused,
        "turns": done.turns,
        "failed": done.failed,
        "lost": done.lost,
        "seconds": done.seconds,
        "planted_stopped": done.planted_stopped,
        "released": done.released,
    }
