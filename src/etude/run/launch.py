"""Stage "rl" from beginning to end: tasks, engines, evaluation, training, evaluation, report."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import msgspec
from rich.console import Console

from etude import processes, runfolder
from etude.config import FleetConfig, RLConfig
from etude.config.secrets import ledger_password
from etude.dashboard import LiveView, RunReport, duration, final_table
from etude.errors import UserError
from etude.evals import EvalResult, evaluate, readiness_of
from etude.fleet import Placed, stop_all
from etude.grading import open_sandbox
from etude.ledger import BlobDamaged, Ledger, get_blob
from etude.processes import Child, Elsewhere, Heartbeat, Process
from etude.protocol.backends import EngineClient
from etude.records import Episode, encode
from etude.rollout import (
    PROBE_TOKENS,
    ProbeScorer,
    ProbeSequences,
    TaskPart,
    Taskset,
    make_probe_sequences,
    open_agent,
    reset_probes,
    sweep_journals,
)
from etude.run import loop
from etude.run.engines import backend_of, engine_token, start_engines, start_seconds
from etude.run.inputs import check_inputs, check_playable, run_taskset
from etude.run.jobs import RunFleet
from etude.run.monitor import Monitor
from etude.run.parts import concurrency_of, context_of, egress_of, profiles_of, renderer_of
from etude.run.run_report import finish_report
from etude.run.sources import BUILDER, TaskPool, missing, trained_tasks
from etude.run.state import Engines, Run, check_processes, last_version
from etude.run.versions import check_engines, observe_versions, swap_seconds, wait_for_version
from etude.sandbox import Sandbox
from etude.store import Store, open_store
from etude.weights import manifests

Boxes = Callable[..., AbstractAsyncContextManager[Sandbox]]
# Seconds of a training episode over those of an evaluation episode, by demo runs on two cores: a group shares its
# prompt and its box, and many of its test runs are answered from memory.
FASTER = 0.45
EXTERNAL_SECONDS = 3600.0  # in which a trainer that others start must begin
STOP_SECONDS = 10.0  # of the processes that the run itself has started
STAGES = ("build tasks", "start engines", "eval before", "train", "eval after", "report")


@dataclass(frozen=True)
class _Inputs:
    """The configuration, tasks, ledger and stores of a run."""

    config: RLConfig
    folder: Path
    pool: TaskPool
    ledger: Ledger
    weights: Store
    rollouts: Store
    probes: Store
    sequences: ProbeSequences


def train_rl(
    config: RLConfig,
    folder: Path,
    *,
    resume: bool,
    toml: str | None,
    boxes: Boxes | None = None,
    fleet: FleetConfig | None = None,
) -> RunReport:
    """Runs or resumes the stage in `folder` and writes its report. `toml` is the text of the configuration, kept for
    people. `fleet` places its processes. `boxes` opens the sandbox of the episodes, e.g. a benchmark's with slower
    tools; by default that of [sandbox]. Raises UserError or RunFailed."""
    started = runfolder.now()
    if not resume:
        runfolder.check_new(folder)
    check_inputs(config, fleet)
    if not resume:
        runfolder.create(folder, config, toml)
        if fleet is not None:
            runfolder.keep_fleet(folder, fleet)
    with runfolder.lock(folder) as lock, LiveView(config.name, STAGES) as view:
        if runfolder.config_changed(folder):
            print(f"etude: {folder / 'config.json'} has changed since the last attempt", file=sys.stderr)
            (folder / "report.html").unlink(missing_ok=True)  # whatever stops this attempt: the run has not ended
        elif resume and (finished := _finished(config, folder)) is not None:
            more = f"raise trainer.steps or trainer.minutes in {folder / 'config.json'} to train on"
            print(f"etude: {folder} has ended with version {finished.steps}: {more}", file=sys.stderr)
            return _shown(finished, folder)
        logs = runfolder.new_attempt(folder)
        try:
            taskset = _taskset(config, folder, view)
        except UserError:
            if not resume:  # nothing of it is worth continuing, and the mended configuration may have its name
                shutil.rmtree(folder)
            raise
        placed = RunFleet(fleet or FleetConfig.model_construct())
        inputs = _open_inputs(config, folder, TaskPool(taskset, missing(config, folder)), placed.away)
        view.stage("start engines")
        token, children, engines = engine_token(), list[Process | Placed](), dict[str, Child | None]()
        try:
            try:
                placed.place(config, folder, logs, token, [lock])
            except UserError:
                placed.stop()
                if not resume:  # as above: there is no token or no cluster, or it lacks what the fleet needs
                    shutil.rmtree(folder)
                raise
            if not placed.tables.engines:
                servers, urls = start_engines(folder, config, logs, token, holds=[lock])
                engines = {url: next(iter(servers[n : n + 1]), None) for n, url in enumerate(urls)}
                children += servers
            children.append(placed.trainer or _trainer(config, folder, logs, lock))
            sandbox = (boxes or partial(open_sandbox, config.sandbox))(
                machine_profiles=profiles_of(config),
                egress=egress_of(config, taskset, folder),
                repeatable=config.deterministic,
            )
            client = EngineClient((), token, backend_of(folder, config))
            command = ["etude.run.sources", str(folder)]
            builder = partial(processes.start, BUILDER, command, logs / "tasks.log", holds=[lock])
            report = asyncio.run(
                _run_stages(inputs, view, children, client, engines, placed, sandbox, started, builder)
            )
        finally:
            stop_all(children, STOP_SECONDS)
            placed.stop()
    return _shown(report, folder)


def _trainer(config: RLConfig, folder: Path, logs: Path, lock: int) -> Process:
    """The ranks of the trainer: started here, or waited for, after a line with the command that starts them."""
    module, ranks = "etude.trainer.rl.process", config.trainer.mesh.ranks
    if config.trainer.launcher == "external":
        program = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
        command = f"{program} -m {module} {shlex.quote(str(folder.absolute()))}"
        print(f"etude: waiting for the trainer: {command} (docs/ranks.md)", file=sys.stderr, flush=True)
        ours = Heartbeat(logs / runfolder.RUN_BEAT)
        return Elsewhere("trainer", logs / runfolder.TRAINER_BEAT, EXTERNAL_SECONDS, ours)
    password = ledger_password(config)  # not in the run folder: libpq reads it from the environment
    env = {"PGPASSWORD": unquote(password)} if password else None
    return processes.start_ranks("trainer", [module, str(folder)], logs, ranks, env, holds=[lock])


def _shown(report: RunReport, folder: Path) -> RunReport:
    Console().print(final_table(report, folder / "report.html"))
    for line in (*report.notes, f"Serve it: {report.serve}"):
        print(line, flush=True)
    return report


def _finished(config: RLConfig, folder: Path) -> RunReport | None:
    """The report of a finished run; None if a file is missing or the report is older than the newest version. A run
    with trainer.minutes is finished though its last step ended before the clock."""
    wanted = {"eval-before.json": config.eval.before, "eval-after.json": config.eval.after, "report.html": True}
    if not all((folder / name).exists() for name, due in wanted.items() if due):
        return None
    try:
        report = msgspec.json.decode((folder / "report.json").read_bytes(), type=RunReport)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors; it is written anew
        return None
    return report if report.steps == last_version(open_store(f"{config.store or folder}/weights")) else None


def _taskset(config: RLConfig, folder: Path, view: LiveView) -> Taskset:
    """The run's tasks, built if they are missing, without those that are not trained on. Raises UserError."""
    if config.sandbox.type != "namespace":
        print(f"sandbox.type = {config.sandbox.type!r} is for episodes; tasks are built in namespaces", file=sys.stderr)
    with _stage(folder, view, "build tasks"):
        taskset = run_taskset(config, folder, view.note)
    taskset = trained_tasks(config, folder, taskset)
    check_playable(taskset.parts, renderer_of(config), config.sandbox)
    return taskset


