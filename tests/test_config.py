import re
import tomllib
from datetime import date
from pathlib import Path

import pytest
from pydantic import ValidationError

from etude.cli.overlays import configuration_text, read_toml, split_overlays
from etude.config import PRETRAINED, RLConfig, RolloutConfig, bundled, find_model, validate
from etude.config.tasks import TasksConfig
from etude.errors import UserError
from etude.trainer.finetune.config import MidtrainConfig, SftConfig


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[tasks]\nrepository = "repo"\n[trainer]\nlr = 1e-3\n')
    return path


def test_defaults_lie_below_the_file_and_the_file_below_the_command_line(toml):
    data = read_toml(toml, ["--trainer.lr", "2e-3", "--rollout.group=4", "--model.path", "some/where"])
    config = validate(RLConfig, data, "run.toml")
    assert (config.trainer.lr, config.rollout.group, config.rollout.prompts) == (2e-3, 4, 16)
    assert config.model.path == str(Path("some/where").absolute()), "relative paths start at the current folder"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["--rollout.gruop", "4"], "unknown key rollout.gruop; did you mean rollout.group?"),
        (["--rollout.gruop", "4", "--trainer.lr", "no"], "unknown key rollout.gruop; did you mean rollout.group?"),
        (["--rollout.zzz", "4"], "unknown key rollout.zzz; `etude train --keys rl` prints the known keys"),
        (["--rollout.group", "1"], "rollout.group: Input should be greater than or equal to 2"),
        (["--rollout.group", "many"], "rollout.group: Input should be a valid integer"),
        (["--rollout.max_in_flight", "0"], 'rollout.max_in_flight: give a number of live episodes from 1, or "auto"'),
        (
            ["--rollout.max_in_flight", "many"],
            'rollout.max_in_flight: give a number of live episodes from 1, or "auto"',
        ),
        (
            ["--deterministic", "true", "--rollout.staleness", "0", "--rollout.max_in_flight", "auto"],
            "deterministic = true needs a number for rollout.max_in_flight",
        ),
        (
            ["--deterministic", "true", "--rollout.staleness", "0", '--sandbox.egress=["a.example"]'],
            "deterministic = true cannot ask the network",
        ),
        (
            ["--inference.engine", "vllm", "--inference.documents_mb", "9"],
            "documents_mb is an option of etude's engine",
        ),
        (["--inference.engine", "vllm", "--inference.dtype", "float32"], "vllm serves the published tensors"),
        (["--inference.engine", "vllm", "--rollout.documents", "true"], "vllm computes no documents"),
        (["--inference.engine", "vllm", "--rollout.temperature", "0.001"], "rollout.temperature below 0.01 needs"),
        (
            ["--inference.engine", "vllm", "--deterministic", "true", "--rollout.staleness", "0"],
            "deterministic = true needs servers of etude's engine",
        ),
        (["--inference.engine", "sglang"], "inference.engine: Input should be 'etude' or 'vllm'"),
        (["--inference.python", "/usr/bin/python3"], "python is not an option of etude's engine"),
        (['--inference.urls=["http://a:1"]', "--inference.servers", "2"], "urls are servers that others have started"),
        (['--inference.urls=["http://u:p@a:1"]'], "is not a URL like http://host:8000"),
        (['--inference.urls=["http://a:1/v1"]'], "is not a URL like http://host:8000"),
        (["--sandbox.index", "https://pypi.org/simple/"], "sandbox.index needs sandbox.index_before"),
        (["--sandbox.index_before", "yesterday"], "sandbox.index_before: Input should be a valid date"),
        (["--name", '"../x"'], "name: String should match pattern"),
        (["--deterministic", "true"], "needs rollout.staleness = 0"),
        (["--name.x", "1"], "name is a value, not a table"),
        (["--trainer.lr"], "--trainer.lr needs a value"),
        (["--resme"], "--resme needs a value; did you mean --resume?"),
        (["--trainer.mseh.shard", "2"], "unknown key trainer.mseh; did you mean trainer.mesh?"),
        (["--trainer.mesh.shrad", "2"], "unknown key trainer.mesh.shrad; did you mean trainer.mesh.shard?"),
        (["--trainer.mesh.foo", "2"], "unknown key trainer.mesh.foo; `etude train --keys rl` prints the known keys"),
        (["lr"], "unexpected argument 'lr'"),
        (["--sandbox.runtime", "runc"], "sandbox: give sandbox.type as well: docker"),
        (["--sandbox.type", "docker"], 'sandbox.image is needed with sandbox.type = "docker"'),
        (["--sandbox.type", "vm"], "sandbox: Input tag 'vm'"),
        (
            ["--sandbox.type", "docker", "--sandbox.image", "x", '--sandbox.egress=["a.example"]'],
            'unknown key sandbox.egress with sandbox.type = "docker"',
        ),
    ],
)
def test_bad_input_is_one_sentence(toml, overrides, sentence):
    with pytest.raises(UserError) as error:
        validate(RLConfig, read_toml(toml, overrides), "run.toml")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_toml(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = [")
    with pytest.raises(UserError, match="cannot be read as TOML"):
        read_toml(broken)


def test_the_resolved_configuration_survives_json(toml):
    overrides = ["--sandbox.index", "https://pypi.org/simple/", "--sandbox.index_before", "2024-05-01"]
    config = validate(RLConfig, read_toml(toml, overrides), "run.toml")
    assert config.sandbox.index_before == date(2024, 5, 1)
    assert RLConfig.model_validate_json(config.model_dump_json()) == config


def test_the_configurations_of_the_docs_are_valid():
    text = (Path(__file__).parents[1] / "docs/losses.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.S)
    assert len(blocks) == 2
    for block in blocks:
        RLConfig.model_validate({"tasks": {"repository": "x"}} | tomllib.loads(block))


def test_one_threshold_of_a_guard_can_be_set_on_the_command_line(tmp_path):
    (tmp_path / "run.toml").write_text('[tasks]\nrepository = "x"\n')
    data = read_toml(tmp_path / "run.toml", ["--guards.mismatch_k2.stop", "0.01"])
    guards = validate(RLConfig, data, "run.toml").guards
    assert (guards.mismatch_k2.warn, guards.mismatch_k2.stop) == (5e-4, 0.01)


def test_unknown_behaviour_is_refused(tmp_path):
    (tmp_path / "run.toml").write_text('[tasks]\nrepository = "x"\n[reward.behaviour]\nlaziness = 1.0\n')
    with pytest.raises(UserError, match="laziness"):
        validate(RLConfig, read_toml(tmp_path / "run.toml"), "run.toml")


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"reward": {"refused_edits": 0.1}}, "drop reward.refused_edits"),
        ({"reward": {"behaviour": {"untested": 0.1}}}, "all but malformed, truncated, unfinished"),
        ({"rollout": {"documents": True, "agent": {"command": "x"}}}, "drop rollout.documents"),
    ],
)
def test_what_an_outside_agent_does_not_show_cannot_be_priced(table, why):
    data = {"tasks": {"repository": "r"}, "rollout": {"agent": {"command": "x"}}}
    validate(RLConfig, data | {"reward": {"behaviour": {"malformed": 0.1}}}, "run.toml")
    with pytest.raises(UserError, match=why):
        validate(RLConfig, data | table, "run.toml")


