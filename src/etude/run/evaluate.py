"""`etude eval MODEL --suite DIR`: measures one model, or two on the same tasks with the same seeds.

A model is a folder, which an engine of this machine serves, or a chat API behind an URL. Both play the same tasks with
the same tools, budgets and grading.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from etude import runfolder
from etude.config import (
    MIN_DECIDED,
    BuildConfig,
    EngineConfig,
    EvalConfig,
    RLConfig,
    RolloutConfig,
    SandboxConfig,
    ServerConfig,
    TasksConfig,
    bundled_model,
    load_toml,
    validate,
)
from etude.dashboard import CLOCKED, LiveView
from etude.errors import UserError
from etude.evals import EvalResult, compare, evaluate, readiness_of
from etude.grading import open_sandbox
from etude.harness import ChatAPI, EngineModel, Model, Toolset, check_context, import_tools
from etude.protocol.backends import ChatClient, ChatModel, EngineClient, check_reachable
from etude.records import Budget, Episode, decode, encode
from etude.renderers import Renderer, load_tokenizer, named, renderer_for, say_dropped
from etude.rollout import Environment, RolloutContext, TaskPart, Taskset, dataset_part, mix, task_part
from etude.run.engines import engine_token, engine_url, spawn_engine
from etude.run.inputs import check_playable
from etude.run.parts import folders_of_tasks, packages_of, part_of, sampling_of
from etude.sandbox import Sandbox
from etude.weights import rl_config, run_and_version

CHATS = 16  # conversations with an API at a time
CHAT_BUDGET = {"turns": 50, "tokens": 32_000, "context": 131_072, "seconds": 900.0}  # by default, with a chat API
KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}  # variables with the key of an API


@dataclass(frozen=True)
class Remote:
    """A model behind an URL, and its key."""

    chat: ChatModel
    key: str | None

    def __str__(self) -> str:
        return f"{self.chat.model} at {self.chat.url}"


@dataclass(frozen=True)
class Served:
    """A model folder that servers compute with; `open` gives their client until its end."""

    folder: Path
    open: Callable[[], AbstractAsyncContextManager[EngineClient]]


def remote(chat: ChatModel, key: str | None) -> Remote:
    """A model behind an URL; its key is that of the environment unless given. Raises UserError for another address."""
    if not chat.url.startswith(("http://", "https://")):
        raise UserError(f"{chat.url} is no URL of an API: give its base, such as https://host/v1")
    return Remote(chat, (os.environ.get(KEYS[chat.api]) if key is None else key) or None)


def named_suites(suite: str | Path) -> Sequence[Path | TasksConfig]:
    """The suites of a name: the folder of a dataset; the datasets, the environment or the edits of a run's folder or
    TOML; or an environment by its import path. Raises UserError."""
    config, path = rl_config(suite), Path(suite)
    if config is None and path.suffix == ".toml" and path.is_file():
        tasks = validate(RLConfig, load_toml(path), str(path)).tasks
        if tasks.dataset is not None:
            return [Path(tasks.dataset)]
        if tasks.of_repositories:
            raise UserError(f"{path} has tasks that must be built: give the folder of the dataset, or of a run")
        return [tasks]
    if config is None:
        return [TasksConfig(environment=str(suite))] if ":" in str(suite) and not path.exists() else [path]
    if not config.tasks.of_repositories:
        return [config.tasks]
    return folders_of_tasks(config, run_and_version(suite)[0])


def sandbox_of_suites(suites: Sequence[str | Path], model: SandboxConfig | None) -> SandboxConfig | None:
    """The table [sandbox] of the run folders and TOMLs among the suites, else that of the model's run. Raises UserError
    if the suites differ."""
    tables: dict[str, tuple[str | Path, SandboxConfig]] = {}
    for suite in suites:
        config, path = rl_config(suite), Path(suite)
        if config is None and path.suffix == ".toml" and path.is_file():
            config = validate(RLConfig, load_toml(path), str(path))
        if config is not None:
            tables.setdefault(config.sandbox.model_dump_json(), (suite, config.sandbox))
    if len(tables) > 1:
        first, second = (name for name, _ in list(tables.values())[:2])
        raise UserError(f"{first} and {second} have different tables [sandbox]: choose one with --sandbox FILE")
    return next((config for _, config in tables.values()), model)


@dataclass(frozen=True)
class Measurement:
    """The tasks and settings of a measurement. `suites` are folders of datasets, environments, or tables [tasks] with
    an environment or edits. Finished episodes are kept in the folder `output`, if there is one, and not played again.
    `dialect` and `chat_template_kwargs` are for model folders, as in a run's configuration; `tools`
    are the names of the agent's built-in tools, () for all, `custom_tools` the import paths of others. `boxes` is the
    table [sandbox]."""

    suites: Sequence[Path | TasksConfig | Environment[Any]]
    options: EvalConfig
    budget: Budget
    split: str
    seed: int
    concurrency: int | None = None
    output: Path | None = None
    dialect: str = "auto"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: tuple[str, ...] = ()
    custom_tools: tuple[str, ...] = ()
    boxes: SandboxConfig | None = None

    def parts(self) -> list[TaskPart]:
        """The tasks of each suite. Raises UserError."""
        parts: list[TaskPart] = []
        for suite in self.suites:
            if isinstance(suite, Path):
                parts.append(dataset_part(suite))
            elif isinstance(suite, Environment):
                parts.append(task_part(suite, BuildConfig().heldout_fraction))
            else:
                parts.append(part_of(suite, None, self.budget))
        return parts

    def renderer(self, model: Path) -> Renderer:
        """The renderer of a folder. Raises UserError."""
        return renderer_for(model, self.dialect, self.chat_template_kwargs)

    def toolset(self) -> Toolset:
        """The agent's tools. Raises UserError."""
        named(self.tools)
        return Toolset(self.tools, functions=import_tools(self.custom_tools))


