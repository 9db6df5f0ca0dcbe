"""The memory table against what passes really take, and the recipes for one GPU against the configurations' sizes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.cli import main
from etude.cli.overlays import read_toml
from etude.config import FleetConfig, LoraConfig, RLConfig, validate
from etude.config.sections import bundled
from etude.errors import UserError
from etude.models.head import head_of
from etude.models.loading import load_model
from etude.trainer.activations import checkpoint_activations
from etude.trainer.head import token_logprobs
from etude.trainer.lora import Adapters
from etude.trainer.rl.memory import LiveBytes
from etude.trainer.rl.memory_table import GIB, memory_table
from etude.trainer.rl.pass_sizes import activation_bytes, head_bytes, sizes_of
from tests.helpers.tiny_models import random_model, save_random_model
from tests.helpers.vllm_environment import python_with

QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151_936, "tie_word_embeddings": True, "max_position_embeddings": 40_960,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "vocab_size": 151_936, "tie_word_embeddings": False, "max_position_embeddings": 262_144,
}  # fmt: skip
BILLIONS = {"Qwen3-4B": 4.02e9, "Qwen3-8B": 8.19e9, "Qwen3-30B-A3B": 30.5e9}  # as their model cards say
SHAPES = {
    "Qwen3-4B": QWEN3,
    "Qwen3-8B": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12_288, "tie_word_embeddings": False},
    "Qwen3-30B-A3B": MOE,
}


def folder_of(tmp_path: Path, shape: dict) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def config_of(folder: Path, **tables) -> RLConfig:
    return validate(RLConfig, {"tasks": {"repository": "x"}, "model": {"path": str(folder)}, **tables}, "test")


@pytest.mark.parametrize("kind", ["moe", "qwen3"])
@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointing"])
def test_activations_are_those_of_a_real_pass(tmp_path, kind, again):
    """Within 1 %: the rest are indices of tokens."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 512}
    folder = save_random_model(tmp_path / "m", kind, **sizes)
    real, sized = load_model(folder).train(), sizes_of(str(folder), "float32")
    ids_1T = torch.arange(200)[None]
    for model in (real, sized):
        if again:
            checkpoint_activations(model)
    with LiveBytes() as live:
        hidden_1TD = real.get_decoder()(input_ids=ids_1T, use_cache=False).last_hidden_state
        kept = live.now
        hidden_1TD.backward(torch.ones_like(hidden_1TD))
    gradients = sum(p.nbytes for p in real.get_decoder().parameters())
    expected_kept, expected_peak = activation_bytes(sized, 200, narrow=False)
    assert expected_kept == pytest.approx(kept, rel=0.01)
    # Gradients of weights gather meanwhile, which the table has in another row.
    assert expected_peak <= live.peak <= 1.1 * (expected_peak + gradients)


def test_adapters_of_experts_keep_what_those_of_a_real_pass_keep(tmp_path):
    folder = save_random_model(tmp_path / "m", "moe", hidden_size=128, moe_intermediate_size=128)
    kept, counted = [], []
    for targets in (("q_proj",), ("q_proj", "experts.gate_up_proj", "experts.down_proj")):
        real, sized = load_model(folder).train(), sizes_of(str(folder), "float32")
        ours, theirs = (Adapters(m, LoraConfig(rank=8, targets=targets)) for m in (real, sized))
        assert {n: t.shape for n, t in ours.tensors.items()} == {n: t.shape for n, t in theirs.tensors.items()}
        with LiveBytes() as live:
            hidden_1TD = real.get_decoder()(input_ids=torch.arange(90)[None], use_cache=False).last_hidden_state
            kept.append(live.now)
            hidden_1TD.sum().backward()
        counted.append(activation_bytes(sized, 90, narrow=False)[0])
    # Two layers, two experts a token: the inputs of both weights, of 128 numbers each.
    assert kept[1] - kept[0] == counted[1] - counted[0] == 2 * 2 * 90 * 2 * 128 * 4
    sized = sizes_of(str(folder), "float32")
    Adapters(sized, LoraConfig(rank=8, targets=("experts.down_proj",)))
    assert activation_bytes(sized, 90, narrow=False)[0] > counted[0] / 2, "a kind of layers without adapters is counted"


