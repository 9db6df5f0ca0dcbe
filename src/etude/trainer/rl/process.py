"""The trainer process: consumes complete groups, steps, publishes a version. `python -m etude.trainer.rl.process RUN`.

consumes     ready groups (ledger) and their token blobs (store)
waits for    P ready groups
unblocks     admission and the engines, by publishing version N+1

Order of what is durable, which makes `kill -9` harmless anywhere: checkpoint N+1, payload N+1, manifest N+1 (the commit
point), ledger, checkpoint N+2. A checkpoint without its manifest is forgotten on resume; a ledger behind the manifests
is caught up. Payload and manifest are written in the background while step N+2 computes, on groups that N+1 has not
had; nothing of step N+2 is written before version N+1 is settled, so a crash costs two steps of work at most.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from etude import processes, runfolder
from etude.config import RLConfig
from etude.errors import RunFailed, UserError
from etude.failpoints import visit
from etude.ledger.ledger import Ledger
from etude.models import router_replay
from etude.models.batch_invariant import float32_head, possible
from etude.models.loading import load_model, model_id
from etude.records import Episode, Group, PolicyVersion, decode
from etude.rollout.audit import audited
from etude.rollout.drift import BehaviourDrift
from etude.store import Store, open_store
from etude.trainer import checkpoint
from etude.trainer.optimizer import for_policy
from etude.trainer.rl import presets
from etude.trainer.rl.batch import Batch, make_batch
from etude.trainer.rl.figures import batch_metrics
from etude.trainer.rl.guards import Guards, GuardVerdict
from etude.trainer.rl.probes import Canaries
from etude.trainer.rl.step import train_step
from etude.trainer.rl.value import Critic
from etude.weights.manifest import manifests, newest
from etude.weights.publisher import Publication, Publisher
from etude.weights.signature import private_key
from etude.weights.ulpd.digest import digest


@dataclass(frozen=True)
class Unsettled:
    """A version that is being published: what is to be noted once its manifest is durable."""

    publication: Publication
    groups: tuple[int, ...]
    line: dict[str, Any]  # of metrics.jsonl; empty for version 0


class Trainer:
    """State of the trainer process: the model, its optimizer, and the version they stand at."""

    def __init__(self, run: Path):
        self.run = run
        self.config: RLConfig = runfolder.load_config(run)
        config = self.config
        torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.seed)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        root = config.store or str(run)
        self.rollouts: Store = open_store(f"{root}/rollouts")
        weights = open_store(f"{root}/weights")
        self.ledger = Ledger.open(config.ledger or f"sqlite:///{run}/ledger.db", config.name)
        self.model = load_model(
            config.model.path, dtype=getattr(torch, config.trainer.dtype), device=config.trainer.device
        )
        self.model.train()
        self.routes = router_replay.shape(self.model) if config.trainer.router_replay else None
        self.recipe = presets.recipe(config.loss)
        self.reference = copy.deepcopy(self.model).eval() if self.recipe.kl_beta else None
        self.optimizer = for_policy(self.model, config.trainer)
        self.critic = Critic(self.model, config.loss.value_lr) if self.recipe.advantage == "value" else None
        self.checked: set[str] | None = set() if config.trainer.self_check else None
        key = config.weights.signing_key
        self.publisher = Publisher(
            weights,
            config.weights.anchor_versions,
            config.weights.anchor_share,
            key=private_key(Path(key)) if key else None,
            model=model_id(config.model.path),
        )
        self._unsettled: Unsettled | None = None
        history = [manifest.metrics for manifest in manifests(weights)]
        inference = config.inference
        exact = config.deterministic and possible(self.model)
        equal_bits = exact and inference.dtype == "float32" and inference.device == "cpu"
        self.guards = Guards(config.guards, config.rollout.staleness, history, exact=equal_bits)
        self.canaries = Canaries(open_store(f"{root}/probes"), self.model, exactly=exact)
        self.drift = BehaviourDrift(config.cheats.window, runfolder.read_jsonl(run / "metrics.jsonl"))
        if not float32_head(self.model):
            print("guard head, warn: the trainer's head is narrower than float32", file=sys.stderr, flush=True)
        last = newest(weights)
        self.version = self._begin() if last is None else self._resume(last)

    def _begin(self) -> int:
        """Publishes the base model as version 0."""
        self._commit(0, (), {}, {})
        self.settle(wait=True)
        return 0

    def _resume(self, last: PolicyVersion) -> int:
        """Loads the checkpoint of the newest manifest and proves that it is that version."""
        self._load(last.version)
        tensors = self.optimizer.published()
        if digest(tensors) != last.digest:
            raise UserError(f"checkpoint {last.version} does not have the digest that was published; start a new run")
        self.publisher.resume(last, tensors)
        return last.version

    def _load(self, version: int) -> None:
        """Weights, optimizer and value head as they were at `version`."""
        tensors = checkpoint.load(self.run / "checkpoints", version)
        self.optimizer.load(tensors)
        if self.critic is not None:
            self.critic.load(tensors)

    @property
    def taken(self) -> tuple[int, ...]:
        """Groups that the version on its way was trained on; the ledger may still call them ready."""
        return self._unsettled.groups if self._unsettled else ()

    def _commit(self, version: int, groups: tuple[int, ...], metrics: dict[str, float], line: dict[str, Any]) -> None:
        """Settles the version before this one, saves the checkpoint, and leaves the rest to the publisher's thread."""
        self.settle(wait=True)
        config = self.config.trainer
        state = self.optimizer.state() | (self.critic.state() if self.critic is not None else {})
        # The last good version stays, to roll back to; until the manifest exists the old one is still the last good.
        good = {self.guards.good, int(metrics.get("guard/good", 0))}
        checkpoint.save(self.run / "checkpoints", version, state, config.keep_checkpoints, protect=good)
        visit("trainer.checkpointed")
        publication = self.publisher.start(version, self.optimizer.published(), groups, metrics)
        self._unsettled = Unsettled(publication, groups, line)

    def settle(self, *, wait: bool) -> None:
        """Tells the ledger, then metrics.jsonl, of the version on its way if its manifest is durable, or waits for it.

        Raises what went wrong with it.
        """
        unsettled = self._unsettled
        if unsettled is None or not (wait or unsettled.publication.done()):
            return
        manifest = unsettled.publication.result()
        visit("trainer.published")
        self.ledger.consume(unsettled.groups, manifest.version)
        visit("trainer.consumed")
        self._unsettled = None
        if unsettled.line:
            figures = {
                "weights/version": manifest.version,
                "weights/bytes": manifest.payload_bytes,
                "weights/changed": manifest.changed / manifest.elements,
                "time/publish_background": unsettled.publication.seconds,
            }
            runfolder.append_json(self.run / "metrics.jsonl", unsettled.line | figures)

    def step(self, groups: list[Group], waited: float, spent: float, progress: float) -> float:
        """Trains on `groups`, commits the next version, and writes one line of metrics.

        `waited` is in seconds; `spent`, too, of training until now; `progress` in [0, 1] is the share of the run that
        lies behind. Returns the seconds spent with this step.
        """
        started = time.time()
        batch = self._batch(groups)
        self.canaries.score(self.version)
        canaries = self.canaries.arrived()
        loaded = time.time()
        observed = batch_metrics(batch, self.version)
        self._note_flags(batch)
        counts = self.ledger.impossible()
        observed |= {f"impossible/{name}": float(getattr(counts, name)) for name in ("played", "passed", "tampered")}
        observed |= self.ledger.left_behind({*self.taken, *(group.id for group in groups)})
        observed["drop/episodes/infra"] = float(len(groups) * self.config.rollout.group - len(batch.flat))
        metrics, verdict = train_step(
            self.model,
            self.reference,
            self.optimizer,
            batch,
            self.config,
            self.version,
            progress,
            critic=self.critic,
            checked=self.checked,
            judge=lambda figures: self.guards.judge(observed | figures, canaries),
        )
        if canaries:
            metrics["canary/k2"] = max(canary.k2 for canary in canaries)
        self._obey(verdict)
        metrics |= self.guards.settle(self.version, verdict)
        trained = time.time()
        self.settle(wait=False)
        visit("trainer.stepped")
        events = {"guard/events": [asdict(event) for event in verdict.events]} if verdict.events else {}
        events |= {"canary/answers": [asdict(canary) for canary in canaries]} if canaries else {}
        line = {
            "step": self.version + 1,
            **observed,
            **metrics,
            **events,
            "time/canary": self.canaries.seconds(),
            "time/load": loaded - started,
            "time/train": trained - loaded,
            "time/wait_for_batch": waited,
        }
        shifts = self.drift.observe(line)
        for shift in shifts:
            print(f"drift, step {shift.step}: {shift.sentence}", file=sys.stderr)
        line |= {"drift/events": [msgspec.structs.asdict(shift) for shift in shifts]} if shifts else {}
        # A manifest is JSON, which has no NaN; the line in metrics.jsonl keeps it.
        figures = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._commit(self.version + 1, tuple(g.id for g in groups), figures, line)
        self.guards.record(figures)
        done = time.time()
        busy = done - started
        line |= {
            "time": done,
            "time/publish": done - trained,
            "time/step": busy,
            "time/spent": spent + busy,
            "perf/trainer_busy": busy / (busy + waited),
        }
        for state, start, end in (("train", started, trained), ("publish", trained, done)):
            record = {"process": "trainer", "state": state, "start": start, "end": end}
            runfolder.append_json(self.run / "timeline.jsonl", record)
        self.version += 1
        return spent + busy

    def _obey(self, verdict: GuardVerdict) -> None:
        """Says what the guards found, and rolls back or raises RunFailed if that is the verdict."""
        for event in verdict.events:
            print(f"guard {event.guard}, {event.level}, step {self.version + 1}: {event.sentence}", file=sys.stderr)
        if verdict.action == "halt":
            reasons = "; ".join(event.sentence for event in verdict.events if event.level == "stop")
            raise RunFailed(
                f"halted before version {self.version + 1}: {reasons}; run `etude doctor mismatch {self.run}`, change "
                f"[guards] or trainer.lr in {self.run / 'config.json'}, then --resume"
            )
        if verdict.action == "rollback":
            self._load(self.guards.good)
        if verdict.action != "go":
            what = f"is that of {self.guards.good} again" if verdict.action == "rollback" else "has the same weights"
            print(f"guards: version {self.version + 1} {what}", file=sys.stderr, flush=True)

    def _batch(self, groups: list[Group]) -> Batch:
        config = self.config.trainer
        episodes = [self._episodes(group) for group in groups]
        return make_batch(
            groups,
            episodes,
            baseline=config.baseline,
            min_std=config.min_reward_std,
            advantage=self.recipe.advantage,
            routes=self.routes,
        )

    def _episodes(self, group: Group) -> list[Episode]:
        members = [decode(self.rollouts.get(key), Episode) for key in group.episodes]
        return audited(members) if self.config.cheats.contrast else members

    def _note_flags(self, batch: Batch) -> None:
        """Tells the ledger what the audit of whole groups has found; the rest was there before."""
        for episode in batch.flat:
            if {"contrast", "effort"} & set(episode.flags):
                self.ledger.flag(episode.group_id, episode.member, episode.metrics, episode.reward)


