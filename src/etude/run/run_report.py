"""The report of a finished run: figures and episodes, read from the run folder, the ledger and the stores."""

from __future__ import annotations

import os
import platform
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from etude import runfolder
from etude.dashboard import (
    CheatingFigures,
    MismatchSummary,
    RunReport,
    RunSetup,
    ShownEpisode,
    Utilisation,
    WeightFigures,
    best_version,
    clock_advice,
    held_out_figures,
    load_view,
    show_run,
    silence_advice,
    training_figures,
    write_report,
)
from etude.evals import EvalResult
from etude.grading.cheats import VIOLATIONS
from etude.ledger import get_blob
from etude.records import Episode, EpisodeBlob, decode
from etude.rollout import Shift, audit_group
from etude.run.state import Run
from etude.trainer.rl.advantages import advantages
from etude.weights import manifests

SHOWN_PAIRS = 6
SHOWN_GROUPS = 3
SHOWN_FLAGGED = 6
LISTED_FLAGGED = 50


def finish_report(run: Run, before: EvalResult | None, after: EvalResult | None, seconds: float) -> RunReport:
    """Writes report.json and report.html; returns the report. `seconds` is the duration of this attempt."""
    steps = runfolder.read_jsonl(run.folder / "metrics.jsonl")
    published = manifests(run.weights)
    timeline = runfolder.read_jsonl(run.folder / "timeline.jsonl", ("start", "end"), ("process", "state"))
    trained, generated = run.ledger.represented()
    held_out, difference = held_out_figures(before, after)
    hardware = f"{os.cpu_count()} CPU cores, {platform.machine()}, {run.config.trainer.device}"
    checks = {
        "ledger_conserved": run.ledger.conservation(published).ok,
        "weights_digest_served": run.record.checked > 0 and run.progress.served == published[-1].version,
        "tokens_prefix_property": all(step.get("rollout/prefix_violations", 0) == 0 for step in steps),
        "engines_alike": not run.record.complaints,
        "no_episode_lost": run.ledger.counts().get("infra", 0) == 0,
        "no_episode_quarantined": run.ledger.counts().get("quarantined", 0) == 0,
    }
    newest = max((m.version for m in published), default=0)
    repositories = {task.id: task.repository for task in run.pool.taskset.tasks}
    silent, note = _silent(run, steps)
    report = RunReport(
        setup=RunSetup(run.config.name, run.config.model.name, run.pool.taskset.name, hardware),
        seed=run.config.seed,
        seconds=seconds + _earlier_attempts(timeline, runfolder.now() - seconds),
        stages=_stages(timeline),
        steps=newest,
        best=best_version(newest, difference),
        serve=f"etude serve {shlex.quote(str(run.folder))}",
        silent=silent,
        notes=tuple(filter(None, (note, clock_advice(before, after, run.config.rollout.seconds)))),
        pass_before=before and before.pass_1.mean,
        pass_after=after and after.pass_1.mean,
        paired_diff=difference,
        held_out=held_out,
        training=training_figures(run.ledger.results(0, consumed_only=True), steps, repositories),
        episodes=run.ledger.counts(),
        trained=trained,
        generated=generated,
        versions=len(published),
        bytes_published=sum(m.payload_bytes for m in published),
        weights=WeightFigures(2 * max((m.elements for m in published), default=0), run.record.pauses),
        utilisation=Utilisation(trainer=_busy(timeline, "trainer"), engine=_busy(timeline, "engine")),
        mismatch=_mismatch(steps),
        checks=checks,
        cheating=_cheating(run, steps),
        recovered=run.ledger.recovered(),
    )
    write_report(run.folder, report, load_view(run.folder, _shown(run, before, after)))
    return report


def _silent(run: Run, steps: list[dict[str, Any]]) -> tuple[float | None, str | None]:
    """The share of groups without variance in rewards, and the report's note on it."""
    groups = sum(step["rollout/groups"] for step in steps)
    if not groups:
        return None, None
    share = sum(step["rollout/zero_variance"] for step in steps) / groups
    rate = sum(step["rollout/pass_rate"] * step["rollout/groups"] for step in steps) / groups
    warn = run.config.guards.zero_variance.warn
    return share, None if warn is None else silence_advice(share, rate, warn)


