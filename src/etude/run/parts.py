"""Objects made from a run's configuration: renderer, dataset, options of the sandbox, sampling of episodes.

The run, its evaluation and the audits that repeat episodes share these functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from etude.config import RLConfig, RolloutConfig, TasksConfig, TaskSource, import_object
from etude.config.secrets import without_secrets
from etude.errors import USERS_FAULTS, UserError
from etude.harness import EngineModel, Policy, Sampling, Toolset, import_tools, merge_applier, server_applier
from etude.records import Budget
from etude.renderers import Renderer, renderer_for
from etude.rollout import (
    Agent,
    Concurrency,
    Environment,
    RolloutContext,
    TaskPart,
    Taskset,
    applied_edits,
    dataset_part,
    episode_concurrency,
    mix,
    task_part,
)
from etude.sandbox import ProfileSource, Sandbox, load_profiles
from etude.sandbox.egress import Egress, configured_egress


def renderer_of(config: RLConfig) -> Renderer:
    """The renderer of the model's dialect. Raises UserError."""
    return renderer_for(Path(config.model.path), config.model.dialect, config.model.chat_template_kwargs)


def taskset_of(config: RLConfig, folder: Path) -> Taskset | None:
    """The configured tasks, or those that were built in the run folder; None if they have not been built yet. Raises
    UserError."""
    tasks, built = config.tasks, folder / "tasks"
    if not tasks.of_repositories:
        return Taskset((part_of(tasks, renderer_of(config), config.rollout.budget()),))
    if tasks.sources:
        later = built_beside(config)
        parts = [source_part(source, built / str(number)) for number, source in enumerate(tasks.sources)]
        known = {number: part for number, part in enumerate(parts) if part is not None}
        if {*range(len(parts))} - {*known, *later}:
            return None
        return mix(list(known.values()), [tasks.sources[n].weight for n in known], more=bool(later))
    part = source_part(tasks, built)
    return None if part is None else Taskset((part,))


def part_of(tasks: TasksConfig, renderer: Renderer | None, budget: Budget) -> TaskPart:
    """The tasks of `tasks.edits`, or of `tasks.environment`; prompts must fit the budget as the renderer counts, if
    there is one. Raises UserError."""
    if tasks.edits is not None:
        edits = applied_edits(Path(tasks.edits), renderer, budget)
        return TaskPart(edits, edits.table)
    assert tasks.environment is not None
    factory = import_object(tasks.environment, "tasks.environment")
    try:
        environment = factory(**tasks.arguments)
    except UserError:
        raise
    except USERS_FAULTS as e:
        raise UserError(
            f"tasks.environment: {tasks.environment} cannot be made of tasks.arguments: {type(e).__name__}: {e}"
        ) from e
    if not isinstance(environment, Environment):
        raise UserError(f"tasks.environment: {tasks.environment} is no subclass of etude.Environment")
    part = task_part(cast(Environment[Any], environment), tasks.heldout_fraction)
    if renderer is not None:
        for task in part.tasks:
            environment.check_fit(task, renderer.prompt(environment.messages(task)), budget)
    return part


def folders_of_tasks(config: RLConfig, folder: Path) -> list[Path]:
    """The dataset folders of the run in `folder`, configured or built. Raises UserError for a run of other tasks."""
    tasks = config.tasks
    if not tasks.of_repositories:
        raise UserError(f"{folder} was trained on an environment or on edits, which are no task dataset")
    built = folder / "tasks"
    later = [n for n in built_beside(config) if not (built / str(n)).exists()]  # the run ended before
    sources = [(s, built / str(n)) for n, s in enumerate(tasks.sources) if n not in later] or [(tasks, built)]
    return [Path(source.dataset) if source.dataset is not None else place for source, place in sources]


def built_beside(config: RLConfig) -> tuple[int, ...]:
    """The numbers of the sources whose tasks are built during the run: repositories without held-out tasks. There are
    none in a deterministic run, nor with a package index in boxes, which must leave out the packages of all tasks, nor
    with a password in the tasks' options."""
    sources = config.tasks.sources
    later = tuple(n for n, source in enumerate(sources) if source.dataset is None and not source.heldout_fraction)
    installs = config.sandbox.type == "namespace" and config.sandbox.index is not None
    secret = without_secrets(config).tasks != config.tasks  # missing in the configuration that the builder reads
    return () if config.deterministic or installs or secret or len(later) == len(sources) else later


def source_part(source: TaskSource, built: Path) -> TaskPart | None:
    """The tasks of one source, configured or in the folder `built`; None if they have not been built. Raises
    UserError."""
    if source.dataset is not None:
        return dataset_part(Path(source.dataset))
    return dataset_part(built) if built.exists() else None


def sampling_of(rollout: RolloutConfig, *, routes: bool = False) -> Sampling:
    """The sampling options of a run's turns. With `routes` the experts of every token are recorded."""
    return Sampling(
        temperature=rollout.temperature,
        max_tokens=rollout.turn_tokens,
        thinking_budget=rollout.thinking_budget,
        routes=routes,
        documents=rollout.documents,
        summarise_at=rollout.summarise_at,
        summary_tokens=rollout.summary_tokens,
    )


def context_of(
    config: RLConfig,
    taskset: Taskset,
    sandbox: Sandbox,
    policy: Policy,
    agent: Agent | None = None,
    *,
    training: bool = False,
) -> RolloutContext:
    """The common settings of a run's episodes. Those of `training` record experts for router replay, and pay the costs
    of [reward]; others are graded alone. Raises UserError."""
    rollout = config.rollout
    sampling = sampling_of(rollout, routes=training and config.trainer.router_replay)
    model = EngineModel(policy, renderer_of(config), sampling)
    apply_edit = server_applier(rollout.apply) if rollout.apply else merge_applier
    toolset = Toolset(rollout.tools, apply_edit, import_tools(rollout.custom_tools))
    return RolloutContext(
        taskset, sandbox, model, rollout.budget(), agent, toolset, config.reward if training else None
    )


def profiles_of(config: RLConfig) -> ProfileSource | None:
    """The machine profiles of boxes; () for the reference description, None for no profile. Raises UserError."""
    path = config.rollout.machine_profiles
    if path == "none":
        return None
    if path == "image":
        return "image"
    return () if path is None else load_profiles(Path(path))


def egress_of(config: RLConfig, taskset: Taskset, folder: Path) -> Egress | None:
    """The hosts and package index that boxes may reach; None without. The index leaves out the packages that tasks are
    made from. Raises UserError."""
    return configured_egress(config.sandbox, packages_of(taskset), folder / "egress.jsonl")


def packages_of(taskset: Taskset) -> frozenset[str]:
    """The packages that tasks are made from, which no index of their boxes may have."""
    return frozenset().union(*(part.packages for part in taskset.parts))


def concurrency_of(config: RLConfig) -> Concurrency:
    """The limit of live episodes: fixed, or following the engines' load."""
    rollout = config.rollout
    fixed = None if rollout.max_in_flight == "auto" else rollout.max_in_flight
    rows = config.inference.count * config.inference.max_batch
    return episode_concurrency(
        fixed, rows=rows, staleness=rollout.staleness, prompts=rollout.prompts, group=rollout.group
    )
