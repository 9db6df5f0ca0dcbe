"""One inference server, as a process, on the bundled model: its routes, its clients, its weights, its end."""

import asyncio
import base64
import json
import os
import select
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import msgspec
import numpy as np
import openai
import pytest
import torch

from etude.cli import main
from etude.config import ServerConfig, WeightSource
from etude.errors import UserError
from etude.inference.engine.configuration import digest_of
from etude.inference.server.server import run
from etude.models.loading import load_model, named_tensors
from etude.protocol.backends import EngineClient, EngineError
from etude.protocol.wire import GenerateRequest
from etude.records import joined
from etude.renderers import document_text, renderer_for
from etude.renderers.base import PlainEncoder, load_tokenizer
from etude.run.engines import engine_url, spawn_engine
from etude.store import open_store
from etude.weights.manifest import create, key
from etude.weights.publisher import Publisher
from etude.weights.signature import generate_key, read_private_key

NANO = Path(__file__).parents[2] / "models" / "nano"
SECONDS = 120.0
TOKEN = "of-the-tests"
AUTH = {"authorization": f"Bearer {TOKEN}"}


def start(folder, source=None, token=None, **options):
    following = None if source is None else WeightSource(**source)
    config = ServerConfig(model=str(NANO), port=0, threads=1, cache_mb=128, source=following, **options)
    child = spawn_engine(config, folder, token=token)
    return child, engine_url(child, folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    child, url = start(folder, {"weights": str(folder / "weights")}, TOKEN, routes=True)
    yield folder, child, url
    child.stop(20)
    assert child.exit_code == 0, child.log.read_text()


@pytest.fixture(scope="module")
def url(server):
    return server[2]


@pytest.fixture(scope="module")
def http(url):
    with httpx2.Client(base_url=url, timeout=SECONDS, headers=AUTH) as client:
        yield client


@pytest.fixture(scope="module")
def chat(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, timeout=SECONDS, max_retries=0)


ASK = [
    {"role": "user", "content": "Fix `chunk` in src/pydash/arrays.py\ndef chunk(array, size=1):\n    return array\n"}
]


def test_generate_as_json_with_curl(url):
    body = json.dumps({"ids": [3, 40, 41], "max_tokens": 5, "seed": 1, "routes_from": 1})
    command = ["curl", "-sS", "-m", "60", "-d", body, "-H", "content-type: application/json", f"{url}/generate"]
    command += ["-H", f"authorization: Bearer {TOKEN}"]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=90).stdout)
    assert len(answer["ids"]) == len(answer["logprobs"]) == 5
    assert answer["finish_reason"] == "length"
    assert set(answer["versions"]) == {0}
    routes = answer["routes"]
    assert (routes["first"], routes["layers"], routes["slots"], routes["wide"]) == (1, 3, 2, False)
    ids = np.frombuffer(base64.b64decode(routes["ids"]), np.uint8)
    assert (len(ids), ids.max() < 8) == (6 * 3 * 2, True), "of positions 1 to 6: the last sampled token was not fed"


def test_client_repeats_itself_and_counts_as_one_session(url):
    async def play():
        async with EngineClient([url], TOKEN) as client:
            ids = list(range(100, 150))
            request = GenerateRequest(ids=ids, max_tokens=20, top_p=0.9, stop=(6,), seed=7)
            turns = [await client.generate(request, SECONDS) for _ in range(2)]
            further = msgspec.structs.replace(request, ids=ids + turns[0].ids, max_tokens=3)
            longer = await client.generate(further, SECONDS)
            health = await client.health(url)
        return ids, turns, longer, health

    ids, (first, second), longer, health = asyncio.run(play())
    assert first.ids == second.ids
    # The second run finds its prompt in the cache: other GEMM sizes, so the last bits of the log-probabilities differ.
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)
    assert second.cached_tokens == len(ids) - 1
    assert longer.cached_tokens == len(ids) + len(first.ids) - 1
    assert health["status"] == "ok"
    assert health["generated_tokens"] >= 20