def test_the_head_is_that_of_a_real_pass(tmp_path):
    model = random_model("qwen3", vocab_size=3000)
    at_S = np.arange(1500)
    hidden_SD = torch.randn(1500, 48, requires_grad=True)
    with LiveBytes() as live:
        token_logprobs(head_of(model), hidden_SD, at_S, at_S)[0].sum().backward()
    folder = save_random_model(tmp_path / "m", "qwen3", vocab_size=3000)
    assert head_bytes(sizes_of(str(folder), "float32"), 1500) == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize(("stored", "computed", "width"), [
    ("bfloat16", "float32", 2), ("float32", "bfloat16", 2), ("float32", "float32", 4), ("float16", "float32", 2),
])  # fmt: skip
def test_versions_have_the_types_in_which_they_are_published(tmp_path, stored, computed, width):
    config = config_of(folder_of(tmp_path, SHAPES["Qwen3-4B"] | {"dtype": stored}), trainer={"dtype": computed})
    sizes = {term.name: term.bytes for term in memory_table(config).terms}
    gradients = sizes["gradients"]
    assert sizes["published weights"] == 2 * width / 4 * gradients
    assert sizes["held and next version of the engines"] == sizes["published weights"] * config.inference.servers


@pytest.mark.parametrize("name", ["Qwen3-4B", "Qwen3-8B"])
def test_recipes_for_one_gpu_fit_from_the_configuration_alone(tmp_path, name, capsys, monkeypatch):
    """`--dry-run` in a folder with config.json and nothing else; weights are counted as the model card counts them."""
    folder, recipe = folder_of(tmp_path, SHAPES[name]), bundled(f"recipes/{name.lower()}-1x80g.toml")
    python = python_with(tmp_path / "env", "0.32.0")
    monkeypatch.setenv("ETUDE_VLLM_PYTHON", python)
    with pytest.raises(SystemExit) as stop:
        main.main(["train", str(recipe), "--dry-run", "--model.path", str(folder)])
    assert not stop.value.code
    printed = capsys.readouterr()
    assert json.loads(printed.out)["model"]["path"] == str(folder)
    assert "of 79.0 GB, most for vLLM, " in printed.err
    assert f"engine: vLLM 0.32.0, in {python}\n" in printed.err
    assert "  inference.gpu_memory_utilization, trainer.device_memory_gb\n" in printed.err
    assert " s of training and " in printed.err
    data = read_toml(recipe, ["--model.path", str(folder)], [])
    table = memory_table(validate(RLConfig, data, "recipe"))
    assert all(term.keys for term in table.terms), "each figure says what it follows from"
    (weights,) = (term for term in table.terms if term.name == "weights of the trainer")
    assert weights.bytes / 2 == pytest.approx(BILLIONS[name], rel=0.01)
    assert 0.8 * 79 * GIB < table.needed("cuda:0") < 79 * GIB, "neither too much, nor most of the GPU idle"


def test_engines_of_a_fleet_are_not_on_the_trainer_s_device(tmp_path):
    """On one GPU both need the memory of both; placed elsewhere, an engine takes nothing from the trainer."""
    gpu = {"trainer": {"device": "cuda", "device_memory_gb": 80}, "inference": {"device": "cuda", "cache_mb": 900}}
    config = config_of(folder_of(tmp_path, SHAPES["Qwen3-4B"]), **gpu)
    engines = {"name": "eu", "gpus": 1, "count": 2}
    placed = memory_table(config, validate(FleetConfig, {"engines": [{**engines, "placer": "ray"}]}, "fleet"))
    together, alone = memory_table(config).needed("cuda:0"), placed.needed("cuda:0")
    weights = placed.needed("cuda of each engine")
    assert together - alone == pytest.approx(weights, rel=1e-9)
    assert weights > 2 * BILLIONS["Qwen3-4B"]
    assert not [t for t in placed.terms if t.name == "held and next version of the engines" and t.bytes]
    here = memory_table(config, validate(FleetConfig, {"engines": [engines]}, "fleet"))
    held = [
        t.bytes for table in (memory_table(config), here) for t in table.terms if t.name.startswith("held and next")
    ]
    assert held[1] == 2 * held[0]
    attached = {"name": "us", "placer": "attach", "urls": ["http://us:8000"]}
    assert memory_table(config, validate(FleetConfig, {"engines": [attached]}, "fleet")).needed("cuda:0") == alone


