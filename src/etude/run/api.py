"""Training and evaluation from Python, as the commands `etude train` and `etude eval` do them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.code import need
from etude.config import (
    EvalConfig,
    InferenceConfig,
    RLConfig,
    RolloutConfig,
    TasksConfig,
    load_toml,
    validate,
    validate_sandbox,
)
from etude.config.secrets import without_secrets
from etude.dashboard import RunReport
from etude.errors import UserError
from etude.evals import EvalResult
from etude.protocol.backends import ChatModel
from etude.records import Budget
from etude.rollout import Environment
from etude.run.evaluate import (
    CHAT_BUDGET,
    KEYS,
    Measurement,
    Remote,
    measure_models,
    named_suites,
    remote,
    sandbox_of_suites,
)
from etude.run.launch import train_rl
from etude.runfolder import load_config
from etude.weights import model_folder, rl_config, with_models

OUTPUTS = Path("outputs")

Tasks = str | Path | Environment[Any]


def train(config: str | Path | Mapping[str, Any], *, resume: bool = False) -> RunReport:
    """Runs stage rl, as `etude train` does: of a TOML file, or of a mapping with its tables. The run's folder is
    outputs/NAME in the current folder; with `resume` a run there goes on where it stopped. Returns its report. Raises
    UserError for a faulty configuration, and RunFailed if a process of the run dies."""
    need("etude.train", "train")
    _check_no_loop("etude.train")
    if isinstance(config, Mapping):
        where, tables, toml = "etude.train", dict(config), None
    else:
        where, tables = str(config), load_toml(Path(config))
        toml = Path(config).read_text("utf-8")
    if (stage := tables.get("stage", "rl")) != "rl":
        raise UserError(f"{where} is of stage {stage!r}, and etude.train runs stage rl: use the command `etude train`")
    checked = with_models(validate(RLConfig, tables, where))
    folder = OUTPUTS / checked.name
    if resume and not folder.exists():
        raise UserError(f"{folder} holds no run yet; start it without resume")
    if resume and load_config(folder) != without_secrets(checked):
        raise UserError(f"{where} differs from the configuration of {folder}; use `etude train --resume {folder}`")
    return train_rl(checked, folder, resume=resume, toml=toml)


def evaluate(
    model: str | Path,
    tasks: Tasks | Sequence[Tasks],
    *,
    samples: int = EvalConfig().samples,
    max_tasks: int | None = None,
    split: str = "heldout",
    seed: int | None = None,
    budget: Mapping[str, float] | None = None,
    inference: Mapping[str, Any] | None = None,
    served_as: str | None = None,
    api: str = "openai",
    key: str | None = None,
    output: str | Path | None = None,
    sandbox: Mapping[str, Any] | None = None,
) -> EvalResult:
    """Plays tasks with a model, as `etude eval` does. `model` is the name of a model, a folder, or the URL of a chat
    API ("openai" or "anthropic") that has the model `served_as`; its key is that of the environment unless given.
    `tasks` are environments, or what `--suite` takes ("module:Class", a dataset, a TOML, a run's folder), or several.
    `budget` changes the limits of an episode: turns, tokens, context, seconds. `inference` are options of the engine,
    such as {"device": "cuda"}; `sandbox` is the table of boxes (by default that of a run among tasks or model). With
    `output`, finished episodes are kept in that folder, and not played again. Raises
    UserError."""
    _check_no_loop("etude.evaluate")
    if split not in ("heldout", "train"):
        raise UserError(f"etude.evaluate: the split is heldout or train, not {split!r}")
    options = validate(EvalConfig, {"samples": samples, "max_tasks": max_tasks}, "etude.evaluate")
    engine = validate(InferenceConfig, {"threads": 2, **(inference or {})}, "etude.evaluate: inference")
    measured, usual = _model(model, served_as, api, key)
    if unknown := sorted({*(budget or {})} - {*Budget.__struct_fields__}):
        raise UserError(f"etude.evaluate: budget has no {unknown[0]}, only {', '.join(Budget.__struct_fields__)}")
    rollout = validate(RolloutConfig, {**usual, **(budget or {})}, "etude.evaluate: budget")
    trained = None if isinstance(measured, Remote) else rl_config(model)
    if sandbox is None:
        named = [each for each in _several(tasks) if not isinstance(each, Environment)]
        boxes = sandbox_of_suites(named, None if trained is None else trained.sandbox)
    else:
        boxes = validate_sandbox(dict(sandbox), "etude.evaluate")
    measurement = Measurement(
        [suite for each in _several(tasks) for suite in _suites(each)],
        options,
        rollout.budget(),
        split,
        seed if seed is not None else trained.seed if trained is not None else 0,
        output=None if output is None else Path(output),
        boxes=boxes,
        tools=() if trained is None else trained.rollout.tools,
        custom_tools=() if trained is None else trained.rollout.custom_tools,
    )
    return measure_models([measured], measurement, engine)[0]


def _model(
    model: str | Path, served_as: str | None, api: str, key: str | None
) -> tuple[Path | Remote, Mapping[str, float]]:
    """A model, and the usual budget of its episodes. Raises UserError."""
    if "://" not in str(model):
        if served_as is not None or key is not None:
            raise UserError(f"served_as and key are for the URL of a chat API, and {model} is none: drop them")
        need("etude.evaluate", "serve")
        trained = rl_config(model)
        rollout = RolloutConfig() if trained is None else trained.rollout
        return model_folder(model), {name: getattr(rollout, name) for name in Budget.__struct_fields__}
    if served_as is None:
        raise UserError(f"{model} is the URL of an API: give served_as, the name of the model there")
    if api not in KEYS:
        raise UserError(f"etude.evaluate: the api is {' or '.join(KEYS)}, not {api!r}")
    return remote(ChatModel(str(model), served_as, "anthropic" if api == "anthropic" else "openai"), key), CHAT_BUDGET


def _several(tasks: Any) -> Sequence[Tasks]:
    several: list[Any] = list(tasks) if isinstance(tasks, list | tuple) else [tasks]
    for each in several:
        if isinstance(each, type):
            raise UserError(f"etude.evaluate: {each.__name__} is a class: give an environment, as in {each.__name__}()")
        if not isinstance(each, str | Path | Environment):
            raise UserError(f"etude.evaluate: {each!r} is no environment, and no name of tasks")
    if not several:
        raise UserError("etude.evaluate: there are no tasks: give an environment")
    return several


def _suites(tasks: Tasks) -> Sequence[Path | TasksConfig | Environment[Any]]:
    return [tasks] if isinstance(tasks, Environment) else named_suites(tasks)


def _check_no_loop(name: str) -> None:
    """Raises UserError in a notebook and its like, where an event loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UserError(f"an event loop runs in this thread: write `await asyncio.to_thread({name}, ...)`")
