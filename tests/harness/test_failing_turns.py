"""Turns of outside agents that fail between sampling and answering: the agent is answered, and its episode ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from etude.harness.endpoint.recording import Recording
from etude.protocol.apis import RequestRefused, SampledTurn, anthropic, merge_streams, responses
from etude.records import Generation
from etude.renderers import ParsedTurn, Renderer
from etude.renderers.chat import ChatRenderer
from tests.harness.test_endpoint import GO, opened
from tests.helpers.speakers import Scripted, Speaker
from tests.inference.test_failing_answers import CHAT, MESSAGES, RESPONSES, SECONDS, odd, refusal_in


def turn_of(renderer: Renderer) -> SampledTurn:
    return SampledTurn(renderer, 3)


def test_a_turn_ends_with_the_task_that_samples_it(hermes: Renderer) -> None:
    async def play() -> None:
        async def dies() -> None:
            raise KeyError("odd")

        async def forgets() -> None:
            pass

        for work, kind in ((dies(), "failed"), (forgets(), "lost")):
            turn = turn_of(hermes)
            task = turn.sampling(work)
            with pytest.raises(RequestRefused) as refused:
                await asyncio.wait_for(turn.whole(), SECONDS)
            assert refused.value.kind == kind
            await asyncio.wait([task])
        turn = turn_of(hermes)
        turn.sampling(asyncio.sleep(9)).cancel()  # before it began
        with pytest.raises(RequestRefused, match="the answer was ended"):
            await asyncio.wait_for(turn.whole(), SECONDS)

        async def cancelled() -> AsyncIterator[int]:
            yield 1
            raise asyncio.CancelledError

        async def endless() -> AsyncIterator[int]:
            while True:
                yield 2
                await asyncio.sleep(60)

        async def read() -> list[Any]:
            return [item async for item in merge_streams([cancelled(), endless()])]

        with pytest.raises(RuntimeError, match="a stream was cancelled"):
            await asyncio.wait_for(read(), SECONDS)

    asyncio.run(play())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "route"),
    [(ChatRenderer, "parse", CHAT), (ParsedTurn, "openai", RESPONSES), (SampledTurn, "settle", MESSAGES),
     (SampledTurn, "events", CHAT), (Recording, "_ask", CHAT), 
     (anthropic, "_stopped", MESSAGES), (responses._Writer, "completed", RESPONSES)],
)  # fmt: skip
def test_an_outside_agent_is_answered_and_its_episode_ends(
    owner: Any, name: str, route: str, stream: bool, hermes: Renderer, hermes_folder: Any, monkeypatch: Any, caplog: Any
) -> None:
    """By the type of the failure the episode is the infrastructure's or quarantined: it goes to the caller."""
    if (name, stream) == ("events", False):
        pytest.skip("answers that are not streamed have no events")
    speaker = Speaker(hermes_folder)
    body = {RESPONSES: {"input": "Go"}, MESSAGES: {"messages": [GO], "max_tokens": 9}, CHAT: {"messages": [GO]}}[route]

    async def play() -> None:
        async with opened(Scripted([speaker.turn(text="Hi.")]), hermes) as agent:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, odd)
                answer = await agent.http.post(route, json=body | {"stream": stream}, timeout=SECONDS)
            refusal_in(route, answer, stream and name != "_ask")
            assert str(agent.recording.failure) == "odd"
            assert agent.recording.ended.is_set()
            again = await agent.http.post(route, json=body, timeout=SECONDS)
            assert again.status_code >= 400

    asyncio.run(play())
    assert any(record.exc_info and str(record.exc_info[1]) == "odd" for record in caplog.records)


def test_a_settled_turn_holds_what_was_sampled(hermes: Renderer, hermes_folder: Any) -> None:
    ids = Speaker(hermes_folder).turn(text="Hi.")
    turn = turn_of(hermes)
    turn.settle(Generation(ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids), finish_reason="stop"))
    assert (turn.done, turn.text, turn.finish_reason) == (True, "Hi.", "stop")
