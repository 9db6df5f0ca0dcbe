"""Our attention and experts against transformers' own, prefix trees against plain rows, and damaged folders.

Tolerance 1e-5 relative to the largest entry: both sides compute in fp32 but sum in another order (grouped against
single GEMMs, other attention tiles), which costs a few units of 2^-23 per layer on values of size ten.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from etude.errors import UserError
from etude.models.attention import SegmentLayout
from etude.models.experts import observe
from etude.models.loading import load_model, named_tensors
from etude.models.segments import trie
from tests.helpers.tiny_models import random_model, save_random_model

KINDS = ["moe", "qwen3", "llama"]


def close(a, b, tolerance=1e-5):
    return (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    return save_random_model(tmp_path / request.param, request.param)


def test_equals_transformers_eager(folder):
    ours = load_model(folder)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.randint(0, 97, (3, 40))
    a, b = ours(input_ids=ids, use_cache=False).logits, theirs(input_ids=ids, use_cache=False).logits
    assert close(a, b)
    for model, logits in ((ours, a), (theirs, b)):
        logits.square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert close(p.grad, q.grad, 1e-4), name  # the backward pass is twice as deep


def test_padding_on_the_right_changes_nothing(folder):
    model = load_model(folder)
    ids = torch.randint(0, 97, (1, 20))
    padded = torch.cat([ids, torch.zeros(1, 9, dtype=torch.int64)], dim=1)
    assert close(model(input_ids=padded).logits[:, :20], model(input_ids=ids).logits)


def test_a_prefix_tree_gives_the_logits_of_plain_rows(folder):
    model = load_model(folder)
    trunk, others = torch.randint(0, 97, (18,)), torch.randint(0, 97, (3, 9))
    rows = [torch.cat([trunk, other[:n]]).numpy() for other, n in zip(others, (9, 1, 6), strict=True)]
    tree = trie(rows)
    ids_T, positions_T = torch.from_numpy(tree.graph.ids_T), torch.from_numpy(tree.graph.positions_T)
    layout = SegmentLayout(tree.graph)
    logits_TV = model(input_ids=ids_T[None], position_ids=positions_T[None], layout=layout, use_cache=False).logits[0]
    assert tree.graph.length == 18 + 9 + 1 + 6
    for i, row in enumerate(rows):
        plain = model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0]
        assert close(logits_TV[tree.where(i)], plain)


def test_a_packed_row_of_another_length_is_refused(folder):
    layout = SegmentLayout(trie([np.arange(7)]).graph)
    with pytest.raises(ValueError, match="the segment graph describes"):
        load_model(folder)(input_ids=torch.zeros(1, 9, dtype=torch.int64), layout=layout)


def test_recorded_experts_are_the_routers_choice(tmp_path):
    model = load_model(save_random_model(tmp_path / "m"))
    ids = torch.randint(0, 97, (2, 11))
    with observe() as choices, torch.no_grad():
        out = model(input_ids=ids, output_router_logits=True, use_cache=False)
    chosen_TLK = choices.stacked()
    assert chosen_TLK.shape == (22, 2, 2)
    assert chosen_TLK.dtype == torch.uint8
    for layer, logits in enumerate(out.router_logits):
        assert torch.equal(chosen_TLK[:, layer].long(), logits.softmax(-1).topk(2).indices)
    with torch.no_grad():
        model(input_ids=ids)
    assert choices.stacked().shape == (22, 2, 2)  # nothing is recorded outside the block


def test_stored_bf16_is_widened_exactly(tmp_path):
    model = random_model().bfloat16()
    model.save_pretrained(tmp_path / "m")
    loaded = named_tensors(load_model(tmp_path / "m"))
    assert loaded.keys() == named_tensors(model).keys()
    for name, tensor in named_tensors(model).items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], tensor.float()), name


def test_named_tensors_are_sorted_live_and_hold_tied_weights_once(tmp_path):
    model = load_model(save_random_model(tmp_path / "m"))
    tensors = named_tensors(model)
    assert list(tensors) == sorted(tensors)
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"].data_ptr() == model.lm_head.weight.data_ptr()


def test_damaged_folders_are_named(tmp_path):
    good = save_random_model(tmp_path / "good")

    def broken(name, damage):
        folder = tmp_path / name
        shutil.copytree(good, folder)
        damage(folder)
        with pytest.raises(UserError) as e:
            load_model(folder)
        assert "\n" not in str(e.value)
        return str(e.value)

    def cut(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    def scramble(folder):
        path = folder / "model.safetensors"
        path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])

    def drop_tensor(folder):
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def lose_shard(folder):
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    assert "is damaged" in broken("cut", cut)
    assert "is damaged" in broken("scramble", scramble)
    assert "model.norm.weight" in broken("drop", drop_tensor)
    assert "is missing" in broken("shard", lose_shard)
    assert "has no model.safetensors" in broken("weights", lambda f: (f / "model.safetensors").unlink())
    assert "no config.json" in broken("config", lambda f: (f / "config.json").unlink())
    assert "not valid JSON" in broken("json", lambda f: (f / "config.json").write_text("{"))
    assert "not a folder" in broken("gone", shutil.rmtree)
