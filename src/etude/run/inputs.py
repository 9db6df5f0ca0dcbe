"""The inputs of a run: checks before a run folder is written, and the building of datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from etude.code import fetch_library
from etude.config import FleetConfig, RLConfig, SandboxConfig, TaskSource, check_ranks_apart
from etude.errors import UserError
from etude.harness import Toolset, check_context, import_tools
from etude.ledger import parse_database_url
from etude.models import check_device, check_devices, check_folder
from etude.renderers import Renderer, named, say_dropped
from etude.rollout import TaskPart, Taskset, check_agent, custom_component, dataset_part, foreign_refusal
from etude.run.jobs import check_reached
from etude.run.parts import built_beside, part_of, profiles_of, renderer_of, source_part, taskset_of
from etude.run.vllm_environment import check_python
from etude.sandbox.backends.choose import check_sandbox
from etude.tasks import build_dataset, check_operators
from etude.tasks.foreign import build_foreign, find_folders
from etude.weights import read_private_key, read_public_key
from etude.weights.preflight import check_before_training

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Note = Callable[[str, int, int], None]
"""A function that shows the progress of a build: its stage, the parts that are done, and all parts."""


def check_inputs(config: RLConfig, fleet: FleetConfig | None = None) -> None:
    """Raises UserError for mistakes in a configuration; called before a run folder is written. Devices and engines that
    the fleet has elsewhere are not looked for here."""
    from etude.trainer.rl.presets import loss_preset

    tasks = config.tasks
    check_ranks_apart(config, fleet)
    check_folder(Path(config.model.path))
    check_before_training(Path(config.model.path))
    renderer = renderer_of(config)
    say_dropped(renderer)  # or what is wrong with tokenizer and template
    if fleet is not None and fleet.players is not None and fleet.players.placer == "ray":
        if not fleet.engines and not config.inference.urls:
            raise UserError("players in Ray do not reach the run's own servers, on loopback: write a table [[engines]]")
        check_reached([*config.inference.urls, *(url for table in fleet.engines for url in table.urls)])
    engines_here = fleet is None or not fleet.engines or any(table.placer == "local" for table in fleet.engines)
    if engines_here:
        check_python(config.inference)
    if config.ledger is not None:
        parse_database_url(config.ledger, "ledger")
    if config.weights.signing_key is not None:
        read_private_key(Path(config.weights.signing_key))
        read_public_key(Path(f"{config.weights.signing_key}.pub"))
    loss_preset(config.loss)
    if config.trainer.baseline == "given":
        raise UserError('trainer.baseline = "given" needs episodes that bring advantages: it is for `etude live train`')
    if config.distill is not None:
        if config.distill.teacher == "self":
            raise UserError(
                'distill.teacher = "self" needs episodes with hints, as `etude live train` has: name a folder'
            )
        check_folder(Path(config.distill.teacher))
    for path in config.reward.custom:
        custom_component(path)
    profiles_of(config)
    check_sandbox(config.sandbox)
    if config.rollout.agent is not None:
        check_agent(config.rollout.agent)
    if config.rollout.apply is not None and renderer.dialect == "compact":
        raise UserError("agents of the compact dialect have no tool `apply`: drop rollout.apply")
    if config.rollout.thinking_budget is not None and not renderer.thinks:
        raise UserError(
            f"rollout.thinking_budget closes thoughts by a tag, and the dialect {renderer.dialect!r} of this model has "
            "none: drop it, and bound a turn with rollout.turn_tokens"
        )
    _check_tools(config)
    check_operators(tasks)
    if not tasks.of_repositories:
        part = part_of(tasks, renderer, config.rollout.budget())
        _check_splits(part, config)
        _check_agent(part, config)
        check_playable([part], renderer, config.sandbox)
    else:
        for source in tasks.sources or (tasks,):
            _check_source(source, "tasks.sources" if tasks.sources else "tasks", config)
    _check_architecture(config)  # last: it loads torch and transformers
    trainer_here = fleet is None or fleet.trainer is None or fleet.trainer.placer == "local"
    if config.trainer.launcher == "local" and trainer_here:  # others may start it on other machines
        check_devices(config.trainer.device, config.trainer.mesh.ranks)
    if (
        config.inference.engine == "etude" and engines_here and not config.inference.urls
    ):  # others have a PyTorch of their own
        check_device(config.inference.device, "inference.device")
    if config.rollout.documents:
        _check_documents(config)


def _check_splits(part: TaskPart, config: RLConfig) -> None:
    """Raises UserError for tasks of one split alone where the run needs both."""
    if not part.split("train"):
        raise UserError(f'{part.name}.tasks gives no task for training: set split to "train", or give more tasks')
    if (config.eval.before or config.eval.after) and not part.split("heldout"):
        raise UserError(
            f"{part.name}.tasks gives no held-out task: set eval.before and eval.after to false, or hold some out"
        )


def _check_agent(part: TaskPart, config: RLConfig) -> None:
    """Raises UserError for an outside agent on tasks without a box."""
    if config.rollout.agent is not None and any(part.environment.image(task) is None for task in part.tasks):
        raise UserError(f"rollout.agent plays in boxes, and tasks of {part.name} have none: give them a repository")


def _check_source(source: TaskSource, table: str, config: RLConfig) -> None:
    if source.sha256 is not None and "==" not in source.repository:
        raise UserError(f"{table}.sha256 is the digest of a package NAME==VERSION, and {source.where} is none: drop it")
    if source.dataset is not None:
        check_playable([dataset_part(Path(source.dataset))], renderer_of(config), config.sandbox)
    elif source.harbor is not None:
        find_folders([Path(source.harbor)])
        if why := foreign_refusal(renderer_of(config).dialect == "compact", config.sandbox.type):
            raise UserError(why)
    elif "==" in source.repository:
        if source.sha256 is None:
            raise UserError(f"{table}.repository = {source.repository!r} needs {table}.sha256, the digest of its sdist")
    elif not Path(source.repository).is_dir():
        raise UserError(f"{table}.repository: {source.repository} is not a folder; give a repository or NAME==VERSION")


def trainable(part: TaskPart, least: float) -> TaskPart:
    """The tasks without those for training with too few tests that are decided outside of the tested process, inside of
    which a reward can be forged; `least` is the least share of such tests. Tasks of unknown share stay. Prints the
    warnings of the environment. Raises UserError if no training task is left."""
    for warning in part.warnings:
        print(f"warning: {part.name}: {warning}", file=sys.stderr)
    if not part.split("train"):
        raise UserError(f"{part.name} has no training tasks: build it anew, or leave the source out")
    low = {task.id for task in part.split("train") if task.decided < least}
    if not low:
        return part
    kept = tuple(task for task in part.tasks if task.id not in low)
    count = len(part.split("train"))
    if len(low) == count:
        raise UserError(
            f"of none of the {count} training tasks of {part.name} {least:.0%} of the tests are decided outside of "
            "what they test: "
            "write tests that call the library alone, or set tasks.min_decided = 0 and trust nothing that is learned."
        )
    print(
        f"{len(low)} of {count} training tasks of {part.name} are left out: tasks.min_decided = {least}",
        file=sys.stderr,
    )
    return replace(part, tasks=kept)


def run_taskset(config: RLConfig, folder: Path, note: Note) -> Taskset:
    """The run's tasks, built into the run folder if the configuration names a repository. Sources that are built
    beside the run are left out until they are complete. Raises UserError, which names the failed one of several
    sources."""
    if (taskset := taskset_of(config, folder)) is not None:
        return taskset
    tasks = config.tasks
    if not tasks.sources:
        return Taskset((build_source(tasks, folder, folder / "tasks", note, config.sandbox),))
    later = built_beside(config)
    for number in range(len(tasks.sources)):
        if number not in later:
            build_numbered(config, number, folder, note)
    taskset = taskset_of(config, folder)
    assert taskset is not None
    return taskset


def build_numbered(config: RLConfig, number: int, folder: Path, note: Note) -> TaskPart:
    """The tasks of source `number`, built into the run folder if it is missing. Raises UserError."""
    source, built = config.tasks.sources[number], folder / "tasks" / str(number)
    built.parent.mkdir(exist_ok=True)
    try:
        return source_part(source, built) or build_source(source, folder, built, note, config.sandbox)
    except UserError as e:
        raise UserError(f"tasks.sources: {source.where} gives no tasks: {e}") from None


def _check_tools(config: RLConfig) -> None:
    """Raises UserError for unknown, unavailable or missing tools of the run's agent, and for a context that their
    schemas fill."""
    names, renderer = config.rollout.tools, renderer_of(config)
    named(names)
    others = config.rollout.agent is not None or not config.tasks.of_repositories
    if names and others:
        raise UserError("rollout.tools chooses among the built-in tools, which this run's agent does not have: drop it")
    if names and renderer.dialect == "compact":
        raise UserError("agents of the compact dialect have the tools that it has words for: drop rollout.tools")
    if (own := config.rollout.custom_tools) and others:
        where = (
            "return them by the method `tools` of the environment"
            if config.tasks.environment is not None
            else "drop it"
        )
        raise UserError(f"rollout.custom_tools joins the built-in tools, which this run's agent does not have: {where}")
    if own and renderer.dialect == "compact":
        raise UserError("agents of the compact dialect have the tools that it has words for: drop rollout.custom_tools")
    if not others:
        check_context(renderer, Toolset(names, functions=import_tools(own)), config.rollout.context)


def check_playable(parts: Sequence[TaskPart], renderer: Renderer, boxes: SandboxConfig | None) -> None:
    """Raises UserError for tasks that a model's dialect or the boxes of a table [sandbox] cannot play."""
    for part in parts:
        if why := part.environment.refusal(renderer.dialect == "compact", "namespace" if boxes is None else boxes.type):
            raise UserError(why)
        if part.dataset is not None:
            part.dataset.check_boxes(boxes)