def _open_inputs(config: RLConfig, folder: Path, pool: TaskPool, away: Sequence[str]) -> _Inputs:
    """Opens the ledger and the stores, recovers the ledger and stores the logprob probes, before a process leases or
    trains. Untrained episodes whose blobs are missing or damaged are played again. Of earlier engines those named
    `away` may still serve."""
    root = config.store or str(folder)
    weights, answers = open_store(f"{root}/weights"), open_store(f"{root}/probes")
    length = min(PROBE_TOKENS, config.rollout.context)
    sequences = make_probe_sequences(pool.taskset.split("train"), renderer_of(config), config.guards.probes, length)
    reset_probes(answers, sequences)
    ledger = Ledger.open(config.ledger or f"sqlite:///{folder}/ledger.db", config.name)
    ledger.recover(manifests(weights))
    ledger.members.part("it ended with an earlier attempt of the run", away)
    rollouts = open_store(f"{root}/rollouts")
    for group, member, blob in ledger.untrained():
        try:
            get_blob(rollouts, blob)
        except BlobDamaged as damage:
            ledger.play_again(group, member)
            print(f"etude: {str(damage).partition(';')[0]}; it is played again", file=sys.stderr)
    sweep_journals(rollouts, ledger.unfinished())
    return _Inputs(config, folder, pool, ledger, weights, rollouts, answers, sequences)


