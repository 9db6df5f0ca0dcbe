"""`import etude`: its names, training and evaluation from Python, and the examples of docs/environments.md."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import etude
from etude.cli import main
from etude.errors import UserError
from tests.helpers.http_apps import answering

ROOT = Path(__file__).parents[1]
SHOP = ROOT / "recipes/environments/shop"
PAGE = (ROOT / "docs/environments.md").read_text()
NAMES = {
    "Box": "etude.sandbox.base", "BoxError": "etude.sandbox.base", "Budget": "etude.records",
    "Engine": "etude.inference.engine.engine", "Environment": "etude.rollout.environments.environment",
    "EnvironmentEpisode": "etude.rollout.environments.environment", "Episode": "etude.records",
    "Limits": "etude.sandbox.base", "RunFailed": "etude.errors", "Task": "etude.records", "UserError": "etude.errors",
    "evaluate": "etude.run.api", "load_model": "etude.models.loading", "open_sandbox": "etude.grading.runner",
    "reward": "etude.rollout.environments.environment", "tool": "etude.harness.python_tools", "train": "etude.run.api",
}  # fmt: skip
Answer = tuple[str, list[tuple[str, dict[str, Any]]]]  # a text, and calls


def chat_app(script: Callable[[str, list[str]], Answer], requests: list[Any] | None = None) -> Starlette:
    """OpenAI's API with a model that answers a user's message and the results so far."""

    async def answer(request: Request) -> JSONResponse:
        body = await request.json()
        if requests is not None:
            requests.append(body | {"key": request.headers.get("authorization")})
        user = next(message["content"] for message in body["messages"] if message["role"] == "user")
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        text, calls = script(user, results)
        made = [
            {
                "id": f"{len(results)}-{n}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given)},
            }
            for n, (name, given) in enumerate(calls)
        ]
        message = {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})
        usage = {"prompt_tokens": 100, "completion_tokens": 7}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """An interpreter in a folder outside of the repository, of which it has the package alone."""
    env = os.environ | {"PYTHONPATH": str(Path(etude.__file__).parents[1]), "TERM": "dumb"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=600)


# Names ----------------------------------------------------------------------------------------------------------------


def test_the_names_are_these_and_stay() -> None:
    assert {*NAMES} == {*etude._PLACES} <= {*dir(etude)}
    for name, module in NAMES.items():
        assert getattr(etude, name) is getattr(importlib.import_module(module), name), name


def test_type_checkers_see_the_same_names() -> None:
    source = Path(etude.__file__).read_text()
    imports = re.findall(r"    from (\S+) import (\w+) as (\w+)", source)
    assert {name: place for place, name, known in imports if name == known} == etude._PLACES


def test_the_page_has_every_name() -> None:
    table = "".join(line for line in PAGE.splitlines(keepends=True) if line.startswith("| `"))
    assert {*re.findall(r"`(\w+)`", re.sub(r"\|[^|]*\|$", "", table, flags=re.M))} == {*NAMES}


def test_the_door_is_cheap_and_an_environment_needs_no_torch(tmp_path: Path) -> None:
    heavy = "sorted({'torch', 'transformers', 'tokenizers', 'numba'} & {*sys.modules})"
    code = (
        "import sys, etude; light = {m for m in sys.modules if m.startswith('etude.')}; assert not light, light\n"
        "assert not {'httpx2', 'numpy', 'msgspec', 'pydantic'} & {*sys.modules}\n"
        "[getattr(etude, name) for name in dir(etude) if name not in ('Engine', 'load_model', 'train', 'evaluate')]\n"
        f"assert not {heavy}, {heavy}\n"
        "etude.train, etude.evaluate\n"
        f"assert not {heavy}, {heavy}"
    )
    done = python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_lists_the_others() -> None:
    with pytest.raises(AttributeError, match=r"etude has no Enviroment; it has Box, .*Environment, .*train"):
        etude.Enviroment  # type: ignore[attr-defined]  # noqa: B018


# Mistakes -------------------------------------------------------------------------------------------------------------


class Unrewarded(etude.Environment):
    def tasks(self) -> Iterator[etude.Task]:
        yield etude.Task(id="a", prompt="b", split="heldout")


class Greeting(Unrewarded):
    @etude.reward
    def polite(self, episode: etude.EnvironmentEpisode) -> bool:
        return episode.answer == "hello"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: etude.train("gone.toml"), "gone.toml does not exist; give the path of a TOML configuration"),
        (lambda: etude.train({"stage": "sft"}), "etude.train is of stage 'sft', and etude.train runs stage rl"),
        (lambda: etude.train({"trainer": {"step": 1}}), "etude.train: unknown key trainer.step; did you mean"),
        (lambda: etude.train({"name": "x", "tasks": {"dataset": "y"}}, resume=True), "outputs/x holds no run yet"),
        (lambda: etude.train({"tasks": {"environment": "gone:Gone"}}), "No module named 'gone'"),
        (lambda: etude.evaluate("http://h/v1", Greeting()), "is the URL of an API: give served_as"),
        (lambda: etude.evaluate("ftp://h/v1", Greeting(), served_as="m"), "ftp://h/v1 is no URL of an API"),
        (lambda: etude.evaluate("http://h/v1", Greeting(), served_as="m", api="x"), "the api is openai or anthropic"),
        (lambda: etude.evaluate("nano", Greeting(), served_as="m"), "served_as and key are for the URL of a chat API"),
        (lambda: etude.evaluate("gone", Greeting()), "gone is not a folder, nor the name of a model"),
        (lambda: etude.evaluate("nano", Unrewarded()), "Unrewarded has no reward"),
        (lambda: etude.evaluate("nano", Greeting), "Greeting is a class: give an environment, as in Greeting()"),
        (lambda: etude.evaluate("nano", [Greeting(), 3]), "3 is no environment, and no name of tasks"),
        (lambda: etude.evaluate("nano", []), "there are no tasks"),
        (lambda: etude.evaluate("nano", "gone:Gone"), "No module named 'gone'"),
        (lambda: etude.evaluate("nano", "gone"), "gone is not a task dataset"),
        (lambda: etude.evaluate("nano", Greeting(), samples=0), "etude.evaluate: samples: Input should be greater"),
        (lambda: etude.evaluate("nano", Greeting(), split="test"), "the split is heldout or train, not 'test'"),
        (lambda: etude.evaluate("nano", Greeting(), budget={"group": 3}), "budget has no group, only turns, tokens"),
        (lambda: etude.evaluate("nano", Greeting(), budget={"turns": 0}), "budget: turns: Input should be greater"),
        (lambda: etude.evaluate("nano", Greeting(), inference={"device": "x"}), "device = 'x' is not there"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    call: Callable[[], Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        call()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert not [*tmp_path.iterdir()]


def test_a_notebook_learns_how_to_call() -> None:
    async def cell() -> None:
        etude.evaluate("nano", Greeting())

    with pytest.raises(UserError, match=r"write `await asyncio.to_thread\(etude.evaluate, \.\.\.\)`"):
        asyncio.run(cell())


# Evaluation -----------------------------------------------------------------------------------------------------------


def test_an_environment_is_measured_behind_a_chat_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key and budget are those of the command: the environment's, and a chat API's."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-shell")
    requests: list[Any] = []
    with answering(chat_app(lambda user, results: ("hello", []), requests)) as url:
        result = etude.evaluate(f"{url}/v1", Greeting(), served_as="m", samples=2)
    assert [task.passed for task in result.tasks] == [(True, True)]
    assert [(body["key"], body["max_tokens"]) for body in requests] == [("Bearer sk-of-the-shell", 32_000)] * 2


def example(heading: str) -> str:
    """The first Python block below a heading of the page."""
    return PAGE.partition(f"## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]


def test_the_first_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """As printed, in a folder of its own, by the command."""
    (tmp_path / "words.py").write_text(example("Without a repository"))
    assert len(example("Without a repository").splitlines()) <= 60
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def spell(user: str, results: list[str]) -> Answer:
        word = user.removeprefix("Reverse: ")
        return ("".join(reversed(results[0].split())), []) if results else ("", [("spell", {"word": word})])

    words = ["--suite", "words:Words", "--split", "train", "--samples", "1", "--json"]
    with answering(chat_app(spell)) as url, pytest.raises(SystemExit) as stop:
        main.main(["eval", f"{url}/v1", "--model", "m", *words])
    out = capfd.readouterr().out
    assert not stop.value.code, out
    assert json.loads(out.splitlines()[-1])["results"][0]["pass_1"]["mean"] == 1.0


def test_the_second_example_of_the_page_is_the_recipe() -> None:
    assert {*example("With a repository").splitlines()} <= {*(SHOP / "shop_rules.py").read_text().splitlines()}
    assert len(example("With a repository").splitlines()) <= 60


def mend(user: str, results: list[str]) -> Answer:
    """Edits the held-out rules of the shop and reads its check, then ends."""
    line = user.splitlines()[-1].strip()
    right = {"age": "return age < 18", "stock": "return stock == 0"}.get(line.split()[1], line)
    if not results:
        return "", [("edit", {"old": line, "new": right}), ("read", {"path": "check.py"})]
    return "Done.", []


def copied_shop(folder: Path) -> Path:
    """The shop, copied out of the repository."""
    return Path(shutil.copytree(SHOP, folder / "shop"))


def test_the_shop_is_measured_behind_a_chat_api(tmp_path: Path) -> None:
    """From Python and by the command, in the folder of the module alone: own and built-in tools, and the check."""
    shop, requests = copied_shop(tmp_path), list[Any]()
    code = (
        "import sys, etude; from shop_rules import ShopRules\n"
        "result = etude.evaluate(sys.argv[1], ShopRules(), served_as='m', samples=1)\n"
        "print([task.passed for task in result.tasks])"
    )
    with answering(chat_app(mend, requests)) as url:
        done = python(shop, "-c", code, f"{url}/v1")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str([(True,)] * 10)
        suite = ["--suite", "shop_rules:ShopRules", "--samples", "1", "--max-tasks", "2"]
        done = python(shop, "-m", "etude.cli.main", "eval", f"{url}/v1", "--model", "m", *suite)
        assert done.returncode == 0, done.stderr
    assert "pass@1 100.0 %" in done.stdout
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["edit", "list", "read", "grep"]
    results = [m["content"] for body in requests for m in body["messages"] if m["role"] == "tool"]
    assert results[0] == "ok"
    assert any("must be" in result for result in results)


def test_a_wrong_rule_fails_the_shops_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied_shop(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with answering(chat_app(lambda user, results: ("It is right as it stands.", []))) as url:
        result = etude.evaluate(f"{url}/v1", "shop_rules:ShopRules", served_as="m", samples=1)
    assert {task.passed for task in result.tasks} == {(False,)}
    assert {task.function for task in result.tasks} == {"is_minor", "sold_out"}


# Training -------------------------------------------------------------------------------------------------------------

PACKAGE = {
    "acme/__init__.py": "",
    "acme/repository/rule.py": "def less(a, b):\n    return a > b\n",
    "acme/work.py": '''
from pathlib import Path

import etude


async def edit(old: str, new: str, box: etude.Box) -> str:
    """Replaces a text of rule.py."""
    text = (await box.read("rule.py")).decode()
    await box.write("rule.py", text.replace(old, new).encode())
    return "ok" if old in text else "error: not found"


class Work(etude.Environment):
    repository = Path(__file__).parent / "repository"

    def tasks(self):
        code = (self.repository / "rule.py").read_text().rstrip()
        for number in range(4):
            yield etude.Task(id=f"less-{number}", prompt=f"Fix `less` in rule.py\\n{code}")

    def tools(self, episode):
        return [edit]

    @etude.reward
    async def right(self, episode):
        line = "python -c 'import rule; assert rule.less(1, 2) and not rule.less(2, 1)'"
        return (await episode.box.exec(line, timeout=20)).rc == 0
''',
    "run.py": '''
import etude

report = etude.train({
    "name": "acme", "tasks": {"environment": "acme.work:Work"}, "trainer": {"steps": 1}, "eval": {"samples": 1},
    "rollout": {"prompts": 2, "group": 4, "turns": 2, "tokens": 96, "context": 512},
})
assert all(report.checks.values()), report.checks
assert report.steps == 1
''',
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.smoke
def test_a_package_outside_of_the_repository_trains_a_step(tmp_path: Path) -> None:
    """With `import etude` alone; the run's folder is a model then, and its tasks a suite."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = python(tmp_path, "run.py")
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((tmp_path / "outputs/acme/metrics.jsonl").read_text().splitlines()[0])
    assert metrics["rollout/environment/right"] >= 0
    code = "import etude; r = etude.evaluate('outputs/acme', 'outputs/acme', samples=1); print(len(r.tasks))"
    done = python(tmp_path, "-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
    changed = "import etude; etude.train({'name': 'acme', 'tasks': {'environment': 'acme.work:Work'}}, resume=True)"
    done = python(tmp_path, "-c", changed)
    assert "UserError: etude.train differs from the configuration of outputs/acme" in done.stderr


@pytest.mark.slow
def test_the_shop_trains_the_bundled_model(tmp_path: Path) -> None:
    shop = copied_shop(tmp_path)
    short = ["--trainer.steps", "1", "--rollout.group", "4", "--rollout.prompts", "2", "--eval.samples", "1"]
    done = python(shop, "-m", "etude.cli.main", "train", "shop.toml", *short)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(json.loads((shop / "outputs/shop/report.json").read_text())["checks"].values())
