"""Episodes that apply an edit: what is asked is what `/v1/apply` asks, and every grade has its worth."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.config import RewardConfig
from etude.edits import examples
from etude.edits.edit import Edit
from etude.edits.examples import Example
from etude.errors import UserError
from etude.harness.loop import EngineModel, Sampling
from etude.inference.server.fast_apply import Applier
from etude.protocol.backends import EngineError
from etude.protocol.wire import GenerateRequest
from etude.records import Budget, Episode, Outcome, StopReason, decode, encode
from etude.renderers import Renderer
from etude.renderers.base import load_tokenizer
from etude.rollout.environments.edits import applied_edits
from etude.rollout.environments.taskset import TaskPart, Taskset
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.rollout.rewards import with_reward
from tests.helpers.speakers import Scripted, Speaker

BUDGET = Budget(turns=6, tokens=200, context=1000, seconds=60.0)
FILE = "def area(a, b):\n    # sides\n    return a + b\n\n\ndef twice(x):\n    return 2 * x\n"
RESULT = FILE.replace("a + b", "a * b")
SKETCH = "def area(a, b):\n    # sides\n    return a * b\n# ... existing code ...\n"
EDIT = Example(
    id="e1", repository="shop-1.0", licence="MIT", origin="files", path="src/area.py", language="python",
    kind="synthetic", noise=(), merges=True, instruction="Multiply.", file=FILE, sketch=SKETCH, result=RESULT, lines=7,
    fraction=0.2,
)  # fmt: skip


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    long = replace(EDIT, id="long", file=FILE * 20, result=FILE * 19 + RESULT)
    examples.write_examples([EDIT, long], tmp_path / "train.parquet")
    examples.write_examples([replace(EDIT, id="e2", repository="other-1.0")], tmp_path / "heldout.parquet")
    return tmp_path


def edit_tasks(folder: Path, renderer: Renderer, budget: Budget) -> Taskset:
    edits = applied_edits(folder, renderer, budget)
    return Taskset((TaskPart(edits, edits.table),))


def played(tables: Path, renderer: Renderer, policy: Any, budget: Budget = BUDGET) -> Episode:
    taskset = edit_tasks(tables, renderer, BUDGET)
    no_box: Any = None
    setting = RolloutContext(taskset, no_box, EngineModel(policy, renderer, Sampling()), budget)
    episode = asyncio.run(run_episode(setting, taskset.by_id["e1"], EpisodeId(3, 1, 0, 5)))
    return with_reward(decode(encode(episode), Episode), RewardConfig(), budget)


@pytest.mark.parametrize("dialect", ["compact", "hermes"])
@pytest.mark.parametrize(
    ("said", "reward", "passed"),
    [
        (RESULT + "</updated-code>", 1.0, True),
        (RESULT.replace("return 2", "return  2") + "</updated-code>", 0.9, False),  # the same tree and comments
        (RESULT + "\n\n</updated-code>", 0.9, False),
        (RESULT.replace("    # sides\n", "") + "</updated-code>", 0.0, False),
        (FILE + "</updated-code>", 0.0, False),
        (RESULT, 0.0, False),  # no end
        ("</updated-code>", 0.0, False),
        ("", 0.0, False),
    ],
)
def test_the_reward_is_the_grade(
    tables: Path, said: str, reward: float, passed: bool, dialect: str, request: pytest.FixtureRequest
) -> None:
    renderer, folder = request.getfixturevalue(dialect), request.getfixturevalue(f"{dialect}_folder")
    policy = Scripted([Speaker(folder).turn(text=said)])
    episode = played(tables, renderer, policy)
    assert (episode.outcome, episode.stop_reason) == (Outcome.SCORED, StopReason.FINISHED)
    assert (episode.reward, episode.passed) == (reward, passed)
    assert episode.metrics["reward/grade"] == reward
    assert episode.metrics["malformed"] == (0.0 if "</updated-code>" in said else 1.0)
    (segment,) = episode.segments
    assert segment.intact
    assert episode.sampled_tokens == len(policy.turns[0])  # type: ignore[arg-type]


def test_the_question_is_that_of_the_apply_model(tables: Path, compact: Renderer, compact_folder: Path) -> None:
    policy = Scripted([Speaker(compact_folder).turn(text=RESULT + "</updated-code>")])
    played(tables, compact, policy)
    applier = Applier(load_tokenizer(compact_folder), compact)
    request, _ = applier.request(Edit(FILE, SKETCH, "Multiply."), 2000)
    assert policy.prompts == [list(request.ids)]
    assert policy.requests[0].max_tokens == BUDGET.tokens


def test_there_is_one_turn_and_no_tool(tables: Path, compact: Renderer, compact_folder: Path) -> None:
    policy = Scripted([Speaker(compact_folder).turn(("test", {}))])
    episode = played(tables, compact, policy)
    assert (episode.reward, len(episode.turns), episode.stop_reason) == (0.0, 1, StopReason.TURNS)
    assert episode.turns[0].results == ("error: unknown tool test",)


def test_a_lost_engine_is_not_the_model_s_fault(tables: Path, compact: Renderer) -> None:
    class Lost:
        async def generate(self, request: GenerateRequest, *rest: Any) -> Any:
            raise EngineError("gone")

    episode = played(tables, compact, Lost())
    assert episode.outcome is Outcome.INFRA


def test_edits_that_do_not_fit_are_no_tasks(tables: Path, compact: Renderer) -> None:
    taskset = edit_tasks(tables, compact, BUDGET)
    assert {task.id: task.split for task in taskset.tasks} == {"e1": "train", "e2": "heldout"}
    with pytest.raises(UserError, match=r"no edit of .*train.parquet fits rollout.context = 60"):
        edit_tasks(tables, compact, Budget(tokens=50, context=60))
    with pytest.raises(UserError, match="does not exist"):
        edit_tasks(tables / "nowhere", compact, BUDGET)