def test_a_streamed_generation_is_told_as_it_is_sampled_and_ends_with_its_reader(url):
    async def play():
        async with EngineClient([url], TOKEN) as client:
            parts, ids = [], list(range(100, 150))
            request = GenerateRequest(ids=ids, max_tokens=300, top_p=0.9, seed=7, part_seconds=0.0)
            generation = await client.generate(request, SECONDS, parts.append)
            whole = await client.generate(msgspec.structs.replace(request, part_seconds=60.0), SECONDS)
            with pytest.raises(EngineError, match="the prompt is empty"):
                await client.generate(GenerateRequest(ids=[], max_tokens=9), SECONDS, parts.append)
            begun = asyncio.Event()
            long = msgspec.structs.replace(request, max_tokens=3900, seed=8)
            left = asyncio.create_task(client.generate(long, SECONDS, lambda _: begun.set()))
            await asyncio.wait_for(begun.wait(), SECONDS)
            left.cancel()
            async with asyncio.timeout(SECONDS):  # far less than what is left would take
                while (await client.health(url))["running"]:
                    await asyncio.sleep(0.01)
            sampled = (await client.health(url))["generated_tokens"]
        return parts, generation, whole, sampled

    before = httpx2.get(f"{url}/health", headers=AUTH).json()["generated_tokens"]
    parts, generation, whole, sampled = asyncio.run(play())
    assert joined(parts) == generation
    assert generation.ids == whole.ids
    assert len(parts) > 1
    assert generation.versions == [0] * 300
    assert sampled - before < 600 + 3900


def test_client_errors(url):
    async def fail(base, ids, timeout):
        async with EngineClient([base], TOKEN) as client:
            await client.generate(GenerateRequest(ids=ids, max_tokens=9), timeout)

    with pytest.raises(EngineError, match="the prompt is empty"):
        asyncio.run(fail(url, [], SECONDS))
    with pytest.raises(EngineError, match=r"4096"):
        asyncio.run(fail(url, [40] * 5000, SECONDS))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        with pytest.raises(EngineError, match="could not be reached"):
            asyncio.run(fail(f"http://127.0.0.1:{taken.getsockname()[1]}", [1], 0.5))


def test_scores_are_those_of_a_plain_pass(url, http):
    """Also of ids that the prefix cache holds: nothing is read from it."""
    sequences = [[3, *range(100, 170)], list(range(40, 50)), [3, *range(100, 170)]]

    async def ask(ids):
        async with EngineClient([url], TOKEN) as client:
            await client.generate(GenerateRequest(ids=ids[0], max_tokens=1), SECONDS)
            return await client.score(url, ids, SECONDS)

    scored, model = asyncio.run(ask(sequences)), load_model(NANO)
    health = http.get("/health").json()
    assert (scored.version, scored.digest) == (health["version"], health["digest"])
    assert scored.logprobs[0] == scored.logprobs[2]
    with torch.no_grad():
        for ids, logprobs in zip(sequences, scored.logprobs, strict=True):
            expected = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            own = expected.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).numpy()
            np.testing.assert_allclose(logprobs, own, atol=1e-4)  # other kernels, other rounding in float32
    for body in ({"sequences": [[3]]}, {"sequences": [[3, 10**6]]}, {"sequences": 3}):
        refused = http.post("/score", json=body)
        assert (refused.status_code, set(refused.json())) == (400, {"error"})


def test_health_says_how_it_computes(http):
    health = http.get("/health").json()
    settings = health["configuration"]
    assert (settings["head"], settings["log_softmax"], settings["dtype"]) == ("float32", "float32", "float32")
    assert (settings["device"], settings["threads"], settings["speculate"], settings["routes"]) == (
        "cpu",
        1,
        True,
        True,
    )
    assert health["configuration_digest"] == digest_of(settings), "JSON carries the settings whole"


def test_a_client_that_goes_away_aborts_its_request(url, http):
    async def leave():
        async with EngineClient([url], TOKEN) as client:
            with pytest.raises(TimeoutError):
                await client.generate(GenerateRequest(ids=[40] * 20, max_tokens=4000), 0.3)
            async with asyncio.timeout(SECONDS):
                while (await client.health(url))["running"]:
                    pass  # every turn of the loop waits for the server

    aborted = http.get("/health").json()["aborted"]
    asyncio.run(leave())
    assert http.get("/health").json()["aborted"] == aborted + 1


