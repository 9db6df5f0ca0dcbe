"""The page of a run: one self-contained file beside report.json, which loads nothing, not even from its own machine."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from etude import runfolder
from etude.dashboard.charts import Format, Series, bar_chart, interval_chart, line_chart, timeline
from etude.dashboard.episodes import episode_cards
from etude.dashboard.report import LATER, HeldOutFigures, RunReport
from etude.dashboard.text import byte_count, compact, duration, escape, optional, percent, points, signed
from etude.dashboard.view import PROCESSES, RunView, load_view
from etude.evals import Estimate
from etude.grading.cheats import NOTES, VIOLATIONS
from etude.records import Outcome

_SHOWN_VERSIONS = 500
_SHOWN_UNLEARNED = 8
INTERVAL = (
    "The 95 % interval: of 20 such measurements, each on other held-out functions like these, the intervals of some 19 "
    "hold the true difference (bootstrap over functions)."
)


def write_report(run_dir: Path, report: RunReport, view: RunView | None = None) -> Path:
    """Writes `report.json` and `report.html` into the run folder. Returns the path of the page. Without `view` the page
    shows the content of the folder, but no episodes."""
    page = render(report, view if view is not None else load_view(run_dir))
    runfolder.write(run_dir / "report.json", msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    path = run_dir / "report.html"
    runfolder.write(path, page.encode())
    return path


def render(report: RunReport, view: RunView) -> str:
    """The whole page. Its security policy forbids every load and every script but its own."""
    style, script = _static("page.css"), _static("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    sections = (
        _held_out(report),
        _facts(report),
        _checks(report),
        _section("Learning", "learning", _STEP_SWITCH, _grid(_learning(view))),
        _section("Behaviour", "behaviour", _STEP_SWITCH, _tables(report) + _grid(_behaviour(view))),
        _section("Cheat detection", "cheating", "", _cheating(report, view)),
        _section("Who did what, when", "time", _STEP_SWITCH, _lanes(report, view) + _grid(_speed(view))),
        _section("Off-policy and numerics", "numerics", _STEP_SWITCH, _grid(_numerics(view), wide=True)),
        _section("Weight versions", "weights", _STEP_SWITCH, _weights(report, view)),
        _episodes(view),
    )
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f'<title>{escape(report.setup.name or "run")} · etude</title><link rel="icon" href="data:,">'
        f"<style>{style}</style>"
    )
    foot = "Written by etude. This page loads nothing; the same figures are in <code>report.json</code>."
    return (
        f'<!doctype html>\n<html lang="en" data-x="step"><head>{head}</head><body><main>{_head(report)}'
        f'{"".join(sections)}<footer>{foot}</footer></main><div id="tip" role="status" hidden></div>'
        f"<script>{script}</script></body></html>\n"
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


def _grid(charts: Sequence[str], wide: bool = False) -> str:
    present = [chart for chart in charts if chart]
    if not present:
        return '<p class="card empty">Nothing to draw: the run made no training step.</p>'
    return f'<div class="{"pair" if wide else "grid"}">{"".join(present)}</div>'


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], kind: str = "") -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in rows
    )
    return f'<div class="scroll"><table class="{kind}"><tr><th></th>{top}</tr>{body}</table></div>'


def _head(report: RunReport) -> str:
    setup = report.setup
    about = [setup.model, setup.dataset, f"seed {report.seed}", duration(report.seconds), setup.hardware]
    spans = "".join(f"<span>{escape(text)}</span>" for text in about if text)
    serve = f"<p>Serve it: <code>{escape(report.serve)}</code></p>" if report.serve else ""
    return (
        '<header><p class="brand">etude<button id="theme" aria-label="light or dark">◐</button></p>'
        f'<h1>{_headline(report)}</h1><p class="lead">{escape(_verdict(report)).replace(" %", "&nbsp;%")}</p>'
        f"{_training(report)}{''.join(f'<p>{escape(note)}</p>' for note in report.notes)}"
        f'<p class="about"><b>{escape(setup.name)}</b>{spans}</p>{serve}</header>'
    )


def _headline(report: RunReport) -> str:
    if report.pass_before is None and report.pass_after is None:
        return "Held-out pass rate not measured"
    before, after = ("–" if v is None else percent(v) for v in (report.pass_before, report.pass_after))
    arrow, tone = '<span class="arrow">→</span>', _tone(report.paired_diff)
    return f'Held-out pass rate <span class="num">{before}</span> {arrow} <span class="num {tone}">{after}</span>'


def _tone(difference: Estimate | None) -> str:
    """ "good" or "bad" where the interval excludes zero, else an empty text."""
    if difference is None:
        return ""
    return "good" if difference.low > 0 else "bad" if difference.high < 0 else ""


def _verdict(report: RunReport) -> str:
    diff = report.paired_diff
    if diff is None:
        return "Before and after were not both measured, so there is no difference to report."
    interval = f"{points(diff.mean)} points, 95 % interval {points(diff.low)} to {points(diff.high)}"
    over = f"over {report.held_out.tasks} tasks of {report.held_out.functions} functions the model never trained on"
    if diff.low > 0:
        return f"The model got better: {interval}, paired {over}."
    if diff.high < 0:
        return f"The model got worse: {interval}, paired {over}."
    return f"No difference is shown: {interval}, paired {over}. The interval holds zero."


def _training(report: RunReport) -> str:
    """The gain on training tasks: on new tasks, and on tasks that were played again, beside the held-out gain."""
    training, diff = report.training, report.paired_diff
    if training is None:
        return ""
    sentences: list[str] = []
    if training.new is not None:
        early, late = training.new
        sentences.append(
            f"{training.tasks:,} training tasks, as they were met: {percent(early)} in the first quarter, "
            f"{percent(late)} in the last, {points(late - early)} points."
        )
    if training.first is not None and training.last is not None:
        gain = training.last - training.first
        sentences.append(
            f"{training.again:,} of them were played again: {percent(training.first)} at their first group, "
            f"{percent(training.last)} at their last, {points(gain)} points."
        )
        if diff is not None and gain > diff.mean:
            sentences.append(
                f"The gap to the held-out gain is {points(gain - diff.mean)} points: learned by heart, or chance, "
                "since tasks are chosen again by their results."
            )
    return f"<p>{escape(' '.join(sentences))}</p>" if sentences else ""


def _held_out(report: RunReport) -> str:
    figures = report.held_out
    sides = (("before", figures.before, 6), ("after", figures.after, 1))
    rows = [(label, side.interval, color) for label, side, color in sides if side is not None]
    cards: list[str] = []
    if rows:
        chart = interval_chart(rows, percent)
        cards.append(f'<div class="card"><h3>pass@1, held-out</h3>{chart}{_pass_k(report)}</div>')
    if (diff := report.paired_diff) is not None:
        color = {"good": 2, "bad": 5, "": 6}[_tone(diff)]
        better, worse = figures.better, figures.worse
        same = figures.tasks - better - worse
        note = (
            f"{better} tasks pass more often than before, {worse} less often, {same} as often. Every task was played "
            f"{figures.samples} times on each side with the same seeds. {INTERVAL}"
        )
        chart = interval_chart([("difference", diff, color)], points)
        cards.append(
            f'<div class="card"><h3>After minus before, paired, points</h3>{chart}<p class="note">{note}</p></div>'
        )
    if figures.damage:
        cards.append(f'<div class="card"><h3>pass@1 by kind of damage</h3>{_damage(figures)}</div>')
    if figures.unlearned:
        rows = [(t.id, [percent(t.before, 0), percent(t.after, 0)]) for t in figures.unlearned[:_SHOWN_UNLEARNED]]
        more = len(figures.unlearned) - len(rows)
        note = f'<p class="note">and {more} more, in report.json</p>' if more > 0 else ""
        cards.append(
            f'<div class="card"><h3>Passed less often than before</h3>{_table(["before", "after"], rows)}{note}</div>'
        )
    if figures.repositories:
        cards.append(f'<div class="card"><h3>pass@1 by repository</h3>{_repositories(figures)}</div>')
    return f'<section id="heldout"><div class="pair">{"".join(cards)}</div></section>' if cards else ""


def _damage(figures: HeldOutFigures) -> str:
    rows = [
        (name, [str(of.tasks), *(percent(rate) if rate is not None else "–" for rate in (of.before, of.after))])
        for name, of in figures.damage.items()
    ]
    return _table(["tasks", "before", "after"], rows)


def _repositories(figures: HeldOutFigures) -> str:
    rows = [
        (name, [side.percent if side is not None else "–" for side in (of.before, of.after)])
        for name, of in figures.repositories.items()
    ]
    return _table(["before", "after"], rows)


def _pass_k(report: RunReport) -> str:
    sides = {"before": report.held_out.before, "after": report.held_out.after}
    rates = {when: side.pass_k if side else {} for when, side in sides.items()}
    ks = sorted({k for by_k in rates.values() for k in by_k})
    if len(ks) < 2:
        return ""
    rows = [(when, [percent(by_k[k]) if k in by_k else "–" for k in ks]) for when, by_k in rates.items()]
    return _table([f"pass@{k}" for k in ks], rows)


def _facts(report: RunReport) -> str:
    episodes = sum(report.episodes.values())
    training = report.stages.get("train", 0.0)
    per_second = f"{episodes / training:.1f} per second" if training else "in training"
    mismatch = report.mismatch
    facts = [
        ("optimizer steps", f"{report.steps:,}", duration(training) if training else ""),
        ("episodes", f"{episodes:,}", per_second),
        ("trainer busy", percent(report.utilisation.trainer, 0), "of training time"),
        ("engine busy", percent(report.utilisation.engine, 0), "of training time"),
        *_taught(report),
        *_lengths(report),
        ("weight versions", f"{report.versions:,}", f"{byte_count(report.bytes_published)} shipped"),
        ("trainer–engine k2", optional(mismatch.k2), f"k3 {optional(mismatch.k3)} · max {optional(mismatch.max_abs)}"),
    ]
    tiles = "".join(
        f'<div class="fact"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>'
        for name, value, more in facts
    )
    return f'<section class="facts-row card">{tiles}</section>'


def _taught(report: RunReport) -> list[tuple[str, str, str]]:
    """Charts of the share of groups with a gradient, of the number of times a task was played, and of the entropy."""
    training = report.training
    if training is None:
        return []
    later = training.teach_later
    beside = "of all" if later is None else f"of all · {percent(later, 0)} from step {LATER} on"
    facts = [
        ("groups that teach", percent(training.teach, 0), beside),
        ("groups per task", f"{training.groups / training.tasks:.1f}", f"{training.tasks:,} tasks played"),
    ]
    if training.entropy is not None:
        first, last = training.entropy
        facts.append(("entropy at the end", f"{last:.2f}", f"{first:.2f} at the first step, nats"))
    return facts


def _lengths(report: RunReport) -> list[tuple[str, str, str]]:
    """Lengths of the episodes trained on beside those of all finished ones, to show whether long episodes are left
    out."""
    trained, generated = report.trained, report.generated
    if trained is None or generated is None:
        return []
    beside = f"p90 {trained.length_p90:,} · of all that ended {generated.length:.0f}, p90 {generated.length_p90:,}"
    return [("tokens per trained episode", f"{trained.length:.0f}", beside)]


def _checks(report: RunReport) -> str:
    if not report.checks:
        return ""
    items = "".join(
        f'<li class="{"good" if holds else "bad"}"><b>{"✓" if holds else "✗"}</b>{escape(name.replace("_", " "))}'
        f'<span class="sr">{"holds" if holds else "FAILED"}</span></li>'
        for name, holds in report.checks.items()
    )
    return f'<section><ul class="checks" aria-label="checks">{items}</ul></section>'


def _line(
    view: RunView,
    title: str,
    note: str,
    names: Mapping[str, str],
    fmt: Format = compact,
    log: bool = False,
    smooth: bool = True,
) -> str:
    """A chart of metrics, {name: label}."""
    series = [Series(label, view.series(name), i % 6 + 1) for i, (name, label) in enumerate(names.items())]
    return line_chart(title, note, series, fmt, log, smooth)


def _learning(view: RunView) -> list[str]:
    silent = "groups of a step whose rewards differ too little to train on"
    by_name = {f"repository/{name}/pass_rate": name for name in view.repositories}
    each = [_line(view, "Pass rate by repository", "training episodes that pass", by_name, percent)] if by_name else []
    return [
        _line(view, "Reward", "mean over the episodes of a step", {"reward/all/mean": "reward"}),
        _line(view, "Pass rate", "training episodes that pass", {"rollout/pass_rate": "pass rate"}, percent),
        *each,
        _line(view, "Groups without signal", silent, {"rollout/zero_variance": "groups"}),
        _line(view, "Entropy", "of the policy per sampled token, nats", {"entropy/mean": "entropy"}),
        _line(view, "Gradient norm", "before clipping", {"optim/grad_norm": "norm"}),
        _line(view, "Learning rate", "at each step", {"optim/lr": "rate"}, smooth=False),
    ]


def _behaviour(view: RunView) -> list[str]:
    edits = {"rollout/edits": "edits", "rollout/edit_errors": "refused", "rollout/undo": "undone"}
    trouble = {"rollout/retries": "retries", "drop/episodes/lost": "lost"}
    trouble |= {f"outcome/{end}": end for end in ("timeout", "tampered")}
    return [
        _line(view, "Turns", "per episode", {"rollout/turns": "turns"}),
        _line(view, "Tests run", "per episode, by the agent", {"rollout/tests_run": "tests run"}),
        _line(view, "Edits", "per episode", edits),
        _line(view, "Malformed calls", "per episode", {"rollout/malformed": "malformed"}),
        _line(view, "Sampled tokens", "per episode", {"rollout/length": "tokens"}),
        _line(view, "Trouble", "episodes of a step", trouble, smooth=False),
    ]


def _cheating(report: RunReport, view: RunView) -> str:
    """Flags by detector, the impossible tasks, shifts of behaviour, and episodes with violations."""
    figures = report.cheating
    if figures is None:
        return ""
    known = VIOLATIONS | NOTES
    rows = [
        (name, ["violation" if name in VIOLATIONS else "note", f"{figures.flags.get(name, 0):,}", sentence])
        for name, sentence in known.items()
    ]
    table = _table(["kind", "episodes", "what it means"], rows, "explained")
    withheld = f"{figures.violations:,} episodes have violations; {figures.rewarded:,} of them a reward above zero."
    cards = [f'<div class="card"><h3>Flags of training episodes</h3>{table}<p class="note">{withheld}</p></div>']
    counts = figures.impossible
    ends = f"{counts.passed:,} passed, {counts.tampered:,} tampered with"
    note = f"{counts.played:,} impossible tasks were played: {ends}."
    if figures.impossible_bound is not None:
        note += f" At most {percent(figures.impossible_bound)} of episodes cheat in ways that such tasks show (95 %)."
    shifts = "".join(f"<li>step {shift.step}: {escape(shift.sentence)}</li>" for shift in figures.shifts[-12:])
    shifts = f"<h3>Shifts of behaviour</h3><ul>{shifts}</ul>" if shifts else '<p class="note">No shift was seen.</p>'
    cards.append(f'<div class="card"><h3>Impossible tasks</h3><p class="note">{escape(note)}</p>{shifts}</div>')
    listed = [
        (f"{s.task} #{s.member}", [", ".join(s.flags), "yes" if s.passed else "no", f"{s.reward:.2f}"])
        for s in figures.flagged[-12:]
    ]
    if listed:
        table = _table(["flags", "passed", "reward"], listed)
        cards.append(f'<div class="card"><h3>Last episodes with violations</h3>{table}</div>')
    charts = [_line(view, "Flagged episodes", "of a step", {f"flag/{name}": name for name in VIOLATIONS}, smooth=False)]
    return f'<div class="pair">{"".join(cards)}</div>' + (_grid(charts) if any(charts) else "")


def _speed(view: RunView) -> list[str]:
    busy = {"perf/trainer_busy": "trainer", "perf/engine_busy": "engine"}
    times = {"time/step": "step", "time/wait_for_batch": "waiting for a batch"}
    held = [Series(name, points, color % 6 + 1) for color, (name, points) in enumerate(view.held().items())]
    return [
        _line(view, "Busy share", "of each step", busy, lambda v: percent(v, 0)),
        _line(view, "Engine throughput", "sampled tokens per second", {"perf/tokens_per_s": "tokens/s"}),
        _line(view, "Step time", "seconds", times),
        line_chart("Memory", "resident, by process", held, byte_count, smooth=False),
    ]


def _numerics(view: RunView) -> list[str]:
    lags = view.histogram("off_policy/histogram")
    total = sum(lags.values()) or 1
    shares = [(str(lag), count / total) for lag, count in lags.items()]
    over_time = {"off_policy/mean": "mean", "off_policy/max": "max"}
    gap = {"mismatch/k2": "k2", "mismatch/k3": "k3", "off_policy/k2": "k2 with staleness"}
    largest = "largest |Δ log-probability| of a step, log scale"
    return [
        bar_chart("Staleness", "versions from sampling to training, share of all", shares, percent, color=4),
        _line(view, "Staleness over time", "versions", over_time, smooth=False),
        _line(view, "Trainer–engine mismatch", "log-probabilities, same version, log scale", gap, log=True),
        _line(view, "Largest mismatch", largest, {"mismatch/max_abs": "max |Δ|"}, log=True),
    ]


def _tables(report: RunReport) -> str:
    """Behaviour and outcomes, before and after."""
    cards: list[str] = []
    evaluations = {"before": report.held_out.before, "after": report.held_out.after}
    before, after = (side.behaviour if side else {} for side in evaluations.values())
    if names := list(before | after):
        rows = [(name.replace("_", " "), _change(before.get(name), after.get(name))) for name in names]
        table = _table(["before", "after", "change"], rows)
        cards.append(f'<div class="card"><h3>A held-out episode on average</h3>{table}</div>')
    sides = {"training": report.episodes} | {when: side.outcomes for when, side in evaluations.items() if side}
    sides = {when: counts for when, counts in sides.items() if counts}
    if sides:
        outcomes = dict.fromkeys([*map(str, Outcome), *(name for counts in sides.values() for name in counts)])
        rows = [(name, [f"{counts.get(name, 0):,}" for counts in sides.values()]) for name in outcomes]
        note = '<p class="note">Before and after: held-out episodes.</p>'
        cards.append(f'<div class="card"><h3>Episodes by outcome</h3>{_table(list(sides), rows)}{note}</div>')
    return f'<div class="pair">{"".join(cards)}</div>' if cards else ""


def _change(before: float | None, after: float | None) -> list[str]:
    cells = ["–" if value is None else f"{value:.2f}" for value in (before, after)]
    return [*cells, "" if before is None or after is None else signed(after - before)]


def _lanes(report: RunReport, view: RunView) -> str:
    lanes = timeline(view.timeline, PROCESSES)
    stages = " · ".join(f"{escape(name)} {duration(seconds)}" for name, seconds in report.stages.items())
    note = f'<p class="note">Stages: {stages}</p>' if stages else ""
    legend = '<p class="note">Minutes. Columns are stacked by share of time; grey is waiting.</p>' if lanes else ""
    return f'<div class="card">{note}{lanes}{legend}</div>' if lanes or note else ""


def _weights(report: RunReport, view: RunView) -> str:
    published = [step for step in view.steps if "weights/version" in step]
    if not published:
        return '<p class="card empty">No version was published.</p>'
    whole, rows, sizes = report.weights.bytes_whole, [], []
    for step in published:
        version, shipped = int(step["weights/version"]), step.get("weights/bytes", 0)
        pause = report.weights.pauses.get(version)
        ratio = f"{whole / shipped:.1f}x" if whole and shipped else ""  # how much smaller than a whole version
        changed, stood = percent(step.get("weights/changed", 0)), "" if pause is None else f"{pause:.1f} ms"
        rows.append((f"v{version}", [str(step["step"]), byte_count(shipped), ratio, changed, stood]))
        sizes.append((f"v{version}", float(shipped)))
    charts = [
        bar_chart("Bytes per version", "full copies stand out", sizes, byte_count, color=3),
        _line(view, "Changed elements", "share of all, per version", {"weights/changed": "changed"}, percent),
    ]
    table = _table(["step", "bytes", "ratio", "changed", "pause"], rows[-_SHOWN_VERSIONS:])
    return (
        f'{_grid(charts, wide=True)}<details class="card"><summary>All {len(published)} versions, '
        f'{byte_count(report.bytes_published)} in all</summary><div class="body tall">{table}</div></details>'
    )


def _episodes(view: RunView) -> str:
    if not view.episodes:
        return ""
    stages = dict.fromkeys(e.stage for e in view.episodes if e.stage)
    filters = ("all", *stages, "passed", "failed")
    buttons = "".join(f'<button data-filter="{escape(name)}">{escape(name)}</button>' for name in filters)
    ramp = "".join(f'<i class="{level}"></i>' for level in ("n5", "n3", "n1", "", "p1", "p3", "p5"))
    legend = (
        f'<p class="legend">Sampled tokens are tinted by advantage <span class="ramp">{ramp}</span> and '
        '<span class="u">underlined</span> where their probability was below 10 %. Point at one for its '
        "log-probability, weight version and advantage.</p>"
    )
    tools = f'<span class="switch" role="group" aria-label="episodes shown">{buttons}</span>'
    return _section("Episodes", "episodes", tools, legend + episode_cards(view.episodes))
