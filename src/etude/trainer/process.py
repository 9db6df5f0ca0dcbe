"""The trainer process: consumes complete groups, steps, publishes a version. `python -m etude.trainer.process RUN`.

consumes     ready groups (ledger) and their token blobs (store)
waits for    P ready groups
unblocks     admission and the engines, by publishing version N+1

Order within a step, which makes `kill -9` harmless anywhere: checkpoint N+1, payload N+1, manifest N+1 (the commit
point), ledger. A checkpoint without its manifest is forgotten on resume; a ledger behind the manifests is caught up.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from pathlib import Path

import torch

from etude import processes, runfolder
from etude.config import RLConfig
from etude.errors import RunFailed, UserError
from etude.failpoints import visit
from etude.models.loading import load_model
from etude.records import Episode, Group, PolicyVersion, decode
from etude.rollout.ledger import Ledger
from etude.store import Store, open_store
from etude.trainer import checkpoint
from etude.trainer.batch import Batch, make_batch
from etude.trainer.optimizer import MasterAdamW
from etude.trainer.step import batch_metrics, train_step
from etude.weights.digest import digest
from etude.weights.manifest import newest
from etude.weights.publisher import Publisher


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
        self.reference = copy.deepcopy(self.model).eval() if config.trainer.kl_beta else None
        self.optimizer = MasterAdamW(self.model, config.trainer)
        self.checked: set[str] = set()
        self.publisher = Publisher(weights, config.weights.anchor_every)
        last = newest(weights)
        self.version = self._begin() if last is None else self._resume(last)

    def _begin(self) -> int:
        """Publishes the base model as version 0."""
        self._commit(0, (), {})
        return 0

    def _resume(self, last: PolicyVersion) -> int:
        """Loads the checkpoint of the newest manifest and proves that it is that version."""
        self.optimizer.load(checkpoint.load(self.run / "checkpoints", last.version))
        tensors = self.optimizer.published()
        if digest(tensors) != last.digest:
            raise UserError(f"checkpoint {last.version} does not have the digest that was published; start a new run")
        self.publisher.resume(last, tensors)
        return last.version

    def _commit(self, version: int, groups: tuple[int, ...], metrics: dict[str, float]) -> PolicyVersion:
        config = self.config.trainer
        checkpoint.save(self.run / "checkpoints", version, self.optimizer.state(), config.keep_checkpoints)
        visit("trainer.checkpointed")
        manifest = self.publisher.publish(version, self.optimizer.published(), groups, metrics)
        visit("trainer.published")
        self.ledger.consume(groups, version)
        visit("trainer.consumed")
        return manifest

    def step(self, groups: list[Group], waited: float, progress: float) -> None:
        """Trains on `groups`, commits the next version, and writes one line of metrics.

        `waited` is in seconds; `progress` in [0, 1] is the share of the run that lies behind.
        """
        started = time.time()
        batch = self._batch(groups)
        loaded = time.time()
        metrics = train_step(
            self.model, self.reference, self.optimizer, batch, self.config, self.version, progress, self.checked
        )
        trained = time.time()
        visit("trainer.stepped")
        manifest = self._commit(self.version + 1, tuple(g.id for g in groups), metrics)
        done = time.time()
        self._report(batch, metrics, manifest, waited, (started, loaded, trained, done))
        self.version += 1

    def _batch(self, groups: list[Group]) -> Batch:
        config = self.config.trainer
        episodes = [self._episodes(group) for group in groups]
        return make_batch(groups, episodes, baseline=config.baseline, min_std=config.min_reward_std)

    def _episodes(self, group: Group) -> list[Episode]:
        return [decode(self.rollouts.get(key), Episode) for key in group.episodes]

    def _report(
        self,
        batch: Batch,
        metrics: dict[str, float],
        manifest: PolicyVersion,
        waited: float,
        at: tuple[float, float, float, float],
    ) -> None:
        started, loaded, trained, done = at
        runfolder.append_json(
            self.run / "metrics.jsonl",
            {
                "step": manifest.version,
                "time": done,
                **batch_metrics(batch, self.version),
                **metrics,
                "weights/version": manifest.version,
                "weights/bytes": manifest.payload_bytes,
                "weights/changed": manifest.changed / manifest.elements,
                "time/load": loaded - started,
                "time/train": trained - loaded,
                "time/publish": done - trained,
                "time/step": done - started,
                "time/wait_for_batch": waited,
                "perf/trainer_busy": (done - started) / (done - started + waited),
            },
        )
        for state, start, end in (("train", started, trained), ("publish", trained, done)):
            record = {"process": "trainer", "state": state, "start": start, "end": end}
            runfolder.append_json(self.run / "timeline.jsonl", record)


def run(folder: Path) -> None:
    """Steps until the configured number of versions is published or the minutes of training are spent."""
    trainer = Trainer(folder)
    config = trainer.config
    first, waiting_since = True, time.time()
    limit, spent = (config.trainer.minutes or math.inf) * 60, _spent(folder)
    while trainer.version < config.trainer.steps and spent < limit:
        groups = trainer.ledger.ready_groups(
            config.rollout.prompts, in_order=config.deterministic, due=trainer.version - config.rollout.staleness
        )
        if len(groups) < config.rollout.prompts:
            time.sleep(0.05)
            continue
        record = {"process": "trainer", "state": "wait", "start": waiting_since, "end": time.time()}
        runfolder.append_json(folder / "timeline.jsonl", record)
        waited = time.time() - waiting_since
        trainer.step(groups, waited, max(trainer.version / config.trainer.steps, spent / limit))
        # Before an attempt's first groups are ready, tasks are built and the model is measured: that is no training.
        spent += time.time() - waiting_since - (waited if first else 0.0)
        first, waiting_since = False, time.time()


def _spent(folder: Path) -> float:
    """Seconds of training that earlier attempts of this run have used; the first wait of the run is none of it."""
    lines = runfolder.read_jsonl(folder / "metrics.jsonl")
    return sum(line["time/step"] + (line["time/wait_for_batch"] if i else 0.0) for i, line in enumerate(lines))


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
