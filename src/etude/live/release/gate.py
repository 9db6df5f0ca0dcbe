"""The gate: the checks that a version must pass before it answers users.

    integrity   signature, digest of every tensor, no NaN, the recorded mismatch of trainer and engine
    floor       the pass rate on frozen tasks, an absolute bar that the first release must clear, too
    suites      paired non-inferiority on those tasks against the incumbent, and at twice the margin against the anchor
    cost        sampled tokens, turns and seconds of a task, as multiples of the incumbent's
    replay      recent consented prefixes answered again: two-sided bands on behaviour, no planted string, no secret

The anchor bounds gradual losses: versions that each lose less than a margin cannot together lose more than two margins.
The report is signed and lies in the version's store under its digest.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from etude.config import GuardsConfig
from etude.config.live import GateConfig
from etude.errors import UserError
from etude.evals import EvalResult, TaskResult, clustered_score, defended_margin, needed_score
from etude.failpoints import failpoint
from etude.live.log.records import Release, ReleaseStage
from etude.live.release import releases
from etude.live.release.operations import ReleaseCandidate, ReleaseSite
from etude.live.release.releases import ReleaseState
from etude.live.release.reports import DISCORDANT, SPLIT, GatePart, GateReport, keep_report
from etude.records import PolicyVersion
from etude.store import open_store
from etude.tasks import load_dataset

if TYPE_CHECKING:
    from etude.weights.content import Folder

_LOST = 0.1  # share of tasks that may be lost to infrastructure
_MOST = 0.99  # of a margin
_EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}  # of infinities and NaN


Measure = Callable[[Release, Path], EvalResult]
"""(release, suite) -> result of playing a suite, a dataset folder, with the release's content."""
Replay = Callable[[Release, Release | None], GatePart]
"""(candidate, incumbent) -> comparison of their answers to recent prefixes."""


def play_gate(
    site: ReleaseSite,
    version: ReleaseCandidate,
    measure: Measure,
    replay: Replay,
    say: Callable[[str], None],
    new_anchor: bool = False,
) -> GateReport:
    """Runs the gate, stores its report, and writes a release in stage GATE or REFUSED. After a failure of integrity
    nothing is played. With `new_anchor` the incumbent is the anchor from now on. Raises UserError, before the first
    play, without a suite, or for one that cannot defend the configured margin."""
    log = site.read()
    incumbent, config = log.current, site.config.gate
    if incumbent is not None and incumbent.release.manifest == version.manifest.live:
        raise UserError(f"version {version.manifest.version} is release {incumbent.release.number}, the current one")
    anchor = None
    if incumbent is not None:
        known = incumbent.release.anchor
        anchor = incumbent if new_anchor or known is None else log.of(known)
    refuse_weak(config, say, alone=incumbent is None)
    release = Release(
        number=log.next_number,
        store=version.store,
        version=version.manifest.version,
        manifest=version.manifest.live,
        parent=incumbent.release.number if incumbent else None,
        anchor=anchor.release.number if anchor else None,
        report=None,
        window=version.window,
        at=0,
    )
    parts = [integrity(version, site.key, lambda: site.base(version.store))]
    if parts[0].passed:
        for suite in config.suites:
            parts += _suite(config, Path(suite), release, incumbent, anchor, measure)
    if parts[0].passed:
        parts.append(replay(release, incumbent.release if incumbent else None))
    for part in parts:
        say(f"{part.name}: {'passed' if part.passed else 'FAILED'}, {part.reason}")
    report = GateReport(
        store=version.store,
        version=release.version,
        manifest=release.manifest,
        incumbent=release.parent,
        anchor=release.anchor,
        parts=tuple(parts),
        at=time.time_ns(),
    )
    _keep(site, release, report)
    return report


def _keep(site: ReleaseSite, release: Release, report: GateReport) -> None:
    """Stores the report, then writes the release's row: without a row the gate is run again."""
    digest = keep_report(report, site.key)
    failpoint("gate.report")
    failed = report.failed
    stage = ReleaseStage.GATE if failed is None else ReleaseStage.REFUSED
    reason = "passed every part" if failed is None else f"{failed.name}: {failed.reason}"
    releases.begin(site.engine, msgspec.structs.replace(release, report=digest), stage, reason, "gate")