def test_the_configuration_says_when_summaries_do_not_fit() -> None:
    assert RolloutConfig().summarise_at == 0
    assert RolloutConfig(summarise_at=800, summary_tokens=100, context=1024).summarise_at == 800
    with pytest.raises(ValidationError, match=r"two summaries of 112 tokens do not fit into rollout\.context = 1024"):
        RolloutConfig(summarise_at=800, summary_tokens=112, context=1024)


def test_tasks_are_drawn_with_the_seed_of_the_run() -> None:
    def seed(**tasks: object) -> int:
        return RLConfig.model_validate({"seed": 3, "tasks": {"repository": "r", **tasks}}).tasks.seed

    assert (seed(), seed(seed=5)) == (3, 5)
    assert RLConfig(seed=3, tasks=TasksConfig(repository="r")).tasks.seed == 3


def test_overlays_merge_tables_and_replace_arrays(tmp_path):
    (tmp_path / "a.toml").write_text(
        'name = "a"\n[tasks]\nrepository = "x"\n[rollout]\ngroup = 4\nturns = 3\ntools = ["read", "edit"]\n'
    )
    (tmp_path / "b.toml").write_text("[rollout]\ngroup = 8\ntools = ['list']\n")
    (tmp_path / "c.toml").write_text("[rollout]\ngroup = 2\n")
    files, overrides = split_overlays(["@", str(tmp_path / "b.toml"), "--name", "d", f"@{tmp_path / 'c.toml'}"])
    assert overrides == ["--name", "d"]
    config = validate(RLConfig, read_toml(tmp_path / "a.toml", overrides, files), "a @ b @ c")
    assert (config.name, config.rollout.group, config.rollout.turns, config.rollout.tools) == ("d", 2, 3, ("list",))
    text = configuration_text([tmp_path / "a.toml", *files], overrides)
    assert text.index("b.toml") < text.index("c.toml") < text.index("# --name d")


@pytest.mark.parametrize("given", [["--tasks.dataset", "d"], ["--tasks.repository", "r"]])
def test_where_tasks_come_from_replaces_where_they_came_from(tmp_path, given):
    """Sources, a package with its digest, a dataset: one of them is meant."""
    (tmp_path / "a.toml").write_text('[tasks]\nmax_tasks = 7\n[[tasks.sources]]\nrepository = "x"\nper_function = 2\n')
    (tmp_path / "b.toml").write_text('[tasks]\nmax_tasks = 7\nrepository = "x==1.0"\nsha256 = "00"\n')
    for name in ("a.toml", "b.toml"):
        tasks = validate(RLConfig, read_toml(tmp_path / name, given), name).tasks
        assert (tasks.sources, tasks.sha256, tasks.max_tasks) == ((), None, 7)
        assert (tasks.dataset is not None, tasks.repository != "") == ("dataset" in given[0], "repository" in given[0])
        assert Path(tasks.where).name == given[1]


