"""The preflight of model folders: planted faults are found by name and mended, sound folders raise no alarm."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from etude.cli.main import main
from etude.errors import UserError
from etude.weights.preflight import FolderReport, check_before_training, examine, repair
from tests.helpers.sound_folders import BY_NAME, SOUND, edit, read, sound_folder, write


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Folders of all families in SOUND."""
    root = tmp_path_factory.mktemp("sound")
    for name in SOUND:
        sound_folder(root / name, name)
    return root


def faults(folder: Path) -> list[str]:
    return [fault.name for fault in examine(folder).faults]


@pytest.fixture(scope="module")
def reports(sound) -> dict[str, FolderReport]:
    return {name: examine(sound / name) for name in SOUND}


def test_sound_folders_raise_no_alarm(reports):
    assert len(reports) >= 20
    assert {name: report.faults for name, report in reports.items()} == {name: [] for name in SOUND}
    assert not [f for report in reports.values() for f in report.findings if f.stops]


def test_notes_are_what_makers_ship(reports):
    """Padding that ends a turn, a beginning from template and tokenizer, defaults of sampling, a long tokenizer."""
    notes = {name: {f.name for f in report.findings} for name, report in reports.items()}
    assert notes["deepseek-v3.1"] == {"pad-token", "doubled-bos", "generation-config"}
    assert notes["llama-3.1"] == {"pad-token", "doubled-bos", "generation-config"}
    assert notes["qwen2.5"] == {"generation-config", "context"}
    assert notes["smollm3"] == {"pad-token", "generation-config", "context", "tools"}
    assert notes["qwen3.6"] == set()


def ids(folder: Path, *names: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.token_to_id(name) for name in names]


def ends_at_the_text(folder):
    """The classic: a base model's configuration beside the template of a chat."""
    (end,) = ids(folder, "<|endoftext|>")
    edit(folder, "config.json", {"eos_token_id": end})
    edit(folder, "generation_config.json", {"eos_token_id": end})


def ends_at_the_turn_alone(folder):
    """The reverse: the template ends turns as texts end."""
    text = (folder / "chat_template.jinja").read_text().replace("<|im_end|>", "<|endoftext|>")
    (folder / "chat_template.jinja").write_text(text)
    edit(folder, "generation_config.json", {"eos_token_id": ids(folder, "<|im_end|>")})


def ends_at_a_word(folder):
    edit(folder, "generation_config.json", {"eos_token_id": [*ids(folder, "<|im_end|>"), 2]})


def end_is_no_token(folder):
    edit(folder, "tokenizer_config.json", {"eos_token": "</s>"})


def two_files_name_ends(folder):
    write(folder, "special_tokens_map.json", {"eos_token": {"content": "<|endoftext|>"}})


def pad_is_beyond(folder):
    edit(folder, "config.json", {"pad_token_id": 999_999})


def pad_is_negative(folder):
    edit(folder, "generation_config.json", {"pad_token_id": -1})


def pad_is_no_token(folder):
    edit(folder, "tokenizer_config.json", {"pad_token": "<pad>"})


def template_begins_twice(folder):
    path = folder / "chat_template.jinja"
    path.write_text("{{- bos_token }}" + path.read_text())


def template_begins_twice_by_name(folder):
    path = folder / "chat_template.jinja"
    path.write_text(BY_NAME["llama-3.1"].special.split()[0] + path.read_text())


def tokenizer_begins_twice(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} {bos} $A", pair=None, special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def eos_has_no_token(folder):
    edit(folder, "generation_config.json", {"eos_token_id": [*ids(folder, "<|im_end|>"), 319]})


def decoder_names_another(folder):
    (end,) = ids(folder, "<|im_end|>")
    edit(folder, "tokenizer_config.json", {"added_tokens_decoder": {str(end + 1): {"content": "<|im_end|>"}}})


