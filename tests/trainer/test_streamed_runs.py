"""Runs over streams, as processes: killed anywhere and resumed, on ranks, in bounded memory; `etude corpus trace`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from etude.cli.main import main
from etude.corpus.windows import RowWindow, StreamPlace
from etude.trainer import checkpoint
from etude.trainer.finetune import pretrain
from etude.trainer.finetune.config import MidtrainConfig
from etude.trainer.finetune.reading import RowReader, StreamEnd
from tests.helpers.folders import state_of, write_folder
from tests.trainer.test_folder_stages import metrics
from tests.trainer.test_streams import texts

SECONDS = 150


def write(root: Path, name: str, **trainer: Any) -> Path:
    """The configuration of a run on two sources, of a few windows; the model and the sources are made once."""
    if not (root / "model").exists():
        write_folder(root / "model", "llama", 1300)
        texts(root / "own.jsonl", 1500, "own", 2)
        texts(root / "replay.jsonl", 1500, "replay", 2)
        texts(root / "test.jsonl", 20, "test", 2)
    options = {"batch": 32, "length": 64, "log_every": 1, "threads": 1, "checkpoint_minutes": 0.0001} | trainer
    lines = "".join(f"{key} = {value}\n" for key, value in options.items())
    path = root / f"{name}.toml"
    path.write_text(
        f'stage = "midtrain"\nname = "{name}"\nseed = 5\nmodel.path = "{root}/model"\n[trainer]\n{lines}'
        f'[data]\nheld_out = ["{root}/test.jsonl"]\n'
        f'[[data.sources]]\npath = "{root}/own.jsonl"\nweight = 3\n[[data.sources]]\npath = "{root}/replay.jsonl"\n'
    )
    return path


def train(root: Path, name: str, *more: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "etude.cli.main", "train", str(root / f"{name}.toml"), *more]
    with (root / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=root, stdout=log, stderr=log, env={**os.environ, **environment})


def crossing(root: Path) -> MidtrainConfig:
    """The configuration of a run whose passes are quickly computed."""
    file = write(root, "run", checkpoint_minutes=9, packing='"crossing"')
    return MidtrainConfig.model_validate(tomllib.loads(file.read_text()))


def code(*words: object) -> object:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return end.value.code


def same(one: Path, two: Path) -> None:
    """Both runs have the same weights, states, figures and provenance, bit for bit."""
    for a, b in ([*map(state_of, (one, two))], [load_file(run / "checkpoint/model.safetensors") for run in (one, two)]):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    for name, count in (("loss/token", 8), ("eval/heldout/loss", 1), ("optim/lr", 8)):
        assert metrics(one, name)[-count:] == metrics(two, name)[-count:]
    assert (one / "provenance.jsonl").read_bytes() == (two / "provenance.jsonl").read_bytes()
    assert (one / "data.json").read_bytes() == (two / "data.json").read_bytes()


@pytest.mark.slow
@pytest.mark.smoke
def test_a_run_on_two_sources_that_is_stopped_in_any_window_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = crossing(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain.midtrain(config, whole)
    steps = len(metrics(whole))
    windows = (whole / "provenance.jsonl").read_text().splitlines()
    assert len(windows) >= 3
    rows = [json.loads(line)["row"] // 32 for line in windows]
    for stop in (rows[1], rows[1] + 1, rows[2] + 3):
        pretrain.midtrain(config, parts, resume=(parts / "config.json").exists(), stop_after=stop)
    pretrain.midtrain(config, parts, resume=True)
    same(whole, parts)
    assert metrics(whole) == metrics(parts)
    rates = metrics(whole, "optim/lr")
    assert rates[-1] < 0.2 * max(rates), "the learning rate has decayed where the data ends"
    pretrain.midtrain(config.model_copy(update={"seed": 6}), tmp_path / "other", stop_after=1)
    assert metrics(tmp_path / "other")[0] != metrics(whole)[0]
    assert steps > rows[2] + 3


def test_the_documents_of_a_step_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = crossing(tmp_path)
    pretrain.midtrain(config, tmp_path / "run", stop_after=2)
    capsys.readouterr()
    assert code("corpus", "trace", tmp_path / "run", "--step", 2, "--json") == 0
    pieces = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {piece["row"] for piece in pieces} == set(range(32, 64))
    lines = {name: (tmp_path / name).read_text().splitlines() for name in ("own.jsonl", "replay.jsonl")}
    for piece in pieces:
        assert json.loads(lines[Path(piece["file"]).name][piece["line"] - 1])["id"] == piece["id"]
    assert code("corpus", "trace", tmp_path / "run", "--step", 2) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) == len(pieces)
    first = pieces[0]
    assert f"of {first['id']} ({first['file']}:{first['line']})" in text.splitlines()[0]
    for step, why in ((0, "counted from 1"), (999, "has no step 999 yet")):
        assert code("corpus", "trace", tmp_path / "run", "--step", step) == 2
        assert why in capsys.readouterr().err


def test_a_dry_run_says_what_the_data_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code("train", write(tmp_path, "run"), "--dry-run") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["data"]["sources"][0]["weight"] == 3
    lines = [line for line in printed.err.splitlines() if line.startswith("data:")]
    assert len(lines) == 3
    assert "75.0% of the run, read at most 4 times" in lines[0]
    assert "own.jsonl ends" in lines[2]
    (tmp_path / "own.jsonl").write_text("{}\n")
    assert code("train", tmp_path / "run.toml", "--dry-run") == 2
    assert "own.jsonl can be learned from" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["", "{ shard = 2 }"], ids=["one", "two ranks"])
def test_a_run_on_two_sources_that_is_killed_anywhere_goes_on_bit_for_bit(tmp_path: Path, mesh: str) -> None:
    """kill -9 at the first save, in the midst of a later one, and at any time."""
    more = {"mesh": mesh} if mesh else {}
    for name in ("whole", "killed"):
        write(tmp_path, name, **more)
    whole, killed = (tmp_path / "outputs" / name for name in ("whole", "killed"))
    assert train(tmp_path, "whole").wait(SECONDS) == 0, (tmp_path / "whole.log").read_text()
    resumed = list[str]()
    for point in ("checkpoint.file:1", "checkpoint.manifest:4", "checkpoint.complete:6"):
        assert train(tmp_path, "killed", *resumed, ETUDE_FAILPOINT=point).wait(SECONDS) != 0
        resumed = ["--resume"]
    before = checkpoint.versions(killed / "checkpoints")
    child = train(tmp_path, "killed", *resumed)
    until = time.monotonic() + SECONDS
    while checkpoint.versions(killed / "checkpoints")[-1:] <= before[-1:]:
        assert time.monotonic() < until
        assert child.poll() is None, (tmp_path / "killed.log").read_text()
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert train(tmp_path, "killed", *resumed).wait(SECONDS) == 0, (tmp_path / "killed.log").read_text()
    same(whole, killed)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """The process that reads 60 MB takes no more than for 6 MB, but for what an allocator keeps."""
    write_folder(tmp_path / "model", "llama", 1300)
    line = json.dumps({"text": "value = one + two\n" * 600}) + "\n"
    peaks = list[int]()
    for megabytes in (6, 60):
        file, run = tmp_path / f"{megabytes}.jsonl", tmp_path / f"run{megabytes}"
        file.write_text(line * (megabytes * 10**6 // len(line)))
        run.mkdir()
        values = {"model": {"path": tmp_path / "model"}, "data": {"files": [file]}, "trainer": {"length": 512}}
        (run / "config.json").write_text(MidtrainConfig.model_validate(values).model_dump_json())
        reader, windows = RowReader(run, 0, StreamPlace()), 0
        while not isinstance(frame := reader.frame(), StreamEnd):
            windows += isinstance(frame, RowWindow)
            peaks_of = Path(f"/proc/{reader.pid}/status").read_text()
        reader.close()
        assert windows > megabytes / 3
        peaks.append(int(peaks_of.split("VmHWM:")[1].split()[0]) // 1024)
    assert peaks[1] < peaks[0] + 60, f"MB: {peaks}"
