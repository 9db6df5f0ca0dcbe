"""Every stage begins with the preflight of its model folder, before anything is built."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

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


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "run"])
@pytest.mark.parametrize("stage", ["sft", "rl"])
@pytest.mark.parametrize(
    ("end", "why"), [("q_proj.weight", "1 missing keys, e.g."), ("experts.7.up_proj.weight", "the files lack tensors")]
)
def test_a_tensor_inside_of_a_layer_is_missed_before_anything_is_built(
    tmp_path, monkeypatch, capsys, end, why, stage, dry
):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(find_model("nano"), tmp_path / "model", ignore=shutil.ignore_patterns("*.jsonl"))
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in sorted(tensors) if "layers.1." in name and name.endswith(end))
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    Path("some.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    Path("run.toml").write_text(f'name = "r"\nmodel.path = "model"\n{STAGES[stage]}')
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.toml", *["--dry-run"] * dry])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert why in said
    assert lost in said
    assert "REPORT" not in said
    assert not Path("outputs/r").exists()


def test_edits_neither(folder: Path) -> None:
    edit(folder / "model", "config.json", {"pad_token_id": 10**6})
    with pytest.raises(UserError, match=r"pad_token_id = 1000000.*--repair DIR` mends"):
        applied_edits.finetune(config(folder), folder / "run")
    assert not (folder / "run").exists()
