"""Folders that cannot be computed with: every entrance refuses them in one sentence, before anything is started; and
folders that look so and can."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM

from etude.cli.main import main
from etude.config import EngineConfig
from etude.errors import UserError
from etude.inference.engine.loading import load_engine
from etude.models.files import INDEX
from etude.models.loading import load_model
from etude.weights import model_folder
from tests.helpers.folders import write_folder

WEIGHTS = "model.safetensors"
CODE = 'from pathlib import Path\nPath(__file__).with_name("ran").touch()\n'


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("sound") / "m", "qwen3", 1000)


def changed(folder, **values):
    """config.json with other values; None takes a key away."""
    written = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({k: v for k, v in written.items() if v is not None}))


def quantised(method):
    return lambda folder: changed(folder, quantization_config={"quant_method": method})


def cut(count):
    def cut_off(folder):
        file = folder / WEIGHTS
        file.write_bytes(file.read_bytes()[:count])

    return cut_off


def with_code(folder):
    changed(folder, model_type="zebra", auto_map={"AutoConfig": "zebra.Config", "AutoModelForCausalLM": "zebra.Model"})
    (folder / "zebra.py").write_text(CODE)


def without_scales(folder):
    tensors = load_file(folder / WEIGHTS)
    narrow = {name: t.to(torch.float8_e4m3fn) if "q_proj" in name else t for name, t in tensors.items()}
    save_file(narrow, folder / WEIGHTS, {"format": "pt"})


def pickled(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def adapters(folder):
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "config.json").rename(folder / "adapter_config.json")


def sharded(folder, listed=2, lost="", gone=False):
    """Two files, of which the index lists some, without the tensors called `lost`, the second one `gone`."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    index = {}
    for number in (1, 2):
        names, file = sorted(tensors)[number - 1 :: 2], f"model-0000{number}-of-00002.safetensors"
        index |= dict.fromkeys(names if number <= listed else [], file)
        save_file({name: tensors[name] for name in names if name != lost}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    if gone:
        (folder / "model-00002-of-00002.safetensors").unlink()


def without_a_tensor(folder):
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def encoder(folder):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=1000, **sizes)).save_pretrained(folder)


def emptied(folder):
    for file in folder.iterdir():
        file.unlink()


NORM = "model.layers.0.input_layernorm.weight"
REFUSED = {
    "GPTQ": (quantised("gptq"), "is quantised (gptq)"),
    "AWQ": (quantised("awq"), "is quantised (awq)"),
    "bitsandbytes": (quantised("bitsandbytes"), "is quantised (bitsandbytes)"),
    "a format that nobody knows": (quantised("zigzag"), "is quantised (zigzag)"),
    "FP8 without scales": (without_scales, "is quantised (F8_E4M3)"),
    "a file cut off": (cut(-100), "is damaged: "),
    "a header cut off": (cut(50), "its header is longer than the file"),
    "an empty file": (cut(0), "is damaged ("),
    "code of its own": (with_code, "zebra needs code of its own (auto_map), which is never run"),
    "an unknown type": (lambda folder: changed(folder, model_type="zebra"), "zebra is no model of transformers"),
    "no JSON": (lambda folder: (folder / "config.json").write_text('{"a":'), "is not valid JSON"),
    "an array": (lambda folder: (folder / "config.json").write_text("[1]"), "names no model_type"),
    "an empty object": (lambda folder: (folder / "config.json").write_text("{}"), "names no model_type"),
    "a pickle": (pickled, "pytorch_model.bin, a pickle, which is never read"),
    "nothing": (emptied, "has no config.json"),
    "adapters": (adapters, "holds adapters (LoRA)"),
    "a lost file": (lambda folder: sharded(folder, gone=True), "model-00002-of-00002.safetensors is missing"),
    "a file that is not listed": (lambda folder: sharded(folder, listed=1), "names 1 of 2 files"),
    "a lost tensor": (lambda folder: sharded(folder, lost=NORM), f"lacks 1 tensors of its index, e.g. {NORM}"),
}  # fmt: skip
AT_LOAD = {
    "a lost tensor": (without_a_tensor, "1 missing keys, e.g. model.layers.0.mlp.up_proj.weight"),
    "other sizes": (lambda folder: changed(folder, intermediate_size=64), "mismatched keys, e.g. model.layers.0.mlp"),
    "an unknown rotation": (
        lambda folder: changed(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "'spiral'",
    ),
    "no heads": (lambda folder: changed(folder, num_attention_heads=0), "cannot be loaded as a causal language model"),
    "an encoder": (encoder, "bert is an encoder, whose tokens see those behind them"),
}  # fmt: skip
RL = '[model]\npath = "{0}"\n[tasks]\nrepository = "."\n'
SFT = 'stage = "sft"\n[model]\npath = "{0}"\n[data]\nfiles = ["{1}"]\n'


def entrances(folder, to: Path):
    """Command lines that take a model folder."""
    (to / "rl.toml").write_text(RL.format(folder))
    (to / "chats.jsonl").write_text("{}")
    (to / "sft.toml").write_text(SFT.format(folder, to / "chats.jsonl"))
    yield ["serve", str(folder)]
    yield ["eval", str(folder), "--suite", "retrieval"]
    yield ["train", str(to / "rl.toml"), "--dry-run"]
    yield ["train", str(to / "sft.toml"), "--dry-run"]
    yield ["weights", "publish", str(to / "store"), str(folder)]


def broken(sound, tmp_path, change):
    folder = shutil.copytree(sound, tmp_path / "m")
    change(folder)
    return folder


@pytest.mark.parametrize("what", REFUSED)
def test_every_entrance_refuses_in_one_sentence(what, sound, tmp_path, capsys):
    change, why = REFUSED[what]
    folder = broken(sound, tmp_path, change)
    for words in entrances(folder, tmp_path):
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr().err.strip()
        assert (ended.value.code, said.count("\n")) == (2, 0), (words, said)
        assert said.startswith(f"etude: {folder}"), words
        assert why in said, words
    with pytest.raises(SystemExit) as ended:  # which reports, as far as there is a model
        main(["doctor", "model", str(folder)])
    assert ended.value.code in (1, 2)
    assert "Traceback" not in capsys.readouterr().err
    begun = time.monotonic()
    with pytest.raises(UserError):
        load_model(folder)
    assert time.monotonic() - begun < 1
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("what", AT_LOAD)
def test_what_only_the_class_tells_is_refused_at_load(what, sound, tmp_path):
    change, why = AT_LOAD[what]
    folder = broken(sound, tmp_path, change)
    with pytest.raises(UserError) as refused:
        load_engine(model_folder(folder), EngineConfig(cache_mb=8, speculate=False))
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_folders_that_are_unusual_and_sound(sound, tmp_path):
    """Code in a folder whose type transformers knows is not run; two files; no names of architectures."""
    coded, parted, nameless = (shutil.copytree(sound, tmp_path / name) for name in ("coded", "parted", "nameless"))
    changed(coded, auto_map={"AutoConfig": "zebra.Config", "AutoModelForCausalLM": "zebra.Model"})
    (coded / "zebra.py").write_text(CODE)
    sharded(parted)
    changed(nameless, architectures=None)
    expected = load_model(sound).state_dict()
    for folder in (coded, parted, nameless):
        assert model_folder(folder) == folder
        assert all(torch.equal(t, expected[name]) for name, t in load_model(folder).state_dict().items())
    assert not (coded / "ran").exists()
