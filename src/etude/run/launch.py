"""Stage "rl" from beginning to end: tasks, engines, evaluation, training, evaluation, report."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
from rich.console import Console

from etude import runfolder
from etude.code.packages import fetch_library
from etude.config import RLConfig, read_toml, validate
from etude.dashboard.live import LiveView, final_table
from etude.dashboard.report import RunReport
from etude.errors import UserError
from etude.evals.suite import EvalResult, evaluate
from etude.grading.runner import open_sandbox
from etude.ledger.ledger import Ledger
from etude.protocol.client import EngineClient
from etude.records import Episode, encode
from etude.renderers import Renderer, renderer_for
from etude.rollout import apply_edits, probes
from etude.rollout.agent import check_agent, open_agent
from etude.rollout.concurrency import Concurrency, concurrency
from etude.rollout.environment import environment_dataset
from etude.rollout.rewards import custom_component
from etude.run import loop
from etude.run.engines import start_engines
from etude.run.loop import Run
from etude.run.monitor import Monitor
from etude.run.report import finish_report
from etude.sandbox.base import Sandbox
from etude.sandbox.egress.policy import Egress, check_index, index_of, parse, project_of
from etude.sandbox.machine_profile import ProfileSource, load
from etude.store import open_store
from etude.tasks import dataset as datasets
from etude.tasks import impossible
from etude.tasks.build import build, check_operators
from etude.tasks.dataset import Dataset
from etude.weights.manifest import manifests
from etude.weights.signature import private_key, public_key

Boxes = Callable[..., AbstractAsyncContextManager[Sandbox]]
STAGES = ("build tasks", "start engines", "eval before", "train", "eval after", "report")


def train_rl(
    config: RLConfig, folder: Path, *, resume: bool, toml: Path | None, boxes: Boxes | None = None
) -> RunReport:
    """Runs or resumes the stage in `folder` and writes its report. Raises UserError or RunFailed.

    Episodes are played in what `boxes` makes, such as a benchmark's with slower tools; by default [sandbox] says.
    """
    _check_inputs(config)
    if not resume:
        runfolder.create(folder, config, toml)
    with runfolder.lock(folder), LiveView(config.name, STAGES) as view:
        report = asyncio.run(_train(config, folder, view, boxes or partial(open_sandbox, config.sandbox)))
    Console().print(final_table(report, folder / "report.html"))
    return report


def _check_inputs(config: RLConfig) -> None:
    """Refuses what can be refused before anything is written."""
    from etude.models.loading import check_folder
    from etude.trainer.rl.presets import loss_preset

    check_folder(Path(config.model.path))
    if config.weights.signing_key is not None:
        private_key(Path(config.weights.signing_key))
        public_key(Path(f"{config.weights.signing_key}.pub"))
    loss_preset(config.loss)
    if config.reward.custom is not None:
        custom_component(config.reward.custom)
    machine_profiles(config)
    parse(config.sandbox.egress)
    if config.sandbox.index is not None:
        check_index(config.sandbox.index)
    if config.rollout.documents:
        _check_documents(config)
    if config.rollout.agent is not None:
        check_agent(config.rollout.agent)
    if config.rollout.apply is not None and renderer_of(config).dialect == "compact":
        raise UserError("agents of the compact dialect have no tool `apply`: drop rollout.apply")
    tasks = config.tasks
    check_operators(tasks)
    if tasks.edits is not None:
        apply_edits.tasks_of(Path(tasks.edits), renderer_of(config), config.rollout.budget())
    elif tasks.environment is not None:
        environment_dataset(config, renderer_of(config), Path())
    elif tasks.dataset is not None:
        datasets.load(Path(tasks.dataset))
    elif "==" in tasks.repository:
        if tasks.sha256 is None:
            raise UserError(f"tasks.repository = {tasks.repository!r} needs tasks.sha256, the digest of its sdist")
    elif not Path(tasks.repository).is_dir():
        raise UserError(f"tasks.repository: {tasks.repository} is not a folder; give a repository or NAME==VERSION")


def _check_documents(config: RLConfig) -> None:
    """Refuses models that documents cannot be placed in, and engines that could not hold those of an episode."""
    from transformers import AutoConfig

    from etude.models.documents import config_refusal, token_bytes

    model = AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    if refusal := config_refusal(model):
        raise UserError(f"{refusal}: set rollout.documents to false")
    size = token_bytes(model, 4 if config.inference.dtype == "float32" else 2)
    needed = -(-size * config.rollout.context // 2**20)
    if config.inference.documents_mb < needed:
        raise UserError(
            f"documents of up to rollout.context = {config.rollout.context} tokens need {needed} MB of an engine: set "
            f"inference.documents_mb to that at least, it is {config.inference.documents_mb:g}"
        )


async def _train(config: RLConfig, folder: Path, view: LiveView, boxes: Boxes) -> RunReport:
    started = time.time()
    logs = runfolder.new_attempt(folder)
    with _stage(folder, view, "build tasks"):
        dataset = await asyncio.to_thread(_dataset, config, folder, view)
    async with _open(config, folder, dataset, logs, view, boxes) as run:
        trainer = next(child for child in run.children if child.name == "trainer")
        await loop.check_documents(run)
        await loop.wait_for_version(run, max(0, loop.last_version(run.weights)))
        before = await _evaluate(run, view, "before") if config.eval.before else None
        pids = {child.log.stem: child.popen.pid for child in run.children}
        if run.sandbox.zygote_pid is not None:
            pids["zygote"] = run.sandbox.zygote_pid
        with _stage(folder, view, "train"):
            await loop.rollouts(run, trainer, Monitor(folder, config, view, pids).tick)
        await loop.wait_for_version(run, loop.last_version(run.weights))
        after = await _evaluate(run, view, "after") if config.eval.after else None
        with _stage(folder, view, "report"):
            return finish_report(run, before, after, seconds=time.time() - started)


def _stage(folder: Path, view: LiveView, name: str):
    view.stage(name)
    return runfolder.timed(folder / "timeline.jsonl", "controller", name)


def dataset_of(config: RLConfig, folder: Path) -> Dataset | None:
    """The configured dataset, or the one inside the run folder; None if that is still to be built."""
    tasks, target = config.tasks, folder / "tasks"
    if tasks.edits is not None:
        return apply_edits.tasks_of(Path(tasks.edits), renderer_of(config), config.rollout.budget())
    if tasks.environment is not None:
        return environment_dataset(config, renderer_of(config), folder)
    if tasks.dataset is not None:
        return datasets.load(Path(tasks.dataset))
    return datasets.load(target) if target.exists() else None


def _dataset(config: RLConfig, folder: Path, view: LiveView) -> Dataset:
    """The run's dataset, built from the repository if need be."""
    if (found := dataset_of(config, folder)) is not None:
        return found
    tasks = config.tasks
    if "==" in tasks.repository:
        name, _, version = tasks.repository.partition("==")
        assert tasks.sha256 is not None
        repository = fetch_library(name, version, tasks.sha256, folder / "library")
    else:
        repository = Path(tasks.repository)
    return build(repository, folder / "tasks", tasks, view.note)