def run(folder: Path) -> None:
    """Steps until the configured number of versions is published or the minutes of training are spent."""
    trainer = Trainer(folder)
    config = trainer.config
    first, waiting_since = True, time.time()
    limit, spent = (config.trainer.minutes or math.inf) * 60, _spent(folder)
    while trainer.version < config.trainer.steps and spent < limit:
        trainer.settle(wait=False)
        groups = trainer.ledger.ready_groups(
            config.rollout.prompts,
            in_order=config.deterministic,
            due=trainer.version - config.rollout.staleness,
            without=trainer.taken,
        )
        if len(groups) < config.rollout.prompts:
            trainer.canaries.score(trainer.version)  # while there is nothing else to do
            time.sleep(0.05)
            continue
        record = {"process": "trainer", "state": "wait", "start": waiting_since, "end": time.time()}
        runfolder.append_json(folder / "timeline.jsonl", record)
        waited = time.time() - waiting_since
        # Before an attempt's first groups are ready, tasks are built and the model is measured: that is no training.
        spent += 0.0 if first else waited
        if spent >= limit:
            break
        spent = trainer.step(groups, waited, spent, max(trainer.version / config.trainer.steps, spent / limit))
        first, waiting_since = False, time.time()
    trainer.settle(wait=True)


def _spent(folder: Path) -> float:
    """Seconds of training that earlier attempts of this run have used."""
    lines = runfolder.read_jsonl(folder / "metrics.jsonl")
    return lines[-1]["time/spent"] if lines else 0.0


def main() -> None:
    processes.die_with_parent()
    try:
        run(Path(sys.argv[1]))
    except UserError as e:
        print(f"etude: {e}", file=sys.stderr)
        sys.exit(2)
    except RunFailed as e:
        print(f"etude: {e}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