def build_source(
    source: TaskSource, folder: Path, built: Path, note: Note, boxes: SandboxConfig | None = None
) -> TaskPart:
    """The tasks of a repository, in the folder `built`, from boxes of the table [sandbox] `boxes`; a package is fetched
    into `folder`. Raises UserError."""
    if source.harbor is not None:
        fraction = source.heldout_fraction
        made, _ = build_foreign([Path(source.harbor)], built, note, heldout_fraction=fraction, boxes=boxes)
        return dataset_part(made)
    if "==" in source.repository:
        name, _, version = source.repository.partition("==")
        if source.sha256 is None:
            raise UserError(
                f"{source.repository} needs the digest of its sdist: give a TOML with [tasks] repository and sha256"
            )
        repository = fetch_library(name, version, source.sha256, folder / "library")
    else:
        repository = Path(source.repository)
    return dataset_part(build_dataset(repository, built, source, note, boxes=boxes))


def _check_architecture(config: RLConfig) -> None:
    """Raises UserError for architectures that the trainer or the run's engine does not compute, by the model's
    configuration, for weights that do not fit it, for layers that have no adapters, and for a dtype that the engines
    would round. Their processes refuse what only a trial shows, before the first episode."""
    import torch

    from etude.models.dtypes import main_dtype
    from etude.models.loading import check_tensors, load_config
    from etude.models.lora import adapted_layers
    from etude.models.support import Use, mesh_refusal, refusal

    model = load_config(config.model.path)
    uses: list[Use] = ["rows"]
    if config.trainer.execution not in ("auto", "rows"):
        uses.append("shared prompts")
    own = config.inference.engine == "etude"
    if own:
        uses.append("engine")
    for use in uses:
        if why := refusal(model, use):
            raise UserError(f"{config.model.path}: {why}")
    if why := mesh_refusal(model, config.trainer.mesh):
        raise UserError(f"{config.model.path}: {why}")
    empty = check_tensors(config.model.path)
    if config.trainer.lora is not None:
        adapted_layers(empty, config.trainer.lora.targets)
    inference, main = config.inference, main_dtype(Path(config.model.path))
    if inference.dtype == "bfloat16" and config.trainer.dtype == "float32" and main != torch.bfloat16:
        kind, key = str(main).removeprefix("torch."), 'inference.dtype = "float32" or ' if own else ""
        raise UserError(
            f"{config.model.path} is stored in {kind}, and engines that compute in bfloat16 would round its versions: "
            f'set {key}trainer.dtype = "bfloat16"'
        )
    if own:
        _check_cache(config, model)


