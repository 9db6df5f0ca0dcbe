"""`etude doctor replay RUN`: plays every episode of a run's ledger again in a new box, and compares its tokens.

Nothing is sampled: the turns of the model are those of the ledger. A replay without differences proves that the harness
still requests each turn after exactly the tokens that it was sampled from, so that the context of each log-probability
in the ledger can be reconstructed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import UserError
from etude.grading import open_sandbox
from etude.ledger import StoredEpisodes, run_episodes
from etude.rollout import Taskset, replay_episode
from etude.run import parts

LIVE = 8  # episodes at a time


@dataclass(frozen=True)
class EpisodeReplay:
    """One episode; `difference` is empty if every token is the same."""

    episode: str
    turns: int
    segments: int
    tokens: int  # of all segments, the environment's included
    difference: str


def replay_run(run: Path, names: Sequence[str] = ()) -> list[EpisodeReplay]:
    """Play the named episodes again, or all of the ledger, in boxes of the run's backend. Raises UserError."""
    episodes = run_episodes(run, names)
    if episodes.config.rollout.agent is not None:
        raise UserError(f"{run} was played by an outside agent, whose episodes cannot be played again without it")
    taskset = parts.taskset_of(episodes.config, run)
    if taskset is None:
        raise UserError(f"{run} has lost its tasks: the folder {run / 'tasks'} is not there")
    return asyncio.run(_replay(episodes, taskset))


async def _replay(episodes: StoredEpisodes, taskset: Taskset) -> list[EpisodeReplay]:
    config, free = episodes.config, asyncio.Semaphore(LIVE)
    nobody: Any = None  # an episode's own turns take the policy's place

    async with open_sandbox(
        config.sandbox,
        machine_profiles=parts.profiles_of(config),
        packages=parts.packages_of(taskset),
        repeatable=config.deterministic,
    ) as sandbox:
        setting = parts.context_of(config, taskset, sandbox, nobody, training=True)

        async def one(key: str) -> EpisodeReplay:
            async with free:
                episode = episodes.read(key)
                task = taskset.by_id[episode.task_id]
                decoys = taskset.of(task)[0].decoys(task, config.seed, config.cheats.decoys)
                difference = await replay_episode(setting, task, episode, decoys)
            return EpisodeReplay(
                episode=episode.id,
                turns=sum(len(segment.turn_starts) for segment in episode.segments),
                segments=len(episode.segments),
                tokens=sum(len(segment.mask) for segment in episode.segments),
                difference=difference,
            )

        return await asyncio.gather(*map(one, episodes.keys))
