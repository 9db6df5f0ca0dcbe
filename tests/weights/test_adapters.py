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
from etude.weights.payloads import DamagedVersion
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.tiny_models import save_random_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = save_random_model(tmp_path_factory.mktemp("base") / "model", "qwen3")
    (folder / "tokenizer.json").write_text("{}")
    return folder


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_of_either_type_follows_versions_of_adapters_bit_for_bit(base, store, dtype):
    trainer, live = Publishing(base, store), named_tensors(load_model(base, dtype=dtype))
    receiver, before = Receiver(store, live), {name: t.clone() for name, t in live.items()}
    for version in range(4):
        published = trainer.publish(version)
        assert published.elements == sum(t.numel() for t in trainer.optimizer.published().values())
        assert published.live != published.digest
        if version == 2:  # is skipped
            continue
        update = receiver.poll()
        assert update.before == {}, "an engine holds the base already"
        receiver.swap(update, whole=version == 3)
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