def _check_cache(config: RLConfig, model: PretrainedConfig) -> None:
    """Raises UserError for a context that etude's engine cannot hold in its cache."""
    from etude.models.key_values import cache_mb, configured, cpu_cache_mb

    inference, context = config.inference, config.rollout.context
    shared = inference.servers > 1 or inference.device.partition(":")[0] == config.trainer.device.partition(":")[0]
    if inference.cache_mb is None and not inference.on_cpu and shared:
        raise UserError(
            f"inference.cache_mb is not given, and an engine would take most of what is free on {inference.device}, "
            "which others need, too: set it"
        )
    held = inference.cache_mb or (cpu_cache_mb(configured(model), context) if inference.on_cpu else None)
    needed = cache_mb(configured(model), context, 4 if inference.on_cpu or inference.in_float32 else 2)
    if held is not None and held < needed:
        raise UserError(
            f"a sequence of rollout.context = {context} tokens needs {needed} MB of an engine's cache: set "
            f"inference.cache_mb to that at least, it is {held:g}, or shorten the context"
        )


def _check_documents(config: RLConfig) -> None:
    """Raises UserError for models that cannot attend to documents, and for too little memory for an episode's."""
    from etude.models.document_spans import config_refusal, token_bytes
    from etude.models.loading import load_config

    model = load_config(config.model.path)
    if refusal := config_refusal(model):
        raise UserError(f"{refusal}: set rollout.documents to false")
    size = token_bytes(model, 4 if config.inference.in_float32 else 2)
    needed = -(-size * config.rollout.context // 2**20)
    if config.inference.documents_mb < needed:
        raise UserError(
            f"documents of up to rollout.context = {config.rollout.context} tokens need {needed} MB of an engine: set "
            f"inference.documents_mb to that at least, it is {config.inference.documents_mb:g}"
        )