def evaluate_models(
    models: Sequence[Path | Remote],
    measurement: Measurement,
    inference: EngineConfig,
    *,
    as_json: bool,
    with_readiness: bool = False,
) -> None:
    """Prints pass rates with 95 % intervals, and the paired difference of two models; on request whether RL can begin
    with each. Raises UserError."""
    if with_readiness and measurement.options.samples < 2:
        raise UserError("--readiness compares the samples of a task: give --samples of 2 or more")
    results = measure_models(models, measurement, inference)
    ready = [readiness_of(result) for result in results] if with_readiness else []
    for model, result in zip(models, results, strict=True):
        _show(model, result)
    for each in ready:
        print(each.text)
    difference = compare(results[0], results[1]).difference if len(results) == 2 else None
    if difference is not None:
        print(f"second minus first: {difference.points}")
    if as_json:
        measured = [
            {"model": str(model), **msgspec.to_builtins(result, str_keys=True)}
            for model, result in zip(models, results, strict=True)
        ]
        also = {"readiness": msgspec.to_builtins(ready, str_keys=True)} if with_readiness else {}
        print(json.dumps({"results": measured, "paired_diff": msgspec.to_builtins(difference)} | also))


def measure_models(
    models: Sequence[Path | Remote | Served], measurement: Measurement, inference: EngineConfig
) -> list[EvalResult]:
    """Plays the tasks with each model, one model after the other. Raises UserError."""
    toolset = measurement.toolset()
    parts = measurement.parts()
    taskset = mix(parts, [1.0] * len(parts))
    chosen = taskset.split(measurement.split)
    if inside := sum(task.decided < MIN_DECIDED for task in chosen):
        print(
            f"warning: {inside} of {len(chosen)} {measurement.split} tasks are decided inside the tested process, "
            "where a reward can be forged; they count nevertheless",
            file=sys.stderr,
        )
    for part in parts:
        if part.dataset is not None:
            part.dataset.check_boxes(measurement.boxes)
    for model in models:
        renderer = check_model(model, inference, measurement.renderer, toolset, measurement.budget.context)
        if renderer is not None:
            check_playable(parts, renderer, measurement.boxes)
    journals = [_open_journal(measurement, model, taskset, number) for number, model in enumerate(models)]
    with LiveView("eval", [_label(m) for m in models], console=Console(stderr=True)) as view:
        results = []
        for model, journal in zip(models, journals, strict=True):
            view.stage(_label(model))
            results.append(asyncio.run(_measure(model, taskset, view, inference, measurement, journal)))
    return results