async def _run_stages(
    inputs: _Inputs,
    view: LiveView,
    children: list[Process | Placed],
    client: EngineClient,
    urls: Mapping[str, Child | None],
    fleet: RunFleet,
    boxes: AbstractAsyncContextManager[Sandbox],
    started: float,
    builder: Callable[[], Process],
) -> RunReport:
    """Evaluates, trains, evaluates again and reports, once engines and trainer are started. `urls` are those of the
    engines, with the process where this one has started it. `builder` starts the process that builds the sources for
    training alone."""
    config, folder = inputs.config, inputs.folder
    async with (
        boxes as sandbox,
        client,
        aclosing(ProbeScorer(inputs.probes, inputs.sequences, client)) as scorer,
        aclosing(Engines([], client, scorer, elastic=bool(fleet.tables.engines))) as engines,
        open_agent(config.rollout.agent) as agent,
    ):
        for number, (url, child) in enumerate(urls.items()):
            engines.add(url, f"engine-{number}", child, serves=True)
        for url, name in fleet.attached.items():
            await asyncio.to_thread(inputs.ledger.members.join, url, name)
        taskset = inputs.pool.taskset
        settings = config, taskset, sandbox, client, agent
        run = Run(
            folder=folder,
            config=config,
            pool=inputs.pool,
            impossible=_impossible(taskset, folder / "impossible") if config.cheats.impossible else None,
            training=context_of(*settings, training=True),
            measuring=context_of(*settings),
            ledger=inputs.ledger,
            weights=inputs.weights,
            rollouts=inputs.rollouts,
            sandbox=sandbox,
            engines=engines,
            children=children,
            fleet=fleet,
            concurrency=concurrency_of(config),
        )
        try:
            return await _evaluate_and_train(run, view, started, builder)
        except asyncio.CancelledError:
            view.note("stopping: boxes are closed, engines and the trainer are ended")
            raise


def _impossible(taskset: Taskset, folder: Path) -> Taskset | None:
    """The impossible versions of the training tasks of each part, below a folder of its name in a mixture."""

    def made(part: TaskPart) -> TaskPart | None:
        environment = part.environment.impossible(folder / part.name if taskset.mixed else folder)
        return None if environment is None else TaskPart(environment, tuple(environment.tasks()))

    return taskset.each(made)


