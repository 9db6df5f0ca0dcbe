"""Versions of adapters: what receivers make of them, what they refuse, and folders that hold the sum."""

import json

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from etude.config import LoraConfig, TrainerConfig
from etude.errors import UserError
from etude.models.dtypes import published_dtypes
from etude.models.loading import load_model, model_id, named_tensors
from etude.store import open_store
from etude.trainer.lora import for_adapters
from etude.weights import manifest as manifests
from etude.weights.audit import audit
from etude.weights.content import load
from etude.weights.export import advance, export, export_adapters
from etude.weights.manifest import Trust
from etude.weights.payloads import DamagedVersion, PayloadSource
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.slabs import counted, patterns, whole
from etude.weights.ulpd.digest import digest_text, weights_digest
from tests.helpers.small_tensors import sliced
from tests.helpers.tiny_models import save_random_model

OF_EXPERTS = ("o_proj", "gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = save_random_model(tmp_path_factory.mktemp("base") / "model", "qwen3")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A model with two layers of experts and two dense ones."""
    return save_random_model(tmp_path_factory.mktemp("sparse") / "model", "moe")


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "weights"))


class Publishing:
    """A model with adapters that move by noise, and its versions."""

    def __init__(self, base, store, **lora):
        self.model = load_model(base).train()
        self.types = published_dtypes(base, self.model, torch.float32)
        lora = LoraConfig(**({"rank": 4} | lora))
        self.optimizer = for_adapters(self.model, TrainerConfig(), lora, self.types)
        self.publisher = Publisher(store, 8, model=model_id(base), base=self.optimizer.base_schema)

    def publish(self, version):
        if version:
            noise = torch.Generator().manual_seed(version)
            for tensor in self.optimizer.live.values():
                tensor.grad = torch.randn(tensor.shape, generator=noise)
            self.optimizer.collect()
            self.optimizer.apply(1e-2)
        adapted = self.optimizer.adapted()
        return self.publisher.publish(version, self.optimizer.published(), (), {}, adapted=adapted)


def test_workers_that_hold_columns_add_adapters_to_them(base, store):
    trainer, tensors = Publishing(base, store, targets="all-linear"), named_tensors(load_model(base))
    lives = [
        {n: sliced(t, 1, rank, 2) if t.dim() == 2 else whole(t.clone()) for n, t in tensors.items()} for rank in (0, 1)
    ]
    words = [patterns(live) for live in lives]
    lives = [counted(live, words, rank) for rank, live in enumerate(lives)]
    receivers = [Receiver(store, live, PayloadSource(store, folder=lambda: tensors)) for live in lives]
    for version in range(3):
        published, shares = trainer.publish(version), []
        for receiver in receivers:
            update = receiver.poll()
            receiver.write(update)
            shares.append(receiver.digest(update.staged))
            receiver.commit(update)
        assert digest_text(sum(shares)) == published.live


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", ["all-linear", OF_EXPERTS])
def test_an_engine_of_either_type_follows_versions_of_adapters_bit_for_bit(base, sparse, store, dtype, targets):
    base = sparse if targets == OF_EXPERTS else base
    trainer, live = Publishing(base, store, targets=targets), named_tensors(load_model(base, dtype=dtype))
    receiver, before = Receiver(store, live), {name: t.clone() for name, t in live.items()}
    for version in range(4):
        published = trainer.publish(version)
        assert published.elements == sum(t.numel() for t in trainer.optimizer.published().values())
        assert published.live != published.digest
        if version == 2:  # is skipped
            continue
        update = receiver.poll()
        assert update.before == {}, "an engine holds the base already"
        receiver.swap(update)
        receiver.commit(update)
        assert (receiver.version, receiver.manifest) == (version, published)
        assert (
            weights_digest(live, receiver.types)
            == published.live
            == weights_digest(named_tensors(trainer.model), trainer.types)
        )
        if version == 0:
            assert all(torch.equal(t, before[name]) for name, t in live.items())
    receiver.undo(update)  # back to what was committed: version 3
    trainer.publish(4)
    following = receiver.poll()
    receiver.swap(following)
    receiver.undo(following)
    assert weights_digest(live, receiver.types) == published.live
    assert not audit(store, Trust()).problems


def test_damage_of_live_sums_is_repaired_from_base_and_adapters(base, store):
    trainer, live = Publishing(base, store), named_tensors(load_model(base))
    receiver = Receiver(store, live)
    trainer.publish(0)
    published = trainer.publish(1)
    receiver.apply(receiver.poll())
    weight = live["model.layers.0.self_attn.q_proj.weight"]
    weight.view(-1)[7] = 3.0
    damaged = receiver.scrub(1.0)
    assert damaged
    held = receiver._held.bits["model.layers.0.self_attn.q_proj.weight"]
    held[7] ^= 1  # the host image, too
    (repaired, *_) = found = receiver.find_repair(damaged)
    assert repaired.source == "base and adapters"
    receiver.write_repair(found)
    assert weights_digest(live, receiver.types) == published.live


