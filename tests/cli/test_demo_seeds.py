"""The table of the demo's seeds shows every run that was started."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from benchmarks.experiments import demo_seeds


def test_a_run_that_did_not_end_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run fails, is resumed, and ends; a seed that has ended is not played again."""
    monkeypatch.setattr(demo_seeds, "LOG", tmp_path / "seeds.jsonl")
    monkeypatch.setattr(demo_seeds, "OUTPUTS", tmp_path)
    folder, ran = tmp_path / "demo-11", []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if command[0] == "git":
            return subprocess.CompletedProcess(command, 0, "abc\n" if "rev-parse" in command else "")
        ran.append(command[3:])
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        if len(ran) == 1:
            raise subprocess.CalledProcessError(1, command)
        gain = {"mean": 0.12, "low": 0.03, "high": 0.2}
        report = {
            "seconds": 780.0, "steps": 50, "pass_before": 0.3, "pass_after": 0.42, "paired_diff": gain, "stages": {},
            "training": {"new": [0.3, 0.5], "teach_later": 0.75}, "checks": {},
            "held_out": {"tasks": 120, "functions": 50},
        }  # fmt: skip
        (folder / "report.json").write_text(json.dumps(report))
        (folder / "memory.jsonl").write_text('{"memory/trainer": 2000000000}\n{"memory/trainer": null}\n')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo_seeds.subprocess, "run", run)
    with pytest.raises(subprocess.CalledProcessError):
        demo_seeds.play("demo-11", 11)
    lines = demo_seeds.runfolder.read_jsonl(demo_seeds.LOG)
    assert "| 11 | did not end |" in demo_seeds.table(lines)
    assert not demo_seeds.finished("demo-11")
    demo_seeds.play("demo-11", 11)
    assert ran == [["demo", "--name", "demo-11", "--seed", "11"], ["demo", "--name", "demo-11", "--resume"]]
    assert demo_seeds.finished("demo-11")
    text = demo_seeds.table(demo_seeds.runfolder.read_jsonl(demo_seeds.LOG))
    assert "| +12.0 [+3.0, +20.0] | 120, 50 | 30.0 %, then 50.0 % | 75 % | abc | 50 | 13.0 | 2.00 | 2 |" in text
    (tmp_path / "demo-12").mkdir()
    (tmp_path / "demo-12/config.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"demo-12 is of a run that seeds.jsonl does not know"):
        demo_seeds.play("demo-12", 12)
    assert "1 of 1 intervals above 0, mean +12.0 points" in text