def test_chat_calls_tools(chat):
    """What the model was trained to answer is a call; the same seed streams the same message."""
    options = {"model": "nano", "messages": ASK, "seed": 3, "temperature": 0.0, "max_tokens": 200}
    whole = chat.chat.completions.create(**options, logprobs=True)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert isinstance(json.loads(call.function.arguments), dict)
    assert whole.usage.prompt_tokens == len(renderer_for(NANO).prompt(ASK))
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert all(entry.logprob <= 0.0 for entry in choice.logprobs.content)

    chunks = list(chat.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    calls = [call for chunk in chunks for c in chunk.choices for call in c.delta.tool_calls or ()]
    expected = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert [(c.function.name, c.function.arguments) for c in calls] == expected
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_stream_stop_strings_and_choices(chat):
    options = {"model": "nano", "prompt": "def chunk(array, size):\n", "seed": 5, "max_tokens": 40}
    free = chat.completions.create(**options, logprobs=1).choices[0]
    streamed = "".join(chunk.choices[0].text for chunk in chat.completions.create(**options, stream=True))
    assert streamed == free.text
    assert len(free.logprobs.tokens) == len(free.logprobs.token_logprobs)
    stop = free.text[len(free.text) // 2 :][:3]
    cut = chat.completions.create(**options, stop=[stop, "never said"]).choices[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason == "stop"
    several = chat.completions.create(**options, n=3)
    assert len({choice.text for choice in several.choices}) == 3


def test_a_prediction_changes_nothing_but_usage(chat, http):
    options = {"model": "nano", "messages": ASK, "seed": 3, "temperature": 0.0, "max_tokens": 200}
    plain = chat.chat.completions.create(**options)
    # The answer is a call, which content does not show: its text comes from the completions route.
    prompt = renderer_for(NANO).prompt(ASK)
    completion = {"model": "nano", "prompt": prompt, "temperature": 0.0, "max_tokens": 60}
    text = chat.completions.create(**completion).choices[0].text
    for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}], "", "unrelated"):
        prediction = {"type": "content", "content": content}
        same = chat.chat.completions.create(**options, prediction=prediction)
        assert same.choices[0].message.tool_calls[0].function == plain.choices[0].message.tool_calls[0].function
        assert same.usage.completion_tokens == plain.usage.completion_tokens
        details = same.usage.completion_tokens_details
        assert 0 <= details.accepted_prediction_tokens <= same.usage.completion_tokens
        assert details.rejected_prediction_tokens >= 0
    chunks = chat.completions.create(
        **completion, stream=True, stream_options={"include_usage": True}, n=1, stop=[text[30:34]],
        extra_body={"prediction": {"type": "content", "content": text}},
    )  # fmt: skip
    *events, last = list(chunks)
    assert "".join(event.choices[0].text for event in events) == text[: text.index(text[30:34])]
    assert last.usage.completion_tokens_details is not None
    for wrong in ({"type": "diff", "content": "x"}, {"type": "content"}, {"type": "content", "content": 3}, "text"):
        answer = http.post("/v1/completions", json=completion | {"prediction": wrong})
        assert answer.status_code == 400, wrong


