"""Training on a window: its turns go into the ledger of a run, and the trainer of stage rl makes one step.

    FOLDER/train         the run, without engines and sandboxes; its weight store holds the candidates
    FOLDER/base-DIGEST   the weights that the control served when the run began, as a model folder

That store numbers its versions independently: the gate reads a candidate there, and a release copies it to the stores
of the clusters, which are only read here. Weights are identified by their digests, so a token keeps the version that
sampled it, by the version's number in this store. If the newest candidate was not released, the trainer first goes back
to the weights that the control serves.

The ledger decides which turns were trained on. After a kill at any point the command can be repeated: admitted turns
are recognised by their ids, and turns of an existing version are trained. The tokens of users lie in the run folder
until that version is durable, and are deleted then.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from etude import processes, runfolder
from etude.config import Guard, LiveConfig, OnPolicyDistillConfig, RLConfig, load_toml, validate
from etude.errors import RunFailed, UserError
from etude.failpoints import failpoint
from etude.ledger import EpisodeLease, Ledger, blob_key, put_blob
from etude.live.learn.samples import live_batch
from etude.live.learn.served import ServedVersions, served
from etude.live.log.records import ExitKind, LiveSample
from etude.live.log.schema import exits, windows
from etude.records import Episode, Outcome, StepRecord
from etude.renderers import renderer_for
from etude.store import Store, open_store
from etude.weights import manifests, read_manifest, with_models
from etude.weights.preflight import check_before_training

KL = 1e-3
"""Weight of the KL to version 0 for recipes without a KL, so that no window leads far from version 0."""

_OWN_KL = ("fireworks", "grpo")  # presets with a KL
_LEASE_SECONDS = 600.0


@dataclass(frozen=True)
class TrainedWindow:
    """The result of training on a window. `refused`: number of refused turns by reason. `action`: the guards' decision;
    after "skip" the version has the weights of its base."""

    window: int
    version: int
    digest: str
    base: int
    turns: int
    refused: dict[str, int]
    hints: int
    hints_left_out: dict[str, int]
    action: str


@dataclass(frozen=True)
class _Admitted:
    """The turns of a window in the ledger, with the ids of their groups; and refused turns, with the reasons."""

    groups: dict[str, int]
    refused: dict[str, str]
    source: int  # version that the trainer continues from
    hints: int
    hints_left_out: dict[str, int]


def train_window(
    config: LiveConfig, log: sa.Engine, number: int, samples: Sequence[LiveSample], *, seconds: float = 3600.0
) -> TrainedWindow:
    """Trains on a window, unless it has been trained on, and writes its version to the log. Turns that the trainer
    refuses get the exit DROPPED. Raises UserError, or RunFailed if the trainer fails or takes longer than `seconds`."""
    folder = Path(config.folder) / "train"
    _check_window(log, number, samples)
    if not folder.exists():
        _create(config, folder)
    with runfolder.lock(folder) as lock:
        run = runfolder.load_config(folder)
        weights = open_store(f"{folder}/weights", durable=True)
        ledger = Ledger.open(f"sqlite:///{folder}/ledger.db", run.name)
        try:
            ledger.recover(manifests(weights))
            _leave_out_others(log, ledger, folder, number, {sample.turn for sample in samples})
            admitted = _admit(log, ServedVersions(config, weights), run, ledger, folder, number, samples)
            failpoint("live.admitted")
            if _version(ledger, weights, admitted, number) is None:
                _run_trainer(folder, admitted.source, lock, seconds)
                ledger.recover(manifests(weights))
            failpoint("live.trained")
            return _settle(log, ledger, folder, weights, number, admitted)
        finally:
            ledger.close()


def _check_window(log: sa.Engine, number: int, samples: Sequence[LiveSample]) -> None:
    with log.begin() as c:
        if c.execute(sa.select(windows.c.number).where(windows.c.number == number)).scalar() is None:
            raise UserError(f"the log has no window {number}: make it with `etude live window`")
    if not samples:
        raise UserError(f"window {number} has no turns: wait for more feedback, then make the next window")
    if twice := [turn for turn, n in Counter(sample.turn for sample in samples).items() if n > 1]:
        raise ValueError(f"turn {twice[0]} is in window {number} twice")


# The run --------------------------------------------------------------------------------------------------------------


def read_recipe(path: str) -> RLConfig:
    """The recipe of stage rl in a file. Raises UserError."""
    return validate(RLConfig, load_toml(Path(path)), path)


def live_run(config: LiveConfig, model: Path | None = None) -> RLConfig:
    """The configuration of the run: the recipe, with the settings that training on windows needs, and `model` in place
    of its model. Raises UserError."""
    if config.train is None:
        raise UserError("give `train`, the path of a recipe of stage rl, in the configuration of stage live")
    recipe = with_models(read_recipe(config.train))
    loss, trainer, guards = recipe.loss, recipe.trainer, recipe.guards
    if loss.kl_beta is None and loss.preset not in _OWN_KL:
        loss = loss.model_copy(update={"kl": loss.kl or "k1", "kl_beta": KL})
    fixed: dict[str, Any] = {"baseline": "given", "minutes": None, "decay": 0.0, "checkpoint_every": 1}
    fixed["launcher"] = "local"
    # The trainer goes back, with the optimizer, to a candidate that is released only after the next window's training.
    fixed["keep_checkpoints"] = max(4, trainer.keep_checkpoints)
    changed = {
        "name": f"{config.name}-train",
        "store": None,
        "ledger": None,
        "model": recipe.model if model is None else recipe.model.model_copy(update={"path": str(model)}),
        "loss": loss,
        "distill": recipe.distill or OnPolicyDistillConfig(),
        "trainer": trainer.model_copy(update=fixed),
        "weights": recipe.weights.model_copy(
            update={"anchor_first": True}
        ),  # the stores of releases have no model folder
        # The age of a turn counts in releases (served.py), not in numbers of candidates.
        "guards": guards.model_copy(update={"lag": Guard(action="halt", stop=float(2**31), warn=None)}),
    }
    return validate(RLConfig, recipe.model_copy(update=changed).model_dump(), config.train)


def _create(config: LiveConfig, folder: Path) -> None:
    """Makes the run, whose version 0 has the weights that the control serves."""
    from etude.weights.export import export

    control = open_store(config.clusters[0].store)
    now, recipe = served(control), live_run(config)
    base = Path(config.folder) / f"base-{now.live[:16]}"
    check_before_training(Path(recipe.model.path))
    if not base.exists():
        base.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        export(control, now.version, Path(recipe.model.path), base)
    runfolder.create(folder, live_run(config, base), None)
    os.chmod(folder, 0o700)


def _run_trainer(folder: Path, source: int, lock: int, seconds: float) -> None:
    logs = runfolder.new_attempt(folder)
    argv = ["etude.trainer.rl.process", str(folder), str(source)]
    ranks = runfolder.load_config(folder).trainer.mesh.ranks
    child = processes.start_ranks("trainer", argv, logs, ranks, holds=[lock])
    try:
        if not child.ends(seconds):
            raise RunFailed(f"the trainer took longer than {seconds:.0f} seconds, see {child.log}; give it more")
    finally:
        child.stop(10)
    if failure := child.failure():
        kind = UserError if child.exit_code == 2 else RunFailed
        raise kind(f"{failure}; see {child.log}, then give the command again")


# The batch ------------------------------------------------------------------------------------------------------------


def _admit(
    log: sa.Engine,
    versions: ServedVersions,
    run: RLConfig,
    ledger: Ledger,
    folder: Path,
    number: int,
    samples: Sequence[LiveSample],
) -> _Admitted:
    """Adds the window's missing turns to the ledger, as finished episodes. Raises UserError,
    after all turns have left the window as dropped, if none can be trained on."""
    turns = [sample.turn for sample in samples]
    there = ledger.admitted(turns)
    batch = live_batch(samples, versions.of, renderer_for(Path(run.model.path)), run)
    if not there and not batch.episodes:
        with log.begin() as c:
            _note_refused(c, number, batch.refused)
        counts = ", ".join(f"{n} {why}" for why, n in Counter(batch.refused.values()).items())
        raise UserError(f"window {number} has no turn that can be trained on: {counts}")
    if _trained({v for _, v in there.values()}) is None:
        index = ledger.figures().groups
        for turn in batch.episodes:
            if turn not in there:
                ledger.admit(index, turn, 1, versions.base)
                index += 1
                failpoint("live.turn")
        rollouts = open_store(f"{folder}/rollouts")
        while leases := ledger.lease("live", 64, _LEASE_SECONDS):
            for lease in leases:
                _finish(ledger, rollouts, lease, batch.episodes.get(lease.task_id))
        there = ledger.admitted(turns)
    groups = {turn: group for turn, (group, _) in there.items()}
    hints = sum(episode.hint is not None for turn, episode in batch.episodes.items() if turn in groups)
    refused = {turn: batch.refused.get(turn, "stale") for turn in turns if turn not in groups}
    return _Admitted(groups, refused, versions.source, hints, batch.hints_left_out)


def _leave_out_others(log: sa.Engine, ledger: Ledger, folder: Path, number: int, turns: set[str]) -> None:
    """Takes turns out of the ledger that have left the window since they were admitted, because their account was
    forgotten. Raises UserError if another window's turns wait."""
    ended = {group: blob for group, _, blob in ledger.untrained()}
    waiting = {group.task_id: group.id for group in ledger.groups(sorted(ended)) if group.task_id not in turns}
    others = {*waiting, *ledger.figures().open_tasks} - turns
    with log.begin() as c:
        ours = {turn for turn in others if _left_by(c, turn, number)}
    if others - ours:
        raise UserError(f"another window of {folder} is not trained on yet: train it before window {number}")
    rollouts = open_store(f"{folder}/rollouts")
    for group in waiting.values():
        ledger.play_again(group, 0)
        rollouts.delete(ended[group].key)