async def _evaluate_and_train(run: Run, view: LiveView, started: float, builder: Callable[[], Process]) -> RunReport:
    config, folder = run.config, run.folder
    await check_engines(run)
    # The trainer starts first: it loads the model, tries it, and publishes version 0.
    first = swap_seconds(config) + start_seconds(config.inference, config.model.path)
    first += EXTERNAL_SECONDS if config.trainer.launcher == "external" else 0.0
    await wait_for_version(run, max(0, last_version(run.weights)), seconds=first)
    before = await _evaluate(run, view, "before") if config.eval.before else None
    if before is not None and any(len(task.passed) > 1 for task in before.tasks):
        print(f"etude: {readiness_of(before).verdict}", file=sys.stderr)
    pids = {name: pid for child in run.children for name, pid in child.pids.items()}
    if run.sandbox.zygote_pid is not None:
        pids["zygote"] = run.sandbox.zygote_pid
    expected = step_seconds(config, before)
    with _stage(folder, view, "train"):
        left = config.trainer.steps - max(0, last_version(run.weights))
        if expected is not None and left > 0:
            episodes, minutes = config.rollout.prompts * config.rollout.group, config.trainer.minutes
            most = "" if minutes is None else f", {duration(minutes * 60)} at most"
            plan = f"{left} steps of {episodes} episodes: about {duration(expected * left)} on this machine{most}"
            print(f"etude: {plan}", file=sys.stderr)
        # The builder runs during training alone: neither evaluation shares the machine with it.
        building = [builder()] if run.pool.waiting and left > 0 else []
        run.children.extend(building)
        await loop.rollouts(run, Monitor(folder, config, view, pids, run.trainer.log, expected).tick)
    for child in building:
        run.children.remove(child)
        child.stop(10)
    await wait_for_version(run, last_version(run.weights))
    after = await _evaluate(run, view, "after") if config.eval.after else None
    with _stage(folder, view, "report"):
        return finish_report(run, before, after, seconds=runfolder.now() - started)


def step_seconds(config: RLConfig, before: EvalResult | None) -> float | None:
    """The estimated seconds of a step, by the pace of the evaluation before; None without an evaluation."""
    if before is None or not (played := sum(before.outcomes.values())) or not before.seconds:
        return None
    return before.seconds / played * FASTER * config.rollout.prompts * config.rollout.group


def _stage(folder: Path, view: LiveView, name: str):
    view.stage(name)
    return runfolder.timed(folder / "timeline.jsonl", "controller", name)


def measured(path: Path) -> EvalResult:
    """A measurement of an earlier attempt. Raises UserError if its file is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EvalResult)
    except (OSError, ValueError) as e:  # msgspec's errors are ValueErrors
        cure = "delete it, and it is measured again" if path.stem == "eval-after" else "restore it, or start a new run"
        raise UserError(f"{path} is damaged ({e}); {cure}") from None


async def _evaluate(run: Run, view: LiveView, when: str) -> EvalResult:
    """pass@1 on the held-out tasks with the served weights; read from the file of an earlier attempt if there is one,
    after training only of the same version. Raises RunFailed as soon as a process or the last engine is gone."""
    path, served = run.folder / f"eval-{when}.json", last_version(run.weights)
    if path.exists():
        known = measured(path)
        if when == "before" or known.version == served:
            return known

    def keep(episode: Episode) -> None:
        run.rollouts.put(f"eval-{when}/{episode.task_id}-{episode.member}.msgpack", encode(episode))

    with _stage(run.folder, view, f"eval {when}"):
        task = asyncio.ensure_future(
            evaluate(
                replace(run.measuring, taskset=run.pool.taskset),
                samples=run.config.eval.samples,
                max_tasks=run.config.eval.max_tasks,
                seed=run.config.seed,
                concurrency=run.concurrency.limit,
                progress=view.evaluated,
                on_episode=keep,
            )
        )
        try:
            while not task.done():
                check_processes(run)
                await observe_versions(run)
                await asyncio.wait([task], timeout=1.0)
            result = msgspec.structs.replace(task.result(), version=served)
        finally:
            task.cancel()
    runfolder.write(path, msgspec.json.encode(result))
    return result
