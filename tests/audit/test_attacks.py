"""The attack suite and the benchmark as a user runs them, and boxes by the hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from etude.audit import attacks
from etude.audit.attacks import attack_suite, fingerprints, packs
from etude.audit.attacks.boxes import CHECKS
from etude.audit.attacks.library import JAVASCRIPT, PYTHON, unpacked
from etude.audit.attacks.probes import PROBES, script
from etude.audit.attacks.report import INSIDE, ITEMS, OUTSIDE, AttackReport, AttackResult
from etude.cli.doctor_reports import show_attacks, table
from etude.config import NamespaceSandboxConfig

ROOT = Path(__file__).parents[2]


def test_every_item_is_attacked_or_skipped_with_a_reason() -> None:
    checked = set(CHECKS) | set(attack_suite.LIBRARY_CHECKS) | set(attack_suite.GRADED_CHECKS)
    played = {program.item for name in (PYTHON, JAVASCRIPT) for program in packs.programs(packs.OWN / name)}
    attacked = played | set(PROBES) | checked | {"F1"}  # F1: the flags of B1 to B3
    assert set(ITEMS) == (attacked & set(ITEMS)) | set(fingerprints.REASONS)
    assert set(fingerprints.REASONS) == {f"E{n}" for n in range(1, 10)}
    assert not attacked & set(fingerprints.REASONS)
    assert all("--against" in reason for reason in fingerprints.REASONS.values())
    for item in PROBES:
        text = script(item, "quartz-lantern", "velvet-anchor", 1)
        compile(text, item, "exec")
        assert "quartz-lantern" not in text  # a probe must not find itself


@pytest.mark.parametrize("name", [PYTHON, JAVASCRIPT])
def test_own_packs_are_packs_like_any_other(name: str, tmp_path: Path) -> None:
    """After a change of a library: `etude.tasks.dataset.seal(root, read_manifest(root))` writes its digests anew."""
    pack = unpacked(name, tmp_path)
    assert (pack.name, len(pack.tasks)) == (name, 1)
    assert all(program.item in ITEMS and program.kind for program in pack.programs)
    (task,) = pack.tasks
    assert {path: (pack.data.repository / path).read_text() for path in task.solution} == task.solution


def test_the_summary_counts_what_was_missed_on_the_default_backend() -> None:
    stopped = [
        AttackResult("B1", "x", OUTSIDE, "fail"),
        AttackResult("B2", "x", "subprocess", "pass", "rewarded"),
    ]
    report = AttackReport(
        [*stopped, AttackResult("B3", "x", INSIDE, "pass", "rewarded", "mounts")], dict(fingerprints.REASONS)
    )
    summary = report.summary
    assert (summary["missed"], summary["host_effects"]) == (1, 1)
    assert summary["stopped"] == 1
    report.absent["bwrap"] = "it is not installed"
    shown = table(report)
    assert "1 of 1 missed: x" in shown
    assert "bwrap: skipped, it is not installed" in shown


def test_what_was_missed_is_named_beside_the_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def made(*_: object, **__: object) -> AttackReport:
        return AttackReport([AttackResult("A7", "probe", "box", "missed", "/run/x")], dict(fingerprints.REASONS))

    monkeypatch.setattr(attacks, "run_attacks", made)
    assert show_attacks(NamespaceSandboxConfig(), as_json=True, quick=True) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["missed"] == 1
    assert "A7 probe (box): /run/x" in shown.err


@pytest.mark.slow
@pytest.mark.smoke
def test_no_attack_succeeds_on_this_machine() -> None:
    command = [sys.executable, "-m", "etude.cli.main", "doctor", "sandbox", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["missed"], found["host_effects"]) == (0, 0), done.stderr
    assert found["stopped"] + len(found["skipped"]) == found["items"]
    assert done.returncode == 0


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    command = [sys.executable, "-m", "etude.cli.main", "bench", "sandbox", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode in (0, 1), done.stderr  # 1: a check failed, maybe one of speed
    result = json.loads(done.stdout.splitlines()[-1])
    assert all(holds for name, holds in result["checks"].items() if "=" not in name), result["checks"]
    cases = {row["case"] for row in result["rows"]}
    assert cases >= {"create-python/p50-ms", "create-python/p95-ms", "create-run-destroy/per-s"}
    assert cases >= {"live-500/mib-each", "destroy-500/ms", "create-python/p50-ms plain"}
    assert all(row["value"] > 0 for row in result["rows"])
