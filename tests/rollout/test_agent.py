"""Outside agents in the real sandbox: one of our own on a real engine, and mini-swe-agent as it is published."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etude
from etude.config import AgentConfig, EngineConfig
from etude.errors import UserError
from etude.grading.runner import open_sandbox
from etude.harness.loop import EngineModel, Sampling
from etude.protocol.backends.client import EngineClient
from etude.protocol.wire import GenerateRequest
from etude.records import Budget, Episode, Generation, Outcome, StopReason
from etude.renderers import Renderer
from etude.rollout.environments.agent import open_agent
from etude.rollout.environments.code import dataset_part
from etude.rollout.environments.taskset import Taskset, task_part
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.tasks.dataset import Dataset
from tests.helpers.engines import served
from tests.helpers.speakers import PATH, SOURCE, Speaker
from tests.helpers.tiny_models import save_random_model

MINI = os.environ.get("ETUDE_MINI_SWE_AGENT")
SECONDS = 240.0
BUDGET = Budget(turns=20, tokens=4000, context=8192, seconds=120.0)
FIX = f"sed -i 's/- 3/* 3/' {PATH}"
# Talks plainly, without a library: one question per line of its input, each a turn of the same conversation.
TALKER = """
import json, os, subprocess, urllib.request
messages = [{"role": "user", "content": os.environ["TASK"]}]
for line in range(3):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        message = json.load(answer)["choices"][0]["message"]
    done = subprocess.run((message["content"] or "").replace(chr(0), ""), shell=True, capture_output=True, text=True)
    messages += [message, {"role": "user", "content": done.stdout + done.stderr}]