def test_what_is_said_of_tasks_later_counts_for_every_source(tmp_path):
    (tmp_path / "a.toml").write_text(
        '[tasks]\nmax_tasks = 7\n[[tasks.sources]]\nrepository = "x"\nmax_tasks = 3\nweight = 2.0\n'
        '[[tasks.sources]]\nrepository = "y"\n'
    )
    given = validate(RLConfig, read_toml(tmp_path / "a.toml", ["--tasks.max_tasks", "5"]), "a").tasks.sources
    assert [(Path(one.where).name, one.max_tasks, one.weight) for one in given] == [("x", 5, 2.0), ("y", 5, 1.0)]


@pytest.mark.parametrize("words", [["@"], ["@", "--resume"]])
def test_an_overlay_without_a_file_is_refused(words):
    with pytest.raises(UserError, match="@ needs a TOML file"):
        split_overlays(words)


def test_an_overlay_of_another_type_replaces_the_table(tmp_path):
    (tmp_path / "a.toml").write_text('[tasks]\nrepository = "x"\n[sandbox]\ntype = "docker"\nimage = "python"\n')
    assert validate(RLConfig, read_toml(tmp_path / "a.toml"), "a").sandbox.type == "docker"
    config = validate(RLConfig, read_toml(tmp_path / "a.toml", ["--sandbox.type", "namespace"]), "a")
    assert config.sandbox.type == "namespace"
    assert RLConfig.model_validate_json(config.model_dump_json()) == config


def test_models_go_by_name_and_by_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nano = bundled("models/nano")
    assert nano is not None
    assert find_model("nano") == nano
    assert find_model("/gone/models/nano") == nano, "an installation may have moved"
    (tmp_path / "nano").mkdir()
    assert find_model("nano") == nano, "a repository's folder does not stand in for a bundled model"
    assert find_model("./nano") == tmp_path / "nano"
    (tmp_path / "smollm2").mkdir()
    stages = [
        RLConfig.model_validate({"model": {"path": p}, "tasks": {"dataset": "d"}}) for p in ("./smollm2", "./nano")
    ]
    data = {"files": ["a.jsonl"]}
    stages += [SftConfig.model_validate({"model": {"path": path}, "data": data}) for path in ("./smollm2", "./nano")]
    assert [Path(stage.model.path).absolute().relative_to(tmp_path).as_posix() for stage in stages] == [
        "smollm2", "nano", "smollm2", "nano",
    ]  # fmt: skip
    assert SftConfig.model_validate({"model": {"path": "smollm2"}, "data": data}).model.path == PRETRAINED[0].folder
    with pytest.raises(UserError, match=r"nowhere is not a folder, nor the name of a model .nano, smollm2"):
        find_model("nowhere")


def test_a_user_without_a_home_has_models_in_folders(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert find_model(tmp_path) == tmp_path
    with pytest.raises(UserError, match="no home folder: name a folder for the cache in XDG_CACHE_HOME"):
        find_model("smollm2")


def test_a_resolved_configuration_does_not_depend_on_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {"tasks": {"dataset": "d", "repository": "pydash==8.1.0"}, "weights": {"signing_key": "k"}, "store": "s"}
    config = validate(RLConfig, data, "x")
    assert (config.tasks.dataset, config.tasks.repository) == (str(tmp_path / "d"), "pydash==8.1.0")
    assert (config.weights.signing_key, config.store) == (str(tmp_path / "k"), str(tmp_path / "s"))
    assert config.model.name == "nano"
    assert validate(RLConfig, {"tasks": {"dataset": "d"}, "store": "s3://b/x"}, "x").store == "s3://b/x"
    monkeypatch.chdir(tmp_path.parent)
    assert RLConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(("tables", "sentence"), [
    ({"trainer": {"execution": "streaming", "mesh": {"shard": 2}}},
     'trainer.execution = "streaming" is for one rank, and trainer.mesh has 2: set "packed" or "rows"'),
    ({"trainer": {"device": "cuda:1", "mesh": {"shard": 2}}}, 'trainer.device = "cuda:1" is one device'),
    ({"trainer": {"self_check": True, "dtype": "bfloat16", "mesh": {"shard": 2}}},
     "trainer.self_check compares passes of one rank"),
])  # fmt: skip
def test_ranks_are_refused_where_they_do_less(tables, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        validate(RLConfig, {"tasks": {"repository": "x"}, **tables}, "test")
    trainer = {"compile": True, "packing": "crossing", "mesh": {"shard": 2}}
    with pytest.raises(UserError, match=r"trainer\.compile is for one rank: drop it, or trainer\.mesh"):
        validate(MidtrainConfig, {"trainer": trainer}, "test")
