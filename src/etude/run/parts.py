"""Objects made from a run's configuration: renderer, dataset, options of the sandbox, sampling of episodes.

The run, its evaluation and the audits that repeat episodes share these functions.
"""

from __future__ import annotations

from pathlib import Path

from etude.config import RLConfig, RolloutConfig, TaskSource
from etude.config.secrets import without_secrets
from etude.errors import UserError
from etude.grading.cheats import Decoys, has_decoys, plant_decoys
from etude.harness import EngineModel, Policy, Sampling, Toolset, import_tools, merge_applier, server_applier
from etude.records import Task
from etude.renderers import Renderer, renderer_for
from etude.rollout import Agent, Concurrency, RolloutContext, edit_tasks, environment_dataset, episode_concurrency
from etude.sandbox import ProfileSource, Sandbox, load_profiles
from etude.sandbox.egress import Egress, package_index, parse_allowed_hosts, wheel_project
from etude.tasks import Dataset, mix
from etude.tasks.foreign import FOREIGN, load_any_dataset


def renderer_of(config: RLConfig) -> Renderer:
    """The renderer of the model's dialect. Raises UserError."""
    return renderer_for(Path(config.model.path), config.model.dialect, config.model.chat_template_kwargs)


def dataset_of(config: RLConfig, folder: Path) -> Dataset | None:
    """The configured dataset, or the one in the run folder; None if it has not been built yet. Raises UserError."""
    tasks, built = config.tasks, folder / "tasks"
    if tasks.edits is not None:
        return edit_tasks(Path(tasks.edits), renderer_of(config), config.rollout.budget())
    if tasks.environment is not None:
        return environment_dataset(config, renderer_of(config), folder)
    if tasks.sources:
        later = built_beside(config)
        parts = [source_dataset(source, built / str(number)) for number, source in enumerate(tasks.sources)]
        known = {number: part for number, part in enumerate(parts) if part is not None}
        if {*range(len(parts))} - {*known, *later}:
            return None
        return mix(list(known.values()), [tasks.sources[n].weight for n in known], more=bool(later))
    return source_dataset(tasks, built)


def folders_of_tasks(config: RLConfig, folder: Path) -> list[Path]:
    """The dataset folders of the run in `folder`, configured or built. Raises UserError for a run of other tasks."""
    tasks = config.tasks
    if tasks.edits is not None or tasks.environment is not None:
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


def source_dataset(source: TaskSource, built: Path) -> Dataset | None:
    """The dataset of one source, configured or in the folder `built`; None if it has not been built. Raises
    UserError."""
    if source.dataset is not None:
        return load_any_dataset(Path(source.dataset))
    return load_any_dataset(built) if built.exists() else None


def sampling_of(rollout: RolloutConfig, *, routes: bool = False) -> Sampling:
    """The sampling options of a run's turns."""
    return Sampling(
        temperature=rollout.temperature,
        routes=routes,
        documents=rollout.documents,
        summarise_at=rollout.summarise_at,
        summary_tokens=rollout.summary_tokens,
    )


def context_of(
    config: RLConfig,
    dataset: Dataset,
    sandbox: Sandbox,
    policy: Policy,
    renderer: Renderer,
    agent: Agent | None = None,
    *,
    routes: bool = False,
) -> RolloutContext:
    """The common settings of a run's episodes. With `routes` they record experts: training episodes do with router
    replay."""
    rollout = config.rollout
    model = EngineModel(policy, renderer, sampling_of(rollout, routes=routes))
    apply_edit = server_applier(rollout.apply) if rollout.apply else merge_applier
    toolset = Toolset(rollout.tools, apply_edit, import_tools(rollout.custom_tools))
    return RolloutContext(dataset, sandbox, model, rollout.budget(), agent, toolset)


def decoys_of(config: RLConfig, task: Task) -> Decoys | None:
    """The decoys of a task in this run, or None; its impossible version has the same."""
    if task.sketch is not None or task.kind == FOREIGN or config.tasks.environment is not None:
        return None  # there is no repository to hide them in
    chosen = has_decoys(task.id, config.seed, config.cheats.decoys)
    return plant_decoys(task, config.seed) if chosen else None


def profiles_of(config: RLConfig) -> ProfileSource | None:
    """The machine profiles of boxes; () for the reference description, None for no profile. Raises UserError."""
    path = config.rollout.machine_profiles
    if path == "none":
        return None
    return () if path is None else load_profiles(Path(path))


def egress_of(config: RLConfig, dataset: Dataset, folder: Path) -> Egress | None:
    """The hosts and package index that boxes may reach; None without. The index leaves out the packages that tasks are
    made from. Raises UserError."""
    sandbox, index = config.sandbox, None
    if sandbox.type != "namespace":
        return None
    if sandbox.index is not None and sandbox.index_before is not None:
        roots = {Path(root).stem for task in dataset.tasks for root in task.source_roots}
        without = {*sandbox.index_without, *roots, *(wheel_project(part.name) for part in dataset.parts)}
        index = package_index(sandbox.index, sandbox.index_before, without)
    if not sandbox.egress and index is None:
        return None
    return Egress(parse_allowed_hosts(sandbox.egress), index, folder / "egress.jsonl")


def concurrency_of(config: RLConfig) -> Concurrency:
    """The limit of live episodes: fixed, or following the engines' load."""
    rollout = config.rollout
    fixed = None if rollout.max_in_flight == "auto" else rollout.max_in_flight
    rows = config.inference.count * config.inference.max_batch
    return episode_concurrency(
        fixed, rows=rows, staleness=rollout.staleness, prompts=rollout.prompts, group=rollout.group
    )