# --- integrity --------------------------------------------------------------------------------------------------------


def integrity(version: ReleaseCandidate, key: Path | None, base: Folder | None = None) -> GatePart:
    """Whether the version is complete, signed and finite, and its step within the trainer's guards. `base` reads the
    model folder that a run's versions begin with."""
    from etude.weights import Trust, read_private_key
    from etude.weights.content import load_content

    trust = Trust(read_private_key(key).public_key()) if key is not None else None
    try:
        manifest, content = load_content(open_store(version.store), version.manifest.version, trust, base)
    except UserError as e:
        return GatePart(name="integrity", passed=False, reason=str(e))
    for spec in content.schema.tensors:
        exponent = _EXPONENTS.get(spec.dtype)
        if exponent is None:
            return _broken(f"{spec.name} has the type {spec.dtype}, in which the gate cannot look for NaN")
        bits = content.bits[spec.name]
        if bits.size and bool((bits & bits.dtype.type(exponent) == exponent).any()):
            return _broken(f"{spec.name} holds NaN or infinity")
    outside, figures = _step_bands(manifest)
    if outside:
        return GatePart(name="integrity", passed=False, reason=outside, figures=figures)
    signed = "signed, " if key is not None else ""
    reason = f"{signed}{len(content.schema.tensors)} tensors with the published digest, all finite"
    return GatePart(name="integrity", passed=True, reason=reason, figures=figures)


def _broken(reason: str) -> GatePart:
    return GatePart(name="integrity", passed=False, reason=reason)


def _step_bands(manifest: PolicyVersion) -> tuple[str, dict[str, float]]:
    """A sentence on the first figure of the step beyond the guards' bounds, or ""; and the figures."""
    step = manifest.step
    if isinstance(step, msgspec.UnsetType):
        return "", {}
    guards = GuardsConfig()
    figures = {"mismatch_k2": step.mismatch_k2, "probe_k2": step.probe_k2}
    bound = guards.mismatch_k2.stop
    measured = {name: value for name, value in figures.items() if value is not None}
    for name, value in measured.items():
        if bound is not None and not value <= bound:
            return f"{name} is {value:.2g}, above {bound:.2g}", measured
    return "", measured


# --- suites -----------------------------------------------------------------------------------------------------------


def refuse_weak(config: GateConfig, say: Callable[[str], None], alone: bool = False) -> None:
    """Raises UserError without a suite, or for one that cannot defend the margin; `alone`, a suite has to have tasks:
    there is no release to compare with."""
    if not config.suites:
        raise UserError(
            "nothing is released without a frozen suite, on which a version must pass tasks: name dataset folders in "
            "gate.suites (`etude tasks build` makes them)"
        )
    for suite in map(Path, config.suites):
        sizes = Counter(task.cluster for task in load_dataset(suite).tasks if task.split == SPLIT)
        if not sizes:
            raise UserError(f"the suite {suite} has no {SPLIT} tasks")
        if alone:
            continue
        margin = defended_margin(list(sizes.values()), DISCORDANT / config.samples, config.alpha)
        least = math.ceil(1000 * margin) / 1000
        what = f"{sizes.total()} tasks of {len(sizes)} functions, {config.samples} samples each, defend"
        say(f"{suite.name}: {what} a margin of {100 * margin:.1f} points")
        if margin > config.margin:
            raise UserError(
                f"the suite {suite} cannot defend gate.margin = {config.margin:g}: {what} {least:g}; take "
                + ("that margin, " if least < 1 else "")
                + "more functions or more samples"
            )


