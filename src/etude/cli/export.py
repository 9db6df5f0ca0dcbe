"""`etude export RUN -o DIR`: the episodes of a run's ledger as ATIF-v1.8 trajectories, a JSON file each."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from etude.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude export`."""
    parser.add_argument("folder", type=Path, help="run folder")
    parser.add_argument("episode", nargs="*", help="as GROUP-MEMBER-ATTEMPT, e.g. 3-1-0; default: all in the ledger")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write; must not exist")


def run(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Writes the named episodes, or all, to GROUP-MEMBER-ATTEMPT.json in a new folder. Raises UserError."""
    from etude.harness import Toolset, atif_document, import_tools, schemas_of
    from etude.ledger import run_episodes
    from etude.run.parts import renderer_of

    episodes, output = run_episodes(arguments.folder, arguments.episode), arguments.output
    config = episodes.config
    renderer = renderer_of(config)
    agent: dict[str, Any] = {"name": "etude", "version": version("etude"), "model_name": config.model.path}
    if config.rollout.agent is not None:
        agent |= {"name": "outside", "extra": {"command": config.rollout.agent.command}}
    elif renderer.dialect != "compact":
        agent["tool_definitions"] = schemas_of(
            Toolset(config.rollout.tools, functions=import_tools(config.rollout.custom_tools))
        )
    try:
        output.mkdir(parents=True)
    except OSError as e:
        raise UserError(f"{output} cannot be made ({e.strerror}); name a folder that does not exist yet") from None
    for key in episodes.keys:
        episode = episodes.read(key)
        trajectory = atif_document(episode, renderer, agent, config.name)
        (output / f"{episode.id}.json").write_text(json.dumps(trajectory), "utf-8")
    print(f"{len(episodes.keys)} episodes were written to {output}")