def check_model(
    model: Path | Remote | Served,
    inference: EngineConfig,
    rendered: Callable[[Path], Renderer],
    toolset: Toolset,
    context: int,
) -> Renderer | None:
    """The renderer of a folder that can be served and play with these tools in such a context; None for a chat API that
    answers. Raises UserError."""
    from etude.models import check_device, check_folder

    if isinstance(model, Remote):
        check_reachable(model.chat)
        return None
    if isinstance(model, Path):
        check_device(inference.device, "device")
    folder = _folder(model)
    check_folder(folder)
    load_tokenizer(folder)
    renderer = rendered(folder)
    say_dropped(renderer)
    check_context(renderer, toolset, context)
    return renderer


def _folder(model: Path | Served) -> Path:
    return model.folder if isinstance(model, Served) else model


def served_as(model: Path | Remote | Served) -> list[Any]:
    """The files of a folder, or the options of an API: they differ between models of one name."""
    if isinstance(model, Remote):
        return [model.chat.api, model.chat.temperature]
    files = ((path.name, path.stat()) for path in sorted(_folder(model).iterdir()) if path.is_file())
    return [[name, status.st_size, status.st_mtime_ns] for name, status in files]


def _label(model: Path | Remote | Served) -> str:
    """The shown name of a model: a bundled model's name, or a folder's path from the current folder."""
    if isinstance(model, Remote):
        return str(model)
    folder = _folder(model)
    if folder == bundled_model(folder.name):
        return folder.name
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def _show(model: Path | Remote, result: EvalResult) -> None:
    rates = ", ".join(f"pass@{k} {100 * rate:.1f} %" for k, rate in sorted(result.pass_k.items()) if k > 1)
    print(f"{_label(model)}: pass@1 {result.pass_1.percent}" + (f", {rates}" if rates else ""))
    if result.clocked > CLOCKED:
        print(f"  {result.clocked:.0%} of the episodes ended by the clock: raise --seconds")
    for name, estimate in result.repositories.items():
        print(f"  {name}: pass@1 {estimate.percent}")
    if isinstance(model, Remote):
        used = result.tokens
        print(f"  tokens: {used['prompt']:,} read, {used['cached']:,} of them cached; {used['sampled']:,} sampled")


@dataclass(frozen=True)
class _Journal:
    """The finished episodes of an evaluation, one file each."""

    folder: Path | None

    def known(self) -> dict[tuple[str, int], Episode]:
        """The episodes of earlier starts, by task and sample. Raises UserError for a damaged file."""
        if self.folder is None:
            return {}
        episodes: dict[tuple[str, int], Episode] = {}
        for path in sorted(self.folder.glob("*.msgpack")):
            try:
                episode = decode(path.read_bytes(), Episode)
            except msgspec.MsgspecError as e:
                raise UserError(f"{path} is damaged ({e}); delete it, and its episode is played again") from None
            episodes[episode.task_id, episode.member] = episode
        return episodes

    def keep(self, episode: Episode) -> None:
        """Writes a finished episode."""
        if self.folder is not None:
            name = re.sub(r"[^A-Za-z0-9._-]", "_", episode.task_id)
            runfolder.write(self.folder / f"{name}-{episode.group_id}-{episode.member}.msgpack", encode(episode))