def test_what_does_not_fit_is_refused_by_the_name_of_the_largest_term(tmp_path, capsys):
    folder = folder_of(tmp_path, SHAPES["Qwen3-4B"])
    trainer = {"device": "cuda", "dtype": "bfloat16", "device_memory_gb": 80.0}
    inference = {"device": "cuda", "dtype": "bfloat16", "cache_mb": 8192}
    rollout = {"context": 8192}

    def refusal(**options):
        tables = {"trainer": trainer | options, "inference": inference, "rollout": rollout}
        return memory_table(config_of(folder, **tables)).refusal()

    assert "for activations of 8,192 tokens: set trainer.activation_checkpointing = true" in refusal()
    states = refusal(activation_checkpointing=True)
    assert "of 80.0 GB, 45.0 of them for master weights and moments: set trainer.offload_optimizer = true" in states
    assert refusal(activation_checkpointing=True, offload_optimizer=True) == ""
    assert "for gradients: take a smaller model" in refusal(
        activation_checkpointing=True, offload_optimizer=True, device_memory_gb=20.0
    )
    (tmp_path / "a.toml").write_text('[tasks]\nrepository = "x"\n[trainer]\ndevice = "cuda"\ndevice_memory_gb = 40\n')
    with pytest.raises(SystemExit) as stop:
        main.main(["train", str(tmp_path / "a.toml"), "--dry-run", "--model.path", str(folder)])
    assert stop.value.code == 2
    assert "cuda:0 needs" in capsys.readouterr().err


def test_engines_of_others_take_a_share_or_nothing(tmp_path):
    folder = folder_of(tmp_path, SHAPES["Qwen3-4B"])
    trainer = {"device": "cuda", "dtype": "bfloat16", "device_memory_gb": 80.0}

    def terms(**inference):
        table = memory_table(config_of(folder, trainer=trainer, inference=inference))
        return {t.name: t.bytes / GIB for t in table.terms if t.device == "cuda:0"}

    vllm = {"engine": "vllm", "device": "cuda"}
    tokens = (0.35 * 80 * GIB - 2 * BILLIONS["Qwen3-4B"]) / (36 * 8 * 128 * 2 * 2)
    told = terms(**vllm, gpu_memory_utilization=0.35)
    ((name, share),) = ((name, share) for name, share in told.items() if name.startswith("vLLM, 35% of the device"))
    assert share == pytest.approx(28)
    assert int(name.split()[-2].replace(",", "")) == pytest.approx(tokens, rel=0.01)
    assert "driver and libraries of 2 processes" in told
    assert "driver and libraries of 1 process" in terms(**vllm | {"device": "cuda:1"}, servers=2)
    ((two, _),) = (
        (n, b) for n, b in terms(**vllm, args=["-tp", "2"], gpu_memory_utilization=0.35).items() if "35%" in n
    )
    shared = (0.35 * 80 * GIB - BILLIONS["Qwen3-4B"]) / (36 * 8 * 128 * 2)  # half of the weights and of the heads
    assert int(two.split()[-2].replace(",", "")) == pytest.approx(shared, rel=0.01)
    with pytest.raises(UserError, match=r"= 0.09 is 7.2 GB of cuda:0: beside 7.5 GB of weights, not one context of"):
        terms(**vllm, gpu_memory_utilization=0.09)
    elsewhere = terms(engine="vllm", urls=["http://host:8000"])
    assert not [name for name in elsewhere if "vLLM" in name or "engines" in name]
    assert "driver and libraries of 1 process" in elsewhere


def test_offload_moves_bytes_to_the_host(tmp_path):
    folder = folder_of(tmp_path, SHAPES["Qwen3-4B"])
    trainer = {"device": "cuda", "dtype": "bfloat16", "activation_checkpointing": True, "device_memory_gb": 80.0}
    both = {"offload_activations": True, "offload_optimizer": True}
    plain, away = (
        memory_table(config_of(folder, trainer=trainer | more, rollout={"context": 8192})) for more in ({}, both)
    )
    inputs, states = 36 * 8192 * 2560 * 2, 12 * BILLIONS["Qwen3-4B"]
    # The states take the place of their copy, which waits there for the disk.
    assert away.needed("host") - plain.needed("host") == pytest.approx(inputs, rel=0.01)
    assert plain.needed("cuda:0") - away.needed("cuda:0") >= inputs + states


def test_the_host_is_checked_where_the_devices_are(tmp_path, monkeypatch):
    """Also with a configured size of the device. On a machine without the device the table is of another one."""
    folder = folder_of(tmp_path, SHAPES["Qwen3-4B"])
    trainer = {"device": "cuda", "dtype": "bfloat16", "device_memory_gb": 80.0, "offload_optimizer": True}
    config = config_of(folder, trainer=trainer | {"activation_checkpointing": True}, rollout={"context": 8192})
    monkeypatch.setattr("etude.trainer.rl.memory_table._host_bytes", lambda: 24.0 * GIB)
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        table = memory_table(config)
        assert table.limits["cuda:0"] == 80 * GIB
        assert ("host needs" in table.refusal()) == there == ("host" in table.limits)
        assert ("this machine has no cuda:0: the table is of another" in table.text()) != there