def end_is_not_special(folder):
    tokenizer = read(folder, "tokenizer.json")
    for token in tokenizer["added_tokens"]:
        token["special"] = False
    write(folder, "tokenizer.json", tokenizer)
    edit(folder, "tokenizer_config.json", {"eos_token": None, "bos_token": None})


def tied_beside_a_head(folder):
    edit(folder, "config.json", {"tie_word_embeddings": True})


def tensors_of(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def no_head(folder):
    tensors_of(folder, lambda tensors: tensors.pop("lm_head.weight"))


def no_layer(folder):
    tensors_of(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def not_a_number(folder):
    tensors_of(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].__setitem__((3, 3), np.nan))


def index_names_another(folder):
    held = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    write(folder, "model.safetensors.index.json", {"weight_map": held | {"model.norm.weight": "model.safetensors"}})


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def no_json(folder):
    (folder / "config.json").write_text("{")


def generation_no_json(folder):
    (folder / "generation_config.json").write_text("{'a'")


def vocabulary_too_small(folder):
    edit(folder, "config.json", {"vocab_size": 64})


def tokenizer_too_large(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<new_{n}>" for n in range(100)])
    tokenizer.save(str(folder / "tokenizer.json"))


def top_p_above_one(folder):
    edit(folder, "generation_config.json", {"top_p": 1.5})


def temperature_beside_greedy(folder):
    edit(folder, "generation_config.json", {"do_sample": False})


def short_tokenizer(folder):
    edit(folder, "tokenizer_config.json", {"model_max_length": 512})


def scaled_to_fewer(folder):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 131072}
    edit(folder, "config.json", {"rope_scaling": scaling})


def no_positions(folder):
    edit(folder, "config.json", {"max_position_embeddings": 0})


def template_breaks_off(folder):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + "{% if %}")


def template_counts(folder):
    """Each turn changes the text before it."""
    path = folder / "chat_template.jinja"
    path.write_text("{{- messages | length }}" + path.read_text())


def template_of_another(folder):
    (folder / "chat_template.jinja").write_text(BY_NAME["phi-3.5"].template)


def length_is_a_text(folder):
    edit(folder, "tokenizer_config.json", {"model_max_length": "32768"})


def scaled_without_a_kind(folder):
    edit(folder, "config.json", {"rope_scaling": {"factor": 4.0}})


def generation_too_deep(folder):
    (folder / "generation_config.json").write_text("[" * 100_000)


def header_of(folder, change):
    """Changes the entry of the embeddings in the header of the weights."""
    data = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header["model.embed_tokens.weight"])
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def header_without_a_dtype(folder):
    header_of(folder, lambda entry: entry.pop("dtype"))


def header_with_another_shape(folder):
    header_of(folder, lambda entry: entry.update(shape=[entry["shape"][0] * 2, entry["shape"][1]]))


def header_with_an_overlap(folder):
    header_of(folder, lambda entry: entry.update(data_offsets=[each - 32 for each in entry["data_offsets"]]))


def header_of_texts(folder):
    header_of(folder, lambda entry: entry.update(data_offsets=["0", 32]))


