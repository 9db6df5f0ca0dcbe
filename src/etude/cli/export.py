"""`etude export RUN -o DIR`: the episodes of a run's ledger as ATIF-v1.8 trajectories, a JSON file each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from etude.errors import UserError
from etude.harness import atif
from etude.ledger import stored_episodes
from etude.renderers import renderer_for
from etude.renderers.schemas import SCHEMAS


def export(run: Path, names: Sequence[str], output: Path) -> None:
    """Writes the named episodes, or all, to GROUP-MEMBER-ATTEMPT.json in a new folder. Raises UserError."""
    episodes = stored_episodes.episodes(run, names)
    config = episodes.config
    renderer = renderer_for(Path(config.model.path), None if config.model.dialect == "auto" else config.model.dialect)
    agent: dict[str, Any] = {"name": "etude", "version": version("etude"), "model_name": config.model.path}
    if config.rollout.agent is not None:
        agent |= {"name": "outside", "extra": {"command": config.rollout.agent.command}}
    elif renderer.dialect != "compact":
        agent["tool_definitions"] = list(SCHEMAS)
    try:
        output.mkdir(parents=True)
    except OSError as e:
        raise UserError(f"{output} cannot be made ({e.strerror}); name a folder that does not exist yet") from None
    for key in episodes.keys:
        episode = episodes.read(key)
        found = atif.document(episode, renderer, agent, config.name)
        (output / f"{episode.id}.json").write_text(json.dumps(found), "utf-8")
    print(f"{len(episodes.keys)} episodes were written to {output}")
