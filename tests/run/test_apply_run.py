"""A run of reinforcement learning on applied edits: every process is real, the model has a few thousand parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models.make_nano import tokenizer as bpe
from models.make_nano.tokenizer import save as save_tokenizer

from etude.edits import examples as tables
from etude.edits.examples import Example
from etude.edits.formats import edit_prompt
from etude.records import Episode, decode
from etude.store import open_store
from etude.trainer.finetune import applied_edits, pretrain
from etude.trainer.finetune.config import ApplyConfig, NewModelConfig
from etude.weights.manifest import manifests

SHAPE = NewModelConfig(
    vocab_size=360, hidden_size=48, intermediate_size=64, layers=2, heads=2, kv_heads=1, head_dim=24, expert_size=32,
    experts=4, max_positions=128,
)  # fmt: skip
CONFIG = """
stage = "rl"
name = "run"

[model]
path = "sft/checkpoint"

[tasks]
edits = "edits"

[rollout]
prompts = 4
group = 6
staleness = 1
max_in_flight = 24
tokens = 32
context = 128

[trainer]
steps = 4
lr = 1e-3

[eval]
samples = 1
"""


def edit(letter: str, repository: str) -> Example:
    """Every letter has a number of its own, so a tiny model can know the answers by heart."""
    before, after = f"{letter} = 1\n", f"{letter} = {'abcdefgh'.index(letter) + 2}\n"
    return Example(
        id=f"{letter}-{repository}", repository=repository, licence="MIT", origin="files", path="a.py",
        language="python", kind="synthetic", noise=(), merges=True, instruction="", file=before, sketch=after,
        result=after, lines=1,
        fraction=1.0,
    )  # fmt: skip


def etude(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "etude.cli.main", *arguments], cwd=folder, env=os.environ | {"TERM": "dumb"},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip


def prepare(folder: Path) -> None:
    """A model that has half learned to apply edits of one line, and tables of them."""
    train = [edit(letter, "lib-1.0") for letter in "abcdefgh"]
    (folder / "edits").mkdir()
    tables.write_examples(train, folder / "edits/train.parquet")
    tables.write_examples([edit(letter, "other-1.0") for letter in "abcd"], folder / "edits/heldout.parquet")
    texts = [edit_prompt(e.file, e.sketch).content + "<updated-code>\n" + e.result + "</updated-code>" for e in train]
    save_tokenizer(bpe.train(texts, 360), folder / "model", 128)
    pretrain.new_model(SHAPE, 0).save_pretrained(folder / "model")
    trainer = {"tokens": 110_000, "batch": 4, "length": 128, "lr": 5e-3, "compile": False, "threads": 1}
    values = {"model": {"path": folder / "model"}, "data": folder / "edits/train.parquet",
              "held_out": folder / "edits/heldout.parquet", "phases": ({"share": 1.0, "longest": 128},),
              "trainer": trainer}  # fmt: skip
    applied_edits.finetune(ApplyConfig.model_validate(values), folder / "sft")
    (folder / "run.toml").write_text(CONFIG)


@pytest.mark.slow
@pytest.mark.smoke
def test_a_run_trains_on_applied_edits(tmp_path: Path) -> None:
    prepare(tmp_path)
    done = etude(tmp_path, "train", "run.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs/run"
    store = open_store(str(run / "rollouts"))
    episodes = [decode(store.get(key), Episode) for key in store.list() if not key.startswith("eval-")]
    assert len(episodes) == 4 * 4 * 6
    rewards = {e.reward for e in episodes}
    assert {0.0, 1.0} <= rewards <= {0.0, 0.9, 1.0}, "all answers are alike: the run has shown nothing"
    assert all(e.passed == (e.reward == 1.0) for e in episodes)
    assert len({m.digest for m in manifests(open_store(str(run / "weights")))}) == 5
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["rollout/turns"] == 1 for line in lines)
    assert any(0 < line["reward/grade/mean"] < 1 for line in lines)
    report = json.loads((run / "report.json").read_text())
    assert all(report["checks"].values()), report["checks"]
    assert json.loads((run / "eval-after.json").read_text())["tasks"]


def test_what_a_user_may_get_wrong(tmp_path: Path) -> None:
    (tmp_path / "edits").mkdir()
    (tmp_path / "run.toml").write_text(CONFIG.replace("sft/checkpoint", str(Path("models/nano").resolve())))
    done = etude(tmp_path, "train", "run.toml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "edits/train.parquet does not exist" in done.stderr
    done = etude(tmp_path, "train", "run.toml", "--rollout.documents", "true")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "prompts without documents" in done.stderr
    (tmp_path / "run.toml").write_text(CONFIG.replace('edits = "edits"', "max_tasks = 9"))
    done = etude(tmp_path, "train", "run.toml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "give tasks.repository, tasks.dataset, tasks.harbor, tables [[tasks.sources]], tasks.edits" in done.stderr
    assert not (tmp_path / "outputs").exists()