def test_adapters_of_another_base_or_another_sum_are_never_served(base, store, tmp_path, monkeypatch):
    other = named_tensors(load_model(save_random_model(tmp_path / "other", "qwen3", seed=1)))
    trainer = Publishing(base, store)
    trainer.publish(0)
    before = {name: t.clone() for name, t in other.items()}
    with pytest.raises(DamagedVersion, match="adapters of another base"):
        Receiver(store, other).poll()
    assert all(torch.equal(t, before[name]) for name, t in other.items())
    live = named_tensors(load_model(base))
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll())
    honest = trainer.optimizer.adapted
    wrong = msgspec.structs.replace(honest(), scale=2.5)
    monkeypatch.setattr(trainer.optimizer, "adapted", lambda: wrong)
    trainer.publish(1)
    with pytest.raises(DamagedVersion, match="do not add up"):
        receiver.poll()
    assert receiver.version == 0


def test_a_version_of_adapters_becomes_a_folder_of_the_sum_and_one_in_pefts_format(base, store, tmp_path):
    trainer = Publishing(base, store, targets=("q_proj", "down_proj"), alpha=8.0)
    trainer.publish(0)
    published = trainer.publish(1)
    out = tmp_path / "out"
    assert export(store, 1, base, out) == published
    whole = load_model(out)
    assert weights_digest(named_tensors(whole), trainer.types) == published.live
    assert model_id(out) == model_id(base)
    with pytest.raises(UserError, match="holds adapters"):
        advance(store, base, 1, tmp_path / "moved")
    with pytest.raises(UserError, match="another base"):
        export(store, 1, save_random_model(tmp_path / "other", "qwen3", seed=1), tmp_path / "wrong")

    folder = tmp_path / "adapter"
    export_adapters(store, 1, base, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert {name: config[name] for name in ("peft_type", "task_type", "r", "lora_alpha", "bias")} == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8.0, "bias": "none",
    }  # fmt: skip
    assert config["target_modules"] == ["down_proj", "q_proj"]
    saved = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model."
    assert set(saved) == {f"{prefix}{name}" for name in trainer.optimizer.live}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in saved
    # What PEFT computes: x W' + (x A' B') * alpha / r, here for one layer.
    name, x = "model.layers.1.mlp.down_proj", torch.randn(3, 48, dtype=torch.float64)
    own = named_tensors(load_model(base))[f"{name}.weight"].double()
    down, up = (saved[f"{prefix}{name}.lora_{part}.weight"].double() for part in "AB")
    theirs = x @ own.T + (x @ down.T @ up.T) * (config["lora_alpha"] / config["r"])
    ours = x @ named_tensors(whole)[f"{name}.weight"].double().T
    # Rounding of the sum to bfloat16: 2^-9 relative in each weight, 48 of them with random signs.
    assert float((ours - theirs).abs().max()) < 2**-9 * 5 * float(own.abs().mean() * 48**0.5 * 3)
    assert load(store, 1)[0] == manifests.read_manifest(store, 1)


def test_adapters_of_experts_have_the_names_and_shapes_of_peft(sparse, store, tmp_path):
    """PEFT 0.21.2 computed the merged folder's logits with such folders to 5e-6 of 7 (Qwen3-MoE, GLM, DeepSeek-V3,
    gpt-oss, Mixtral; float32). Its sum is written down here."""
    trainer = Publishing(sparse, store, targets=OF_EXPERTS, alpha=8.0)
    trainer.publish(0)
    published = trainer.publish(1)
    export(store, 1, sparse, tmp_path / "whole")
    whole, own = (named_tensors(load_model(folder)) for folder in (tmp_path / "whole", sparse))
    assert weights_digest(whole, trainer.types) == published.live
    export_adapters(store, 1, sparse, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["o_proj"]
    # In a sparse model PEFT would take modules of this name for experts.
    assert config["target_parameters"] == ["down_proj.weight", "experts.down_proj", "experts.gate_up_proj"]
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == len(trainer.optimizer.live)
    E, R, D, I = 8, 4, 48, 16  # noqa: E741
    at = "base_model.model.model.layers.1.mlp.experts"  # the weight that a module has first lies within
    for place, name, (rows, columns) in ((".base_layer", "gate_up_proj", (2 * I, D)), ("", "down_proj", (D, I))):
        down, up = (saved[f"{at}{place}.lora_{part}.weight"] for part in "AB")
        assert (down.shape, up.shape) == ((E * R, columns), (rows, R * E))
        scale = config["lora_alpha"] / config["r"]
        product = torch.einsum("ore,eri->eoi", up.reshape(rows, R, E), down.reshape(E, R, columns)) * scale
        weight = f"model.layers.1.mlp.experts.{name}"
        # The sum is rounded to bfloat16.
        torch.testing.assert_close(whole[weight], own[weight] + product, rtol=2**-8, atol=1e-6)
        assert not torch.equal(whole[weight], own[weight])
