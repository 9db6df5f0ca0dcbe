"""Every stage begins with the preflight of its model folder, before anything is built."""

import json
import shutil
from pathlib import Path

import pytest

from etude.cli.main import main
from etude.config import find_model
from etude.errors import UserError
from etude.trainer.finetune import applied_edits
from tests.helpers.apply_edits import config
from tests.helpers.mixtures import TINY
from tests.helpers.sound_folders import edit

STAGES = {
    "midtrain": 'stage = "midtrain"\n[data]\nfiles = ["some.jsonl"]\n',
    "sft": 'stage = "sft"\n[data]\nfiles = ["some.jsonl"]\n',
    "rl": f'[tasks]\ndataset = "{TINY}"\n',
}


def untied(folder: Path) -> Path:
    """nano, whose output embeddings are its input embeddings, with a configuration that says otherwise."""
    shutil.copytree(find_model("nano"), folder, ignore=shutil.ignore_patterns("*.jsonl", "recipes"))
    edit(folder, "config.json", {"tie_word_embeddings": False})
    return folder


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "run"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_does_not_begin(tmp_path, monkeypatch, capsys, stage, dry):
    monkeypatch.chdir(tmp_path)
    untied(tmp_path / "model")
    row = {
        "text": "def f(): pass",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    }
    Path("some.jsonl").write_text(json.dumps(row))
    Path("run.toml").write_text(f'name = "r"\nmodel.path = "model"\n{STAGES[stage]}')
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.toml", *["--dry-run"] * dry])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "no output embeddings (lm_head) are stored" in said
    assert f"`etude doctor model {tmp_path}/model --repair DIR` mends it" in " ".join(said.split())
    assert not Path("outputs/r").exists()


def test_edits_neither(folder: Path) -> None:
    edit(folder / "model", "config.json", {"pad_token_id": 10**6})
    with pytest.raises(UserError, match=r"pad_token_id = 1000000.*--repair DIR` mends"):
        applied_edits.finetune(config(folder), folder / "run")
    assert not (folder / "run").exists()
