"""The trainer process: consumes complete groups, steps, publishes a version. `python -m etude.trainer.rl.process RUN`.

consumes     ready groups (ledger) and their token blobs (store)
waits for    P ready groups
unblocks     admission and the engines, by publishing version N+1

One step, in the order of this file:

    next_groups   waits for P ready groups
    load          token blobs -> rows with advantages
    train_step    gradients, guards, optimizer (step.py)
    commit        publication, checkpoint, and the step's line of metrics

The order of durable writes makes `kill -9` harmless at any point: payload N+1, manifest N+1 (the commit point), ledger,
payload N+2. They are written in the background while step N+2 computes, on groups that version N+1 was not trained on;
nothing of step N+2 is published before version N+1 is settled. A resume brings a ledger that lags behind the manifests
up to date.

Several ranks run this program together (`trainer/world.py`). Each loads the batch and computes a part of it; rank 0
alone has the ledger and the clock and writes metrics, and what it decides reaches the others by `World.agree`.

Checkpoints, one every `trainer.checkpoint_every` versions, are written at the same time (checkpoint.py). A resume takes
the newest one, and computes the later steps again from the groups that the manifests name (restore.py). A checkpoint of
a version without a manifest is deleted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import blake3
import msgspec
import torch

from etude import runfolder
from etude.config import FleetConfig, RLConfig
from etude.errors import RunFailed, UserError
from etude.failpoints import failpoint
from etude.ledger import Ledger, get_blob
from etude.models import router_replay, support
from etude.models.batch_invariant import possible
from etude.models.dtypes import published_dtypes
from etude.models.loading import load_model, model_id
from etude.records import Episode, Group, PolicyVersion, StepRecord
from etude.rollout import BehaviourDrift, audit_group
from etude.store import Store, open_store
from etude.trainer import checkpoint
from etude.trainer.activations import checkpoint_activations
from etude.trainer.lora import for_adapters
from etude.trainer.optimizer import MasterAdamW, for_policy
from etude.trainer.rl.batch import Batch, make_batch
from etude.trainer.rl.clock import TrainingClock
from etude.trainer.rl.external import attended
from etude.trainer.rl.figures import batch_metrics
from etude.trainer.rl.guards import Guards, GuardVerdict, ProbeComparison, StepFigures
from etude.trainer.rl.memory import bound_kernels
from etude.trainer.rl.memory_table import memory_table
from etude.trainer.rl.presets import loss_preset
from etude.trainer.rl.probe_scores import TrainerProbes
from etude.trainer.rl.reference import Reference
from etude.trainer.rl.restore import Restorer
from etude.trainer.rl.step import Learner, StepResult, train_step
from etude.trainer.rl.trial import allowed
from etude.trainer.rl.value import Critic
from etude.trainer.sharding import load_sharded, reshard, shard_of
from etude.trainer.world import World
from etude.weights import manifests, newest_manifest, read_manifest, read_private_key
from etude.weights.publisher import Publication, Publisher
from etude.weights.ranks import Ranks

_WAIT_SECONDS = 1.0  # of several ranks for rank 0, which waits for groups
MAX_RECORDED_GROUPS = 100_000
"""Largest number of groups in a batch with recorded advantages (`trainer.baseline = "given"`)."""


@dataclass(frozen=True)
class Unsettled:
    """A version that is being published, and the entries for ledger and metrics once its manifest is durable."""

    publication: Publication
    groups: tuple[int, ...]
    line: dict[str, Any]  # of metrics.jsonl; empty for version 0


@dataclass(frozen=True)
class LoadedStep:
    """The batch of a step, and the metrics and probes that were collected while it was loaded."""

    batch: Batch
    observed: dict[str, Any]  # metrics of the batch, of the ledger and of the probes; on rank 0
    probes: list[ProbeComparison]  # since the previous step
    progress: float  # completed share of the run


def main() -> None:
    """Trains the run in the folder argv[1], from the newest version or from the version argv[2].

    Steps until the configured number of versions is published or the minutes of training are spent; a batch with
    recorded advantages is one step. Exits with 2 for an error that the user can fix, with 1 for a failed run.
    """
    bound_kernels(os.environ)
    try:
        run = Path(sys.argv[1])
        with attended(run):
            options = runfolder.load_config(run).trainer
            world = World.join(options.mesh, options.device, options.collective_seconds)
            with world.named_failures():  # those of the start, too
                _train(Trainer(run, world), [int(version) for version in sys.argv[2:]])
    except (UserError, RunFailed) as e:
        print(f"etude: {e}", file=sys.stderr)
        sys.exit(2 if isinstance(e, UserError) else 1)


def _train(trainer: Trainer, back_to: Sequence[int]) -> None:
    for version in back_to:
        trainer.go_back(version)
    while (groups := trainer.next_groups()) is not None:
        loaded = trainer.load(groups)
        result = train_step(
            trainer.learner,
            loaded.batch,
            trainer.config,
            trainer.version,
            loaded.progress,
            judge=partial(trainer.judge, probes=loaded.probes),
            checked=trainer.checked,
        )
        trainer.commit(loaded, result)
    trainer.finish()


def use_deterministic_algorithms() -> None:
    """Makes PyTorch deterministic for the rest of the process. On a GPU, PyTorch then refuses products unless cuBLAS
    has a fixed workspace."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


