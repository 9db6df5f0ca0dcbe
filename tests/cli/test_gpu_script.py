"""`make gpu` without a GPU: what is missing is said, and is no failure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import gpu

from etude.cli.overlays import read_toml
from etude.config import RLConfig, validate
from etude.trainer.finetune.config import SftConfig


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_dry_run_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run"])
    assert gpu.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(gpu.STEPS)
    assert lines[0].split()[1:] == ["can", "run"]  # says what the machine has
    assert all("absent: no GPU that PyTorch can use" in line for line in lines[1:])
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run", "--device", "cpu"])
    assert gpu.main() == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (found["flex"], found["trainer"]) == ("absent: cpu is no GPU", "can run")


def test_a_bare_python_says_what_it_lacks(tmp_path: Path) -> None:
    """Of the standard library alone, as on a machine without any of our packages."""
    code = f"import sys; sys.path.insert(0, {str(gpu.ROOT)!r}); from benchmarks.gpu import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", code, "--dry-run", "--out", str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(gpu.STEPS)
    assert lines[0].endswith("can run")
    assert all("packages are not installed: blake3, " in line for line in lines[1:])


@pytest.mark.parametrize("step", ["deterministic", "rl", "rl-vllm", "sft"])
def test_its_configurations_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str) -> None:
    def etude(_: gpu.Setting, command: str, path: str, *flags: str) -> None:
        assert command == "train"
        overrides = [word for flag in flags for word in ([flag, "true"] if flag == "--deterministic" else [flag])]
        validate(SftConfig if step == "sft" else RLConfig, read_toml(Path(path), overrides), path)
        raise gpu.Absent("judged")

    monkeypatch.setattr(gpu, "_model_folder", lambda _: tmp_path / "model")
    monkeypatch.setattr(gpu, "_etude", etude)
    with pytest.raises(gpu.Absent, match="judged"):
        gpu.STEPS[step].work(gpu.Setting("cuda", True, tmp_path))


def test_a_step_writes_json_whatever_becomes_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = gpu.Setting("cpu", True, tmp_path)

    def broken(_: gpu.Setting) -> dict[str, object]:
        raise ValueError("why")

    monkeypatch.setitem(gpu.STEPS, "machine", gpu.Step(broken))
    monkeypatch.setattr(sys, "argv", ["gpu", "--step", "machine", "--device", "cpu", "--out", str(tmp_path)])
    assert gpu.main() == 0
    written = json.loads((tmp_path / "machine.json").read_text())
    assert (written["status"], written["why"]) == ("failed", "ValueError: why")
    assert gpu._run_step("triton", setting)["status"] == "absent"


def test_an_unknown_step_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--steps", "trainer,tea"])
    assert gpu.main() == 2
    assert "there is no step tea; there are machine, device-tests" in capsys.readouterr().err