def test_a_dry_run_without_a_model_folder_is_refused_as_the_run_is(tmp_path, capsys):
    (tmp_path / "a.toml").write_text('[tasks]\nrepository = "x"\n')
    with pytest.raises(SystemExit) as stop:
        main.main(["train", str(tmp_path / "a.toml"), "--dry-run", "--model.path", str(tmp_path / "none")])
    assert stop.value.code == 2
    assert "none is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_recipes_for_eight_gpus_fit_from_the_configuration_alone(tmp_path, name, capsys, monkeypatch):
    """`--dry-run` prints the table of a rank; all devices are used, and no rank shares one with a server."""
    folder, recipe = folder_of(tmp_path, SHAPES[name]), bundled(f"recipes/{name.lower()}-8x80g.toml")
    monkeypatch.setenv("ETUDE_VLLM_PYTHON", python_with(tmp_path / "env", "0.32.0"))
    with pytest.raises(SystemExit) as stop:
        main.main(["train", str(recipe), "--dry-run", "--model.path", str(folder)])
    assert not stop.value.code
    assert "cuda of each rank needs" in capsys.readouterr().err
    config = validate(RLConfig, read_toml(recipe, ["--model.path", str(folder)], []), "recipe")
    table, ranks = memory_table(config), config.trainer.mesh.ranks
    assert ranks + config.inference.servers == 8
    devices = ["cuda of each rank", *(f"cuda:{number}" for number in range(ranks, 8))]
    assert [*table.limits] == sorted(devices)
    assert all(term.keys for term in table.terms), "each figure says what it follows from"
    assert all(0.75 * 79 * GIB < table.needed(device) < 79 * GIB for device in devices)
    (masters,) = (term for term in table.terms if term.name == "weights of the trainer, the masters")
    assert masters.bytes * ranks / 4 == pytest.approx(BILLIONS[name], rel=0.01)


def test_states_and_tokens_are_divided_over_ranks(tmp_path):
    folder, total = folder_of(tmp_path, MOE), BILLIONS["Qwen3-30B-A3B"]
    trainer = {"device": "cuda", "dtype": "bfloat16", "device_memory_gb": 80.0, "activation_checkpointing": True}
    inference, rollout = {"engine": "vllm", "urls": ["http://host:8000"]}, {"context": 8192}

    def terms(mesh, **more):
        config = config_of(folder, trainer=trainer | more | {"mesh": mesh}, inference=inference, rollout=rollout)
        table = memory_table(config)
        return {t.name: t.bytes for t in table.terms if t.device != "host"}, table.needed("host")

    one, host = terms({})
    states = "weights of the trainer, the masters", "gradients", "moments"
    four, host_of_four = terms({"shard": 4})
    assert [four[name] * 4 / total for name in states] == pytest.approx([4, 4, 8], rel=0.01)
    assert host_of_four == host, "the copies on the host are the rows of all ranks"
    assert "keys and values of shared prefixes" in one
    assert "keys and values of shared prefixes" not in four, "packed or rows"
    gathered, summed = "gathered layers, embeddings and head", "gradients of a layer before their sum"
    assert not {gathered, summed} & {*one}
    experts, outside = 128 * 3 * 768 * 2048, 2 * 151_936 * 2048
    dense = 2 * 2048 * (32 + 4) * 128 + 128 * 2048
    assert four[gathered] == pytest.approx(2 * (2 * (experts + dense) + outside), rel=0.01)
    divided, _ = terms({"shard": 4, "expert": 4})
    assert divided[gathered] == pytest.approx(2 * (2 * (experts / 4 + dense) + outside), rel=0.01)
    assert [divided[name] for name in states] == [four[name] for name in states]
    halves, _ = terms({"shard": 2, "context": 2})
    assert [halves[name] for name in states] == [four[name] for name in states]
    assert halves["activations of 4,096 tokens"] == pytest.approx(four["activations of 8,192 tokens"] / 2, rel=0.01)
    copies, _ = terms({"shard": 2, "replicate": 2})
    assert copies["gradients"] == 2 * four["gradients"]
    _, away = terms({"shard": 4}, offload_optimizer=True)
    assert away - host == pytest.approx(0, abs=0.01 * total), "moments, in place of their copy for the disk"


def test_ranks_on_the_host_share_its_memory(tmp_path):
    folder = folder_of(tmp_path, SHAPES["Qwen3-4B"])

    def gradients(mesh):
        table = memory_table(config_of(folder, trainer={"mesh": mesh}))
        return next(term.bytes for term in table.terms if term.device == "host" and term.name == "gradients")

    assert gradients({"shard": 2}) == gradients({})
    assert gradients({"replicate": 2}) == 2 * gradients({})
