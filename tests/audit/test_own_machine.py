"""Boxes of an image against containers of it: the comparison by pairs, and what is left to tell them apart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from etude.audit.parity import audit, compare_with_own_machine, own_machine
from etude.cli import doctor_reports
from etude.cli.main import main
from etude.errors import RunFailed, UserError
from etude.evals import Estimate
from etude.sandbox.fingerprints import FingerprintSample, read_fingerprints
from tests.helpers.containers import runtime

RECORDED = Path(__file__).parent / "data"
# What always tells a box from a container of rootful podman under control groups of version 1; docs/sandbox.md.
LEFT = {
    *("cgroup", "disk.free", "disk.inodes", "disk.size", "latency.stat", "latency.write"),
    *("mounts", "mounts.root", "mounts.types", "namespaces"),
}
LOAD = {"latency.call", "latency.program", "latency.python", "load"}


def pairs(count: int, seed: int, **told: tuple[object, object]) -> tuple[list[FingerprintSample], ...]:
    """Boxes and machines that differ in `told`, name -> (of boxes, of machines), and share the load of their pair."""
    rng = np.random.default_rng(seed)
    sides: tuple[list[FingerprintSample], ...] = ([], [])
    for number in range(count):
        load = float(rng.exponential(5.0))
        for place, side in enumerate(sides):
            own = {"load": load + rng.normal() / 100, "uptime": 1e4 + 20 * number + rng.random()}
            side.append(FingerprintSample(str(number), own | {name: values[place] for name, values in told.items()}))
    return sides


def test_what_a_pair_shares_tells_nothing() -> None:
    """Over five draws the mean AUC of equal sides is 0.5 within 0.15: the better of two classifiers counts."""
    means = [audit.compare_pairs_of_machines(*pairs(20, seed)).whole.mean for seed in range(5)]
    assert abs(np.mean(means) - 0.5) < 0.15, means


def test_no_exception_is_left_out_of_the_figure_that_counts() -> None:
    comparison = audit.compare_pairs_of_machines(*pairs(20, 0, **{"status.Seccomp": ("2", "0")}))
    assert comparison.whole.mean == 1.0
    assert comparison.gated.mean < 0.75
    assert not own_machine.ImageParity(comparison, 20, 3).passed
    with pytest.raises(UserError, match="say nothing"):
        audit.compare_pairs_of_machines(*pairs(9, 0))


def test_recorded_boxes_differ_from_containers_by_what_the_page_says() -> None:
    """Forty fingerprints of Debian trixie on one busy machine: after the mends, none but these always tell."""
    boxes, machines = (read_fingerprints([RECORDED / f"{side}.jsonl"]) for side in ("boxes", "containers"))
    comparison = audit.compare_pairs_of_machines(boxes, machines)
    assert comparison.whole.mean == 1.0
    assert {tell.probe for tell in comparison.tells if tell.auc == 1.0} - LOAD == LEFT
    assert all(tell.exception and tell.cure for tell in comparison.tells if tell.probe in LEFT)
    rest = {tell.probe for tell in comparison.tells if tell.auc > 0.8}
    assert rest <= LEFT | LOAD, "a probe of the image, its user or its limits tells"


def test_the_report_names_probes_and_cures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = audit.compare_pairs_of_machines(*pairs(20, 0, umask=(18, 2), mounts=(40, 29)))
    result = own_machine.ImageParity(shown, 20, 4)
    monkeypatch.setattr("etude.audit.parity.compare_with_own_machine", lambda *_: result)
    assert doctor_reports.show_image_parity(Path("image.tar"), 20, as_json=False) == 1
    printed = capsys.readouterr().out
    assert "AUC of all probes, 95 %: 1.000" in printed
    assert "2 of 4 probes tell by themselves" in printed
    assert "cure: Set the users' umask." in printed
    assert doctor_reports.show_image_parity(Path("image.tar"), 20, as_json=True) == 1
    line = json.loads(capsys.readouterr().out)
    assert (line["auc"], line["pairs"], line["ok"]) == (1.0, 20, False)
    assert own_machine.ImageParity(audit.ParityAudit(shown.gated, Estimate(0.5, 0.4, 0.6), ()), 20, 4).passed


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="--boxes must be at least 10"):
        compare_with_own_machine(tmp_path, 3)
    with pytest.raises(SystemExit):
        main(["doctor", "parity", "--image", str(tmp_path), "--dataset", str(tmp_path)])
    assert "drop --sandbox, --dataset" in capsys.readouterr().err
    with pytest.raises(RunFailed, match="mistake"):
        own_machine._podman(["sh", "-c", "echo a mistake >&2; exit 3"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="podman is not installed"):
        compare_with_own_machine(tmp_path, 10)


@pytest.mark.release
@pytest.mark.skipif(
    shutil.which("mmdebstrap") is None or os.geteuid() != 0 or shutil.which("podman") is None,
    reason="needs mmdebstrap, podman and root",
)
def test_boxes_of_another_debian_against_podmans_containers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if runtime() is None:
        pytest.skip("podman starts no container here")
    root, archive = tmp_path / "root", tmp_path / "image.tar"
    account = 'chroot "$1" useradd -m -u 1000 -s /bin/bash dev'
    made = ["mmdebstrap", "--variant=minbase", "--include=python3,bash,git,procps", f"--customize-hook={account}"]
    subprocess.run([*made, "trixie", str(root)], check=True)
    name = "localhost/etude-parity-test:trixie"
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packed:
        subprocess.run(["podman", "import", "--change", "USER=dev", "-", name], stdin=packed.stdout, check=True)
    try:
        subprocess.run(["podman", "save", "--quiet", "--output", str(archive), name], check=True)
        with pytest.raises(SystemExit):  # the gate is not held
            main(["doctor", "parity", "--image", str(archive), "--boxes", "10", "--json"])
    finally:
        subprocess.run(["podman", "rmi", "--force", name], check=False)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    always = {tell["probe"] for tell in line["tells"] if tell["auc"] == 1.0}
    assert always <= LEFT | LOAD, "something new tells a box from a container"