def _open_journal(measurement: Measurement, model: Path | Remote | Served, taskset: Taskset, number: int) -> _Journal:
    """The journal of one model below `output`. Raises UserError if another measurement was written there."""
    if measurement.output is None:
        return _Journal(None)
    folder = measurement.output / f"model-{number}"
    runfolder.make(folder)
    digests = [part.digest or part.name for part in taskset.parts]
    settings = {
        "model": str(model),
        "suites": digests,
        "split": measurement.split,
        "seed": measurement.seed,
        "max_tasks": measurement.options.max_tasks,
        "budget": msgspec.to_builtins(measurement.budget),
        "rendered": [
            measurement.dialect,
            dict(measurement.chat_template_kwargs),
            *measurement.tools,
            *measurement.custom_tools,
        ],
        "served": served_as(model),
        "sandbox": None if measurement.boxes is None else measurement.boxes.model_dump(mode="json"),
    }
    path, text = folder / "measurement.json", json.dumps(settings, indent=1).encode()
    if path.exists() and path.read_bytes() != text:
        raise UserError(f"{path} is of another measurement (model, suite, budget or seed): give another folder with -o")
    if not path.exists():
        runfolder.write(path, text)
    return _Journal(folder)


async def _measure(
    model: Path | Remote | Served,
    taskset: Taskset,
    view: LiveView,
    inference: EngineConfig,
    measurement: Measurement,
    journal: _Journal,
) -> EvalResult:
    rows = measurement.concurrency or (CHATS if isinstance(model, Remote) else inference.max_batch)
    options = measurement.options
    async with (
        open_sandbox(measurement.boxes, packages=packages_of(taskset)) as sandbox,
        _context(model, taskset, sandbox, inference, measurement) as context,
    ):
        return await evaluate(
            context,
            samples=options.samples,
            split=measurement.split,
            max_tasks=options.max_tasks,
            seed=measurement.seed,
            concurrency=rows,
            progress=view.evaluated,
            on_episode=journal.keep,
            known=journal.known(),
        )


@asynccontextmanager
async def _context(
    model: Path | Remote | Served, taskset: Taskset, sandbox: Sandbox, inference: EngineConfig, measurement: Measurement
) -> AsyncIterator[RolloutContext]:
    """The common settings of one model's episodes."""
    budget, toolset = measurement.budget, measurement.toolset()
    async with opened_model(model, inference, measurement.renderer, budget.context) as opened:
        yield RolloutContext(taskset, sandbox, opened, budget, toolset=toolset)


@asynccontextmanager
async def opened_model(
    model: Path | Remote | Served, inference: EngineConfig, rendered: Callable[[Path], Renderer], context: int
) -> AsyncIterator[Model]:
    """A model that can play; an engine serves a folder, with sequences of at most `context` tokens, until the end."""
    if isinstance(model, Remote):
        async with ChatClient(model.chat, model.key) as client:
            yield ChatAPI(client)
        return
    opened = model.open() if isinstance(model, Served) else started_engine(model, inference, context)
    async with opened as client:
        yield EngineModel(client, rendered(_folder(model)), sampling_of(RolloutConfig()))


@asynccontextmanager
async def started_engine(model: Path, inference: EngineConfig, context: int) -> AsyncIterator[EngineClient]:
    """The client of an engine of etude's that serves a folder until the end."""
    shared = inference.model_dump(include=set(EngineConfig.model_fields))
    serving = ServerConfig(**shared, model=str(model), port=0, max_model_len=context)
    with tempfile.TemporaryDirectory(prefix="etude-eval-") as folder:
        logs = Path(folder)
        token = engine_token()
        engine = spawn_engine(serving, logs, token=token)
        try:
            url = await asyncio.to_thread(engine_url, engine, logs)
            async with EngineClient([url], token) as client:
                yield client
        finally:
            engine.stop(10)
