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

from etude.errors import UserError
from etude.ledger import stored_episodes
from etude.ledger.stored_episodes import Episodes
from etude.rollout.replay import replay
from etude.run import parts
from etude.sandbox.namespace.sandbox import open_sandbox
from etude.tasks.dataset import Dataset

LIVE = 8  # episodes at a time


@dataclass(frozen=True)
class EpisodeReplay:
    """One episode; `difference` is empty if every token is the same."""

    episode: str
    turns: int
    segments: int
    tokens: int  # of all segments, the environment's included
    forked: bool
    difference: str


def replay_run(run: Path, names: Sequence[str] = ()) -> list[EpisodeReplay]:
    """Plays the named episodes again, or all of the ledger. Raises UserError."""
    episodes = stored_episodes.episodes(run, names)
    if episodes.config.rollout.agent is not None:
        raise UserError(f"{run} was played by an outside agent, whose episodes cannot be played again without it")
    dataset = parts.dataset_of(episodes.config, run)
    if dataset is None:
        raise UserError(f"{run} has lost its tasks: the folder {run / 'tasks'} is not there")
    return asyncio.run(_replay(episodes, dataset))


async def _replay(episodes: Episodes, dataset: Dataset) -> list[EpisodeReplay]:
    config, free = episodes.config, asyncio.Semaphore(LIVE)
    nobody: Any = None  # an episode's own turns take the policy's place

    async with open_sandbox(personas=parts.profiles_of(config), repeatable=config.deterministic) as sandbox:
        setting = parts.context_of(config, dataset, sandbox, nobody, parts.renderer_of(config))
        setting = replace(setting, sampling=replace(setting.sampling, routes=config.trainer.router_replay))

        async def one(key: str) -> EpisodeReplay:
            async with free:
                episode = episodes.read(key)
                task = dataset.by_id[episode.task_id]
                found = await replay(setting, task, episode, parts.decoys_of(config, task))
            return EpisodeReplay(
                episode=episode.id,
                turns=sum(len(segment.turn_starts) for segment in episode.segments),
                segments=len(episode.segments),
                tokens=sum(len(segment.mask) for segment in episode.segments),
                forked=episode.fork is not None,
                difference=found,
            )

        return await asyncio.gather(*map(one, episodes.keys))


def show(run: Path, names: Sequence[str], *, as_json: bool) -> int:
    """Prints how many are token-exact, and where the others differ first; exit code 0 if all are."""
    found = replay_run(run, names)
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