def renderer_of(config: RLConfig) -> Renderer:
    """How the run writes conversations in tokens. Raises UserError."""
    return renderer_for(Path(config.model.path), None if config.model.dialect == "auto" else config.model.dialect)


@asynccontextmanager
async def _open(
    config: RLConfig, folder: Path, dataset: Dataset, logs: Path, view: LiveView, boxes: Boxes
) -> AsyncIterator[Run]:
    """Every process of the run, started and stopped together."""
    root = config.store or str(folder)
    weights = open_store(f"{root}/weights")
    renderer = renderer_of(config)
    answers, length = open_store(f"{root}/probes"), min(probes.TOKENS, config.rollout.context)
    sequences = probes.make_sequences(dataset.split("train"), renderer, config.guards.probes, length)
    probes.reset(answers, sequences)  # before the trainer looks for them
    ledger = Ledger.open(config.ledger or f"sqlite:///{folder}/ledger.db", config.name)
    ledger.recover(manifests(weights))  # before any process leases or trains
    view.stage("start engines")
    children, urls = await asyncio.to_thread(start_engines, folder, config, logs)
    try:
        children.append(loop.start_trainer(folder, logs))
        async with (
            boxes(
                machine_profiles=machine_profiles(config),
                egress=_egress(config, dataset, folder),
                repeatable=config.deterministic,
            ) as sandbox,
            EngineClient(urls) as client,
            aclosing(probes.ProbeScorer(answers, sequences, client, urls)) as scorer,
            open_agent(config.rollout.agent) as agent,
        ):
            yield Run(
                folder=folder,
                config=config,
                dataset=dataset,
                ledger=ledger,
                weights=weights,
                rollouts=open_store(f"{root}/rollouts"),
                sandbox=sandbox,
                renderer=renderer,
                probes=scorer,
                client=client,
                engines=urls,
                children=children,
                concurrency=_concurrency(config),
                twins=impossible.make(dataset, folder / "twins")
                if config.cheats.twins and not config.tasks.edits and not config.tasks.environment
                else None,
                agent=agent,
            )
    finally:
        for child in children:
            child.stop(10)


