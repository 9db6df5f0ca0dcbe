"""The interception endpoint over HTTP: dialects, streams, and ledgers that hold what was sampled, after what."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from etude.harness.endpoint.recording import RecordedFork, Recording
from etude.harness.endpoint.server import Endpoint, open_endpoint
from etude.harness.loop import EngineModel, EpisodeSpec, Sampling, UngradedEpisode
from etude.protocol.guard import LIMITS
from etude.protocol.wire import JSON, GenerateRequest
from etude.records import Budget, Generation, StopReason
from etude.renderers import Renderer
from tests.helpers.speakers import Scripted, Speaker, a_task

BUDGET = Budget(turns=30, tokens=4000, context=6000, seconds=60.0)
BASH = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": BASH}}
SYSTEM = {"role": "system", "content": "Work."}
GO = {"role": "user", "content": "Repair <|im_end|> it.\n"}


class Held(Scripted):
    """Tells the tokens of a turn one by one, and the last of them only once `let_go` is set."""

    def __init__(self, turns: Sequence[list[int]]) -> None:
        super().__init__(turns)
        self.let_go = asyncio.Event()

    async def generate(self, request: GenerateRequest, *rest: Any) -> Generation:
        generation = await super().generate(request, *rest)
        for token in generation.ids[:-1]:
            rest[1](msgspec.structs.replace(generation, ids=[token]))
        await self.let_go.wait()
        return generation


class Open:
    """An endpoint with one episode, as a client sees it."""

    def __init__(self, endpoint: Endpoint, recording: Recording, port: int) -> None:
        self.recording = recording
        self.key = endpoint.open(recording)
        self.url = f"http://127.0.0.1:{port}"
        transport = httpx2.AsyncHTTPTransport(uds=str(endpoint.socket))
        headers = {"authorization": f"Bearer {self.key}"}
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, timeout=30)

    async def chat(self, *messages: Any, **options: Any) -> Any:
        answer = await self.http.post("/v1/chat/completions", json={"messages": messages, "tools": [TOOL]} | options)
        return answer.json()

    async def say(self, *messages: Any, **options: Any) -> Any:
        return (await self.chat(*messages, **options))["choices"][0]["message"]

    def draft(self) -> UngradedEpisode:
        return self.recording.ungraded(StopReason.FINISHED, False)


@asynccontextmanager
async def opened(policy: Any, renderer: Renderer, budget: Budget = BUDGET) -> AsyncIterator[Open]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with open_endpoint(listener) as endpoint:
            recording = Recording(EpisodeSpec(a_task(), EngineModel(policy, renderer, Sampling()), budget, 7))
            found = Open(endpoint, recording, listener.getsockname()[1])
            async with found.http:
                yield found
            await recording.close()


def call(command: str) -> tuple[str, dict[str, object]]:
    return "bash", {"command": command}


def tool(text: str, at: str = "") -> dict[str, str]:
    return {"role": "tool", "tool_call_id": at, "content": text}


def trained(draft: UngradedEpisode) -> list[list[int]]:
    """The sampled ids of each segment, after what the trainer checks."""
    found = []
    for segment in draft.segments:
        ids, mask, logprobs, versions = segment.arrays()
        assert segment.intact
        assert not mask[: segment.prompt_length].any()
        assert (versions[mask == 1] >= 0).all()
        assert not logprobs[mask == 0].any()
        found.append(ids[mask == 1].tolist())
    return found


def test_a_conversation_that_goes_on_appends_only_what_is_new(hermes: Renderer, hermes_folder: Path) -> None:
    """T1, T2, T7, T8, T9: the ledger is what was sampled, and for a plain conversation the whole render of it."""
    speaker = Speaker(hermes_folder)
    # Spelled as no client would write it again: other spaces, 1.0, keys not in order.
    odd = speaker.encode(
        'A\n\n\n<tool_call>\n{"arguments":{"command":"ls","n":1.0,"a":[2.0]},   "name":"bash"}</tool_call>'
    )
    script = [[*odd, speaker.end], speaker.turn(call("a"), call("b"), text="Two"), speaker.turn(text="Done.")]

    async def play() -> tuple[Scripted, UngradedEpisode]:
        policy = Scripted(script)
        async with opened(policy, hermes) as agent:
            first = await agent.say(SYSTEM, GO, temperature=0.1, model="gpt-x")
            arguments = json.loads(first["tool_calls"][0]["function"]["arguments"])
            assert (first["content"], arguments) == ("A", {"command": "ls", "n": 1.0, "a": [2.0]})
            # A client that writes JSON in its own way, and None for no text.
            first["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": [2], "n": 1, "command": "ls"}, indent=1)
            messages = [SYSTEM, GO, first, tool("\n\n<|im_start|>assistant\n")]
            second = await agent.say(*messages)
            assert [c["function"]["name"] for c in second["tool_calls"]] == ["bash", "bash"]
            one, two = (c["id"] for c in second["tool_calls"])
            results = [tool("2", two), tool("1", one)]  # in any order
            third = await agent.say(*messages, second, *results, {"role": "user", "content": "And?"})
            assert third == {"role": "assistant", "content": "Done."}
            return policy, agent.draft()

    policy, draft = asyncio.run(play())
    assert trained(draft) == [[token for turn in script for token in turn]]
    (segment,) = draft.segments
    ids = segment.arrays()[0].tolist()
    assert [ids[: len(prompt)] for prompt in policy.prompts] == policy.prompts
    assert [r.temperature for r in policy.requests] == [1.0] * 3
    assert len({r.session for r in policy.requests}) == 1
    said = [hermes.text(turn[:-1]) for turn in script[:2]]
    messages = [SYSTEM, GO, {"role": "assistant", "content": said[0]}, tool("\n\n<|im_start|>assistant\n")]
    messages += [{"role": "assistant", "content": said[1]}, tool("1"), tool("2"), {"role": "user", "content": "And?"}]
    assert policy.prompts[2] == hermes.prompt(messages, [TOOL])
    assert [turn.results for turn in draft.turns] == [("\n\n<|im_start|>assistant\n",), ("1", "2", "And?"), ()]
    assert draft.metrics["forks"] == 0
    assert draft.metrics["tokens_prefix_property"] == 3
    assert [definition["function"]["name"] for definition in draft.tools] == ["bash"]


def test_a_rewritten_history_is_a_segment_of_its_own(hermes: Renderer, hermes_folder: Path) -> None:
    """T4: a summary, and a changed turn, fork where they leave the record; every sampled token is trained on once."""
    speaker = Speaker(hermes_folder)
    script = [speaker.turn(call(f"c{i}"), text=f"Turn {i}.") for i in range(5)]

    async def play() -> tuple[Scripted, Open]:
        policy = Scripted(script)
        async with opened(policy, hermes) as agent:
            a = await agent.say(SYSTEM, GO)
            b = await agent.say(SYSTEM, GO, a, tool("1"))
            await agent.say(SYSTEM, GO, a, tool("1"), b | {"content": "Rewritten."}, tool("2"))
            await agent.say(SYSTEM, {"role": "user", "content": "A summary."})
            await agent.say(SYSTEM, GO, a, tool("1"), b, tool("2"))  # the first path is not lost
            return policy, agent

    policy, agent = asyncio.run(play())
    draft = agent.draft()
    assert trained(draft) == [script[0] + script[1] + script[4], script[2], script[3]]
    first = policy.prompts[1][: len(policy.prompts[0]) + len(script[0])]
    assert agent.recording.forks == [RecordedFork(0, len(first)), RecordedFork(-1, 0)]
    forked = draft.segments[1].arrays()[0].tolist()
    assert forked[: len(first)] == first, "what is kept is kept as it was sampled"
    assert "Rewritten." in hermes.text(forked[len(first) :])
    assert draft.segments[1].prompt_length == len(policy.prompts[2])
    assert [turn.text for turn in draft.turns] == [hermes.text(script[i]) for i in (0, 1, 4, 2, 3)]
    assert draft.metrics["segments"] == 3


def test_a_request_that_comes_again_gets_the_recorded_turn(hermes: Renderer, hermes_folder: Path) -> None:
    """T15: at once, while it is sampled, after a dropped stream, and in another way of answering."""
    speaker = Speaker(hermes_folder)
    script = [speaker.turn(text="One turn."), speaker.turn(text="Another.")]

    async def play() -> tuple[Held, UngradedEpisode]:
        policy = Held(script)
        async with opened(policy, hermes) as agent:
            body = {"messages": [SYSTEM, GO], "stream": True}
            async with agent.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if '"content": "One' in line:  # streamed before it was whole
                        break
            assert len(policy.prompts) == 1
            waiting = [asyncio.create_task(agent.say(SYSTEM, GO, tools=[])) for _ in range(3)]
            while agent.recording.requests < 4:
                await asyncio.sleep(0)
            policy.let_go.set()
            said = await asyncio.gather(*waiting)
            assert said == [{"role": "assistant", "content": "One turn."}] * 3
            longer = await agent.say(SYSTEM, GO, tools=[], max_tokens=900)  # asks for something else
            assert longer["content"] == "Another."
            return policy, agent.draft()

    policy, draft = asyncio.run(play())
    assert len(policy.prompts) == 2
    assert trained(draft) == script
    assert draft.metrics["repeated_requests"] == 3


def test_calls_beside_each_other_open_branches(hermes: Renderer, hermes_folder: Path) -> None:
    """Sub-agents that go on from one turn share its tokens; a title is told and not trained on."""
    speaker = Speaker(hermes_folder)
    script = [speaker.turn(call("plan")), *(speaker.turn(text=f"Part {i}.") for i in range(3))]

    async def play() -> tuple[Held, UngradedEpisode]:
        policy = Held(script)
        async with opened(policy, hermes) as agent:
            policy.let_go.set()
            first = await agent.say(SYSTEM, GO)
            policy.let_go.clear()
            both = [asyncio.create_task(agent.say(SYSTEM, GO, first, tool(text))) for text in "ab"]
            title = asyncio.create_task(agent.say({"role": "user", "content": "A title?"}, tools=[]))
            while len(policy.prompts) < 4:
                await asyncio.sleep(0)
            policy.let_go.set()
            await asyncio.gather(*both, title)
            return policy, agent.draft()

    policy, draft = asyncio.run(play())
    assert trained(draft) == [script[0] + script[1], script[2]]
    assert policy.prompts[1] == draft.segments[0].arrays()[0][: len(policy.prompts[1])].tolist()
    assert draft.segments[1].prompt_length == len(policy.prompts[2])
    assert [turn.text for turn in draft.turns] == [hermes.text(turn) for turn in script]
    assert draft.metrics["side_turns"] == 1


def test_stop_strings_cut_the_view_and_what_follows_but_no_token(hermes: Renderer, hermes_folder: Path) -> None:
    """T10, T11: the token that completes the stop stays, what was sampled after it is in no segment."""
    speaker = Speaker(hermes_folder)
    script = [speaker.turn(text="Say STOP and no more."), speaker.turn(text="Next.")]
    whole = [len(speaker.encode("Say STOP")) + 1 >= 2]
    assert whole == [True]

    async def play() -> tuple[Scripted, UngradedEpisode]:
        policy = Scripted(script)
        async with opened(policy, hermes) as agent:
            first = await agent.say(SYSTEM, GO, stop=["STOP"])
            assert first["content"].strip() == "Say"
            await agent.say(SYSTEM, GO, first, {"role": "user", "content": "Go on."})
            return policy, agent.draft()

    policy, draft = asyncio.run(play())
    (sampled,) = trained(draft)
    kept = sampled[: -len(script[1])]
    assert kept == script[0][: len(kept)]
    assert "STOP" in hermes.text(kept)
    assert "STOP" not in hermes.text(kept[:-1])
    after = policy.prompts[1][len(policy.prompts[0]) + len(kept) :]
    assert hermes.text(after).startswith("<|im_end|>\n<|im_start|>user\nGo on.")


def test_anthropics_dialect(hermes: Renderer, hermes_folder: Path) -> None:
    speaker = Speaker(hermes_folder)
    thought = speaker.encode("<think>\nHm.\n</think>\n\n")
    script = [thought + speaker.turn(call("ls"), text="Look"), speaker.turn(text="Fine é.")]
    tools = [
        {"name": "bash", "description": "Run.", "input_schema": BASH},
        {"type": "web_search_20250305", "name": "w"},
    ]
    go = {"role": "user", "content": [{"type": "text", "text": "Go.", "cache_control": {"type": "ephemeral"}}]}
    body = {"model": "claude", "max_tokens": 500, "system": [{"type": "text", "text": "Work."}], "tools": tools}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 100}}

    async def play() -> tuple[Scripted, UngradedEpisode]:
        policy = Scripted(script)
        async with opened(policy, hermes) as agent:
            del agent.http.headers["authorization"]
            agent.http.headers["x-api-key"] = agent.key
            count = (await agent.http.post("/v1/messages/count_tokens", json=body | {"messages": [go]})).json()
            first = (await agent.http.post("/v1/messages?beta=true", json=body | {"messages": [go]})).json()
            assert count == {"input_tokens": len(policy.prompts[0])}
            kinds = [part["type"] for part in first["content"]]
            assert (kinds, first["stop_reason"]) == (["thinking", "text", "tool_use"], "tool_use")
            assert first["content"][2]["input"] == {"command": "ls"}
            result = {"type": "tool_result", "tool_use_id": first["content"][2]["id"]}
            result |= {"content": [{"type": "text", "text": "a file"}]}
            reply = {"role": "user", "content": [result, {"type": "text", "text": "Remember."}]}
            again = {"messages": [go, {"role": "assistant", "content": first["content"]}, reply], "stream": True}
            events = []
            async with agent.http.stream("POST", "/v1/messages", json=body | again) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        events.append(json.loads(line[6:]))
            names = [event["type"] for event in events]
            assert names == [
                "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
                "message_stop",
            ]  # fmt: skip
            assert events[2]["delta"] == {"type": "text_delta", "text": "Fine é."}
            assert events[4]["delta"]["stop_reason"] == "end_turn"
            return policy, agent.draft()

    policy, draft = asyncio.run(play())
    assert trained(draft) == [script[0] + script[1]], "one segment: thoughts come back and stay as they were sampled"
    assert draft.turns[0].results == ("a file", "Remember.")
    assert "web_search" not in hermes.text(policy.prompts[0])
    assert "bash" in hermes.text(policy.prompts[0])


def test_openais_own_client_streams_chats_and_responses(hermes: Renderer, hermes_folder: Path) -> None:
    speaker = Speaker(hermes_folder)
    script = [
        speaker.turn(call("ls"), text="Look"),
        speaker.turn(text="Fine."),
        speaker.turn(call("x")),
        speaker.turn(text="End."),
    ]
    flat = {"type": "function", "name": "bash", "description": "Run.", "parameters": BASH, "strict": False}

    async def play() -> tuple[Scripted, UngradedEpisode]:
        policy = Scripted(script)
        async with opened(policy, hermes) as agent:
            client = openai.AsyncOpenAI(base_url=f"{agent.url}/v1", api_key=agent.key, max_retries=0, timeout=30)
            assert [model.id async for model in await client.models.list()] == ["etude"]
            usage = {"stream_options": {"include_usage": True}}
            chunks = [c async for c in await client.chat.completions.create(
                model="m", messages=[SYSTEM, GO], tools=[TOOL], stream=True, **usage)]  # fmt: skip
            deltas = [c.choices[0].delta for c in chunks if c.choices]
            assert "".join(d.content or "" for d in deltas) == "Look"
            (asked,) = [d.tool_calls[0] for d in deltas if d.tool_calls]
            assert (asked.index, asked.function.arguments) == (0, '{"command": "ls"}')
            assert chunks[-1].usage.completion_tokens == len(script[0])
            args = {"model": "m", "instructions": "Work.", "tools": [flat, {"type": "web_search"}]}
            first = await client.responses.create(input="Go.", **args)
            assert (first.output_text, first.status) == ("Fine.", "completed")
            second = await client.responses.create(input="On.", previous_response_id=first.id, **args)
            (item,) = second.output
            assert (item.type, item.name, item.arguments) == ("function_call", "bash", '{"command": "x"}')
            output = {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
            stream = await client.responses.create(input=[output], previous_response_id=second.id, stream=True, **args)
            events = [event async for event in stream]
            assert events[-1].type == "response.completed"
            assert events[-1].response.output_text == "End."
            assert [event.sequence_number for event in events] == list(range(len(events)))
            with pytest.raises(openai.BadRequestError, match="not found"):
                await client.responses.create(input="On.", previous_response_id="resp_0", **args)
            await client.close()
            return policy, agent.draft()

    policy, draft = asyncio.run(play())
    assert trained(draft) == [script[0], script[1] + script[2] + script[3]]
    assert "web_search" not in hermes.text(policy.prompts[1])


def test_refusals_have_the_dialects_shape(hermes: Renderer, hermes_folder: Path) -> None:
    speaker = Speaker(hermes_folder)
    budget = Budget(turns=2, tokens=4000, context=400, seconds=60.0)

    async def play() -> Recording:
        async with opened(Scripted([speaker.turn(text="A"), speaker.turn(text="B")]), hermes, budget) as agent:
            post = agent.http.post
            wrong = {"authorization": "Bearer sk-no", "x-api-key": "sk-no"}
            answer = await post("/v1/chat/completions", json={}, headers=wrong)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            answer = await post("/v1/messages", json={}, headers=wrong)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
            assert (await post("/v1/embeddings", json={})).json()["error"]["code"] == "not_found"
            long = {"messages": [{"role": "user", "content": "word " * 500}], "max_tokens": 5}
            answer = await post("/v1/chat/completions", json=long)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            answer = await post("/v1/messages", json=long)
            assert answer.json()["error"]["message"].startswith("prompt is too long: ")
            answer = await post("/v1/chat/completions", json={"messages": [GO], "n": 2})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
            for broken in ({"messages": [1]}, {"messages": []}, {}, {"messages": [GO], "max_tokens": "many"}):
                assert (await post("/v1/chat/completions", json=broken)).status_code == 400
                assert (await post("/v1/messages", json=broken)).status_code == 400
            for results in ([tool("1", "b")], [tool("1", "a")] * 2, []):
                asked = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
                answer = await post("/v1/chat/completions", json={"messages": [GO, asked, *results, GO]})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
            image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
            assert "image_url" in (await post("/v1/chat/completions", json={"messages": [image]})).text
            for route, kind in (
                ("/v1/chat/completions", "invalid_request_error"),
                ("/v1/messages", "request_too_large"),
            ):
                answer = await post(route, content=b" " * (LIMITS.body_bytes + 1), headers={"content-type": JSON})
                assert (answer.status_code, answer.json()["error"]["type"]) == (413, kind)
            for broken in (b"[]", b"{", b'{"messages": NaN}', b'{"a":' * 70 + b"1" + b"}" * 70, b"[" * 1_100_000):
                answer = await post("/v1/chat/completions", content=broken, headers={"content-type": JSON})
                assert answer.status_code == 400
            stops = {"messages": [GO], "stop": ["x"] * 17}
            assert (await post("/v1/chat/completions", json=stops)).json()["error"]["param"] == "stop"
            for evil in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
                assert (await post("/v1/chat/completions", json={}, headers=evil)).status_code == 403
            answer = await post("/v1/messages", json={}, headers={"host": "evil.example"})
            assert answer.json()["error"]["type"] == "permission_error"
            assert not agent.recording.ended.is_set()
            assert (await agent.say(GO))["content"] == "A"
            half = json.dumps({"messages": [GO], "model": "\ud800"}).encode()  # the name is repeated in the answer
            answer = await post("/v1/chat/completions", content=half, headers={"content-type": JSON})
            assert (answer.status_code, answer.json()["model"]) == (200, "?")
            assert (await agent.say(GO, tools=[]))["content"] == "B"
            answer = await agent.chat(SYSTEM, GO)
            assert answer["error"]["code"] == "episode_ended"
            assert (await agent.say(GO))["content"] == "A", "what was recorded is answered all the same"
            return agent.recording

    recording = asyncio.run(play())
    assert recording.stop_reason is StopReason.TURNS
    assert recording.ended.is_set()


def test_a_lost_engine_ends_the_episode_and_is_nobodys_answer(hermes: Renderer) -> None:
    async def play() -> Recording:
        async with opened(Scripted(lambda _: [1, 2, -3]), hermes) as agent:
            answer = await agent.http.post("/v1/messages", json={"messages": [GO], "max_tokens": 9})
            assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
            return agent.recording

    recording = asyncio.run(play())
    assert "negative id" in str(recording.failure)
    assert recording.ungraded(StopReason.ERROR, False).segments == ()
