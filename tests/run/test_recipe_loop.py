"""The loop in one file: it learns, within the staleness bound, and publishes what it swaps in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from recipes.loop import admit, open_context, train

from etude.config import RLConfig
from etude.store import open_store
from etude.weights.manifest import manifests
from tests.helpers import boxed_functions
from tests.helpers.tiny_environment import save_model, tables

STEPS = 30


def test_the_loop_in_one_file_learns(tmp_path: Path) -> None:
    config = RLConfig.model_validate(tables(save_model(tmp_path / "model"), STEPS))
    history = asyncio.run(train(config, tmp_path))
    assert len(history) == STEPS
    assert {metrics["lag"] for metrics in history} == {0, 1}, "later groups are played while the trainer steps"
    rewards = [metrics["reward"] for metrics in history]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.2, rewards
    published = manifests(open_store(str(tmp_path / "weights")))
    assert [m.version for m in published] == list(range(STEPS + 1))
    groups = [group for manifest in published for group in manifest.groups]
    assert groups == list(range(4 * STEPS)), "every group is trained on once"


def test_the_loop_in_one_file_has_the_tools_of_the_run(tmp_path: Path) -> None:
    own = ["tests.helpers.boxed_functions:echo", "tests.helpers.boxed_functions:price"]
    given = tables(save_model(tmp_path / "model"), 1)
    given["tasks"] = {"dataset": str(Path(__file__).parents[1] / "tasks/data/tiny")}
    given["rollout"] |= {"tools": ["run", "finish"], "custom_tools": own}
    config = RLConfig.model_validate(given)

    async def opened() -> None:
        async with open_context(config, tmp_path) as (context, _):
            assert context.toolset.names == ("run", "finish")
            assert context.toolset.functions == (boxed_functions.echo, boxed_functions.price)
            assert context.reward == config.reward
            assert len(context.taskset.split("train")) == 3

    asyncio.run(opened())
    two = RLConfig.model_validate(given | {"tasks": {"sources": [given["tasks"], {"repository": "x"}]}})
    for other in (two, RLConfig.model_validate(given | {"tasks": {"repository": "x"}})):
        with pytest.raises(SystemExit, match=r"takes tasks\.environment, tasks\.edits or tasks\.dataset"):
            asyncio.run(train(other, tmp_path))


def test_admission_is_a_matter_of_versions() -> None:
    config = RLConfig.model_validate({"tasks": {"repository": "x"}, "rollout": {"prompts": 4, "staleness": 2}})
    assert admit(config, version=0, admitted=0) == 12
    assert admit(config, version=0, admitted=12) == 0
    assert admit(config, version=3, admitted=12) == 12
    assert admit(config, version=99, admitted=399) == 1, "the last steps have their groups"


def test_it_fits_on_the_page() -> None:
    assert len(Path("recipes/loop.py").read_text().splitlines()) <= 250
    assert len(Path("recipes/environments/reverse_text.py").read_text().splitlines()) <= 60
