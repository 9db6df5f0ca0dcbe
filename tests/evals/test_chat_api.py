"""A model behind OpenAI's or Anthropic's API plays tasks with real tools, boxes and grading; the model is a fake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec import structs
from starlette.requests import Request
from starlette.responses import JSONResponse

from etude.cli.main import main
from etude.config import ServerConfig
from etude.errors import UserError
from etude.evals.suite import EvalResult, evaluate, pick_tasks
from etude.grading.runner import open_sandbox
from etude.harness.loop import ChatAPI
from etude.protocol.backends import EngineError
from etude.protocol.backends.chat_formats import FORMATS, Api, ChatModel, Conversation
from etude.protocol.backends.chat_model import ChatClient, ContextSpent
from etude.records import Budget, Episode, StopReason, Turn, encode
from etude.renderers import Renderer, renderer_for
from etude.renderers.schemas import SCHEMAS
from etude.rollout.environments.code import dataset_part
from etude.rollout.environments.taskset import Taskset
from etude.rollout.episode import RolloutContext
from etude.run.engines import engine_url, spawn_engine
from etude.tasks import dataset
from tests.helpers.chat_apis import KEY, Call, FakeModel
from tests.helpers.http_apps import answering
from tests.helpers.mixtures import TINY
from tests.helpers.speakers import TEMPLATE, hermes_tokenizer, write_model
from tests.helpers.tiny_models import save_random_model
from tests.rollout.test_applied_edits import BUDGET as EDIT_BUDGET
from tests.rollout.test_applied_edits import RESULT, edit_tasks, tables  # noqa: F401 - `tables` is a fixture
from tests.rollout.test_environment import config as environment_config
from tests.rollout.test_environment import tasks_of

APIS: tuple[Api, ...] = ("openai", "anthropic")
BUDGET = Budget(turns=5, tokens=1000, context=10_000, seconds=60.0)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return renderer_for(write_model(tmp_path_factory.mktemp("hermes"), hermes_tokenizer(), TEMPLATE))


def play(fake: FakeModel, api: Api, *budgets: Budget, tasks: int) -> list[EvalResult]:
    """So many training tasks of the tiny dataset, once under each budget."""
    data = Taskset((dataset_part(TINY),))

    async def work(url: str) -> list[EvalResult]:
        async with open_sandbox() as sandbox, ChatClient(ChatModel(f"{url}/v1", "m", api), KEY) as client:
            contexts = [RolloutContext(data, sandbox, ChatAPI(client), budget) for budget in budgets]
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


class Scripted(FakeModel):
    """Says what `script` makes of the user's message and of the results so far: a text and calls."""

    def __init__(self, script: Callable[[str, list[str]], tuple[str, list[Call]]]) -> None:
        super().__init__(())
        self.script = script

    async def openai(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body)
        users = [message["content"] for message in body["messages"] if message["role"] == "user"]
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        text, calls = self.script(users[0], results)
        made = [
            {
                "id": str(len(results)),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for name, arguments in calls
        ]
        message = {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})
        usage = {"prompt_tokens": 100, "completion_tokens": 7}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    async def anthropic(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body)
        later = [m["content"] for m in body["messages"][1:] if m["role"] == "user"]
        results = [block["content"] for blocks in later for block in blocks]
        text, calls = self.script(body["messages"][0]["content"], results)
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        blocks += [
            {"type": "tool_use", "id": str(len(results)), "name": name, "input": arguments} for name, arguments in calls
        ]
        usage = {"input_tokens": 100, "output_tokens": 7}
        return JSONResponse({"content": blocks, "stop_reason": "end_turn", "usage": usage})


