"""Brings the trainer back to a version: the newest complete checkpoint before it, then the later steps, computed again.

A published version stays: engines may serve it, and its groups are trained on. Its manifest names the groups and the
guards' decision, and the store has their episodes. So the step is computed again from the same batch, and the version's
digest proves the result. If the bits differ (a GPU adds in another order, or an episode is missing), the published
weights take their place, with the optimizer as computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from torch import Tensor

from etude import runfolder
from etude.config import RLConfig
from etude.errors import UserError
from etude.failpoints import failpoint
from etude.ledger import BlobDamaged
from etude.records import PolicyVersion, StepRecord
from etude.store import Store
from etude.trainer import checkpoint
from etude.trainer.checkpoint import CheckpointDamaged
from etude.trainer.rl.batch import Batch
from etude.trainer.rl.clock import TrainingClock
from etude.trainer.rl.guards import GuardVerdict, StepFigures
from etude.trainer.rl.step import Learner, train_step
from etude.trainer.sharding import reshard, world_of
from etude.trainer.world import World
from etude.weights import read_manifest
from etude.weights.content import Content, content_of
from etude.weights.export import folder_tensors
from etude.weights.payloads import PayloadSource
from etude.weights.ranks import digest_of_parts, schema_of_parts
from etude.weights.ulpd import digest_text


@dataclass(frozen=True)
class Restorer:
    """Restores the learner of a run. `batch` returns the batch of groups by their ids, and may raise BlobDamaged."""

    learner: Learner
    config: RLConfig
    weights: Store
    checkpoints: Path
    batch: Callable[[Sequence[int]], Batch]
    clock: TrainingClock

    def restore(self, version: int, *, fresh: bool = False) -> None:
        """Gives the learner the weights, optimizer and value head of a published version. `fresh`: it holds the base
        model. Raises UserError if no checkpoint at or before the version is complete."""
        saved, damage, damaged = set(self._saved()), "", list[int]()
        while (path := self._path(version, saved)) is not None:
            base, steps = path
            if not (why := self._load(base)):
                break
            damage = damage or why
            saved.remove(base)
            damaged.append(base)
        else:
            damage = damage or f"checkpoint {version} is missing ({self.checkpoints})"
            if not (fresh and version == 0):
                raise UserError(f"{damage}, and no older one is whole; restore one from a copy, or start a new run")
            return self._note(f"{damage}; the run goes on with the base model")
        if steps:
            again = f"the run goes on from checkpoint {base}, and computes {_named(steps)} again"
            self._note(f"{damage}; {again}" if damage else again)
        if self.world.first:
            checkpoint.drop(self.checkpoints, damaged)
        published = _PublishedWeights(self.weights, Path(self.config.model.path))
        if different := [m for m in steps if not self._repeat(m, published, last=m is steps[-1])]:
            self._note(f"{_named(different)} did not come out bit for bit; the published weights are taken")
        return None

    def base(self, version: int) -> int | None:
        """The checkpoint that `restore` would begin with, if none is damaged."""
        path = self._path(version, self._saved())
        return None if path is None else path[0]

    def _path(self, version: int, saved: Collection[int]) -> tuple[int, list[PolicyVersion]] | None:
        """A saved version, and the versions to compute from it, up to one with the weights of `version`."""
        steps: list[PolicyVersion] = []
        while version not in saved:
            manifest = read_manifest(self.weights, version) if version > 0 else None
            if manifest is None:
                return None
            if isinstance(manifest.step, StepRecord) and manifest.step.action == "rollback":
                version = manifest.step.good
            else:
                steps.append(manifest)
                version -= 1
        return version, steps[::-1]

    def _saved(self) -> list[int]:
        return self.world.agree(lambda: checkpoint.versions(self.checkpoints))

    def _load(self, version: int) -> str:
        """Loads a checkpoint. The reason why it cannot be used on some rank, or ""; its weights may differ from the
        published ones."""
        reshard(self.learner.model)
        try:
            tensors, _ = checkpoint.load(self.checkpoints, version, self.learner.optimizer.rows)
            own = ""
        except CheckpointDamaged as e:
            tensors, own = {}, str(e)
        if why := next(filter(None, self.world.gathered(own)), ""):
            return why
        self.learner.optimizer.load(tensors)
        if self.learner.critic is not None:
            self.learner.critic.load(tensors)
        manifest = read_manifest(self.weights, version)
        if manifest is None or not self.holds(manifest):
            return f"checkpoint {version} does not have the digest that was published"
        return ""

    def holds(self, manifest: PolicyVersion) -> bool:
        """Whether the learner has the weights of a version."""
        parts = self.learner.optimizer.published()
        own = digest_of_parts(parts, schema_of_parts(parts).types)
        return digest_text(sum(self.world.gathered(own))) == manifest.digest

    def _note(self, sentence: str) -> None:
        if self.world.first:
            print(f"note: {sentence}", file=sys.stderr, flush=True)

    @property
    def world(self) -> World:
        """The ranks that the learner is divided over."""
        return world_of(self.learner.model)

    def _repeat(self, manifest: PolicyVersion, published: _PublishedWeights, *, last: bool) -> bool:
        """Computes the step that made a version, from the previous version; false if the bits differ. After the `last`
        version the weights are the published ones; before it they are, if these can be read."""
        step, began = manifest.step, runfolder.now()
        if isinstance(step, StepRecord) and step.updates:
            batch, damage = None, ""
            try:
                batch = self.batch(manifest.groups)
            except BlobDamaged as e:
                damage = str(e).partition(";")[0]
            damage = next(filter(None, self.world.gathered(damage)), "")  # on any rank: then none computes the step
            if batch is None or damage:
                self._note(damage)
            else:
                judge = _as_recorded(step)
                train_step(self.learner, batch, self.config, manifest.version - 1, 0.0, judge=judge, lr=step.lr)
        self.clock.repeated(began)
        failpoint("trainer.repeated")
        if self.holds(manifest):
            return True
        reshard(self.learner.model)
        try:
            self.learner.optimizer.follow(published.of(manifest.version))
        except UserError:
            if last:
                raise
        return False


class _PublishedWeights:
    """Reads versions of ascending numbers: the first from an anchor, each later one by the deltas since."""

    def __init__(self, store: Store, folder: Path):
        self._source = PayloadSource(store, folder=lambda: folder_tensors(folder))
        self._version = -1
        self._content: Content | None = None

    def of(self, version: int) -> dict[str, Tensor]:
        """The tensors of a version, as published. Raises UserError."""
        _, self._content = content_of(self._source, version, self._version, self._content)
        self._version = version
        return self._content.tensors()


def _as_recorded(step: StepRecord) -> Callable[[StepFigures], GuardVerdict]:
    """The guards' recorded verdict before each update."""
    judged = count()
    return lambda _: GuardVerdict("go" if next(judged) < step.updates else step.action, ())


def _named(steps: Sequence[PolicyVersion]) -> str:
    first, last = steps[0].version, steps[-1].version
    return f"version {first}" if len(steps) == 1 else f"versions {first} to {last}"