def machine_profiles(config: RLConfig) -> ProfileSource | None:
    """What boxes imitate; by default the reference description. Raises UserError."""
    name = config.rollout.machine_profiles
    if name == "none":
        return None
    return () if name is None else load(Path(name))


def _egress(config: RLConfig, dataset: Dataset, folder: Path) -> Egress | None:
    """What boxes may reach, if anything. The package that tasks are made from is no part of it. Raises UserError."""
    sandbox, index = config.sandbox, None
    if sandbox.index is not None and sandbox.index_before is not None:
        roots = {Path(root).stem for task in dataset.tasks for root in task.source_roots}
        without = {*sandbox.index_without, *roots, project_of(dataset.name)}
        index = index_of(sandbox.index, sandbox.index_before, without)
    if not sandbox.egress and index is None:
        return None
    return Egress(parse(sandbox.egress), index, folder / "egress.jsonl")


def _concurrency(config: RLConfig) -> Concurrency:
    rollout = config.rollout
    fixed = None if rollout.max_in_flight == "auto" else rollout.max_in_flight
    rows = config.inference.servers * config.inference.max_batch
    return concurrency(fixed, rows=rows, staleness=rollout.staleness, prompts=rollout.prompts, group=rollout.group)


async def _evaluate(run: Run, view: LiveView, when: str) -> EvalResult:
    """pass@1 on the held-out tasks with the weights served now; read back if an earlier attempt measured it."""
    path = run.folder / f"eval-{when}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=EvalResult)

    def keep(episode: Episode) -> None:
        run.rollouts.put(f"eval-{when}/{episode.task_id}-{episode.member}.msgpack", encode(episode))

    with _stage(run.folder, view, f"eval {when}"):
        measure = evaluate(
            run.setting,
            samples=run.config.eval.samples,
            max_tasks=run.config.eval.max_tasks,
            seed=run.config.seed,
            concurrency=run.concurrency.limit,
            progress=view.evaluated,
            on_episode=keep,
        )
        result = await loop.watched(run, measure)
    path.write_bytes(msgspec.json.encode(result))
    return result


def demo(seed: int, overrides: Sequence[str]) -> None:
    """`etude demo`: recipes/demo.toml with a seed. An earlier demo's folder is kept under another name."""
    from etude.cli.train import OUTPUTS, train

    recipe, overrides = Path("recipes/demo.toml"), [*overrides, "--seed", str(seed)]
    folder = OUTPUTS / validate(RLConfig, read_toml(recipe, overrides), str(recipe)).name
    if folder.exists():
        with runfolder.lock(folder):
            names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
            kept = next(name for name in names if not name.exists())
            shutil.move(folder, kept)
        print(f"the earlier demo was moved to {kept}")
    train(recipe, overrides, resume=False, dry_run=False)
