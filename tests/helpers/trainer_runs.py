"""Small run folders with real versions, and real episodes of one turn each, sampled by the engine."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import blake3
import msgspec
import numpy as np
import torch

from etude import runfolder
from etude.audit.rescoring import set_weights
from etude.config import RLConfig
from etude.harness.loop import turn_seed
from etude.harness.token_ledger import TokenLedger
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.ledger import put_blob
from etude.ledger.ledger import Ledger, blob_key
from etude.models.loading import load_model, named_tensors
from etude.models.router_replay import routers
from etude.protocol.wire import SequenceScores
from etude.records import Episode, EpisodeBlob, Generation, Outcome, StopReason, segment_digest
from etude.rollout import probes
from etude.store import open_store
from etude.trainer.rl.process import Trainer, main
from etude.trainer.rl.step import train_step
from etude.weights.publisher import Publisher
from tests.helpers.tiny_models import save_random_model

GROUP = 4


def new_run(
    root: Path, kind: str = "qwen3", *, stored: torch.dtype = torch.bfloat16, **tables: object
) -> tuple[Path, RLConfig]:
    """A run folder of a random model, `stored` in that type; `tables` are tables of the configuration."""
    model = save_random_model(root / "model", kind, dtype=stored, num_hidden_layers=4 if kind == "moe" else 2)
    values = {
        "tasks": {"repository": "unused"},
        "model": {"path": str(model)},
        "rollout": {"prompts": 1, "group": GROUP, "tokens": 40, "context": 128},
        "trainer": {"lr": 3e-3, "warmup_steps": 0},
        "weights": {"anchor_first": True},  # tests read versions from the store alone
    }
    config = RLConfig.model_validate(values | tables)
    runfolder.create(root / "run", config, None)
    return root / "run", config


def run_trainer(run: Path, *version: int) -> None:
    """The trainer process, in this one: all steps that are ready, from the newest version or from `version`."""
    with patch.object(sys, "argv", ["process", str(run), *map(str, version)]):
        main()


def publish_versions(run: Path, config: RLConfig, count: int, groups: dict[int, tuple[int, ...]]) -> None:
    """Versions 0 to `count` - 1, each some noise away from the one before; `groups` names what they were trained on."""
    model = load_model(config.model.path)
    publisher = Publisher(open_store(str(run / "weights")), 16)
    noise = torch.Generator().manual_seed(5)
    tensors = {name: t.clone() for name, t in named_tensors(model).items()}
    for version in range(count):
        if version:
            for tensor in tensors.values():
                tensor += 0.01 * torch.randn(tensor.shape, generator=noise)
        rounded = {name: t.to(torch.bfloat16) for name, t in tensors.items()}
        publisher.publish(version, rounded, groups.get(version, ()), {})
    publisher.finish_anchor()  # else it is still being written while a test copies the run


def sampled(engine: Engine, requests: list[Request]) -> list[Generation]:
    rows = [engine.submit(request) for request in requests]
    for _ in range(2000):
        if all(row.future.done() for row in rows):
            return [row.future.result() for row in rows]
        engine.step()
    raise AssertionError("the requests did not finish")


def prompt(number: int, length: int = 24) -> list[int]:
    return np.random.default_rng(number).integers(7, 97, length).tolist()


def play(
    engine: Engine, group: int, count: int = GROUP, *, tokens: int = 30, routes: bool = False, **options: float
) -> list[Episode]:
    """Episodes of one group, their rewards 0, 1, 2, ... in turn; with `routes` an engine that records them tells."""
    options |= {"routes_from": 0} if routes else {}
    ids = prompt(group)
    seeds = [1000 * group + member for member in range(count)]
    generations = sampled(
        engine, [Request(ids=ids, max_tokens=tokens, seed=turn_seed(seed, 0), **options) for seed in seeds]
    )
    return [
        episode(ids, generation, group, member, seed)
        for member, (generation, seed) in enumerate(zip(generations, seeds, strict=True))
    ]


def episode(ids: list[int], generation: Generation, group: int, member: int, seed: int) -> Episode:
    """An episode of one turn, its tokens kept as the agent loop keeps them."""
    ledger = TokenLedger()
    ledger.add_environment(ids)
    ledger.add_turn(ids, generation)
    return Episode(
        id=f"{group}-{member}-0",
        group_id=group,
        member=member,
        attempt=0,
        task_id="t",
        seed=seed,
        outcome=Outcome.SCORED,
        stop_reason=StopReason.FINISHED,
        reward=float(member),
        passed=member > 0,
        segments=ledger.segments(),
        turns=(),
        metrics={"kv_lag": float(ledger.kv_lag)},
    )


def edited(episode: Episode, **arrays: np.ndarray) -> Episode:
    """The episode as if the engine or the harness had given these arrays in the first place."""
    segment = msgspec.structs.replace(episode.segments[0], **{k: v.tobytes() for k, v in arrays.items()})
    digest = segment_digest(blake3.blake3(segment.ids), blake3.blake3(segment.mask))
    return msgspec.structs.replace(episode, segments=(msgspec.structs.replace(segment, digest=digest),))


def keep(run: Path, episodes: list[Episode]) -> list[EpisodeBlob]:
    """Stores the blobs as the controller does."""
    store = open_store(str(run / "rollouts"))
    return [put_blob(store, blob_key(e.group_id, e.member, e.attempt), e) for e in episodes]


def admit(run: Path, config: RLConfig, index: int, version: int, episodes: list[Episode]) -> None:
    """Admits a group, and finishes its members with these episodes."""
    ledger = Ledger.open(f"sqlite:///{run}/ledger.db", config.name)
    ledger.admit(index, "t", len(episodes), version)
    _finish(ledger, run, episodes)
    ledger.close()


def admit_alone(run: Path, config: RLConfig, first: int, version: int, episodes: list[Episode]) -> None:
    """Admits a group for each of the episodes, from index `first` on, and finishes it."""
    ledger = Ledger.open(f"sqlite:///{run}/ledger.db", config.name)
    for index in range(first, first + len(episodes)):
        ledger.admit(index, "t", 1, version)
    _finish(ledger, run, episodes)
    ledger.close()


def _finish(ledger: Ledger, run: Path, episodes: list[Episode]) -> None:
    leases = ledger.lease("test", len(episodes), 60.0)
    for lease, e, blob in zip(leases, episodes, keep(run, episodes), strict=True):
        assert ledger.finish(
            lease,
            outcome=e.outcome,
            reward=e.reward,
            passed=e.passed,
            blob=blob,
            tokens=e.sampled_tokens,
            min_version=e.min_version,
            metrics=e.metrics,
            flags=e.flags,
        )


def step(trainer: Trainer, prompts: int = 1) -> None:
    """One step of the trainer on the groups that are ready, up to the durable manifest and checkpoint."""
    trainer.clock.begin()
    loaded = trainer.load(trainer.ledger.ready_groups(prompts, in_order=True))
    judge = partial(trainer.guards.judge, probes=loaded.probes)
    result = train_step(trainer.learner, loaded.batch, trainer.config, trainer.version, 0.0, judge=judge)
    trainer.commit(loaded, result)
    trainer.settle(wait=True)
    trainer.writer.wait()
    trainer.publisher.finish_anchor()  # else it is still being written while a test copies the run


def engine_of(config: RLConfig, tensors: dict[str, torch.Tensor], version: int) -> Engine:
    """An engine that serves these tensors under this version, and keeps routes."""
    model = load_model(config.model.path)
    set_weights(model, tensors)
    return Engine(model, version=version, routes=True)


def flip(model: torch.nn.Module) -> None:
    """From now on the model's routers often take the third best expert instead of the second, where the two are near.

    Gates are those of the router's formula, so replay of the choice leaves nothing but rounding.
    """

    def other(router: torch.nn.Module, _args: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits_TE, _, _ = output
        best = logits_TE.softmax(-1).topk(3)
        near_T = (best.values[:, 2] > 0.6 * best.values[:, 1]) & (logits_TE[:, 0] > 0)
        ids_TK = torch.where(near_T[:, None], best.indices[:, [0, 2]], best.indices[:, :2])
        weight_TK = logits_TE.softmax(-1).gather(1, ids_TK)
        return logits_TE, weight_TK / weight_TK.sum(-1, keepdim=True), ids_TK

    for router in routers(model):
        router.register_forward_hook(other)


def begin_probes(run: Path, count: int = 8, tokens: int = 64) -> list[list[int]]:
    """Begins the run's logprob probes with random sequences."""
    sequences = probes.ProbeSequences(ids=tuple(prompt(1000 + i, tokens) for i in range(count)))
    probes.reset_probes(open_store(str(run / "probes")), sequences)
    return list(sequences.ids)


def answer(run: Path, engine: Engine, number: int = 0, digest: str = "") -> None:
    """The scores that this engine gives the probes of the run, stored as the controller does."""
    store = open_store(str(run / "probes"))
    futures = [engine.score(ids, decoded=True) for ids in probes.read_probe_sequences(store)]
    for _ in range(2000):
        if all(future.done() for future in futures):
            break
        engine.step()
    found = [future.result(0) for future in futures]
    (version,) = {version for version, _ in found}
    scored = SequenceScores(version=version, digest=digest, logprobs=tuple(logprobs for _, logprobs in found))
    probes.write_result(store, number, probes.ProbeResult(engine=f"http://engine-{number}", scored=scored))