class Trainer:
    """State of the trainer process: the model, its optimizer, and their version. Raises UserError if the run folder's
    newest version cannot be continued."""

    def __init__(self, run: Path, world: World | None = None):
        self.run = run
        self.config: RLConfig = runfolder.load_config(run)
        config = self.config
        self.world = world = world or World(device=config.trainer.device)
        torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.seed)
        if config.deterministic:
            use_deterministic_algorithms()
        root = config.store or str(run)
        self.rollouts: Store = open_store(f"{root}/rollouts")
        self.weights = weights = open_store(f"{root}/weights", durable=True)
        self._checkpoints = run / "checkpoints"
        ranks = Ranks(world.rank, world.size, world.agree(lambda: token_hex(8)), world.control)
        self.writer = checkpoint.CheckpointWriter(self._checkpoints, config.trainer.keep_checkpoints, ranks)
        self._waited = 0.0  # seconds for checkpoints, since the last version
        self._line = run / "metrics.next.json"  # of the version in publication
        self._ledger = Ledger.open(config.ledger or f"sqlite:///{run}/ledger.db", config.name) if world.first else None
        self.learner = make_learner(config, world, runfolder.load_fleet(run))
        model = self.learner.model
        self.routes = router_replay.shape(model) if config.trainer.router_replay else None
        self.checked: set[str] | None = set() if config.trainer.self_check else None
        self.publisher = _publisher(config, weights, self.learner.optimizer, ranks)
        self._unsettled: Unsettled | None = None
        published = manifests(weights)
        exact = config.deterministic and possible(model)
        equal_bits = exact and config.inference.in_float32 and config.inference.on_cpu
        history = [m.step for m in published if isinstance(m.step, StepRecord)]
        self.guards = Guards(config.guards, config.rollout.staleness, history, exact=equal_bits)
        self.probes = TrainerProbes(open_store(f"{root}/probes"), model, exactly=exact)
        last = world.agree(lambda: newest_manifest(weights), PolicyVersion | None)
        if last is not None and world.first:
            self._check_lines()
            self._write_lost_line(last)
        self.drift = BehaviourDrift(config.cheats.window, runfolder.read_jsonl(run / "metrics.jsonl"))
        self.clock = TrainingClock(run, config.trainer.minutes, notes=world.first)
        self.version = 0 if last is None else last.version
        self.restorer = Restorer(
            self.learner,
            config,
            weights,
            self._checkpoints,
            lambda ids: self._batch(world.agree(lambda: self.ledger.groups(ids), list[Group])),
            self.clock,
        )
        if last is not None:
            self._resume(last)
        else:
            self._drop_checkpoints_after(-1)
            self._publish(0, (), {}, {})
            self.settle(wait=True)
            self.writer.close()  # raises the error if the first checkpoint cannot be written

    def _resume(self, last: PolicyVersion) -> None:
        """Continues from the newest manifest. Raises UserError."""
        self._check_base(last)
        self._drop_checkpoints_after(last.version)
        self.restorer.restore(last.version, fresh=True)
        self.publisher.resume(last, self.learner.optimizer.published())

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run, on rank 0."""
        assert self._ledger is not None
        return self._ledger

    def _drop_checkpoints_after(self, version: int) -> None:
        if self.world.first:
            checkpoint.drop_after(self._checkpoints, version)
        self.world.agree(lambda: True)  # before another rank begins to write

    def _check_base(self, last: PolicyVersion) -> None:
        """Raises UserError unless the run's versions match the optimizer, which holds the model folder: all weights, or
        adapters of the same base and scale. Engines begin with the folder, too, until there is a full copy."""
        ours, theirs, folder = self.learner.optimizer.adapted(), last.adapted, self.config.model.path
        changed = UserError(f"the weights in {folder} are not those that the run began with: restore the folder")
        if isinstance(theirs, msgspec.UnsetType) or ours is None:
            if ours is not None or not isinstance(theirs, msgspec.UnsetType):
                raise UserError("the run's versions and trainer.lora do not fit: set it as when the run began")
            first = None if last.anchor.parts else read_manifest(self.weights, last.anchor.version)
            if first is not None and not self.restorer.holds(first):
                raise changed
        elif (ours.base, ours.schema) != (theirs.base, theirs.schema):
            raise changed
        elif ours.scale != theirs.scale:
            raise UserError("the run began with another trainer.lora.alpha or rank: set them as when the run began")

    @property
    def in_publication(self) -> tuple[int, ...]:
        """Groups of the version in publication, which the ledger may still call ready."""
        return self._unsettled.groups if self._unsettled else ()

    def go_back(self, version: int) -> None:
        """Publishes weights and optimizer state of an earlier version as the next one, unless they equal the newest's.
        Raises UserError if they cannot be restored."""
        last = self.world.agree(lambda: newest_manifest(self.weights), PolicyVersion | None)
        target = read_manifest(self.weights, version)
        if last is None or target is None:
            raise UserError(f"{self.weights.url} has no version {version} to go on from")
        if target.digest == last.digest:
            return
        self.writer.wait()
        self.restorer.restore(version)
        step = StepRecord(action="rollback", good=version)
        self._publish(self.version + 1, (), {}, {}, step=step)
        self.guards.remember(step)
        self.settle(wait=True)
        self.version += 1

    # --- before the step --------------------------------------------------------------------------------------------

    def next_groups(self) -> list[Group] | None:
        """Waits for the groups of the next step; None once all versions are published or the minutes are spent. A batch
        with recorded advantages is complete from the start: all ready groups are one step, and without any the run
        ends."""
        while True:
            self.world.at(f"the groups of version {self.version + 1}")
            groups = self.world.agree(self._groups, list[Group] | None | Literal["later"])
            if groups != "later":
                return groups
            self.probes.score(self.version)  # uses the wait

    def _groups(self) -> list[Group] | Literal["later"] | None:
        """The groups of the next step, "later" if they are not there within a second, None if the run ends."""
        config = self.config
        if config.trainer.baseline == "given":
            self.settle(wait=True)
            self.clock.begin()
            return self.ledger.ready_groups(MAX_RECORDED_GROUPS, in_order=True) or None
        deadline = time.monotonic() + _WAIT_SECONDS
        while self.version < config.trainer.steps and not self.clock.over:
            self.settle(wait=False)
            groups = self.ledger.ready_groups(
                config.rollout.prompts,
                in_order=config.deterministic,
                due=self.version - config.rollout.staleness,
                without=self.in_publication,
            )
            if len(groups) == config.rollout.prompts:
                self.clock.begin()
                return None if self.clock.over else groups
            if not self.probes.scored(self.version) or (self.world.size > 1 and time.monotonic() > deadline):
                return "later"
            time.sleep(0.05)
        return None

    def load(self, groups: list[Group]) -> LoadedStep:
        """The audited episodes of the groups as rows with advantages. New flags of the audit go to the ledger."""
        config = self.config
        batch = self._batch(groups)
        if self.learner.swaps:
            self.writer.wait()  # the others take the place of tensors that the checkpoint may hold
        self.probes.score(self.version)
        progress = self.world.agree(lambda: self.clock.progress(self.version, config.trainer.steps))
        probes = self.world.agree(self.probes.arrived, list[ProbeComparison])
        self.clock.loaded()
        if not self.world.first:
            return LoadedStep(batch, {}, probes, progress)
        for episode in batch.flat:
            if {"contrast", "effort"} & set(episode.flags):  # the audit's flags; all others are in the ledger already
                self.ledger.flag(episode)
        impossible = self.ledger.impossible()
        observed: dict[str, Any] = dict(batch_metrics(batch, self.version))
        observed |= {f"impossible/{name}": float(n) for name, n in msgspec.structs.asdict(impossible).items()}
        observed |= self.ledger.left_behind({*self.in_publication, *(group.id for group in groups)})
        if config.trainer.baseline != "given":
            observed["drop/episodes/lost"] = float(len(groups) * config.rollout.group - len(batch.flat))
        if shifts := self.drift.observe({"step": self.version + 1, **observed}):
            observed["drift/events"] = [msgspec.structs.asdict(shift) for shift in shifts]
        for shift in shifts:
            print(f"drift, step {shift.step}: {shift.sentence}", file=sys.stderr)
        if probes:
            observed["probe/answers"] = [asdict(probe) for probe in probes]
        observed["time/probes"] = self.probes.seconds()
        return LoadedStep(batch, observed, probes, progress)

    def _batch(self, groups: Sequence[Group]) -> Batch:
        config = self.config
        return make_batch(
            groups,
            [self._episodes(group) for group in groups],
            baseline=config.trainer.baseline,
            min_std=config.trainer.min_reward_std,
            advantage=loss_preset(config.loss).advantage,
            routes=self.routes,
            taught="none" if config.distill is None else "hinted" if config.distill.teacher == "self" else "all",
        )

    def _episodes(self, group: Group) -> list[Episode]:
        members = [get_blob(self.rollouts, blob) for blob in group.episodes]
        return audit_group(members) if self.config.cheats.contrast else members

    # --- after the step ---------------------------------------------------------------------------------------------

    def commit(self, loaded: LoadedStep, result: StepResult) -> None:
        """Acts on the guards' verdict, publishes the next version, and writes one line of metrics. Raises RunFailed if
        the guards halt the run; nothing is consumed or published then."""
        verdict = result.verdict
        self._act_on(verdict)
        record = self.guards.record(self.version, verdict, result.figures, loaded.probes)
        record = msgspec.structs.replace(record, lr=result.lr, updates=result.updates)
        self.clock.trained()
        self.settle(wait=False)
        failpoint("trainer.stepped")
        metrics = result.metrics | guard_metrics(verdict, record)
        if record.probe_k2 is not None:
            metrics["probe/k2"] = record.probe_k2
        line: dict[str, Any] = {"step": self.version + 1, **loaded.observed, **metrics}
        if verdict.events:
            line["guard/events"] = [asdict(event) for event in verdict.events]
        line |= self.clock.until_trained()
        groups = tuple(group.id for group in loaded.batch.groups)
        self._publish(self.version + 1, groups, metrics, line, lr=result.lr, step=record)
        self.guards.remember(record)
        line |= self.clock.end()  # written when the version is settled
        self.version += 1

    def _act_on(self, verdict: GuardVerdict) -> None:
        """Reports the guards' events, and carries out a rollback, or raises RunFailed for a halt."""
        for event in verdict.events if self.world.first else ():
            print(f"guard {event.guard}, {event.level}, step {self.version + 1}: {event.sentence}", file=sys.stderr)
        if verdict.action == "halt":
            reasons = "; ".join(event.sentence for event in verdict.events if event.level == "stop")
            raise RunFailed(
                f"halted before version {self.version + 1}: {reasons}; run `etude doctor mismatch {self.run}`, change "
                f"[guards] or trainer.lr in {self.run / 'config.json'}, then --resume"
            )
        if verdict.action == "rollback":
            self.writer.wait()
            self.restorer.restore(self.guards.good)
        if verdict.action != "go" and self.world.first:
            what = f"is that of {self.guards.good} again" if verdict.action == "rollback" else "has the same weights"
            print(f"guards: version {self.version + 1} {what}", file=sys.stderr, flush=True)

    def judge(self, figures: StepFigures, probes: Sequence[ProbeComparison]) -> GuardVerdict:
        """The guards' verdict before an update. A checkpoint that is being written from the optimizer's tensors is
        waited for."""
        self._waited += self.writer.wait()
        return self.world.agree(lambda: self.guards.judge(figures, probes=probes), GuardVerdict)

    def _publish(
        self,
        version: int,
        groups: tuple[int, ...],
        metrics: dict[str, float],
        line: dict[str, Any],
        *,
        lr: float | None = None,
        step: StepRecord | None = None,
    ) -> None:
        """Settles the previous version, and starts publication and checkpoint on their threads."""
        self.settle(wait=True)
        waited, self._waited = self._waited, 0.0
        if version % self.config.trainer.checkpoint_every == 0:
            waited += self._save(version, {step.good} if step is not None else set())
        if line and self.world.first:
            line |= {"time/checkpoint_wait": waited, "checkpoint/failed": float(self.writer.failed)}
            runfolder.write(self._line, json.dumps(line | self.clock.figures()).encode())
        optimizer = self.learner.optimizer
        tensors, adapted = optimizer.published(), optimizer.adapted()
        publication = self.publisher.start(version, tensors, groups, metrics, lr=lr, step=step, adapted=adapted)
        self._unsettled = Unsettled(publication, groups, line)

    def _save(self, version: int, good: set[int]) -> float:
        """Begins the checkpoint of a version. Returns the seconds of the wait for the previous one. Checkpoints for a
        rollback are kept: until the manifest exists, the guards' good version is still the previous one."""
        optimizer, critic = self.learner.optimizer, self.learner.critic
        state = optimizer.state()
        if critic is not None:
            state |= {name: shard_of(tensor, tensor, self.world) for name, tensor in critic.state().items()}
        waited = self.writer.wait()
        bases = [self.restorer.base(v) for v in {self.guards.good, *good} if v != version]
        self.writer.start(version, checkpoint.parts_of(state), {v for v in bases if v is not None})
        return waited

    def finish(self) -> None:
        """Settles the last version, and saves its checkpoint if it has none. Raises the errors of the threads."""
        self.settle(wait=True)
        self.writer.wait()
        if self.world.agree(lambda: self.version not in checkpoint.versions(self._checkpoints)):
            self._save(self.version, set())
        self.writer.close()
        self.world.close()

    def settle(self, *, wait: bool) -> None:
        """Records the version in publication in the ledger, then in metrics.jsonl, once its manifest is durable.
        Without `wait`, it returns if the manifest is not durable yet. Raises the error of a failed publication."""
        unsettled = self._unsettled
        if unsettled is None or not (wait or unsettled.publication.done()):
            return
        manifest = unsettled.publication.result()
        failpoint("trainer.published")
        if self.world.first:
            self.ledger.consume(unsettled.groups, manifest.version)
        failpoint("trainer.consumed")
        self._unsettled = None
        if unsettled.line and self.world.first:
            self._write_line(unsettled.line, manifest, unsettled.publication.seconds)

    def _write_line(self, line: dict[str, Any], manifest: PolicyVersion, seconds: float) -> None:
        figures = {
            "weights/version": manifest.version,
            "weights/bytes": manifest.payload_bytes,
            "weights/changed": manifest.changed / manifest.elements,
            "time/publish_background": seconds,
        }
        runfolder.append_json(self.run / "metrics.jsonl", line | figures)
        proof = {"step": manifest.version, "digest": _line_digest(line | figures)}
        runfolder.append_json(self.run / "metrics.digests.jsonl", proof)
        self._line.unlink(missing_ok=True)

    def _check_lines(self) -> None:
        """Reports lines of metrics.jsonl that have been altered. They are only for people, so the run goes on."""
        proofs = runfolder.read_jsonl(self.run / "metrics.digests.jsonl", ["step"], ["digest"])
        known = {proof["step"]: proof["digest"] for proof in proofs}
        lines = {line["step"]: line for line in runfolder.read_jsonl(self.run / "metrics.jsonl", ["step"])}
        if altered := [n for n in known if n not in lines or _line_digest(lines[n]) != known[n]]:
            steps = ", ".join(map(str, altered))
            print(f"note: figures of step {steps} in metrics.jsonl have been altered", file=sys.stderr, flush=True)

    def _write_lost_line(self, last: PolicyVersion) -> None:
        """Writes the line of the newest version, if the trainer was killed between its manifest and its line."""
        lines = runfolder.read_jsonl(self.run / "metrics.jsonl")
        if not self._line.exists() or (lines and lines[-1]["step"] >= last.version):
            return
        with suppress(ValueError):  # the file is damaged, so the line stays lost
            line = json.loads(self._line.read_bytes())
            if line["step"] == last.version:
                self._write_line(line, last, 0.0)


