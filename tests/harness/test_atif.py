"""Episodes as ATIF documents: every token can be put together again, and no key is there that the format has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.corpus import chats
from etude.harness import atif
from etude.harness.loop import UngradedEpisode
from etude.records import Episode, Outcome, StopReason, decode, encode
from etude.renderers import Renderer
from tests.harness.test_loop import edit, play
from tests.harness.test_summaries import Agent, a_search, chain, long_box, notes
from tests.helpers.rows import chat_rows
from tests.helpers.speakers import Scripted, Speaker, a_task

AGENT = {"name": "etude", "version": "0"}
# Fields of ATIF-v1.8, which forbids all others.
ROOT = {"schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra"}
STEP = {
    "step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics", "is_copied_context",
    "llm_call_count", "extra",
}  # fmt: skip
METRICS = {"prompt_tokens", "completion_tokens", "prompt_token_ids", "completion_token_ids", "logprobs", "extra"}
SPOKEN = {"reasoning_content", "tool_calls", "metrics"}  # of agent steps only


def an_episode(draft: UngradedEpisode) -> Episode:
    return Episode(
        id="3-1-0", group_id=3, member=1, attempt=0, task_id=a_task().id, seed=7, outcome=Outcome.SCORED,
        stop_reason=draft.stop_reason, reward=1.0, passed=True, segments=draft.segments, turns=draft.turns,
        metrics=draft.metrics,
    )  # fmt: skip


def written(draft: UngradedEpisode, renderer: Renderer) -> dict[str, Any]:
    found = json.loads(json.dumps(atif.atif_document(an_episode(draft), renderer, AGENT, "run")))
    assert found.keys() <= ROOT
    assert [step["step_id"] for step in found["steps"]] == list(range(1, len(found["steps"]) + 1))
    for step in found["steps"]:
        assert step.keys() <= STEP
        assert step.get("metrics", {}).keys() <= METRICS
        assert step["source"] == "agent" or not step.keys() & SPOKEN
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        assert {r.get("source_call_id") for r in step.get("observation", {"results": []})["results"]} <= calls
    return found


def tokens(document: dict[str, Any]) -> list[list[int]]:
    """The ids of each segment, up to the last sampled one."""
    found: list[list[int]] = []
    for step in document["steps"]:
        if metrics := step.get("metrics"):
            if "prompt_token_ids" in metrics:
                found.append(list(metrics["prompt_token_ids"]))
            found[-1] += metrics["extra"].get("added_token_ids", [])
            assert len(found[-1]) == metrics["prompt_tokens"]
            found[-1] += metrics["completion_token_ids"]
    return found


@pytest.mark.parametrize("dialect", ["compact", "hermes"])
def test_a_document_holds_every_token_of_a_chain(dialect: str, request: pytest.FixtureRequest) -> None:
    renderer, speaker = request.getfixturevalue(dialect), Speaker(request.getfixturevalue(f"{dialect}_folder"))
    turns = [a_search(speaker)] * 5 + [speaker.turn(edit(speaker, "- 3", "* 3"), ("test", {}), text="Mend."),
                                       speaker.turn(("finish", {}))]  # fmt: skip
    draft = play(
        renderer, Agent(renderer, turns, notes(speaker, 99)), box=long_box(), sampling=chain(renderer, speaker)
    )
    assert len(draft.segments) > 1
    document = written(draft, renderer)
    whole = [segment.arrays()[0][: segment.spans()[-1][1]].tolist() for segment in draft.segments]
    assert tokens(document) == whole
    said = [step for step in document["steps"] if step["source"] == "agent"]
    assert [p for step in said for p in step["metrics"]["logprobs"]] == [
        float(p) for s in draft.segments for a, b in s.spans() for p in s.arrays()[2][a:b]
    ]
    shown = [step for step in document["steps"] if step["source"] == "user"]
    assert [step.get("is_copied_context", False) for step in shown] == [False] + [True] * (len(shown) - 1)
    assert a_task().prompt in shown[0]["message"]
    mended = next(step for step in said if "Mend." in step["message"])
    assert [call["function_name"] for call in mended["tool_calls"]] == ["edit", "test"]
    assert mended["observation"]["results"][0]["content"] == "ok"
    assert document["extra"]["reward"] == 1.0


@pytest.mark.parametrize("dialect", ["compact", "hermes"])
def test_an_exported_chain_is_learned_in_the_tokens_that_were_played(
    dialect: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    renderer, speaker = request.getfixturevalue(dialect), Speaker(request.getfixturevalue(f"{dialect}_folder"))
    turns = [a_search(speaker)] * 5 + [speaker.turn(edit(speaker, "- 3", "* 3"), text="Mend."), speaker.turn()]
    agent = Agent(renderer, turns, notes(speaker, 99))
    draft = play(renderer, agent, box=long_box(), sampling=chain(renderer, speaker))
    (tmp_path / "episode.json").write_text(json.dumps(written(draft, renderer)))
    rows = list(chat_rows([tmp_path], lambda: renderer))
    assert len(rows) == len(draft.segments) > 1
    for row, segment in zip(rows, draft.segments, strict=True):
        assert isinstance(row, chats.LearnedRow)
        ids, mask = (x.tolist() for x in row.tokens)
        assert ids == segment.arrays()[0][: len(ids)].tolist()
        assert mask == [int(any(a <= at < b for a, b in segment.spans())) for at in range(len(ids))]
        assert mask[-1] == 1
    other = request.getfixturevalue({"compact": "hermes", "hermes": "compact"}[dialect])
    [refused] = chat_rows([tmp_path], lambda: other)
    assert isinstance(refused, chats.RefusedRow)
    assert "another tokenizer or chat template" in refused.why


def test_a_malformed_call_and_an_episode_without_a_token(compact: Renderer, compact_folder: Any) -> None:
    speaker = Speaker(compact_folder)
    cut = [*speaker.encode("<|call|>edit<|arg|>x"), speaker.end]
    document = written(play(compact, Scripted([cut, speaker.turn()])), compact)
    (call,) = document["steps"][1]["tool_calls"]
    assert (call["arguments"], bool(call["extra"]["error"])) == ({}, True)
    draft = UngradedEpisode((), (), play(compact, Scripted([speaker.turn()])).stop_reason, {}, False)
    assert written(draft, compact)["steps"] == [{"step_id": 1, "source": "system", "message": "nothing was sampled"}]


def test_tools_of_an_outside_agent_are_those_of_its_trajectory(compact: Renderer) -> None:
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    episode = Episode(
        id="1-0-0", group_id=1, member=0, attempt=0, task_id="t", seed=1, outcome=Outcome.INFRA,
        stop_reason=StopReason.ERROR, reward=0.0, passed=False, segments=(), turns=(), metrics={}, tools=(tool,),
    )  # fmt: skip
    stored = decode(encode(episode), Episode)
    assert stored == episode
    document = atif.atif_document(stored, compact, AGENT, "run")
    assert document["agent"] == AGENT | {"tool_definitions": [tool]}
    assert "tool_definitions" not in AGENT
