"""The printed reports of `etude doctor` and its checks. An audit is imported when it is called."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs
from rich.console import Console
from rich.table import Table

from etude.evals import Estimate

if TYPE_CHECKING:
    from etude.audit.architectures.table import ModelRow
    from etude.audit.attacks import AttackReport, AttackResult, FingerprintsAgainst
    from etude.audit.parity import ParityAudit, ParityComparison
    from etude.config import SandboxConfig

SHOWN = 10  # probes that tell boxes apart


def show_machine(*, as_json: bool) -> int:
    """Prints the checks of this machine; exit code 0 if boxes can be made here and hold, else 1."""
    from etude.audit.machine import checks

    results = checks()
    ok = all(check.ok for check in results if check.needed)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in results]}, indent=1))
        return 0 if ok else 1
    for check in results:
        mark = "ok  " if check.ok else "FAIL" if check.needed else "no  "
        cure = f"\n     cure: {check.cure}" if check.cure and not check.ok else ""
        print(f"{mark} {check.name:32} {check.detail}{cure}")
    return 0 if ok else 1


def show_mismatch(run: Path, *, as_json: bool) -> int:
    """Prints the diagnosis; exit code 0 if the run is healthy or only stale, else 1. Raises UserError."""
    from etude.audit.mismatch import diagnose

    diagnosis = diagnose(run)
    if as_json:
        print(json.dumps(asdict(diagnosis)))
    else:
        print(f"{diagnosis.cause}: {diagnosis.sentence}\n  {diagnosis.action}")
        if diagnosis.tokens:
            print(f"  {diagnosis.tokens} tokens, {diagnosis.wrong_draws:.1%} of them not what their seeds draw")
        for name, share in diagnosis.shares.items():
            print(f"  {share:6.1%} of the difference in training: {name}")
        if diagnosis.flips is not None:
            print(f"  {diagnosis.flips:.1%} of tokens change experts in bfloat16")
        for s in diagnosis.suppositions:
            print(f"  k2 {s.k2:8.2g} if {s.what} ({s.cause})")
    return 0 if diagnosis.cause in ("healthy", "staleness") else 1


def show_replay(run: Path, names: Sequence[str], *, as_json: bool) -> int:
    """Prints the number of token-exact episodes, and the first difference of others; exit code 0 if all are exact."""
    from etude.audit.replay import replay_run

    replays = replay_run(run, names)
    exact = sum(not r.difference for r in replays)
    if as_json:
        print(json.dumps({"episodes": len(replays), "exact": exact, "replayed": [asdict(r) for r in replays]}))
    else:
        for r in replays:
            if r.difference:
                print(f"{r.episode}: {r.difference}")
        turns, tokens = sum(r.turns for r in replays), sum(r.tokens for r in replays)
        segments = sum(r.segments for r in replays)
        print(
            f"{exact} of {len(replays)} episodes are token-exact ({turns:,} turns, {tokens:,} tokens, "
            f"{segments:,} segments)"
        )
    return 0 if exact == len(replays) else 1


def show_model(folder: Path, repaired: Path | None, *, as_json: bool, quick: bool = False) -> int:
    """Prints the check of a model folder, or of its mended copy `repaired`, which is written; exit code 1 if anything
    is wrong. With `quick`, the model is not loaded. Raises UserError."""
    from etude.weights.preflight import examine, repair

    edits = [] if repaired is None else [str(edit) for edit in repair(folder, repaired)]
    report = examine(folder if repaired is None else repaired, whole=not quick)
    if not as_json:
        for edit in edits:
            print(f"mended  {edit}")
        print(report.folder.name)
        dialect = ", ".join(filter(None, (report.speech.dialect, report.speech.calls)))
        print(f"  dialect         {dialect or '-'}\n  thoughts        {report.speech.thoughts or '-'}")
        for finding in report.findings:
            mended = " (--repair DIR mends it)" if finding.edits else ""
            print(f"{finding.severity:5}  {finding.name}: {finding.sentence}{mended}", flush=True)
    from etude.audit.model_check import ModelCheck, check_model  # with torch, behind the findings

    check = ModelCheck(report, None) if quick else check_model(report)
    summary = check.summary()
    if as_json:
        print(json.dumps(summary | {"repaired": edits}))
        return int(not summary["ok"])
    if check.row is not None:
        print(_model_line(check.row))
    if check.refusal:
        print(f"fault  loading: {check.refusal}")
    notes = len(report.findings) - len(report.faults)
    print(f"{check.faults} fault{'s' * (check.faults != 1)}, {notes} note{'s' * (notes != 1)}")
    return int(not summary["ok"])


def show_families(
    *, as_json: bool, docs: Path | None = None, templates: Path | None = None, vllm: str | None = None
) -> int:
    """Prints the table of known families; exit code 1 if a computation is wrong without an error. `vllm` is a Python
    that has vLLM. Raises UserError."""
    from etude.audit.architectures import page
    from etude.audit.architectures import table as architectures
    from etude.config import InferenceConfig
    from etude.run.vllm_environment import check_python

    if vllm:
        check_python(InferenceConfig(engine="vllm", python=vllm))
    made = []
    for row in architectures.rows(templates=templates, vllm=vllm):
        made.append(row)
        print(json.dumps(asdict(row)) if as_json else _model_line(row), flush=True)
    counts = architectures.summary(made)
    if docs is not None:
        page.write(docs, made)
    print(json.dumps(counts) if as_json else ", ".join(f"{count} {name}" for name, count in counts.items()))
    return int(counts["silent"] > 0)


def _model_line(row: ModelRow) -> str:
    lines = [f"{row.name} ({row.model_type})"]
    for use, cell in row.cells.items():
        error = "" if cell.error is None else f" {cell.error:.1e}"
        lines.append(f"  {use:15} {cell.state}{error}{f'  {cell.said}' if cell.said else ''}")
    return "\n".join(lines)


def table(report: AttackReport) -> str:
    """The report as a table of items, one column per place."""
    from etude.audit.attacks import INSIDE, ITEMS, OUTSIDE

    places = [w for w in (OUTSIDE, INSIDE, "box", "subprocess", "bwrap") if any(r.where == w for r in report.results)]
    shown = Table("item", *places, "host", title="attacks", expand=False)
    for item in ("gold", "no-op", *ITEMS):
        if item in report.skipped:
            shown.add_row(item, *["-"] * len(places), f"skipped: {report.skipped[item]}")
            continue
        cells = [_cell(report.of(item, place)) for place in places]
        hosts = {r.host for r in report.of(item, OUTSIDE, INSIDE, "box") if r.host}
        shown.add_row(item, *cells, "[red]" + "; ".join(hosts) if hosts else "unchanged")
    console = Console(width=int(os.environ.get("COLUMNS", "140")))
    with console.capture() as text:
        console.print(shown)
        for name, reason in report.absent.items():
            console.print(f"{name}: skipped, {reason}")
    return text.get()


def _cell(results: Sequence[AttackResult]) -> str:
    if not results:
        return ""
    bad = [r for r in results if r.problem]
    if bad:
        return f"[red]{len(bad)} of {len(results)} missed: {bad[0].name}"
    words = [r.verdict.split(" ")[0].rstrip(":") for r in results]
    return ", ".join(f"{words.count(w)} {w}" if len(words) > 1 else w for w in dict.fromkeys(words))


def show_attacks(
    config: SandboxConfig, against: FingerprintsAgainst | None = None, *, as_json: bool, quick: bool
) -> int:
    """Prints the table, or the summary on one line; 1 if an attack was missed or had an effect on the host."""
    from etude.audit.attacks import run_attacks

    with Console(stderr=True).status("attacks") as status:
        report = asyncio.run(run_attacks(config, against, quick=quick, progress=status.update))
    if not as_json:
        print(table(report), end="")
    for result in report.problems:
        line = f"{result.item} {result.name} ({result.where}): {result.problem or result.host}"
        print(line, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(report.summary))
    else:
        counts = "{stopped} of {items} stopped, {missed} missed".format(**report.summary)
        print(counts, f"and {len(report.skipped)} skipped")
    return 0 if report.passed else 1


def show_packs(folders: Sequence[Path], config: SandboxConfig, *, as_json: bool) -> int:
    """Prints the rewards of attack packs; 1 if an attack got through or a control failed. Raises UserError."""
    from etude.audit.attacks import load_pack, pack_table, play_pack

    loaded = [load_pack(folder) for folder in folders]
    with Console(stderr=True).status("attack packs") as status:
        played = [asyncio.run(play_pack(pack, config, status.update)) for pack in loaded]
    if as_json:
        print(json.dumps([each.summary | {"played": [a.row for a in each.played]} for each in played]))
    else:
        print(pack_table(played))
    return 0 if all(each.passed for each in played) else 1


def show_record(path: Path, samples: int) -> int:
    """Appends fingerprints of this machine to a file, and prints their number. Raises UserError."""
    from etude.audit.parity import record_fingerprints

    record_fingerprints(path, samples)
    print(f"{samples} fingerprints appended to {path}; read them before you hand them on")
    return 0


def show_parity(
    files: Sequence[Path],
    boxes: int,
    *,
    as_json: bool,
    dataset: Path | None = None,
    machine_profiles: Path | None = None,
    config: SandboxConfig | None = None,
) -> int:
    """Prints the audit; 1 if boxes with a machine profile are told apart more often than the gate allows. Raises
    UserError."""
    from etude.audit.parity import compare_boxes

    comparison = compare_boxes(files, boxes, dataset=dataset, machine_profiles=machine_profiles, boxes=config)
    if as_json:
        print(json.dumps(_summary(comparison)))
    else:
        _print(comparison)
    return 0 if comparison.passed else 1


def show_image_parity(image: Path, pairs: int, *, as_json: bool) -> int:
    """Prints how boxes of an image differ from the image's own machine, all probes counted; 1 if they are told apart
    more often than the gate allows. Raises UserError."""
    from etude.audit.parity import PARITY_GATE, compare_with_own_machine

    with Console(stderr=True).status("pairs") as status:
        comparison = compare_with_own_machine(image, pairs, lambda done, of: status.update(f"{done} of {of} pairs"))
    tells = [tell for tell in comparison.audit.tells if tell.auc > PARITY_GATE]
    if as_json:
        part = {"ok": comparison.passed, "gate": PARITY_GATE, "pairs": comparison.pairs, **_auc(comparison.audit.whole)}
        print(json.dumps(part | {"tells": [asdict(tell) for tell in comparison.audit.tells]}))
        return 0 if comparison.passed else 1
    audit = comparison.audit
    print(f"AUC of all probes, 95 %: {_interval(audit.whole)} ({comparison.pairs} pairs of a box and a container)")
    print(f"without the exceptions of other comparisons: {_interval(audit.gated)}")
    print(f"gate: at most {PARITY_GATE:.2f}: {'held' if comparison.passed else 'NOT held'}")
    print(f"{len(tells)} of {comparison.probes} probes tell by themselves{':' if tells else ''}")
    for tell in tells:
        why = f"\n   why: {tell.exception}" if tell.exception else ""
        print(f"{tell.group} {tell.probe:20} {tell.auc:.2f}  {tell.seen}\n   cure: {tell.cure}{why}")
    return 0 if comparison.passed else 1


def show_pairs(runs: Sequence[Path], prefix: str, *, as_json: bool) -> int:
    """Prints the comparison of two runs; 1 if hacks or remarks on a test differ. Raises UserError."""
    from etude.audit.parity import compare_pairs, pairs_differ, read_pair

    first, second = (read_pair(run, prefix) for run in runs)
    compared = compare_pairs(first, second)
    if as_json:
        rows = [asdict(pair) | {"difference": structs.asdict(pair.difference)} for pair in compared]
        print(json.dumps({"pairs": rows}))
    else:
        print(f"{'':32} {'first':>9} {'second':>9}  difference, 95 %   ({len(first)} and {len(second)} episodes)")
        for pair in compared:
            d, mark = pair.difference, " *" if pair.differs else ""
            means = f"{pair.name:32} {pair.first:9.3f} {pair.second:9.3f}"
            print(f"{means}  {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]{mark}")
    return int(pairs_differ(compared))


def _summary(comparison: ParityComparison) -> dict[str, Any]:
    from etude.audit.parity import PARITY_GATE

    def part(audit: ParityAudit) -> dict[str, Any]:
        tells = [asdict(tell) for tell in audit.tells]
        return {"gated": _auc(audit.gated), "whole": _auc(audit.whole), "telling": audit.telling, "tells": tells}

    return {
        "ok": comparison.passed,
        "gate": PARITY_GATE,
        "machines": comparison.machines,
        "production": comparison.samples,
        "boxes": comparison.boxes,
        "treated": part(comparison.treated),
        "untreated": part(comparison.untreated),
        "notes": comparison.notes,
    }


def _auc(estimate: Estimate) -> dict[str, float]:
    return {"auc": round(estimate.mean, 4), "low": round(estimate.low, 4), "high": round(estimate.high, 4)}


def _interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _print(comparison: ParityComparison) -> None:
    from etude.audit.parity import PARITY_GATE

    print(f"{'AUC, 95 %':24} {'without exceptions':24} {'all probes':24} telling")
    sides = {"without machine profile": comparison.untreated, "with machine profile": comparison.treated}
    for name, side in sides.items():
        print(f"{name:24} {_interval(side.gated):24} {_interval(side.whole):24} {side.telling:>6}")
    print(f"gate: at most {PARITY_GATE:.2f} without exceptions: {'held' if comparison.passed else 'NOT held'}\n")
    tells = comparison.treated.tells
    counted = [tell for tell in tells if not tell.exception and tell.auc > PARITY_GATE]
    for tell in counted[:SHOWN]:
        print(f"{tell.group} {tell.probe:20} {tell.auc:.2f}  {tell.seen}\n   cure: {tell.cure}")
    print("\ndeclared exceptions (docs/sandbox.md):")
    reasons: dict[str, list[str]] = {}
    for tell in tells:
        if tell.exception and tell.auc > PARITY_GATE:
            reasons.setdefault(tell.exception, []).append(f"{tell.probe} {tell.auc:.2f}")
    for reason, names in reasons.items():
        print(f"   {', '.join(names)}: {reason}")
    for note in comparison.notes:
        print(note)