def _line_digest(line: dict[str, Any]) -> str:
    return blake3.blake3(json.dumps(line, sort_keys=True).encode()).hexdigest(length=16)


def guard_metrics(verdict: GuardVerdict, record: StepRecord) -> dict[str, float]:
    """The guards' part of a line of metrics; the action as a number: 0 go, 1 skip, 2 rollback, 3 halt."""
    return {
        "guard/warned": float(verdict.count("warn")),
        "guard/stopped": float(verdict.count("stop")),
        "guard/action": float(("go", "skip", "rollback", "halt").index(verdict.action)),
        "guard/good": float(record.good),
    }


def make_learner(config: RLConfig, world: World, fleet: FleetConfig | None = None) -> Learner:
    """The model of the run with its optimizer, and the reference, value head and teacher that its loss needs. Raises
    UserError for a model that does not fit its devices, beside what `fleet` leaves there, or would not be computed
    exactly."""
    options, preset = config.trainer, loss_preset(config.loss)
    if options.device != "cpu" and (refusal := memory_table(config, fleet).refusal()):
        raise UserError(f"{refusal} (trainer.device_memory_gb overrides the detected size)")
    model = load_sharded(config.model.path, getattr(torch, options.dtype), world)
    if world.first:
        support.say_noise(model)
    if options.activation_checkpointing:
        checkpoint_activations(model, offload=options.offload_activations)
    execution, refused = None, ""
    try:
        execution = allowed(model, "rows" if config.deterministic else options.execution)
    except UserError as e:
        refused = str(e)
    # A trial takes the loss of another rank for a failure of the model. Here the loss shows.
    if why := next(filter(None, world.gathered(refused)), ""):
        raise UserError(why)
    reshard(model)
    reference = Reference(model) if preset.kl_beta else None
    teacher = None
    if config.distill is not None and config.distill.teacher != "self":
        teacher_model = load_model(config.distill.teacher, dtype=next(model.parameters()).dtype)
        teacher = Reference(model, dict(teacher_model.named_parameters()))
    types = published_dtypes(Path(config.model.path), model, getattr(torch, options.dtype))
    if options.lora is None:
        optimizer = for_policy(model, options, types)
    else:
        optimizer = for_adapters(model, options, options.lora, types, seed=config.seed)
    critic = Critic(model) if preset.advantage == "value" else None
    return Learner(model, optimizer, reference, critic, execution, teacher)


def _publisher(config: RLConfig, store: Store, optimizer: MasterAdamW, ranks: Ranks) -> Publisher:
    key = config.weights.signing_key
    return Publisher(
        store,
        config.weights.anchor_versions,
        config.weights.anchor_share,
        key=read_private_key(Path(key)) if key else None,
        ranks=ranks,
        model=model_id(config.model.path),
        base=optimizer.base_schema,
        of_folder=optimizer.base_schema is None and not config.weights.anchor_first,
        seconds=config.weights.seconds,
    )


if __name__ == "__main__":
    main()
