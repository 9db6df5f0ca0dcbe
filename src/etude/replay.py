"""`etude doctor replay RUN`: every episode of a run's ledger played again in a new box, and its tokens compared.

Nothing is sampled: the model's turns are those of the ledger. What is proved is that the harness still asks for each of
them after exactly the tokens that it was sampled from, so that a log-probability in the ledger is that of a context
which can be made again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from etude import controller, rl, runfolder
from etude.config import RLConfig
from etude.environments.namespace import open_sandbox
from etude.errors import UserError
from etude.harness.episode import Setting
from etude.harness.replay import replay
from etude.records import Episode, decode
from etude.rollout.ledger import Ledger
from etude.store import Store, open_store
from etude.tasks.dataset import Dataset

LIVE = 8  # episodes at a time


@dataclass(frozen=True)
class Replayed:
    """One episode; `difference` is empty if every token is the same."""

    episode: str
    turns: int
    segments: int
    tokens: int  # of all segments, the environment's included
    forked: bool
    difference: str


def replay_run(run: Path, episodes: Sequence[str] = ()) -> list[Replayed]:
    """Plays the named episodes again, or all of the ledger. Raises UserError."""
    config = runfolder.load_config(run)
    if config.rollout.agent is not None:
        raise UserError(f"{run} was played by an outside agent, whose episodes cannot be played again without it")
    dataset = rl.dataset_of(config, run)
    if dataset is None:
        raise UserError(f"{run} has no tasks yet; let the run play some episodes first")
    ledger = Ledger.open(config.ledger or f"sqlite:///{run}/ledger.db", config.name)
    keys = ledger.blobs()
    ledger.close()
    if not keys:
        raise UserError(f"{run} holds no episodes; let the run play some first")
    chosen = [_key(name, keys, run) for name in episodes] or keys
    return asyncio.run(_replay(config, dataset, open_store(f"{config.store or run}/rollouts"), chosen))


def _key(name: str, keys: Sequence[str], run: Path) -> str:
    numbers = name.split("-")
    if len(numbers) == 3 and all(n.isdecimal() for n in numbers):
        group, member, attempt = map(int, numbers)
        if (key := controller.blob_key(group, member, attempt)) in keys:
            return key
    raise UserError(f"the ledger of {run} has no episode {name!r}; give GROUP-MEMBER-ATTEMPT, e.g. 3-1-0")


async def _replay(config: RLConfig, dataset: Dataset, rollouts: Store, keys: Sequence[str]) -> list[Replayed]:
    free = asyncio.Semaphore(LIVE)
    sampling = replace(controller.sampling(config.rollout), routes=config.trainer.router_replay)
    nobody: Any = None  # an episode's own turns take the policy's place

    async with open_sandbox(personas=rl.personas_of(config)) as sandbox:
        setting = Setting(dataset, sandbox, nobody, rl.renderer_of(config), config.rollout.budget(), sampling)

        async def one(key: str) -> Replayed:
            async with free:
                episode = decode(rollouts.get(key), Episode)
                task = dataset.by_id[episode.task_id]
                found = await replay(setting, task, episode, controller.decoys_of(config, task))
            return Replayed(
                episode=episode.id,
                turns=sum(len(segment.turn_starts) for segment in episode.segments),
                segments=len(episode.segments),
                tokens=sum(len(segment.mask) for segment in episode.segments),
                forked=episode.fork is not None,
                difference=found,
            )

        return await asyncio.gather(*map(one, keys))


def show(run: Path, episodes: Sequence[str], *, as_json: bool) -> int:
    """Prints how many are token-exact, and where the others differ first; exit code 0 if all are."""
    found = replay_run(run, episodes)
    exact = sum(not r.difference for r in found)
    if as_json:
        print(json.dumps({"episodes": len(found), "exact": exact, "replayed": [asdict(r) for r in found]}))
    else:
        for r in found:
            if r.difference:
                print(f"{r.episode}: {r.difference}")
        turns, tokens, forked = sum(r.turns for r in found), sum(r.tokens for r in found), sum(r.forked for r in found)
        print(
            f"{exact} of {len(found)} episodes are token-exact ({turns:,} turns, {tokens:,} tokens, "
            f"{sum(r.segments for r in found):,} segments; {forked} forked)"
        )
    return 0 if exact == len(found) else 1
