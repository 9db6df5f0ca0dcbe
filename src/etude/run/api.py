"""Training and evaluation from Python, as the commands `etude train` and `etude eval` do them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.config import EvalConfig, InferenceConfig, RLConfig, RolloutConfig, TasksConfig, validate
from etude.dashboard import RunReport
from etude.errors import UserError
from etude.evals import EvalResult
from etude.protocol.backends import ChatModel
from etude.rollout import Environment
from etude.run.evaluate import Measurement, Remote, measure_models
from etude.run.launch import train_rl
from etude.weights import model_folder, with_models

OUTPUTS = Path("outputs")


def train(config: str | Path | Mapping[str, Any], *, resume: bool = False) -> RunReport:
    """Runs stage rl, as `etude train` does: of a TOML file, or of a mapping with its tables. The run's folder is
    outputs/NAME in the current folder; with `resume` a run there goes on where it stopped. Returns its report. Raises
    UserError for a faulty configuration, and RunFailed if a process of the run dies."""
    where, toml = "etude.train", None
    if not isinstance(config, Mapping):
        where, path = str(config), Path(config)
        try:
            toml = path.read_text("utf-8")
            config = tomllib.loads(toml)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise UserError(f"{path} cannot be read: {e}") from None
    if (stage := config.get("stage", "rl")) != "rl":
        raise UserError(f"{where} is of stage {stage!r}, and etude.train runs stage rl: use the command `etude train`")
    checked = with_models(validate(RLConfig, dict(config), where))
    folder = OUTPUTS / checked.name
    if resume and not folder.exists():
        raise UserError(f"{folder} holds no run yet; start it without resume")
    return train_rl(checked, folder, resume=resume, toml=toml)


def evaluate(
    model: str | Path,
    tasks: str | Path | Environment[Any] | Sequence[str | Path | Environment[Any]],
    *,
    samples: int = 1,
    max_tasks: int | None = None,
    split: str = "heldout",
    seed: int = 0,
    budget: Mapping[str, float] | None = None,
    served_as: str | None = None,
    key: str | None = None,
    output: str | Path | None = None,
) -> EvalResult:
    """Plays tasks with a model, as `etude eval` does. `model` is a folder, the name of a model, or the URL of an OpenAI
    API that has the model `served_as`. `tasks` are environments, import paths of environments ("module:Class"), folders
    of datasets, or several of these. `budget` changes the limits of an episode: turns, tokens, context, seconds. With
    `output`, finished episodes are kept in that folder, and not played again. Raises UserError."""
    remote = "://" in str(model)
    if remote and served_as is None:
        raise UserError(f"{model} is the URL of an API: give served_as, the name of the model there")
    several = [tasks] if isinstance(tasks, str | Path | Environment) else tasks
    limits = validate(RolloutConfig, dict(budget or {}), "etude.evaluate: budget").budget()
    options = EvalConfig(samples=samples, max_tasks=max_tasks)
    measurement = Measurement(
        [_suite(each) for each in several],
        options,
        limits,
        split,
        seed,
        output=None if output is None else Path(output),
    )
    measured = Remote(ChatModel(str(model), str(served_as)), key) if remote else model_folder(str(model))
    return measure_models([measured], measurement, InferenceConfig(threads=2))[0]


def _suite(tasks: str | Path | Environment[Any]) -> Path | TasksConfig | Environment[Any]:
    if isinstance(tasks, Environment):
        return tasks
    is_path = isinstance(tasks, Path) or ":" not in tasks or Path(tasks).exists()
    return Path(tasks) if is_path else TasksConfig(environment=str(tasks))
