"""What a run refuses of its model before any process starts."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from etude.audit.architectures.families import FAMILIES, make
from etude.config import FleetConfig, RLConfig, find_model, validate
from etude.errors import UserError
from etude.run.inputs import check_inputs
from tests.helpers.mixtures import TINY
from tests.helpers.tiny_models import save_random_model

SIZE = 4096  # tokens of nano, whose tokenizer the folders have
BY_TYPE = {family.model_type: family for family in FAMILIES}
SAID = {
    "gemma2": "caps the scores of attention .* train another model",
    "lfm2": "conv, which carry a state .* use inference.engine",
}


random_folder = partial(save_random_model, vocab_size=SIZE)


def config(folder, **tables):
    if not (Path(folder) / "tokenizer.json").exists():
        for file in find_model("nano").glob("*token*"):
            shutil.copy(file, folder)
    return validate(RLConfig, {"model": {"path": str(folder)}, "tasks": {"dataset": str(TINY)}} | tables, "run.toml")


def refused(folder, **tables):
    """The sentence of `check_inputs`."""
    with pytest.raises(UserError) as error:
        check_inputs(config(folder, **tables))
    return str(error.value)


@pytest.mark.parametrize("model_type", SAID)
def test_what_the_configuration_tells(tmp_path, model_type):
    family = BY_TYPE[model_type]
    folder = make(replace(family, options=family.options | {"vocab_size": SIZE}), tmp_path / "m")
    with pytest.raises(UserError, match=SAID[model_type]) as refused:
        check_inputs(config(folder))
    assert str(refused.value).startswith(f"{folder}: {model_type} ")


def test_an_architecture_that_transformers_does_not_know(tmp_path):
    folder = random_folder(tmp_path / "m", "llama")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"llama"', '"tidal_llama"'))
    with pytest.raises(UserError, match="tidal_llama"):
        check_inputs(config(folder))


def test_layers_that_have_no_adapters(tmp_path):
    model = random_folder(tmp_path / "m", "moe")
    said = refused(model, trainer={"lora": {"targets": ["q_proj", "gate"]}})
    assert said.startswith("lora.targets: gate is not a plain linear layer (Qwen3MoeTopKRouter); choose among ")
    check_inputs(config(model, trainer={"lora": {"targets": ["q_proj", "experts.gate_up_proj"]}}))


def test_a_context_beyond_the_cache(tmp_path):
    """3 layers of 2 heads of 64 numbers are 3 KB a token in float32; the CPU's cache has an eighth of the memory at
    most unless it is given."""
    model = random_folder(tmp_path, "qwen3")
    said = refused(model, rollout={"context": 400}, inference={"cache_mb": 1})
    assert "rollout.context = 400 tokens needs 2 MB of an engine's cache" in said
    assert "rollout.context = 90000000 tokens needs 263672 MB" in refused(model, rollout={"context": 90_000_000})
    check_inputs(config(model, rollout={"context": 400}, inference={"cache_mb": 2}))


def test_engines_that_share_a_device_are_given_their_memory(tmp_path):
    model = random_folder(tmp_path, "qwen3")
    for tables in ({"trainer": {"device": "cuda"}}, {"inference": {"servers": 2}}):
        inference = {"device": "cuda"} | tables.get("inference", {})
        assert "inference.cache_mb is not given" in refused(model, **tables | {"inference": inference})
    if not torch.cuda.is_available():
        assert refused(model, inference={"device": "cuda"}).startswith("inference.device = 'cuda' is not there")


@pytest.mark.parametrize("key", ["trainer", "inference"])
def test_a_device_that_is_not_there(tmp_path, key):
    model = random_folder(tmp_path, "qwen3")
    for device in ("nonsense", "meta", "cuda:99"):
        said = refused(
            model, **{key: {"device": device}}, **({"inference": {"cache_mb": 64}} if key == "trainer" else {})
        )
        assert said.startswith(f"{key}.device = {device!r} is not there: ")


TOOLS = "tests.helpers.boxed_functions"


def test_tools_of_the_users(tmp_path):
    from tests.helpers.speakers import TEMPLATE, hermes_tokenizer, write_model

    compact, tokenizer = random_folder(tmp_path / "compact", "qwen3"), hermes_tokenizer()
    chat = save_random_model(tmp_path / "chat", "qwen3", vocab_size=tokenizer.get_vocab_size())
    write_model(chat, tokenizer, TEMPLATE)

    def rollout(*paths, **keys):
        return {"rollout": {"custom_tools": [f"{TOOLS}:{path}" for path in paths], "context": 6000} | keys}

    check_inputs(config(chat, **rollout("echo", "unboxed", "lines_with")))
    for paths, why in (
        (["nothing"], f"rollout.custom_tools: the module {TOOLS} has no nothing"),
        (["HERE"], f"rollout.custom_tools: {TOOLS}:HERE is no function"),
        (["Line"], "is no function with a name: write one"),
        (["echo", "echo"], "rollout.custom_tools: two tools have the name echo"),
        (["grep"], "rollout.custom_tools: the tool grep has the name of a built-in tool: rename the function"),
        (["of_an_environment"], "the tool of_an_environment takes a OtherTask, and these tasks are CodeTasks"),
        (["untyped"], "the tool untyped: words: set[str] must be a str, int"),
    ):
        assert why in refused(chat, **rollout(*paths))
    few = rollout("grep", tools=["read", "finish"])
    assert "the name of a built-in tool" in refused(chat, **few), "whatever the agent has of them"
    assert "'echo' is not an import path; write \"module:name\"" in refused(chat, rollout={"custom_tools": ["echo"]})
    assert "compact dialect have the tools that it has words for: drop rollout.custom_tools" in refused(
        compact, **rollout("echo")
    )
    other = "rollout.custom_tools joins the built-in tools, which this run's agent does not have: "
    assert other + "drop it" in refused(chat, **rollout("echo", agent={"command": "x"}))
    tasks = {"environment": "recipes.environments.reverse_text:ReverseText"}
    assert other + "return them by the method `tools` of the environment" in refused(
        chat, tasks=tasks, **rollout("echo")
    )
    assert "schemas of the tools take" in refused(chat, **rollout("echo", context=2000))


def test_a_folder_without_a_tokenizer(tmp_path):
    folder = config(random_folder(tmp_path, "qwen3"))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer.json"):
        check_inputs(folder)


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_boxes_of_containers_decide_all_hidden_tests(tmp_path, kind):
    sandbox, model = {"type": kind, "image": "i"}, random_folder(tmp_path, "qwen3")
    (tmp_path / "library").mkdir()
    (tmp_path / "library/pyproject.toml").write_text("{}")
    package = {"repository": "pydash==8.1.0", "sha256": "0" * 64}
    for tasks in ({"dataset": str(TINY)}, {"repository": str(tmp_path / "library")}, package, {"sources": [package]}):
        check_inputs(config(model, sandbox=sandbox, tasks=tasks))


def test_a_type_that_engines_would_round(tmp_path):
    model = random_folder(tmp_path, "qwen3", dtype=torch.float32)
    said = refused(model, inference={"dtype": "bfloat16"})
    assert "is stored in float32, and engines that compute in bfloat16 would round its versions" in said


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://localhost:8000/", "http://[::1]:80", "http://127.1.2.3"]
)
def test_players_of_other_hosts_do_not_reach_servers_on_loopback(tmp_path, url):
    """Attached by the fleet, or by the configuration; players of this machine reach them."""
    attached = {"engines": [{"name": "us", "placer": "attach", "urls": ["http://us:8000", url]}]}
    for placer in ("ray", "local"):
        players = {"players": {"placer": placer}}
        model = random_folder(tmp_path / placer, "llama")
        for tables, own in ((attached, {}), ({}, {"inference": {"urls": [url]}})):
            run, fleet = config(model, **own), validate(FleetConfig, tables | players, "fleet.toml")
            if placer == "local":
                check_inputs(run, fleet)
                continue
            with pytest.raises(UserError) as error:
                check_inputs(run, fleet)
            assert f"players in Ray do not reach {url}, a loopback address" in str(error.value)


def test_what_only_the_live_loop_has(tmp_path):
    model = random_folder(tmp_path, "qwen3")
    assert "it is for `etude live train`" in refused(model, trainer={"baseline": "given"})
    assert "name a folder" in refused(model, distill={"teacher": "self"})
    assert "nowhere" in refused(model, distill={"teacher": str(tmp_path / "nowhere")})
    check_inputs(config(model, distill={"teacher": str(model)}))


def test_a_mesh_is_checked_before_anything_is_built(tmp_path):
    dense = random_folder(tmp_path / "dense", "qwen3")
    trainer = {"mesh": {"shard": 2, "expert": 2}}
    assert refused(dense, trainer=trainer) == f"{dense}: qwen3 has no experts: drop trainer.mesh.expert = 2"