def play_script(fake: Scripted, api: Api, data: Taskset) -> tuple[list[Episode], EvalResult]:
    """The training tasks of a dataset, once each."""
    episodes: list[Episode] = []

    async def work(url: str) -> EvalResult:
        async with open_sandbox(workers=1) as sandbox, ChatClient(ChatModel(f"{url}/v1", "m", api), KEY) as client:
            context = RolloutContext(data, sandbox, ChatAPI(client), BUDGET)
            return await evaluate(context, samples=1, split="train", on_episode=episodes.append)

    with answering(fake.app()) as url:
        result = asyncio.run(asyncio.wait_for(work(url), 120))
    return sorted(episodes, key=lambda episode: episode.task_id), result


@pytest.mark.parametrize("api", APIS)
def test_an_environment_in_python_is_played_over_the_api(api: Api, hermes: Renderer) -> None:
    """Its tools are those that the model sees, its reward gets the answer, and no empty message or list is sent."""

    def script(user: str, results: list[str]) -> tuple[str, list[Call]]:
        number = int(user.partition(" ")[0])
        if not results:
            return "Let me add.", [("add", {"first": number, "second": number if number < 3 else 0})]
        return f" {results[0]}\n", []

    fake = Scripted(script)
    data = tasks_of(environment_config("tests.rollout.test_environment:Sums"), hermes)
    episodes, result = play_script(fake, api, data)
    train = [task.id for task in data.tasks if task.split == "train"]
    assert [episode.task_id for episode in episodes] == train
    assert [episode.passed for episode in episodes] == [id != "sum-3" for id in train]
    first = episodes[0]
    assert [turn.text for turn in first.turns] == ["Let me add.", f" {first.turns[0].results[0]}\n"]
    assert (first.metrics["turns"], first.metrics["calls/add"], first.segments) == (2, 1, ())
    assert first.grade == first.metrics["environment/reward"] == first.reward
    assert result.stops == {"finished": len(train)}
    asked = fake.requests[0]
    assert "system" not in asked
    assert asked["messages"][0]["role"] == "user"
    assert [tool.get("function", tool)["name"] for tool in asked["tools"]] == ["add", "fail"]