"""
TALK = f"python3 -c {shlex.quote(TALKER)}"


@pytest.fixture(scope="module")
def engine(hermes_folder: Path) -> Iterator[str]:
    """The URL of an inference server with a small random model that has the tokenizer of the hermes tests."""
    save_random_model(hermes_folder, "qwen3", vocab_size=1280, max_position_embeddings=8192, eos_token_id=1)
    with served(hermes_folder, EngineConfig(cache_mb=64)) as url:
        yield url


@pytest.fixture(scope="module")
def taskset(dataset: Dataset) -> Taskset:
    return Taskset((dataset_part(dataset),))


class Forced:
    """The engine's client with chosen answers: their log-probabilities and versions are the engine's own."""

    def __init__(self, client: EngineClient, url: str, turns: Sequence[list[int]]) -> None:
        self.client, self.url, self.turns = client, url, list(turns)
        self.said: list[list[int]] = []

    async def generate(self, request: GenerateRequest, *rest: Any) -> Generation:
        said = self.turns[len(self.said)]
        self.said.append(said)
        scored = await self.client.score(self.url, [request.ids + said], 60.0)
        assert scored is not None
        logprobs = scored.logprobs[0][len(request.ids) - 1 :]
        return Generation(ids=said, logprobs=logprobs, versions=[scored.version] * len(said), finish_reason="stop")


@asynccontextmanager
async def parts(url: str, config: AgentConfig) -> AsyncIterator[tuple[Any, EngineClient, Any]]:
    async with open_sandbox(workers=1) as sandbox, EngineClient([url]) as client, open_agent(config) as agent:
        yield sandbox, client, agent


def played(
    taskset: Taskset, renderer: Renderer, url: str, config: AgentConfig, budget: Budget = BUDGET,
    policy: Callable[[EngineClient], Any] | None = None, max_tokens: int = 40,
) -> Episode:  # fmt: skip
    """One episode; its segments are scored by the engine, as whole sequences, and must be what was recorded."""

    async def run() -> Episode:
        async with parts(url, config) as (sandbox, client, agent):
            sampler = policy(client) if policy else client
            model = EngineModel(sampler, renderer, Sampling(max_tokens=max_tokens))
            setting = RolloutContext(taskset, sandbox, model, budget, agent)
            episode = await run_episode(setting, taskset.tasks[0], EpisodeId(group_id=3, member=1, attempt=0, seed=5))
            for segment in episode.segments:
                ids, mask, logprobs, _ = segment.arrays()
                scored = await client.score(url, [ids.tolist()], 60.0)
                assert scored is not None
                # Cached keys and other sizes of batches: the last bits of float32 differ.
                found = np.array(scored.logprobs[0])[mask[1:] == 1]
                np.testing.assert_allclose(found, logprobs[mask == 1], atol=2e-4)
            return episode

    return asyncio.run(run())


def test_a_real_engine_is_sampled_through_the_door_of_a_box(
    taskset: Taskset,
    hermes: Renderer,
    engine: str,
) -> None:
    """What a random model says is nonsense, and all of it is in the ledger as it was sampled."""
    episode = played(taskset, hermes, engine, AgentConfig(command=TALK))
    assert (episode.outcome, episode.reward, episode.stop_reason) == (Outcome.SCORED, 0.0, StopReason.FINISHED)
    assert episode.metrics["turns"] == episode.metrics["requests"] == 3
    assert len(episode.segments) == 1, episode.metrics
    assert 3 <= episode.sampled_tokens <= 120
    assert episode.segments[0].turn_starts[0] == episode.segments[0].prompt_length


def test_the_tree_that_an_agent_leaves_is_graded(
    taskset: Taskset,
    hermes: Renderer,
    hermes_folder: Path,
    engine: str,
) -> None:
    speaker = Speaker(hermes_folder)
    script = [speaker.turn(text=text) for text in ("ls", FIX, "true")]
    episode = played(taskset, hermes, engine, AgentConfig(command=TALK), policy=lambda c: Forced(c, engine, script))
    assert (episode.outcome, episode.reward, episode.passed) == (Outcome.SCORED, 1.0, True), episode.detail
    assert [turn.text for turn in episode.turns] == [f"{text}<|im_end|>" for text in ("ls", FIX, "true")]
    assert "src" in episode.turns[0].results[0]


def test_a_spent_budget_and_the_clock_end_the_command(
    taskset: Taskset,
    hermes: Renderer,
    hermes_folder: Path,
    engine: str,
) -> None:
    """The tree is graded as it stands; a command that would go on for ever is ended at once."""
    speaker = Speaker(hermes_folder)
    forever = AgentConfig(command=f"{TALK}; sleep 1000")
    two = Budget(turns=2, tokens=4000, context=8192, seconds=100.0)
    script = [speaker.turn(text=FIX), speaker.turn(text="true")]
    spent = played(taskset, hermes, engine, forever, two, lambda c: Forced(c, engine, script))
    assert (spent.stop_reason, spent.passed) == (StopReason.TURNS, True), spent.detail
    assert sum(turn.seconds_tools for turn in spent.turns) < 60
    short = Budget(turns=9, tokens=4000, context=8192, seconds=1.0)
    late = played(taskset, hermes, engine, AgentConfig(command=f"{FIX}; sleep 1000"), short)
    assert (late.stop_reason, late.passed, late.segments) == (StopReason.SECONDS, True, ())
    assert "the agent's command was ended" in late.detail


def test_an_agent_that_cannot_start_is_the_users_to_repair(
    taskset: Taskset,
    hermes: Renderer,
    engine: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=r"before its first request: .*exit code 127.*no-such-agent"):
        played(taskset, hermes, engine, AgentConfig(command="no-such-agent --yes"))
    with pytest.raises(UserError, match="is not a folder"):
        played(taskset, hermes, engine, AgentConfig(command="x", folder=str(tmp_path / "none")))
    (tmp_path / "hello").write_text("echo from the folder >&2; exit 3\n")
    with pytest.raises(UserError, match=r"exit code 3.* from the folder"):
        played(taskset, hermes, engine, AgentConfig(command="sh /opt/agent/hello", folder=str(tmp_path)))


class Shop(etude.Environment[etude.Task]):
    """The shop in a folder, whose price is wrong. The reward looks at the tree, the last answer and all turns."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository

    def tasks(self) -> list[etude.Task]:
        return [etude.Task(id="price", prompt="Fix the price.", split="train")]

    async def setup(self, episode: etude.EnvironmentEpisode[etude.Task]) -> None:
        assert episode.box is not None
        await episode.box.write("hint.txt", b"Multiply.\n")

    @etude.reward
    async def repaired(self, episode: etude.EnvironmentEpisode[etude.Task]) -> bool:
        assert episode.box is not None
        return b"* 3" in await episode.box.read(PATH)

    @etude.reward(weight=0.5)
    def polite(self, episode: etude.EnvironmentEpisode[etude.Task]) -> bool:
        return episode.answer == "true # thanks" and len(episode.turns) == 3


