"""A model behind OpenAI's or Anthropic's API plays tasks with real tools, boxes and grading; the model is a fake."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from etude.cli.main import main
from etude.config import ServerConfig
from etude.errors import UserError
from etude.evals.suite import EvalResult, evaluate, pick_tasks
from etude.grading.runner import open_sandbox
from etude.protocol.backends import EngineError
from etude.protocol.backends.chat_model import Api, ChatClient, ChatModel, ContextSpent, Conversation
from etude.records import Budget
from etude.renderers.schemas import SCHEMAS
from etude.rollout.chat_episode import ChatContext
from etude.run.engines import engine_url, spawn_engine
from etude.tasks import dataset
from tests.helpers.chat_apis import KEY, FakeModel
from tests.helpers.http_apps import answering
from tests.helpers.mixtures import TINY
from tests.helpers.speakers import TEMPLATE, hermes_tokenizer, write_model
from tests.helpers.tiny_models import save_random_model

APIS: tuple[Api, ...] = ("openai", "anthropic")
BUDGET = Budget(turns=5, tokens=1000, context=10_000, seconds=60.0)


def play(fake: FakeModel, api: Api, *budgets: Budget, tasks: int) -> list[EvalResult]:
    """So many training tasks of the tiny dataset, once under each budget."""
    data = dataset.load_dataset(TINY)

    async def work(url: str) -> list[EvalResult]:
        async with open_sandbox() as sandbox, ChatClient(ChatModel(f"{url}/v1", "m", api), KEY) as client:
            contexts = [ChatContext(data, sandbox, client, budget) for budget in budgets]
            return [await evaluate(context, samples=1, split="train", max_tasks=tasks) for context in contexts]

    with answering(fake.app()) as url:
        return asyncio.run(asyncio.wait_for(work(url), 240))


@pytest.mark.parametrize("api", APIS)
def test_tasks_are_solved_over_the_api(api: Api) -> None:
    """Tasks, tools and grading as with a model of our own; busy servers are asked again, and tokens are counted."""
    tasks = pick_tasks(dataset.load_dataset(TINY).tasks, "train", 2)
    fake = FakeModel(tasks, busy=(429, 503, 529), fails=tasks[0].prompt)
    (result,) = play(fake, api, BUDGET, tasks=2)
    assert [task.passed for task in result.tasks] == [(False,), (True,)]
    assert result.stops == {"finished": 2}
    assert result.behaviour["edits"] == 0.5
    prompts = {"openai": 100 + (100 + 200 + 300), "anthropic": 100 + (100 + 160 + 220)}
    assert result.tokens == {"prompt": prompts[api], "cached": 40 * 4, "sampled": 7 * 4}
    assert fake.statuses == {429: 1, 503: 1, 529: 1, 200: 4}
    last = max(fake.requests, key=lambda body: len(body["messages"]))
    assert "passed" in json.dumps(last["messages"][-1]), "the result of `test`"


def test_budgets_end_an_episode_where_it_stands() -> None:
    fake = FakeModel(dataset.load_dataset(TINY).split("train"))
    spent = {"turns": 1}, {"tokens": 10}, {"context": 150}
    results = play(fake, "openai", *(structs.replace(BUDGET, **one) for one in spent), tasks=1)
    assert [result.stops for result in results] == [{"turns": 1}, {"tokens": 1}, {"tokens": 1}]
    last = [body["max_tokens"] for body in fake.requests[-2:]]
    assert last == [150, 43], "what is left of the context bounds a turn"


def ask(fake: FakeModel, key: str | None = KEY, *, path: str = "/v1", patience: float = 1.0) -> Any:
    talk = Conversation("system", [{"role": "user", "content": "hello"}])

    async def work(url: str) -> Any:
        async with ChatClient(ChatModel(f"{url}{path}", "m"), key, patience) as client:
            return await client.answer(talk, SCHEMAS, 10, 1, 5.0)

    with answering(fake.app()) as url:
        return asyncio.run(work(url))


def test_what_the_command_line_is_to_blame_for_is_said() -> None:
    fake = FakeModel((), fails="hello")
    with pytest.raises(UserError, match=r"refuses with status 401: no such key; give the key in .* --key-file"):
        ask(fake, "wrong")
    with pytest.raises(UserError, match=r"status 404: .*give the base of the API, ending in /v1"):
        ask(fake, path="/v2")
    assert ask(fake).calls[0].name == "finish"


@pytest.mark.parametrize("url", ["http:///v1", "ftp://host/v1", "host:80/v1"])
def test_what_is_no_url_is_not_asked_again(url: str) -> None:
    async def work() -> None:
        async with ChatClient(ChatModel(url, "m"), patience=60.0) as client:
            await client.answer(Conversation("system", []), SCHEMAS, 10, 1, 5.0)

    with pytest.raises(UserError, match="is no URL of an API"):
        asyncio.run(asyncio.wait_for(work(), 10.0))


def test_a_server_that_stays_busy_is_infrastructure() -> None:
    fake = FakeModel((), busy=[429] * 10_000, fails="hello")
    with pytest.raises(EngineError, match=r"was busy for 0 seconds \(status 429: slow down"):
        ask(fake, patience=0.2)
    assert fake.statuses[429] > 2, "it was asked again"


def test_a_conversation_that_is_too_long_is_no_error() -> None:
    class TooLong(FakeModel):
        def _refused(self, allowed: bool) -> Any:
            return self._bad("This model's maximum context length is 8192 tokens")

    with pytest.raises(ContextSpent):
        ask(TooLong(()))


def test_calls_that_are_no_json_are_shown_to_the_model() -> None:
    from etude.protocol.backends.chat_model import FORMATS

    def message(arguments: Any) -> Any:
        call = {"id": "1", "function": {"name": "read", "arguments": arguments}}
        return {"choices": [{"message": {"content": None, "tool_calls": [call]}, "finish_reason": "length"}]}

    for arguments, why in (("{", "no JSON"), ("[1]", "no object"), ("[" * 100_000, "no JSON")):
        answer = FORMATS["openai"].read(message(arguments))
        assert answer.calls[0].arguments is None
        assert why in answer.calls[0].error
        assert answer.cut
    assert FORMATS["openai"].read(message("")).calls[0].arguments == {}


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *words])
    return int(ended.value.code or 0)


def test_the_command_measures_an_url_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    (tmp_path / "key").write_text(KEY + "\n")
    fake = FakeModel(dataset.load_dataset(TINY).tasks)
    with answering(fake.app()) as url:
        words = (f"{url}/v1", "--model", "m", "--suite", str(TINY), "--split", "train", "--samples", "1", "--json")
        words += ("--max-tasks", "2")
        kept = ("-o", str(tmp_path / "out"), "--key-file", str(tmp_path / "key"), "--turns", "4", "--tokens", "500")
        assert run(*words, *kept) == 0
        out = capsys.readouterr().out.splitlines()
        asked = len(fake.requests)
        next((tmp_path / "out/model-0").glob("*.msgpack")).unlink()
        assert run(*words, *kept) == 0
        again = capsys.readouterr().out.splitlines()
        assert run(*words, *kept[:-1], "600") == 2
    assert (asked, len(fake.requests)) == (6, 9), "one episode of two was played again"
    assert out[0] == f"m at {url}/v1: pass@1 100.0 % [15.8, 100.0]"
    assert out[1] == "  tokens: 1,200 read, 240 of them cached; 42 sampled"
    first, second = (json.loads(lines[-1])["results"][0] for lines in (out, again))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert "is of another measurement" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://h/v1",), "give --model NAME for each URL"),
        (("nano", "--model", "m"), "give --model NAME for each URL"),
        (("nano", "--key-file", "k"), "--key-file and --temperature belong to the URL"),
        (("ftp://h/v1", "--model", "m"), "is no URL of an API"),
        (("http://h/v1", "--model", "m", "--key-file", "gone"), "--key-file gone cannot be read"),
        (("http://127.0.0.1:9/v1", "--model", "m"), "nothing answers at http://127.0.0.1:9/v1"),
        (("nano", "--turns", "0"), "turns"),
        (("nano", "--concurrency", "0"), "--concurrency is a number"),
        (
            ("http://h/v1", "--model", "m", "--dialect", "hermes"),
            "--dialect and --chat-template-kwargs belong to",
        ),
        (("nano", "--chat-template-kwargs", "[]"), "--chat-template-kwargs is a JSON object"),
        (("nano", "--chat-template-kwargs", '{"a": 1}'), "leave chat_template_kwargs out"),
        (("nano", "--dialect", "klingon"), "There is no dialect 'klingon'"),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words, "--suite", str(TINY)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_a_server_of_ours_is_measured_like_any_other(tmp_path: Path, api: Api) -> None:
    """A random model says nothing sensible: that its turns arrive, are counted and graded is all that can be asked."""
    tokenizer = hermes_tokenizer()
    write_model(tmp_path / "model", tokenizer, TEMPLATE)
    vocabulary = tokenizer.get_vocab_size()
    save_random_model(tmp_path / "model", "qwen3", vocab_size=vocabulary, max_position_embeddings=8192)
    engine = spawn_engine(ServerConfig(model=str(tmp_path / "model"), port=0, max_model_len=8192), tmp_path)

    async def work(url: str) -> EvalResult:
        async with open_sandbox() as sandbox, ChatClient(ChatModel(f"{url}/v1", "model", api)) as client:
            budget = Budget(turns=2, tokens=32, context=8192, seconds=120.0)
            return await evaluate(
                ChatContext(dataset.load_dataset(TINY), sandbox, client, budget), samples=1, split="train"
            )

    try:
        result = asyncio.run(work(engine_url(engine, tmp_path)))
    finally:
        engine.stop(10)
    assert result.outcomes == {"scored": 3}
    assert result.tokens["prompt"] > 3 * 500, "the tools are part of each prompt"
    assert 3 <= result.tokens["sampled"] <= 3 * 32
    assert result.retries == 0