def _left_by(c: sa.Connection, turn: str, number: int) -> bool:
    here = (exits.c.turn == turn, exits.c.window == number)
    return c.execute(sa.select(exits.c.turn).where(*here)).first() is not None


def _finish(ledger: Ledger, rollouts: Store, lease: EpisodeLease, episode: Episode | None) -> None:
    """Records the episode of a turn. None for a turn whose weights have become too old, or whose account was forgotten,
    since it was admitted."""
    if episode is None:
        ledger.finish(
            lease,
            outcome=Outcome.QUARANTINED,
            reward=0.0,
            passed=False,
            blob=None,
            tokens=0,
            min_version=-1,
            metrics={},
            reason="stale",
        )
        return
    blob = put_blob(rollouts, blob_key(lease.group_id, lease.member, lease.attempt), episode)
    ledger.finish(
        lease,
        outcome=episode.outcome,
        reward=episode.reward,
        passed=episode.passed,
        blob=blob,
        tokens=episode.sampled_tokens,
        min_version=episode.min_version,
        metrics=episode.metrics,
    )


def _trained(versions: set[int | None]) -> int | None:
    known = versions - {None}
    return max(v for v in known if v is not None) if known else None


def _version(ledger: Ledger, weights: Store, admitted: _Admitted, number: int) -> int | None:
    """The version that was trained on exactly these turns; None while they wait. Raises UserError if a version was
    trained on only some of them, or on others, too."""
    versions = {version for _, version in ledger.admitted(list(admitted.groups)).values()}
    version = _trained(versions)
    if version is None:
        return None
    manifest = read_manifest(weights, version)
    ours = set(admitted.groups.values())
    more = ledger.groups(sorted(set(manifest.groups) - ours)) if manifest is not None else []
    if manifest is None or not ours <= set(manifest.groups) or any(group.episodes for group in more):
        raise UserError(f"turns of window {number} were trained on in another window: make the window again")
    return version