def test_documents_over_http(url, http, chat):
    """Ids, text parts and Anthropic's parts: computed once each, in any order; usage and health tell."""
    sources = {"m.py": "def add(a, b):\n    return a - b\n", "empty.py": "", "n.py": "LIMIT = 3\n" * 20}
    parts = [{"type": "document", "title": title, "text": text} for title, text in sources.items()]
    plain = [
        {"type": "document", "title": title, "source": {"type": "text", "media_type": "text/plain", "data": text}}
        for title, text in sources.items()
    ]
    question = {"type": "text", "text": "Fix `add` in m.py"}
    ids = [PlainEncoder(load_tokenizer(NANO)).encode(document_text(*item)) for item in sources.items()]
    total = sum(map(len, ids))
    options = {"model": "nano", "temperature": 0.0, "max_tokens": 12}
    before = http.get("/health").json()["documents"]
    answers = [
        chat.chat.completions.create(messages=[{"role": "user", "content": content}], **options)
        for content in ([*parts, question], [*plain[::-1], question], [parts[1], question, parts[0]])
    ]
    after = http.get("/health").json()["documents"]
    assert (after["misses"] - before["misses"], after["hits"] - before["hits"]) == (3, 5)
    assert after["bytes"] - before["bytes"] == total * 6 * 2 * 2 * 64 * 4
    assert after["refusal"] == ""
    tail = renderer_for(NANO).prompt([{"role": "user", "content": question["text"]}])
    assert [a.usage.prompt_tokens for a in answers] == [total + len(tail)] * 2 + [len(ids[0] + ids[1] + tail)]
    cached = [answer.usage.prompt_tokens_details.model_dump()["cached_document_tokens"] for answer in answers]
    assert cached == [0, total, len(ids[0] + ids[1])]
    assert "etude_documents_hit_tokens_total" in http.get("/metrics").text

    async def ask(documents):
        async with EngineClient([url], TOKEN) as client:
            request = GenerateRequest(ids=tail, documents=tuple(documents), max_tokens=12, temperature=0.0)
            return await client.generate(request, SECONDS)

    packed = asyncio.run(ask(ids))
    as_json = http.post("/generate", json={"ids": tail, "documents": ids, "max_tokens": 12, "temperature": 0.0}).json()
    assert packed.ids == as_json["ids"]
    assert packed.cached_document_tokens == as_json["cached_document_tokens"] == total
    assert asyncio.run(ask(ids[::-1])).logprobs != packed.logprobs, "order matters"


