"""A run's folder in the place of a model: which version is taken, and what is said where there is none."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from etude import runfolder
from etude.cli import main
from etude.config import RLConfig, validate
from etude.errors import UserError
from etude.models.loading import load_model, named_tensors
from etude.store import open_store
from etude.trainer.finetune.config import SftConfig
from etude.weights.receiver import materialise
from etude.weights.runs import model_folder, with_models
from etude.weights.signature import generate_key
from tests.helpers.trainer_runs import new_run, publish_versions


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of four versions, of which each test may take a copy."""
    run, config = new_run(tmp_path_factory.mktemp("made"))
    publish_versions(run, config, 4, {})
    return run, config


def the_weights(run: Path, config: RLConfig, version: int):
    tensors = named_tensors(load_model(config.model.path))
    materialise(open_store(str(run / "weights")), version, tensors)
    return tensors


def holds(folder: Path, run: Path, config: RLConfig, version: int) -> bool:
    found, wanted = named_tensors(load_model(folder)), the_weights(run, config, version)
    return found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)


def test_the_newest_version_another_one_and_the_best(made):
    run, config = made
    newest = model_folder(str(run))
    assert newest == run / "models" / "3"
    assert holds(newest, run, config, 3)
    written = (newest / "model.safetensors").stat().st_mtime_ns
    assert model_folder(run) == newest
    assert (newest / "model.safetensors").stat().st_mtime_ns == written, "it is written once"
    assert holds(model_folder(f"{run}@1"), run, config, 1)
    (run / "report.json").write_text('{"best": 0, "seed": 1, "steps": 3}')
    assert holds(model_folder(run), run, config, 0)
    (run / "report.json").write_text('{"best": 1, "seed": 1, "steps": 1}')
    assert model_folder(run) == newest, "the run was continued after its report, and not to its end"
    (run / "report.json").write_text("{")
    with pytest.raises(UserError, match=r"report.json is damaged .*: name a version, as .*run@3"):
        model_folder(run)
    (run / "report.json").unlink()


def test_two_that_ask_at_once_get_the_same_whole_folder(tmp_path, monkeypatch):
    run, config = new_run(tmp_path)
    publish_versions(run, config, 2, {})
    began, save = threading.Event(), PreTrainedModel.save_pretrained

    def slow(self, *arguments, **options):
        save(self, *arguments, **options)
        began.set()
        time.sleep(0.5)  # in which the other one begins

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(model_folder, run)
        assert began.wait(60)
        second = pool.submit(model_folder, run)
        assert first.result(60) == second.result(60) == run / "models" / "1"
    assert holds(run / "models" / "1", run, config, 1)


def test_a_run_that_signs_its_versions_serves_no_others(tmp_path):
    run, config = new_run(tmp_path)
    publish_versions(run, config, 2, {})
    generate_key(tmp_path / "key")
    weights = config.weights.model_copy(update={"signing_key": str(tmp_path / "key")})
    signed = config.model_copy(update={"weights": weights})
    (run / "config.json").write_text(signed.model_dump_json())
    with pytest.raises(UserError, match="not signed"):
        model_folder(run)


def test_commands_on_weights_name_runs(made, tmp_path, monkeypatch):
    run, config = made
    monkeypatch.chdir(run.parent)
    with pytest.raises(SystemExit) as stop:
        main.main(["weights", "fetch", "run/weights", "--version", "1", "--base", "run@2", "-o", str(tmp_path / "out")])
    assert not stop.value.code
    assert holds(tmp_path / "out", run, config, 1)


def test_configurations_name_runs(made, tmp_path, monkeypatch):
    run, _ = made
    monkeypatch.chdir(run.parent)
    tables = {"tasks": {"repository": "here"}, "model": {"path": "run@2"}, "distill": {"teacher": "run"}}
    rl = with_models(validate(RLConfig, tables, "rl.toml"))
    assert (rl.model.path, rl.distill.teacher) == (str(run / "models/2"), str(run / "models/3"))
    sft = with_models(validate(SftConfig, {"model": {"path": "run@2"}, "data": {"files": ["a.jsonl"]}}, "sft.toml"))
    assert sft.model.path == run / "models/2"
    same = validate(RLConfig, tables | {"model": {"path": "nano"}, "distill": None}, "rl.toml")
    assert with_models(same) == same


def test_what_has_no_model(made, tmp_path):
    run, config = made
    with runfolder.lock(run), pytest.raises(UserError, match="is still running: wait for its end, or name a version"):
        model_folder(run)
    with runfolder.lock(run):
        assert model_folder(f"{run}@1").is_dir()
    with pytest.raises(UserError, match="version 9"):
        model_folder(f"{run}@9")
    runfolder.create(tmp_path / "new", config, None)
    with pytest.raises(UserError, match="new has no model yet: continue it with `etude train --resume"):
        model_folder(tmp_path / "new")
    assert not (tmp_path / "new" / "weights").exists()


def test_a_damaged_version_leaves_no_folder(tmp_path):
    run, config = new_run(tmp_path)
    publish_versions(run, config, 2, {})
    for file in (run / "weights").rglob("*"):
        if file.is_file() and "versions" not in file.parts and "schemas" not in file.parts:
            file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(UserError):
        model_folder(run)
    assert not (run / "models").exists() or not list((run / "models").iterdir())


def test_the_run_of_another_stage(tmp_path, made):
    _, config = made
    other = tmp_path / "sft"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"stage": "sft"}))
    with pytest.raises(UserError, match="sft has no model yet"):
        model_folder(other)
    (other / "checkpoint").symlink_to(config.model.path)
    assert model_folder(other) == other / "checkpoint"
    with pytest.raises(UserError, match="keeps its last model alone: name it without @3"):
        model_folder(f"{other}@3")
    with runfolder.lock(other), pytest.raises(UserError, match=r"is still running: wait for its end$"):
        model_folder(other)


def test_an_evaluation_takes_budget_seed_and_tasks_of_the_run(made, monkeypatch):
    """Then its figures are comparable with those of the run's report."""
    from etude.run import evaluate

    run, config = made
    asked = []
    monkeypatch.setattr(evaluate, "evaluate_models", lambda models, measurement, engine, **_: asked.append(measurement))
    for words in (["eval", str(run)], ["eval", "nano", "--against", f"{run}@1"], ["eval", "nano"]):
        with pytest.raises(SystemExit) as stop:
            main.main([*words, "--suite", str(run)])
        assert not stop.value.code
    own, against, other = asked
    assert own.budget == against.budget == config.rollout.budget() != other.budget
    assert (own.seed, against.seed, other.seed) == (config.seed, config.seed, 0)
    assert own.suites == [Path(config.tasks.dataset or run / "tasks")]
    with pytest.raises(SystemExit):
        main.main(["eval", str(run), "--suite", str(run), "--seed", "9", "--turns", "3"])
    assert (asked[-1].seed, asked[-1].budget.turns, asked[-1].budget.tokens) == (9, 3, config.rollout.tokens)