def _settle(
    log: sa.Engine, ledger: Ledger, folder: Path, weights: Store, number: int, admitted: _Admitted
) -> TrainedWindow:
    """Writes the version and the exits of refused turns to the log, and deletes the tokens."""
    version = _version(ledger, weights, admitted, number)
    manifest = None if version is None else read_manifest(weights, version)
    if version is None or manifest is None:
        raise RunFailed(f"the trainer ended without a version of window {number}; see {folder}/logs/latest/trainer.log")
    there = ledger.groups(list(admitted.groups.values()))
    lost = {group.id for group in there if not group.episodes}
    refused = admitted.refused | {turn: "stale" for turn, group in admitted.groups.items() if group in lost}
    with log.begin() as c:
        _note_refused(c, number, refused)
        noted = {"version": version, "base_version": version - 1, "run": str(folder)}
        c.execute(sa.update(windows).where(windows.c.number == number).values(noted))
    failpoint("live.noted")
    rollouts = open_store(f"{folder}/rollouts")
    for blob in (blob for group in there for blob in group.episodes):
        if rollouts.exists(blob.key):
            rollouts.delete(blob.key)
    step = manifest.step
    return TrainedWindow(
        window=number,
        version=version,
        digest=manifest.live,
        base=version - 1,
        turns=len(there) - len(lost),
        refused=dict(Counter(refused.values())),
        hints=admitted.hints,
        hints_left_out=admitted.hints_left_out,
        action=step.action if isinstance(step, StepRecord) else "go",
    )


def _note_refused(c: sa.Connection, number: int, refused: Mapping[str, str]) -> None:
    """Replaces the exits of refused turns from the window by DROPPED."""
    for turn, why in refused.items():
        here = (exits.c.turn == turn, exits.c.window == number)
        left = {"kind": ExitKind.DROPPED.value, "reason": why, "weight": 0.0, "advantage": 0.0}
        if not c.execute(sa.update(exits).where(*here).values(left)).rowcount:
            c.execute(sa.insert(exits), [{"turn": turn, "window": number, **left}])
