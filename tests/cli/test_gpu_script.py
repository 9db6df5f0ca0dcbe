"""`make gpu` without a GPU: what is missing is said, and a step that is lost costs itself alone."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from benchmarks import gpu

from etude.cli.overlays import read_toml
from etude.config import RLConfig, validate

EVERY = [(name, [step.name for step in command.steps]) for name, command in gpu.COMMANDS.items()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(("command", "steps"), EVERY)
def test_a_dry_run_says_what_is_missing(monkeypatch, capsys, command, steps):
    monkeypatch.setattr(sys, "argv", ["gpu", command, "--dry-run"])
    assert gpu.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == steps
    assert lines[0].split()[1:] == ["can", "run"]  # says what the machine has
    assert all("absent: no GPU that PyTorch can use" in line for line in lines[1:])
    monkeypatch.setattr(sys, "argv", ["gpu", command, "--dry-run", "--device", "cpu"])
    assert gpu.main() == 0
    absent = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "can run" not in line]
    assert absent == {"parts": ["flex"], "run": ["rl-vllm"]}[command]


def test_a_bare_python_says_what_it_lacks(tmp_path):
    """Of the standard library alone, as on a machine without any of our packages."""
    code = f"import sys; sys.path.insert(0, {str(gpu.ROOT)!r}); from benchmarks.gpu import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", code, "parts", "--dry-run", "--out", str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert lines[0].endswith("can run")
    assert all("packages are not installed: blake3, " in line for line in lines[1:])


@pytest.mark.parametrize(("there", "refused"), [
    ("5.17.0", True), ("5.9.1", True), ("4.57.0", True), ("5.20.0", False), ("5.24.0.dev0", False), ("", False),
])  # fmt: skip
def test_an_older_transformers_is_refused(monkeypatch, there, refused):
    """Under it mixtures of experts fail; an older torch runs."""
    least = {"transformers": "5.20", "torch": "2.13"}
    monkeypatch.setattr(gpu, "_wanted", lambda: least)
    monkeypatch.setattr(gpu, "version", {"transformers": there, "torch": "2.11.0+cu130"}.get)
    assert (gpu.refused() == f"transformers {there} < 5.20") == refused
    assert "torch 2.11.0+cu130 < 2.13" in gpu.packages_older()


def test_brought_wheels_go_before(tmp_path):
    """Without those of other Pythons; an archive is all that is needed."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in ("a-1-py3-none-any", f"b-1-{own}-{own}-linux", "c-1-cp37-cp37m-linux", "d-1-cp39-abi3-linux"):
        with zipfile.ZipFile(wheels / f"{name}.whl", "w") as archive:
            archive.writestr(f"{name[0]}.py", "")
    found = gpu.unpacked(gpu.Setting("cpu", True, tmp_path, wheels))
    assert found is not None
    assert sorted(os.listdir(found)) == ["a.py", "b.py", "d.py"]
    assert gpu.environment(found)["PYTHONPATH"].startswith(str(found))


# Steps for the supervisor: they end as steps have ended on GPUs.
LOST = """
import os, signal, time
def fine(setting, figures): figures["x"] = 1.23456
def broken(setting, figures):
    figures["before"] = 1
    raise ValueError("why")
def aborted(setting, figures): os.kill(os.getpid(), signal.SIGABRT)
def slow(setting, figures): time.sleep(60)
def deaf(setting, figures):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)
def poisoned(setting, figures): raise RuntimeError("CUDA error: an illegal memory access")
def clean(): pass
"""


def test_a_lost_step_costs_itself_alone(monkeypatch, tmp_path):
    (tmp_path / "lost_steps.py").write_text(LOST)
    (tmp_path / "script.py").write_text(
        f"import sys\nsys.path[:0] = [{str(gpu.ROOT)!r}, {str(tmp_path)!r}]\nfrom benchmarks import gpu\n"
        "names = 'fine broken aborted slow deaf poisoned fine-again'.split()\n"
        "gpu.GRACE, gpu.ELSEWHERE, gpu.missing = 1.0, 1.0, lambda step, setting: ''\n"
        "gpu.COMMANDS['parts'] = gpu.Command('lost_steps', 60.0, tuple(gpu.Step(n, 0.3) for n in names))\n"
        "import lost_steps\nlost_steps.fine_again = lost_steps.fine\n"
        "sys.exit(gpu.main())\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        gpu.subprocess, "Popen",
        lambda words, **more: popen([sys.executable, str(tmp_path / "script.py"), *words[3:]], **more),
    )  # fmt: skip
    monkeypatch.setattr(gpu, "GRACE", 1.0)
    names = ["fine", "broken", "aborted", "slow", "deaf", "poisoned", "fine-again"]
    steps = [gpu.Step(name, 0.3) for name in names]
    assert not gpu.supervised("parts", steps, gpu.Setting("cpu", True, tmp_path), 60.0)
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == names
    assert [line["status"] for line in lines] == ["ok", "failed", "failed", "late", "late", "failed", "ok"]
    assert lines[0]["figures"] == {"x": 1.235}
    assert (lines[1]["figures"], lines[1]["why"]) == ({"before": 1}, "ValueError: why")
    assert lines[2]["why"] == "its process ended with -6"


def test_steps_that_no_longer_fit_are_skipped(tmp_path, capsys):
    steps = [gpu.Step("versions", 30), gpu.Step("model", 60)]
    assert gpu.supervised("parts", steps, gpu.Setting("cpu", True, tmp_path), 0.0)
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["skipped"] * 2


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_its_configurations_are_valid(monkeypatch, tmp_path, device):
    """Of every run, whatever the device."""
    from benchmarks import gpu_run

    def etude(command, path, *flags):
        overrides = [word for flag in flags for word in ([flag, "true"] if flag == "--deterministic" else [flag])]
        config = validate(RLConfig, read_toml(Path(path), overrides), path)
        assert (command, config.trainer.device, config.inference.device) == ("train", device, device)
        raise KeyError

    monkeypatch.setattr(gpu_run, "_work", lambda: tmp_path)
    monkeypatch.setattr(gpu_run, "random_folder", lambda _: tmp_path / "model")
    monkeypatch.setattr(gpu_run, "_etude", etude)
    for step in ("rl_adapters", "smollm2_rl", "deterministic", *(["rl_vllm"] if device == "cuda" else [])):
        with pytest.raises(KeyError):
            getattr(gpu_run, step)(gpu.Setting(device, True, tmp_path), {})


def test_an_unknown_step_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "parts", "--steps", "rows,tea"])
    assert gpu.main() == 2
    assert "parts has no step tea; there are versions, digests" in capsys.readouterr().err
