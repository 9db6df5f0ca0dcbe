import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from etude.errors import UserError
from etude.models.loading import load_model, model_id, named_tensors
from etude.store import open_store
from etude.weights.export import export, publish_folder
from etude.weights.manifest import Trust
from etude.weights.publisher import Publisher
from etude.weights.ulpd.digest import weights_digest


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
    )
    folder = tmp_path / "base"
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_an_exported_version_is_a_plain_folder_with_the_published_weights(tmp_path, base):
    store = open_store(str(tmp_path / "weights"))
    model = load_model(base, dtype=torch.bfloat16)
    publisher = Publisher(store, 8)
    publisher.publish(0, named_tensors(model), (), {})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.125)
    published = publisher.publish(1, named_tensors(model), (), {})
    out = tmp_path / "out"
    (base / "README.md").write_text("the base's card")
    (base / "train.jsonl").write_text("{}")
    assert export(store, 1, base, out) == published
    assert weights_digest(named_tensors(load_model(out, dtype=torch.float32))) == published.digest
    told = {"README.md", "train.jsonl"}  # how the base was made is not how this version was
    assert {p.name for p in out.iterdir()} == {p.name for p in base.iterdir()} - told
    assert model_id(out) == model_id(base)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, base))
    assert ours == theirs

    ids = torch.arange(12).view(1, -1)
    with torch.no_grad():  # by transformers alone, with nothing of ours registered
        plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
        expected = load_model(out, dtype=torch.float32)
        expected.set_attn_implementation("eager")
        torch.testing.assert_close(plain(ids).logits, expected(ids).logits)
    with pytest.raises(UserError, match="exists already"):
        export(store, 1, base, out)


@pytest.mark.parametrize(
    ("file", "name", "value"), [("config.json", "rope_theta", 5e5), ("tokenizer.json", "model", {})]
)
def test_a_folder_that_gives_the_same_shapes_another_meaning_is_refused(tmp_path, base, file, name, value):
    store = open_store(str(tmp_path / "weights"))
    publish_folder(store, base)
    other = tmp_path / "other"
    shutil.copytree(base, other)
    content = json.loads((other / file).read_text())
    if file == "config.json":
        content["rope_parameters"] = {**content["rope_parameters"], name: value}
    else:
        content[name] = value
    (other / file).write_text(json.dumps(content))
    assert model_id(other) != model_id(base)
    with pytest.raises(UserError, match="another config"):
        export(store, 0, other, tmp_path / "out", Trust(model=model_id(other)))
    assert not (tmp_path / "out").exists()
    assert export(store, 0, base, tmp_path / "out", Trust(model=model_id(base))).model == model_id(base)


def test_a_version_of_another_model_leaves_no_folder(tmp_path, base):
    store = open_store(str(tmp_path / "weights"))
    Publisher(store, 8).publish(0, {"x": torch.zeros(2, dtype=torch.bfloat16)}, (), {})
    with pytest.raises(UserError, match="of another model"):
        export(store, 0, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()
