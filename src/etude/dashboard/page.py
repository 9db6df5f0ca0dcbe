"""The page of a run: one file that loads nothing, not even from the machine it lies on."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from etude.dashboard.charts import Series, bar_chart, interval_chart, line_chart, timeline
from etude.dashboard.episodes import episode_cards
from etude.dashboard.text import byte_count, compact, duration, escape, percent, points
from etude.dashboard.view import RunView

if TYPE_CHECKING:
    from etude.dashboard.report import Report

PROCESSES = ("controller", "engine", "trainer", "sandbox")  # lanes of the timeline, top to bottom
_SHOWN_VERSIONS = 500


def render(report: Report, view: RunView) -> str:
    """The whole page. Its security policy forbids every load and every script but its own."""
    style, script = _static("page.css"), _static("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    sections = (
        _held_out(report),
        _facts(report),
        _checks(report),
        _section("Learning", "learning", _STEP_SWITCH, _grid(_learning(view))),
        _section("Behaviour", "behaviour", _STEP_SWITCH, _behaviour_table(report) + _grid(_behaviour(view))),
        _section("Who did what, when", "time", "", _utilisation(report, view)),
        _section("Off-policy and numerics", "numerics", _STEP_SWITCH, _grid(_numerics(view))),
        _section("Weight versions", "weights", "", _weights(report, view)),
        _section("Episodes by outcome", "outcomes", "", _outcomes(report)),
        _episodes(view),
    )
    title = escape(report.name or "run")
    return (
        f'<!doctype html>\n<html lang="en" data-x="step"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" content="no-referrer">'
        f'<title>{title} · etude</title><link rel="icon" href="data:,"><style>{style}</style></head><body>'
        f"<main>{_head(report)}{''.join(sections)}<footer>Written by etude. This page loads nothing; the same "
        f"figures are in <code>report.json</code>.</footer></main>"
        f'<div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


_STEP_SWITCH = (
    '<span class="switch" role="group" aria-label="horizontal axis"><button data-set-x="step">steps</button>'
    '<button data-set-x="minutes">minutes</button></span>'
)


def _static(name: str) -> str:
    return resources.files("etude.dashboard").joinpath("static", name).read_text(encoding="utf-8")


def _section(title: str, anchor: str, tools: str, body: str) -> str:
    if not body:
        return ""
    return f'<section id="{anchor}"><div class="title"><h2>{escape(title)}</h2>{tools}</div>{body}</section>'


def _grid(charts: Sequence[str]) -> str:
    present = [chart for chart in charts if chart]
    if not present:
        return '<p class="card empty">Nothing to draw: the run made no training step.</p>'
    return f'<div class="grid">{"".join(present)}</div>'


def _head(report: Report) -> str:
    about = [report.model, report.dataset, f"seed {report.seed}", duration(report.seconds), report.hardware]
    return (
        f'<header><p class="brand">etude<button id="theme" aria-label="light or dark">◐</button></p>'
        f'<h1>{_headline(report)}</h1><p class="lead">{escape(_verdict(report))}</p>'
        f'<p class="about"><b>{escape(report.name)}</b>{"".join(f"<span>{escape(a)}</span>" for a in about if a)}</p></header>'
    )


def _headline(report: Report) -> str:
    if report.pass_before is None and report.pass_after is None:
        return "Held-out pass rate not measured"
    sides = ["–" if value is None else percent(value) for value in (report.pass_before, report.pass_after)]
    return f'Held-out pass rate <span class="num">{sides[0]}</span> <span class="arrow">→</span> <span class="num after">{sides[1]}</span>'


def _verdict(report: Report) -> str:
    diff = report.paired_diff
    if diff is None:
        return "Before and after were not both measured, so there is no difference to report."
    interval = f"{points(diff.mean)} points, 95 % interval {points(diff.low)} to {points(diff.high)}"
    over = f"over {report.heldout_tasks} tasks of {report.heldout_functions} functions the model never trained on"
    if diff.low > 0:
        return f"The model got better: {interval}, paired {over}."
    if diff.high < 0:
        return f"The model got worse: {interval}, paired {over}."
    return f"No difference is shown: {interval}, paired {over}. The interval holds zero."


def _held_out(report: Report) -> str:
    rows = [
        (label, estimate, color)
        for label, estimate, color in (
            ("before", report.pass_before_interval, 6),
            ("after", report.pass_after_interval, 2),
        )
        if estimate is not None
    ]
    left = (
        f'<div class="card"><h3>pass@1, held-out</h3>{interval_chart(rows, percent)}{_pass_k(report)}</div>'
        if rows
        else ""
    )
    right = ""
    if report.paired_diff is not None:
        diff = report.paired_diff
        color = 2 if diff.low > 0 else 5 if diff.high < 0 else 6
        same = report.heldout_tasks - report.tasks_better - report.tasks_worse
        chart = interval_chart([("after − before", diff, color)], points, zero_line=True)
        right = (
            f'<div class="card"><h3>Paired difference, points</h3>{chart}<p class="note">{report.tasks_better} tasks pass '
            f"more often than before, {report.tasks_worse} less often, {same} as often; {report.samples_per_task} samples "
            f"each, same seeds on both sides. Intervals: bootstrap over functions.</p></div>"
        )
    return f'<section id="heldout"><div class="pair">{left}{right}</div></section>' if left or right else ""


def _pass_k(report: Report) -> str:
    ks = sorted(set(report.pass_k_before) | set(report.pass_k_after))
    if len(ks) < 2:
        return ""
    cells = [
        "".join(f"<td>{percent(rates[k]) if k in rates else '–'}</td>" for k in ks)
        for rates in (report.pass_k_before, report.pass_k_after)
    ]
    head = "".join(f"<th>pass@{k}</th>" for k in ks)
    return (
        f'<div class="scroll"><table><tr><th></th>{head}</tr><tr><th>before</th>{cells[0]}</tr>'
        f"<tr><th>after</th>{cells[1]}</tr></table></div>"
    )


def _facts(report: Report) -> str:
    episodes = sum(report.episodes.values())
    training = report.stages.get("train", 0.0)
    per_second = f"{episodes / training:.1f} per second" if training else "in training"
    mismatch = report.mismatch
    facts = [
        ("optimizer steps", f"{report.steps:,}", duration(training) if training else ""),
        ("episodes", f"{episodes:,}", per_second),
        ("trainer busy", percent(report.utilisation.trainer, 0), "of training time"),
        ("engine busy", percent(report.utilisation.engine, 0), "of training time"),
        ("weight versions", f"{report.versions:,}", f"{byte_count(report.bytes_published)} shipped"),
        ("trainer–engine k2", compact(mismatch.k2), f"k3 {compact(mismatch.k3)} · max |Δ| {compact(mismatch.max_abs)}"),
    ]
    tiles = "".join(
        f'<div class="fact"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>'
        for name, value, more in facts
    )
    return f'<section class="facts-row card">{tiles}</section>'


def _checks(report: Report) -> str:
    if not report.checks:
        return ""
    items = "".join(
        f'<li class="{"good" if holds else "bad"}"><b>{"✓" if holds else "✗"}</b>{escape(name.replace("_", " "))}'
        f'<span class="sr">{"holds" if holds else "FAILED"}</span></li>'
        for name, holds in report.checks.items()
    )
    return f'<section><ul class="checks" aria-label="checks">{items}</ul></section>'


def _line(view: RunView, title: str, note: str, *names: tuple[str, str], **options: object) -> str:
    series = [Series(label, view.series(name), color) for color, (name, label) in enumerate(names, 1)]
    return line_chart(title, note, series, **options)  # type: ignore[arg-type]


def _learning(view: RunView) -> list[str]:
    return [
        _line(view, "Reward", "mean over the episodes of a step", ("reward/all/mean", "reward")),
        _line(view, "Pass rate", "training episodes whose hidden tests pass", ("rollout/pass_rate", "pass rate"), fmt=percent),
        _line(view, "Groups without signal", "all members got the same reward", ("rollout/zero_variance", "share"), fmt=percent),
        _line(view, "Entropy", "of the policy per sampled token, nats", ("entropy/mean", "entropy")),
        _line(view, "Gradient norm", "before clipping", ("optim/grad_norm", "norm")),
        _line(view, "Learning rate", "", ("optim/lr", "rate")),
    ]  # fmt: skip


def _behaviour(view: RunView) -> list[str]:
    return [
        _line(view, "Turns", "per episode", ("rollout/turns", "turns")),
        _line(view, "Tests run", "per episode, by the agent", ("rollout/tests_run", "tests run")),
        _line(view, "Edits", "per episode", ("rollout/edits", "edits"), ("rollout/edit_errors", "refused"), ("rollout/undo", "undone")),
        _line(view, "Malformed calls", "per episode", ("rollout/malformed", "malformed")),
        _line(view, "Sampled tokens", "per episode", ("rollout/length", "tokens")),
        _line(view, "Retries", "attempts repeated because infrastructure failed, per step", ("rollout/retries", "retries")),
    ]  # fmt: skip


def _behaviour_table(report: Report) -> str:
    names = [name for name in report.behaviour_before | report.behaviour_after]
    if not names:
        return ""
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    rows = "".join(
        f"<tr><th>{when}</th>"
        + "".join(f"<td>{f'{values[n]:.2f}' if n in values else '–'}</td>" for n in names)
        + "</tr>"
        for when, values in (("before", report.behaviour_before), ("after", report.behaviour_after))
    )
    return f'<div class="card scroll"><h3>Per held-out episode</h3><table><tr><th></th>{head}</tr>{rows}</table></div>'


def _utilisation(report: Report, view: RunView) -> str:
    lanes = timeline(view.timeline, PROCESSES)
    busy = line_chart(
        "Busy share", "of each step",
        [Series("trainer", view.series("perf/trainer_busy"), 1), Series("engine", view.series("perf/engine_busy"), 2)],
        fmt=lambda v: percent(v, 0),
    )  # fmt: skip
    speed = _line(view, "Engine throughput", "sampled tokens per second", ("perf/tokens_per_s", "tokens/s"))
    step = _line(view, "Step time", "seconds", ("time/step", "step"), ("time/wait_for_batch", "waiting for a batch"))
    stages = " · ".join(f"{escape(name)} {duration(seconds)}" for name, seconds in report.stages.items())
    note = f'<p class="note">Stages: {stages}</p>' if stages else ""
    legend = '<p class="note">Columns are stacked by share of time; grey is waiting.</p>'
    charts = "".join(chart for chart in (busy, speed, step) if chart)
    return (f'<div class="card">{note}{lanes}{legend if lanes else ""}</div>' if lanes or note else "") + (
        f'<div class="grid">{charts}</div>' if charts else ""
    )


def _numerics(view: RunView) -> list[str]:
    lags = view.histogram("off_policy/histogram")
    total = sum(lags.values()) or 1
    return [
        bar_chart("Staleness", "versions between sampling and training, share of tokens", [(str(lag), n / total) for lag, n in lags.items()], fmt=percent, color=4),
        _line(view, "Staleness over time", "versions", ("off_policy/mean", "mean"), ("off_policy/max", "max")),
        _line(view, "Trainer–engine mismatch", "k2 and k3 of the log-probabilities, log scale", ("mismatch/k2", "k2"), ("mismatch/k3", "k3"), log=True),
        _line(view, "Largest mismatch", "largest |Δ log-probability| of a step, log scale", ("mismatch/max_abs", "max |Δ|"), log=True),
    ]  # fmt: skip


def _weights(report: Report, view: RunView) -> str:
    versions = [step for step in view.steps if "weights/version" in step]
    if not versions:
        return '<p class="card empty">No version was published.</p>'
    sizes = [(f"v{int(step['weights/version'])}", float(step.get("weights/bytes", 0))) for step in versions]
    changed = _line(view, "Changed elements", "per version", ("weights/changed", "changed"))
    rows = "".join(
        f"<tr><td>v{int(s['weights/version'])}</td><td>{int(s['step'])}</td><td>{byte_count(float(s.get('weights/bytes', 0)))}</td>"
        f"<td>{compact(float(s.get('weights/changed', 0)))}</td></tr>"
        for s in versions[-_SHOWN_VERSIONS:]
    )
    table = (
        f'<details class="card"><summary>All {len(versions)} versions, {byte_count(report.bytes_published)} in all</summary>'
        f'<div class="body scroll tall"><table><tr><th>version</th><th>step</th><th>bytes</th><th>changed</th></tr>{rows}</table></div></details>'
    )
    return f'<div class="grid">{bar_chart("Bytes per version", "full copies stand out", sizes, fmt=byte_count, color=3)}{changed}</div>{table}'


def _outcomes(report: Report) -> str:
    columns = [
        (name, counts)
        for name, counts in (
            ("training", report.episodes),
            ("held-out, before", report.outcomes_before),
            ("held-out, after", report.outcomes_after),
        )
        if counts
    ]
    if not columns:
        return ""
    outcomes = ["scored", "timeout", "tampered", "infra"]
    outcomes += sorted({name for _, counts in columns for name in counts} - set(outcomes))
    head = "".join(f"<th>{escape(outcome)}</th>" for outcome in outcomes)
    rows = "".join(
        f"<tr><th>{escape(name)}</th>"
        + "".join(f"<td>{counts.get(outcome, 0):,}</td>" for outcome in outcomes)
        + "</tr>"
        for name, counts in columns
    )
    return f'<div class="card scroll"><table><tr><th></th>{head}</tr>{rows}</table></div>'


def _episodes(view: RunView) -> str:
    if not view.episodes:
        return ""
    stages = list(dict.fromkeys(e.stage for e in view.episodes if e.stage))
    buttons = "".join(
        f'<button data-filter="{escape(value)}">{escape(value)}</button>'
        for value in ("all", *stages, "passed", "failed")
    )
    legend = (
        '<p class="legend">Sampled tokens are tinted by advantage <span class="ramp"><i class="n5"></i><i class="n3"></i>'
        '<i class="n1"></i><i></i><i class="p1"></i><i class="p3"></i><i class="p5"></i></span> and <span class="u">underlined</span> '
        "where their probability was below 10 %. Point at one for its log-probability, weight version and advantage.</p>"
    )
    tools = f'<span class="switch" role="group" aria-label="episodes shown">{buttons}</span>'
    return _section("Episodes", "episodes", tools, legend + episode_cards(view.episodes))