def test_an_environment_with_a_box_is_played_over_the_api(hermes: Renderer) -> None:
    def script(_: str, results: list[str]) -> tuple[str, list[Call]]:
        return ("Done.", []) if results else ("", [("run", {"command": "echo two >> a.txt"})])

    data = tasks_of(environment_config("tests.rollout.test_environment:Filed"), hermes)
    episodes, _ = play_script(Scripted(script), "openai", data)
    assert episodes
    assert all(episode.passed and episode.turns[0].results == ("exit code 0",) for episode in episodes)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("before", "after", "reward"),
    [
        ("<updated-code>\n", "</updated-code>", 1.0),
        ("Here it is:\n<updated-code>\n", "</updated-code>\nI hope this helps.", 1.0),
        ("", "</updated-code>", 1.0),
        ("<updated-code>\n", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_an_edit_is_applied_over_the_api(
    api: Api,
    before: str,
    after: str,
    reward: float,
    hermes: Renderer,
    tables: Path,  # noqa: F811
) -> None:
    """The model is told the tag that an engine's model gets behind its prompt; an answer counts with or without it."""
    fake = Scripted(lambda *_: (before + RESULT + after, []))
    episodes, _ = play_script(fake, api, edit_tasks(tables, hermes, EDIT_BUDGET))
    (episode,) = episodes
    assert (episode.task_id, episode.reward, episode.passed) == ("e1", reward, reward == 1.0)
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.FINISHED, 1)
    assert episode.turns[0].text == RESULT + after
    (asked,) = fake.requests
    assert not {"tools", "system"} & asked.keys()
    user = asked["messages"][0]["content"]
    assert user.startswith("<instruction>Multiply.</instruction>")
    assert user.endswith("close its tag after the last line.\n<updated-code>")
    assert asked["max_tokens"] == BUDGET.tokens


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
        ask(fake, patience=0.45)
    assert 2 < fake.statuses[429] < 7, "it was asked again, and not without end"


def test_a_conversation_that_is_too_long_is_no_error() -> None:
    class TooLong(FakeModel):
        def _refused(self, allowed: bool) -> Any:
            return self._bad("This model's maximum context length is 8192 tokens")

    with pytest.raises(ContextSpent):
        ask(TooLong(()))


def test_calls_that_are_no_json_are_shown_to_the_model() -> None:
    def message(arguments: Any) -> Any:
        call = {"id": "1", "function": {"name": "read", "arguments": arguments}}
        return {"choices": [{"message": {"content": None, "tool_calls": [call]}, "finish_reason": "length"}]}

    for arguments in ("{", "[1]", "[" * 100_000):
        answer = FORMATS["openai"].read(message(arguments))
        assert answer.calls[0].arguments is None
        assert "not a JSON object" in answer.calls[0].error
        assert answer.cut
    assert FORMATS["openai"].read(message("")).calls[0].arguments == {}


def test_what_no_record_can_hold_is_no_fault_of_ours() -> None:
    """Halves of surrogate pairs in texts and arguments, huge integers, and texts that are none."""
    client = ChatClient(ChatModel("http://x/v1", "m"))

    def read(content: Any, *arguments: str) -> Any:
        calls = [{"id": "1", "function": {"name": "f\udc80", "arguments": each}} for each in arguments]
        body = {"choices": [{"message": {"content": content, "tool_calls": calls}}]}
        return client._read(httpx2.Response(200, content=json.dumps(body).encode()), 0.0)

    answer = read("a\ud800b", '{"x": "\\ud800"}', '{"x": 1' + "0" * 30 + "}", '{"x": "é"}')
    encode(Turn(text=answer.text, calls=answer.calls, results=(), seconds_model=0.0, seconds_tools=0.0))
    json.dumps(answer.message, ensure_ascii=False).encode()  # as it is sent back
    assert answer.text == "a?b"
    assert [call.arguments for call in answer.calls] == [None, None, {"x": "é"}]
    assert "cannot be recorded" in answer.calls[0].error
    with pytest.raises(EngineError, match="sent what is no answer: TypeError a text is int"):
        read(3)


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


class Asking(FakeModel):
    """Calls a tool of the user in every turn, too."""

    def turn(self, user: str, number: int) -> Any:
        return [("echo", {"text": "hello", "times": number}), *super().turn(user, number)]


def test_a_measured_agent_has_tools_of_the_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    fake = Asking(dataset.load_dataset(TINY).tasks)
    with answering(fake.app()) as url:
        words = (f"{url}/v1", "--model", "m", "--suite", str(TINY), "--split", "train", "--samples", "1")
        words += ("--max-tasks", "1", "--turns", "4", "-o", str(tmp_path / "out"))
        own = ("--custom-tools", "tests.helpers.boxed_functions:echo")
        assert run(*words, *own) == 0
        assert run(*words) == 2
        assert "is of another measurement" in capsys.readouterr().err
        assert run(*words, own[0], "tests.helpers.boxed_functions:grep") == 2
        assert "the tool grep has the name of a built-in tool" in capsys.readouterr().err
    last = fake.requests[-1]
    assert [tool["function"]["name"] for tool in last["tools"]][-2:] == ["finish", "echo"]
    results = [message["content"] for message in last["messages"] if message["role"] == "tool"]
    assert (results[0], results[3]) == ("", "hello")
    settings = json.loads((tmp_path / "out/model-0/measurement.json").read_text())
    assert settings["rendered"][2:] == [own[1]]


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
        (("nano", "--custom-tools", "a:b"), "speaks the compact dialect, which has its own tools: drop --custom-tools"),
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
            context = RolloutContext(Taskset((dataset_part(TINY),)), sandbox, ChatAPI(client), budget)
            return await evaluate(context, samples=1, split="train")

    try:
        result = asyncio.run(work(engine_url(engine, tmp_path)))
    finally:
        engine.stop(10)
    assert result.outcomes == {"scored": 3}
    assert result.tokens["prompt"] > 3 * 500, "the tools are part of each prompt"
    assert 3 <= result.tokens["sampled"] <= 3 * 32
    assert result.retries == 0