def _suite(
    config: GateConfig,
    suite: Path,
    release: Release,
    incumbent: ReleaseState | None,
    anchor: ReleaseState | None,
    measure: Measure,
) -> list[GatePart]:
    new = measure(release, suite)
    parts = [above_floor(f"floor on {suite.name}", new.tasks, config.floor)]
    if incumbent is None or anchor is None or not parts[0].passed:
        return parts
    old = measure(incumbent.release, suite)
    parts.append(compare_paired(f"suite {suite.name}", old.tasks, new.tasks, config.margin, config.alpha))
    if anchor.release.manifest != incumbent.release.manifest:
        first = measure(anchor.release, suite)
        name = f"suite {suite.name}, anchor"
        parts.append(compare_paired(name, first.tasks, new.tasks, min(2 * config.margin, _MOST), config.alpha))
    return [*parts, cost(f"cost on {suite.name}", old, new, config.cost)]


def above_floor(name: str, tasks: Sequence[TaskResult], floor: float) -> GatePart:
    """Whether the pass rate is at least `floor`: of a version with nothing to compare with, weights that do not work
    are seen here. Lost tasks count as failed."""
    rate = sum(float(np.mean(task.passed)) for task in tasks if task.passed) / max(1, len(tasks))
    reason = f"{rate:.1%} of {len(tasks)} tasks pass, at least {floor:.1%} must"
    return GatePart(name=name, passed=rate >= floor, reason=reason, figures={"rate": rate, "floor": floor})


def compare_paired(
    name: str, old: Sequence[TaskResult], new: Sequence[TaskResult], margin: float, alpha: float
) -> GatePart:
    """Whether the new version's pass rate is shown to be at least the old version's less `margin`, at level alpha, by
    a test whose unit is a function: its tasks share code, and move together."""
    before = {task.id: task for task in old if task.passed}
    pairs = [(before[task.id], task) for task in new if task.passed and task.id in before]
    if len(pairs) < (1 - _LOST) * max(len(old), len(new), 1):
        return GatePart(name=name, passed=False, reason=f"{len(old) - len(pairs)} of {len(old)} tasks were lost")
    gains_N = np.array([np.mean(b.passed) - np.mean(a.passed) for a, b in pairs])
    _, function_N, size_F = np.unique([a.function for a, _ in pairs], return_inverse=True, return_counts=True)
    discordant = float((gains_N**2).mean())
    z, bound = clustered_score(gains_N, function_N, margin), needed_score(size_F.tolist(), alpha)
    figures: dict[str, Any] = {
        "tasks": len(pairs),
        "functions": len(size_F),
        "margin": margin,
        "difference": float(gains_N.mean()),
        "discordant": discordant,
        "defended": defended_margin(size_F.tolist(), max(discordant, 1 / len(pairs)), alpha),
        "z": z,
    }
    verdict = "not worse" if z > bound else "not shown to be no worse"
    reason = (
        f"{verdict} by {100 * margin:.1f} points on {len(pairs)} tasks of {len(size_F)} functions (difference "
        f"{100 * gains_N.mean():+.1f} points, z {z:.2f}, needed {bound:.2f})"
    )
    return GatePart(name=name, passed=z > bound, reason=reason, figures=figures)


def cost(name: str, old: EvalResult, new: EvalResult, most: float) -> GatePart:
    """Whether sampled tokens and turns of an episode, and seconds of the whole suite, are at most `most` times the
    incumbent's."""
    ratios: dict[str, float] = {}
    for figure in ("sampled_tokens", "turns"):
        before, after = old.behaviour.get(figure, 0.0), new.behaviour.get(figure, 0.0)
        if before > 0:
            ratios[figure] = after / before
    if old.seconds > 0:
        ratios["seconds"] = new.seconds / old.seconds
    worst = max(ratios, key=lambda figure: ratios[figure], default=None)
    if worst is None:
        return GatePart(name=name, passed=False, reason="the incumbent sampled nothing")
    shown = ", ".join(f"{figure} {ratio:.2f}" for figure, ratio in ratios.items())
    passed = ratios[worst] <= most
    return GatePart(name=name, passed=passed, reason=f"of the incumbent's: {shown}; at most {most:g}", figures=ratios)