def test_bad_documents_are_one_sentence(http):
    def chat(*content):
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": list(content)}]}

    for (route, body), sentence in (
        (("/generate", {"ids": [40], "documents": [[41], []], "max_tokens": 1}), "document 1 is empty: leave it out"),
        (("/generate", {"ids": [], "documents": [[41]], "max_tokens": 1}), "nothing follows the documents"),
        (("/generate", {"ids": [40], "documents": [41], "max_tokens": 1}), "Expected `array`"),
        (("/generate", {"ids": [40], "documents": [[40] * 5000], "max_tokens": 1}), "5000 of them documents"),
        (chat({"type": "document", "title": "a.pdf"}), "a document part needs its text"),
        (chat({"type": "document", "text": "x", "title": 3}), "may have a title: both are strings"),
        (chat({"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}), "send its text, as type 'text'"),
    ):
        answer = http.post(route, json=body)
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_apply_over_http(http):
    """The bundled model is no apply model, and its answer says so; what is wrong with an edit is told before."""
    body = {"code": "a = 1\nb = 2\n", "update": "a = 1\nb = 3\n"}
    answer = http.post("/v1/apply", json=body)
    assert answer.status_code == 422
    assert "no apply model" in answer.json()["error"]["message"]
    for wrong, sentence in (
        ({"update": "zebra(17)\n"}, "quote a line of the file"),
        ({"code": "x = 1\n" * 10_001}, "split the file"),
        ({"code": "a = 1\n" + "word " * 3000}, "context of 4096"),
        ({"code": 3}, "Expected `str`"),
        ({"temperature": -1}, "temperature"),
    ):
        refused = http.post("/v1/apply", json=body | wrong)
        assert refused.status_code == 400, wrong
        assert sentence in refused.json()["error"]["message"]
    assert http.post("/v1/apply", json=body | {"model": "gpt-7"}).status_code == 404


def test_errors_have_openais_shape(http, chat):
    for route, body, param in (
        ("/v1/chat/completions", b"{", None),
        ("/v1/chat/completions", json.dumps({"messages": []}).encode(), "messages"),
        ("/v1/chat/completions", json.dumps({"messages": [{"role": "alien", "content": "x"}]}).encode(), "messages"),
        ("/v1/chat/completions", json.dumps({"messages": ASK, "temperature": -1}).encode(), None),
        ("/v1/completions", json.dumps({"prompt": "x", "n": 0}).encode(), "n"),
        ("/v1/completions", json.dumps({"prompt": "x " * 5000}).encode(), None),
        ("/generate", json.dumps({"ids": [1], "max_tokens": "many"}).encode(), None),
        ("/generate", b"\xff", None),
    ):
        answer = http.post(route, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, body
        assert answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["param"] == param
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        chat.chat.completions.create(model="gpt-7", messages=ASK)


def test_an_agent_that_compacts_reads_it_off_the_code(http):
    """Too many tokens, and far too many characters, which are not even encoded; a file that does not fit."""
    for content in ("word " * 5000, "x" * 10_000_000):
        chat = {"messages": [{"role": "user", "content": content}]}
        document = {"messages": [{"role": "user", "content": [{"type": "document", "text": content}, ASK[0]]}]}
        predicted = {"messages": ASK, "prediction": {"type": "content", "content": "x" * 10_000_000}}
        for route, body in (
            ("/v1/chat/completions", chat), ("/v1/chat/completions", document), ("/v1/chat/completions", predicted),
            ("/v1/completions", {"prompt": content}), ("/v1/apply", {"code": content, "update": "x = 1\n"}),
        ):  # fmt: skip
            refused = http.post(route, json=body)
            if route == "/v1/apply" and content.startswith("word"):
                assert refused.status_code == 400
                continue
            found = refused.status_code, refused.json()["error"]["code"]
            assert found == (400, "context_length_exceeded"), (route, body.keys())
    assert http.post("/generate", json={"ids": [40] * 5000, "max_tokens": 1}).json()["error"]["code"] is not None


def test_lists_and_strings_are_bounded(http):
    deep = []
    for _ in range(80):
        deep = [deep]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}
    options = {"prompt": "a", "max_tokens": 2}
    for route, body, param in (
        ("/v1/completions", options | {"stop": ["x"] * 17}, "stop"),
        ("/v1/completions", options | {"stop": "x" * 1025}, "stop"),
        ("/v1/completions", options | {"user": "x" * 513}, "user"),
        ("/v1/completions", options | {"logprobs": -1}, "logprobs"),
        ("/v1/chat/completions", {"messages": ASK, "tools": [tool]}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": deep}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"a": 1}}]}, "messages"),
        ("/generate", {"ids": [40], "max_tokens": 2, "stop": [2**70]}, None),
        ("/generate", {"ids": [40], "max_tokens": 2, "session": "x" * 513}, None),
        ("/score", {"sequences": [[40, 41]] * 257}, None),
        ("/score", {"sequences": [[40, 41], [40, 10**9]]}, None),
    ):
        refused = http.post(route, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), (route, refused.text)
    assert http.get(f"/weights/chunks/{'9' * 5000}?version=1").status_code == 400
    assert http.get(f"/weights/chunks/1?version={'9' * 5000}").status_code == 400
    assert http.get("/weights/chunks/99?version=0").status_code == 404


def test_a_cold_request_is_answered_and_the_server_goes_on(http):
    for temperature in (1e-38, 1e-37, 5e-324):
        body = {"prompt": "def f(x):", "max_tokens": 4, "temperature": temperature}
        cold = http.post("/v1/completions", json=body)
        zero = http.post("/v1/completions", json=body | {"temperature": 0})
        assert cold.json()["choices"][0]["text"] == zero.json()["choices"][0]["text"]
    assert http.get("/health").json()["status"] == "ok"


def test_an_engine_that_is_full_says_so_and_the_client_waits(http, url):
    """1024 sequences wait at a paused engine, and one of a client without others; what comes then is told to try again,
    and gets its answer in the end."""
    http.post("/pause?mode=wait")

    async def fill():
        async with (
            httpx2.AsyncClient(base_url=url, timeout=SECONDS, headers=AUTH) as many,
            EngineClient([url], TOKEN) as client,
        ):
            body = {"prompt": "def f(x):", "max_tokens": 1, "n": 128}
            waiting = [asyncio.create_task(many.post("/v1/completions", json=body)) for _ in range(8)]
            async with asyncio.timeout(SECONDS):
                while (await client.health(url))["waiting"] < 1024:
                    await asyncio.sleep(0.05)
            first_of_its_client = asyncio.create_task(client.generate(GenerateRequest(ids=[40], max_tokens=1), SECONDS))
            async with asyncio.timeout(SECONDS):
                while (await client.health(url))["waiting"] < 1025:
                    await asyncio.sleep(0.05)
            refused = [
                await many.post(route, json=more)
                for route, more in (("/v1/completions", body), ("/generate", {"ids": [40], "max_tokens": 1}))
            ]
            late = asyncio.create_task(client.generate(GenerateRequest(ids=[40, 41], max_tokens=2), SECONDS))
            await asyncio.sleep(0.5)
            assert not late.done()
            await many.post("/pause?mode=abort")
            await many.post("/resume")
            assert (await first_of_its_client).finish_reason == "abort"
            return refused, [answer.status_code for answer in await asyncio.gather(*waiting)], await late

    refused, first, late = asyncio.run(fill())
    assert [(answer.status_code, answer.headers["retry-after"]) for answer in refused] == [(503, "1")] * 2
    assert first == [200] * 8
    assert len(late.ids) == 2


def test_other_hosts_origins_and_forms_are_refused(http):
    for headers, status in (
        ({"host": "evil.example"}, 403), ({"origin": "http://evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
    ):  # fmt: skip
        refused = http.post("/pause", headers=headers, content=b"{}")
        assert (refused.status_code, set(refused.json())) == (status, {"error"})
    assert http.post("/pause", headers={"origin": "http://evil.example"}).status_code == 403
    assert http.get("/is_paused").json() == {"is_paused": False}
    assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert http.get("/generate").json()["error"]["code"] == "method_not_allowed"


def test_what_cannot_be_read_is_refused(http):
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    refused = http.post("/v1/chat/completions", json={"messages": messages})
    assert (refused.status_code, "not a part of type 'image_url'" in refused.text) == (400, True)
    refused = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 0})
    assert (refused.status_code, "max_tokens must be at least 1" in refused.text) == (400, True)
    refused = http.post("/generate", json={"ids": [40], "max_tokens": 2, "temprature": 0})
    assert (refused.status_code, "temprature" in refused.text) == (400, True)


def test_pause_keeps_requests_and_resume_goes_on(http, url):
    assert http.get("/is_paused").json() == {"is_paused": False}
    assert http.post("/pause?mode=later").status_code == 400
    http.post("/pause?mode=wait")
    assert http.get("/is_paused").json() == {"is_paused": True}

    async def generate_over_a_pause():
        async with EngineClient([url], TOKEN) as client, httpx2.AsyncClient(base_url=url, headers=AUTH) as admin:
            request = GenerateRequest(ids=[40, 41], max_tokens=3)
            task = asyncio.create_task(client.generate(request, SECONDS))
            while not (await client.health(url))["waiting"]:
                pass  # every turn of the loop waits for the server
            assert not task.done()
            await admin.post("/resume")
            return await task

    assert len(asyncio.run(generate_over_a_pause()).ids) == 3


def test_models_and_metrics(http, server):
    said = server[1].log.read_text()
    assert "loading nano on cpu, and trying it ..." in said
    assert "context: 4096 tokens of prompt and answer\n" in said
    card = http.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("nano", 4096)
    metrics = http.get("/metrics").text
    assert "etude_engine_sampled_tokens_total" in metrics
    assert "etude_weights_version 0.0" in metrics


def test_new_versions_are_served_verified(server, http):
    """A published version goes live in a running server; a damaged one never does, and the reason is told."""
    folder, _, url = server
    store = open_store(str(folder / "weights"))
    tensors = {name: tensor.bfloat16() for name, tensor in named_tensors(load_model(NANO)).items()}
    publisher = Publisher(store, anchor_versions=8)
    publisher.publish(0, tensors, (), {})
    tensors["model.norm.weight"] += 0.125
    manifest = publisher.publish(1, tensors, (), {})

    async def wait_for(key, value):
        async with EngineClient([url], TOKEN) as client, asyncio.timeout(SECONDS):
            while (health := await client.health(url))[key] != value:
                await asyncio.sleep(0.02)
        return health

    assert asyncio.run(wait_for("version", 1))["digest"] == manifest.digest
    assert http.get("/health?verify=1").json()["digest"] == manifest.digest
    answer = http.post("/generate", json={"ids": [40], "max_tokens": 2}).json()
    assert answer["versions"] == [1, 1]

    # Published elsewhere first, so that the server never sees the good payload.
    tensors["model.norm.weight"] += 0.125
    broken = Publisher(open_store(str(folder / "elsewhere")), anchor_versions=8).publish(2, tensors, (), {})
    store.put(broken.payload[0].key, b"not what was published")
    assert create(store, broken)
    health = asyncio.run(wait_for("status", "failed"))
    assert "version 2" in health["error"]
    assert health["version"] == 1
    tensors["model.norm.weight"] += 0.125
    repaired = Publisher(store, anchor_versions=8).publish(3, tensors, (), {})
    assert asyncio.run(wait_for("version", 3))["digest"] == repaired.digest
    assert asyncio.run(wait_for("status", "ok"))


@pytest.mark.slow
def test_a_store_that_goes_back_is_not_followed_after_a_restart(tmp_path):
    generate_key(tmp_path / "key")
    store = open_store(str(tmp_path / "weights"))
    tensors = {name: tensor.bfloat16() for name, tensor in named_tensors(load_model(NANO)).items()}
    publisher, published = Publisher(store, key=read_private_key(tmp_path / "key")), []
    for version in range(2):
        tensors["model.norm.weight"] += 0.125
        published.append(publisher.publish(version, tensors, (), {}))
    source = {"weights": str(tmp_path / "weights"), "public_key": tmp_path / "key.pub"}
    source |= {"accepted": tmp_path / "accepted.json"}

    def served():
        child, url = start(tmp_path, source)
        health = httpx2.get(f"{url}/health", timeout=SECONDS).json()
        child.stop(20)
        return health

    assert served()["digest"] == published[1].digest
    store.delete(key(1))  # what is left is older, though its signature is good
    health = served()
    assert health["digest"] != published[0].digest, "the model of the folder is served, not version 0"
    assert "version 0 is older than version 1, which was accepted before" in health["error"]


@pytest.mark.slow
def test_versions_of_a_model_with_another_vocabulary_are_not_served(tmp_path):
    store = open_store(str(tmp_path / "weights"))
    tensors = {name: tensor.bfloat16() for name, tensor in named_tensors(load_model(NANO)).items()}
    tensors["model.norm.weight"] += 0.125
    published = Publisher(store, model="0" * 32).publish(0, tensors, (), {})
    child, url = start(tmp_path, {"weights": str(tmp_path / "weights")})
    refused = httpx2.post(f"{url}/pause", timeout=SECONDS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_token"), "it was started without one"
    health = httpx2.get(f"{url}/health", timeout=SECONDS).json()
    child.stop(20)
    assert "another config.json or tokenizer.json" in health["error"]
    assert health["digest"] != published.digest


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--relay", "http://127.0.0.1:1"], "--relay: give the store with --weights, too"),
        (["--weights", "store", "--accepted", "a"], "--accepted needs --public-key"),
        (["--threads", "0"], "threads: Input should be greater than or equal to 1"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in: give a token"),
        (["--api-key-file", "gone"], "gone cannot be read"),
        (["--cache-mb", "0.1"], "holds 0 tokens: raise cache_mb (--cache-mb of `etude serve`"),
    ],
)
def test_wrong_flags_are_one_sentence(flags, reason, capsys, monkeypatch):
    monkeypatch.delenv("ETUDE_API_KEY", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main.main(["serve", str(NANO), "--port", "0", *flags])
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


def test_user_errors_are_one_sentence(tmp_path, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
            run(ServerConfig(model=str(NANO), port=port))
    folder = tmp_path / "cut"
    shutil.copytree(NANO, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    child = spawn_engine(ServerConfig(model=str(folder), port=0), tmp_path)
    with pytest.raises(UserError, match="is damaged"):
        engine_url(child, tmp_path)
    assert child.exit_code == 2
    with pytest.raises(UserError, match="is not a folder"):
        run(ServerConfig(model=str(tmp_path / "nothing"), port=0))


@pytest.mark.slow
def test_it_dies_with_its_parent(tmp_path):
    """A parent that is killed leaves no server behind."""
    script = (
        "import sys, pathlib, time; import tests.inference.test_server as t\n"
        "child, url = t.start(pathlib.Path(sys.argv[1])); print(child.popen.pid, flush=True)\n"
        "time.sleep(300)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        server = os.pidfd_open(pid)  # refers to this very process, also when its number is given to another
        parent.kill()
    try:
        assert select.select([server], [], [], 20)[0], "the server outlived its parent"
    finally:
        os.close(server)