def stored_twice(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, files = sorted(tensors), [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for file, some in zip(files, (names[:2], names[1:]), strict=True):
        save_file({name: tensors[name] for name in some}, folder / file)
    index = dict.fromkeys(names[:1], files[0]) | dict.fromkeys(names[1:], files[1])
    write(folder, "model.safetensors.index.json", {"weight_map": index})


BOTH = [  # family, fault, its name, whether a copy is mended
    ("qwen2.5", ends_at_the_text, "end-token", True),
    ("qwen2.5", ends_at_the_turn_alone, "end-token", True),
    ("qwen2.5", ends_at_a_word, "end-token", True),
    ("qwen2.5", end_is_no_token, "end-token", True),
    ("qwen2.5", two_files_name_ends, "end-token", True),
    ("qwen2.5", template_of_another, "end-token", True),
    ("qwen2.5", pad_is_beyond, "pad-token", True),
    ("qwen2.5", pad_is_negative, "pad-token", True),
    ("qwen2.5", pad_is_no_token, "pad-token", True),
    ("llama-3.1", template_begins_twice, "doubled-bos", True),
    ("llama-3.1", template_begins_twice_by_name, "doubled-bos", True),
    ("llama-3.1", tokenizer_begins_twice, "doubled-bos", True),
    ("qwen2.5", eos_has_no_token, "token-ids", True),
    ("qwen2.5", decoder_names_another, "token-ids", True),
    ("qwen2.5", end_is_not_special, "special-tokens", True),
    ("qwen2.5", tied_beside_a_head, "tied", True),
    ("qwen2.5", no_head, "tied", True),
    ("qwen2.5", index_names_another, "index", True),
    ("qwen2.5", vocabulary_too_small, "vocabulary", True),
    ("qwen2.5", generation_no_json, "files", True),
    ("qwen2.5", top_p_above_one, "generation-config", True),
    ("qwen2.5", temperature_beside_greedy, "generation-config", True),
    ("qwen2.5", short_tokenizer, "context", True),
    ("qwen2.5", scaled_to_fewer, "context", True),
    ("qwen2.5", no_positions, "context", True),
    ("qwen2.5", template_breaks_off, "template", True),
    ("qwen2.5", template_counts, "template", True),
    ("qwen2.5", no_layer, "tensors", False),
    ("qwen2.5", not_a_number, "numbers", False),
    ("qwen2.5", cut_short, "files", False),
    ("qwen2.5", no_json, "files", False),
    ("qwen2.5", tokenizer_too_large, "vocabulary", False),
    ("qwen2.5", length_is_a_text, "context", True),
    ("qwen2.5", generation_too_deep, "files", True),
    ("qwen2.5", scaled_without_a_kind, "context", False),
    ("qwen2.5", header_without_a_dtype, "files", False),
    ("qwen2.5", header_with_another_shape, "files", False),
    ("qwen2.5", header_with_an_overlap, "files", False),
    ("qwen2.5", header_of_texts, "files", False),
    ("qwen2.5", stored_twice, "index", False),
]


@pytest.mark.parametrize(("family", "plant", "name", "mendable"), BOTH)
def test_a_planted_fault_is_found_and_mended(sound, tmp_path, family, plant, name, mendable):
    folder = shutil.copytree(sound / family, tmp_path / "model")
    plant(folder)
    assert name in faults(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if mendable:
        assert repair(folder, tmp_path / "mended")
        assert faults(tmp_path / "mended") == []
        check_before_training(tmp_path / "mended")
        weights = [(each / "model.safetensors").stat().st_ino for each in (folder, tmp_path / "mended")]
        assert weights[0] == weights[1]
    else:
        with pytest.raises(UserError, match=r"nothing in .* can be mended"):
            repair(folder, tmp_path / "mended")
        assert not (tmp_path / "mended").exists()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_other_ways_to_be_sound(sound, tmp_path):
    """Tokens that special_tokens_map.json alone names, as an older folder has them; ends in a list, or by the defaults
    of generation alone; tied embeddings that are stored as the head, too; a token of images that a model of text does
    not embed."""
    folder = shutil.copytree(sound / "qwen2.5", tmp_path / "model")
    named = read(folder, "tokenizer_config.json")
    moved = {kind: named.pop(kind) for kind in ("eos_token", "pad_token")}
    write(folder, "tokenizer_config.json", named)
    write(folder, "special_tokens_map.json", moved | {"eos_token": {"content": moved["eos_token"]}})
    config = read(folder, "config.json")
    write(folder, "config.json", config | {"eos_token_id": ids(folder, "<|im_end|>", "<|endoftext|>")})
    assert faults(folder) == []
    write(folder, "config.json", {key: config[key] for key in config if key != "eos_token_id"})
    assert faults(folder) == []
    tensors_of(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    tied_beside_a_head(folder)
    assert faults(folder) == []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reserved = config["vocab_size"] - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([*(f"<|reserved_{n}|>" for n in range(reserved)), "<image_soft_token>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert faults(folder) == []
    assert "vocabulary" in [finding.name for finding in examine(folder).findings]


def test_a_copy_of_links_without_suffixes(sound, tmp_path):
    """Downloads are kept as links to files that are named by their digests; folders of tools are not copied."""
    folder, blobs = tmp_path / "a model", tmp_path / "blobs"
    blobs.mkdir()
    (folder / ".git").mkdir(parents=True)
    for n, path in enumerate(sorted((sound / "qwen2.5").iterdir())):
        shutil.copyfile(path, blobs / f"digest{n}")
        (folder / path.name).symlink_to(blobs / f"digest{n}")
    assert faults(folder) == []
    config = read(sound / "qwen2.5", "config.json")
    (folder / "config.json").unlink()
    write(folder, "config.json", config | {"pad_token_id": -1})
    with pytest.raises(UserError, match="is inside of"):
        repair(folder, folder / "mended")
    assert repair(folder, tmp_path / "mended")
    assert (tmp_path / "mended/model.safetensors").stat().st_nlink == 2
    assert not (tmp_path / "mended/model.safetensors").is_symlink()
    assert not (tmp_path / "mended/.git").exists()


def test_faults_that_etude_meets_stop_a_stage_and_others_are_printed(sound, tmp_path, capsys):
    tied, ends = (shutil.copytree(sound / "qwen2.5", tmp_path / name) for name in ("tied", "ends"))
    tied_beside_a_head(tied)
    with pytest.raises(
        UserError, match=r"tie_word_embeddings = true.*; `etude doctor model .*tied --repair DIR` mends"
    ):
        check_before_training(tied)
    ends_at_the_text(ends)
    check_before_training(ends)
    assert capsys.readouterr().err.count("note: ends: the chat template ends a turn with '<|im_end|>'") == 1


def test_the_copy_is_whole_or_not_there(sound, tmp_path, monkeypatch):
    folder = shutil.copytree(sound / "qwen2.5", tmp_path / "model")
    pad_is_beyond(folder)
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        repair(folder, tmp_path / "there")
    monkeypatch.setattr("etude.weights.preflight.mending._apply", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(UserError, match="cannot be made: full"):
        repair(folder, tmp_path / "mended")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "there"]


def test_how_a_model_speaks(reports):
    speech = reports["qwen3"].speech
    assert (speech.dialect, speech.calls) == ("hermes", "any number of calls a turn")
    assert speech.thoughts == (
        "between <think> and </think>, that enable_thinking changes; the template drops those of former turns, and "
        "episodes keep them"
    )
    assert reports["llama-3.1"].speech.calls == "1 call a turn"
    assert reports["smollm3"].speech.dialect == "none"


def doctor(capsys, *words: str) -> tuple[int, dict[str, object]]:
    """The exit code and the object of `etude doctor model --json`."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "model", "--json", *words])
    out = capsys.readouterr().out
    return ended.value.code, json.loads(out) if out else {}


def test_the_command(sound, tmp_path, capsys):
    folder = shutil.copytree(sound / "qwen2.5", tmp_path / "model")
    cut_short(folder)
    code, said = doctor(capsys, str(folder))
    assert (code, said["ok"], [f["name"] for f in said["findings"] if f["severity"] == "fault"]) == (
        1,
        False,
        ["files"],
    )
    assert doctor(capsys, str(tmp_path / "nothing"))[0] == 2
    assert doctor(capsys, str(folder), "--repair", str(folder))[0] == 2
    assert doctor(capsys, "--repair", str(folder))[0] == 2
    assert doctor(capsys, "--quick")[0] == 2
    quick, found = doctor(capsys, str(folder), "--quick")
    assert (quick, "cells" in found) == (1, False)