def test_an_agent_plays_an_environment_on_a_repository(
    hermes: Renderer, hermes_folder: Path, engine: str, tmp_path: Path
) -> None:
    """The methods of the environment see the box and the conversation as they see those of the agent loop."""
    (tmp_path / PATH).parent.mkdir()
    (tmp_path / PATH).write_text(SOURCE)
    mine, speaker = Taskset((task_part(Shop(tmp_path)),)), Speaker(hermes_folder)
    script = [speaker.turn(text=text) for text in ("cat hint.txt", FIX, "true # thanks")]
    episode = played(mine, hermes, engine, AgentConfig(command=TALK), policy=lambda c: Forced(c, engine, script))
    assert (episode.outcome, episode.stop_reason, episode.passed) == (Outcome.SCORED, StopReason.FINISHED, True)
    assert episode.turns[0].results == ("Multiply.\n",)
    assert (episode.metrics["environment/repaired"], episode.metrics["environment/polite"]) == (1.0, 0.5)
    assert episode.reward == episode.grade == 1.5
    idle = AgentConfig(command=f"{TALK}; echo so long; exit 7")
    script = [speaker.turn(text="true") for _ in range(3)]
    failed = played(mine, hermes, engine, idle, policy=lambda c: Forced(c, engine, script))
    assert (failed.outcome, failed.reward, failed.passed) == (Outcome.SCORED, 0.0, False)
    assert failed.detail.startswith("the environment's reward is 0; the agent's command ended with exit code 7")
    with pytest.raises(UserError, match=r"before its first request: .*exit code 127"):
        played(mine, hermes, engine, AgentConfig(command="no-such-agent --yes"))


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.skipif(not MINI, reason="ETUDE_MINI_SWE_AGENT names no environment that has it: run make agents")
@pytest.mark.parametrize("dialect", ["openai", "anthropic", "responses"])
def test_mini_swe_agent_as_published_repairs_the_task(
    taskset: Taskset,
    hermes: Renderer,
    hermes_folder: Path,
    engine: str,
    dialect: str,
) -> None:
    """Unmodified, in all three dialects: its prompts, its tool, its way of ending, and exact tokens."""
    speaker = Speaker(hermes_folder)
    steps = ["ls src && cat src/shop.py", FIX, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    script = [speaker.turn(("bash", {"command": step}), text="I go on.") for step in steps]
    model = {"openai": "openai/etude", "anthropic": "anthropic/etude", "responses": "openai/etude"}[dialect]
    kind = "litellm_response" if dialect == "responses" else "litellm"
    command = (
        f"/opt/agent/bin/python -m minisweagent.run.mini -m {model} --model-class {kind} -y --exit-immediately "
        '-t "$TASK" -o /tmp/trajectory.json < /dev/null'
    )
    environment = {
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    config = AgentConfig(command=command, folder=MINI, environment=environment)
    budget = Budget(turns=20, tokens=4000, context=8192, seconds=SECONDS)
    episode = played(taskset, hermes, engine, config, budget, lambda c: Forced(c, engine, script))
    assert (episode.outcome, episode.passed, episode.stop_reason) == (Outcome.SCORED, True, StopReason.FINISHED)
    assert [turn.calls[0].arguments for turn in episode.turns] == [{"command": step} for step in steps]
    assert "total = amount - 3" in episode.turns[0].results[0]
    (segment,) = episode.segments
    ids, mask, _, _ = segment.arrays()
    assert ids[mask == 1].tolist() == [token for turn in script for token in turn]
    prompt = hermes.text(ids[: segment.prompt_length].tolist())
    assert "You are a helpful assistant that can interact with a computer." in prompt
    assert episode.metrics["forks"] == 0


def test_a_command_that_its_box_refuses_is_not_the_infrastructures_fault(taskset: Taskset, hermes: Renderer) -> None:
    """It would be played again, for nothing."""

    async def scenario() -> None:
        async with (
            open_agent(AgentConfig(command=f"true {'x' * 200_000}")) as agent,
            open_sandbox(workers=1) as sandbox,
        ):
            model = EngineModel(Forced(None, "", []), hermes, Sampling())  # type: ignore[arg-type]
            context = RolloutContext(taskset, sandbox, model, BUDGET, agent)
            await run_episode(context, taskset.tasks[0], EpisodeId(group_id=0, member=0, attempt=0, seed=0))

    with pytest.raises(UserError, match=r"failed before its first request: .* a command line has at most 100000 bytes"):
        asyncio.run(scenario())
