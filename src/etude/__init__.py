"""Trains a company's own coding agent on its own product. The names here are those that users' Python needs:
docs/environments.md has examples. Each is imported on first use, so `import etude` is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.errors import RunFailed as RunFailed
    from etude.errors import UserError as UserError
    from etude.grading import open_sandbox as open_sandbox
    from etude.harness import tool as tool
    from etude.inference.engine.engine import Engine as Engine
    from etude.models.loading import load_model as load_model
    from etude.records import Budget as Budget
    from etude.records import Episode as Episode
    from etude.records import Task as Task
    from etude.rollout import Environment as Environment
    from etude.rollout import EnvironmentEpisode as EnvironmentEpisode
    from etude.rollout import reward as reward
    from etude.run.api import evaluate as evaluate
    from etude.run.api import train as train
    from etude.sandbox import Box as Box
    from etude.sandbox import BoxError as BoxError
    from etude.sandbox import Limits as Limits

_PLACES = {
    "Box": "etude.sandbox",
    "BoxError": "etude.sandbox",
    "Budget": "etude.records",
    "Engine": "etude.inference.engine.engine",
    "Environment": "etude.rollout",
    "EnvironmentEpisode": "etude.rollout",
    "Episode": "etude.records",
    "Limits": "etude.sandbox",
    "RunFailed": "etude.errors",
    "Task": "etude.records",
    "UserError": "etude.errors",
    "evaluate": "etude.run.api",
    "load_model": "etude.models.loading",
    "open_sandbox": "etude.grading",
    "reward": "etude.rollout",
    "tool": "etude.harness",
    "train": "etude.run.api",
}


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"etude has no {name}; it has {', '.join(sorted(_PLACES))}")
    return getattr(import_module(place), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