def _cheating(run: Run, steps: list[dict[str, Any]]) -> CheatingFigures:
    flagged = run.ledger.flagged()
    violations = [e for e in flagged if VIOLATIONS.keys() & set(e.flags)]
    impossible = run.ledger.impossible()
    # The upper end of the exact 95 % interval; none if a task was passed or tampered with, or none was played.
    clean = impossible.played and not impossible.passed + impossible.tampered
    bound = 1 - 0.05 ** (1 / impossible.played) if clean else None
    return CheatingFigures(
        flags=dict(sorted(Counter(flag for e in flagged for flag in e.flags).items())),
        violations=len(violations),
        rewarded=sum(e.reward > 0 for e in violations),
        flagged=tuple(violations[-LISTED_FLAGGED:]),
        impossible=impossible,
        impossible_bound=bound,
        shifts=tuple(msgspec.convert(event, Shift) for step in steps for event in step.get("drift/events", ())),
    )


def _busy(timeline: list[dict[str, Any]], process: str) -> float:
    """Share of the training stage in which `process` was neither waiting nor idle."""
    stages = [(s["start"], s["end"]) for s in timeline if s["process"] == "controller" and s["state"] == "train"]
    total = sum(end - start for start, end in stages)
    busy = sum(
        max(0.0, min(end, span["end"]) - max(start, span["start"]))
        for span in timeline
        if span["process"] == process and span["state"] not in ("wait", "idle")
        for start, end in stages
    )
    return busy / total if total else 0.0


def _mismatch(steps: list[dict[str, float]]) -> MismatchSummary:
    """Token-weighted means over the run, on tokens that the version before the step sampled."""
    measured = [s for s in steps if s.get("mismatch/tokens")]
    tokens = sum(s["mismatch/tokens"] for s in measured)
    if not tokens:
        return MismatchSummary(None, None, None)
    return MismatchSummary(
        k2=sum(s["mismatch/k2"] * s["mismatch/tokens"] for s in measured) / tokens,
        k3=sum(s["mismatch/k3"] * s["mismatch/tokens"] for s in measured) / tokens,
        max_abs=max(s["mismatch/max_abs"] for s in measured),
    )


def _stages(timeline: list[dict[str, Any]]) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for span in timeline:
        if span["process"] == "controller":
            seconds[span["state"]] += span["end"] - span["start"]
    return dict(seconds)


def _earlier_attempts(timeline: list[dict[str, Any]], started: float) -> float:
    """Seconds of the controller's stages that ended before `started`."""
    spans = [span for span in timeline if span["process"] == "controller" and span["end"] <= started]
    return sum(span["end"] - span["start"] for span in spans)


def _shown(run: Run, before: EvalResult | None, after: EvalResult | None) -> list[ShownEpisode]:
    """Held-out pairs that changed either way, and whole groups of the last steps with their advantages."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(run.config.model.path) / "tokenizer.json"))
    shown: list[ShownEpisode] = []
    for task in _changed_first(before, after):
        for when in ("before", "after"):
            key = f"eval-{when}/{task}-0.msgpack"
            if run.rollouts.exists(key):
                episode = decode(run.rollouts.get(key), Episode)
                shown.append(
                    show_run(f"{task} ({'pass' if episode.passed else 'fail'})", episode, tokenizer, stage=when)
                )
    for group in run.ledger.mixed_groups(SHOWN_GROUPS):
        episodes = [get_blob(run.rollouts, blob) for blob in group.episodes]
        episodes = audit_group(episodes) if run.config.cheats.contrast else episodes
        ranked = sorted(zip(episodes, advantages([e.reward for e in episodes]), strict=True), key=lambda pair: -pair[1])
        for episode, advantage in (ranked[0], ranked[-1]):
            title = f"{group.task_id} #{episode.member} ({'pass' if episode.passed else 'fail'})"
            shown.append(show_run(title, episode, tokenizer, advantage, stage="training"))
    violations = [e for e in run.ledger.flagged() if e.blob and VIOLATIONS.keys() & set(e.flags)]
    for flagged in violations[-SHOWN_FLAGGED:]:
        title = f"{flagged.task} #{flagged.member}: {', '.join(flagged.flags)}"
        episode = get_blob(run.rollouts, EpisodeBlob(key=flagged.blob, digest=flagged.digest))
        shown.append(show_run(title, episode, tokenizer, stage="flagged"))
    return shown


def _changed_first(before: EvalResult | None, after: EvalResult | None) -> list[str]:
    """Task ids: first those whose first sample changed (fixed, then broken), then the others."""
    results = [r for r in (before, after) if r is not None]
    if not results:
        return []
    first = [{t.id: t.passed[0] for t in r.tasks if t.passed} for r in results]
    ids = sorted(set(first[0]).intersection(*first))
    change = {i: int(first[-1][i]) - int(first[0][i]) for i in ids}
    fixed = [i for i in ids if change[i] > 0][: SHOWN_PAIRS - 2]
    broken = [i for i in ids if change[i] < 0][:1]
    rest = [i for i in ids if change[i] == 0][: SHOWN_PAIRS - len(fixed) - len(broken)]
    return fixed + broken + rest
