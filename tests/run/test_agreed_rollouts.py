"""`etude corpus rollouts`: pairs of rollouts over a chat API with recorded answers, in real boxes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from etude.cli.main import main
from etude.config import AgreedRolloutsConfig, EngineConfig
from etude.corpus import chats
from etude.errors import UserError
from etude.protocol.backends import ChatModel
from etude.records import Budget
from etude.renderers import renderer_for
from etude.run.evaluate import Remote
from etude.run.traces import RolloutPlayer, RolloutSources, write_agreed_rollouts
from etude.run.traces.agreed import AgreedReport
from tests.helpers.http_apps import answering
from tests.helpers.rows import chat_rows
from tests.helpers.speakers import TEMPLATE, hermes_tokenizer, write_model

NAMES = ("mean", "largest", "joined")
SOURCE = "".join(
    f"def {name}(values):\n    out = {n}\n    out += len(values)\n    return out\n\n\n" for n, name in enumerate(NAMES)
)
TITLE = "Short input of {}\n\nIt should count from the next number."
Turn = list[tuple[str, Any]] | str | None
FINISH: Turn = [("finish", {})]
KEY = "    key = 'AKIAQ3EGRBWDH7QNLKXT'\n"


def edit(name: str, new: str) -> Turn:
    number = NAMES.index(name)
    return [("edit", {"path": "lib/core.py", "old": f"    out = {number}\n", "new": new.format(number)})]


def new_file(text: str) -> Turn:
    return [("edit", {"path": "new.py", "old": "", "new": text})]


class Recorded:
    """A chat API with recorded answers: turns of the first rollout, the request, and turns of the second rollout, each
    by the name of the function. `requests` are the bodies of requests by stage and name."""

    def __init__(self, **stages: Callable[[str], list[Turn]]) -> None:
        self.stages: dict[str, Callable[[str], list[Turn]]] = {
            "first": lambda name: [[("read", {"path": "lib/core.py"})], edit(name, "    out = {0} + 1\n"), FINISH],
            "request": lambda name: [TITLE.format(name)],
            "second": lambda name: [[("read", {"path": "lib/core.py"})], edit(name, "    out = {0} + 1\n"), FINISH],
        } | stages
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.reached, self.blocked = threading.Event(), ""  # a name whose requests get no answer in time

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        user = next(message["content"] for message in body["messages"] if message["role"] == "user")
        stage = "request" if "tools" not in body else "first" if user.startswith("Look at `") else "second"
        name = next(
            name
            for name in NAMES
            if re.search(rf"def {name}|`{name}`|of {name}\n|^-.*= {NAMES.index(name)}$", user, re.M)
        )
        self.requests.append((stage, name, body))
        if name == self.blocked:
            self.reached.set()
            return JSONResponse({"error": {"message": "busy"}}, 503, headers={"retry-after": "60"})
        number = sum(message["role"] == "assistant" for message in body["messages"])
        turn = self.stages[stage](name)[number]
        if turn is None:
            return JSONResponse({"choices": []})
        named = turn if isinstance(turn, list) else ()
        texts = [(tool, each if isinstance(each, str) else json.dumps(each)) for tool, each in named]
        calls = [
            {"id": f"c{number}{at}", "type": "function", "function": {"name": tool, "arguments": text}}
            for at, (tool, text) in enumerate(texts)
        ]
        message = {"role": "assistant", "content": turn if isinstance(turn, str) else None, "tool_calls": calls or None}
        usage = {"prompt_tokens": 100, "completion_tokens": 7}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    def app(self) -> Starlette:
        return Starlette(routes=[
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1", lambda _: JSONResponse({})),
        ])  # fmt: skip


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "shop/lib").mkdir(parents=True)
    (tmp_path / "shop/lib/__init__.py").write_text("")
    (tmp_path / "shop/lib/core.py").write_text(SOURCE)
    return tmp_path / "shop"


def write(
    library: Path, api: Recorded, output: str = "rows.jsonl", **options: Any
) -> tuple[AgreedReport, list[dict[str, Any]]]:
    with answering(api.app()) as url:
        player = RolloutPlayer(
            Remote(ChatModel(f"{url}/v1", "m"), None), Budget(turns=6, tokens=9999, context=99999), EngineConfig()
        )
        path = library.parent / output
        options = {"tries": 3} | options
        report = write_agreed_rollouts(
            RolloutSources((), [str(library)], "Shop Inc."),
            path,
            AgreedRolloutsConfig(**options),
            player,
            lambda *_: None,
        )
    return report, [json.loads(line) for line in path.read_text().splitlines()]


def test_agreeing_rollouts_become_rows_of_the_second(library: Path) -> None:
    api = Recorded()
    report, rows = write(library, api)
    assert (report.rows, report.kept, report.tries, report.left_out) == (3, 3, 3, {})
    assert not list(library.parent.glob("rows.jsonl.*"))
    for row in rows:
        name = row["origin"]["function"]
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
        assert row["messages"][1]["content"] == TITLE.format(name), "the request alone"
        assert f"out = {NAMES.index(name)}\n" in row["messages"][3]["content"], "a fresh box, without the first patch"
        assert row["messages"][5]["content"] == "ok"
        assert [message.get("weight", 1) for message in row["messages"] if message["role"] == "assistant"] == [1, 1, 1]
        assert not {"test", "history"} & {tool["function"]["name"] for tool in row["tools"]}
        origin = {key: row["origin"][key] for key in ("path", "licence", "rollout", "agreement", "model")}
        assert origin == {"path": "lib/core.py", "licence": "Shop Inc.", "rollout": 2, "agreement": 1.0, "model": "m"}
        assert row["source"] == "shop"
        asked = next(body for stage, other, body in api.requests if (stage, other) == ("request", name))
        assert (
            f"-    out = {NAMES.index(name)}\n+    out = {NAMES.index(name)} + 1\n" in asked["messages"][1]["content"]
        )
    assert len({row["id"] for row in rows}) == 3


def test_rows_are_learned_from_in_the_dialect_of_a_model(library: Path, tmp_path: Path) -> None:
    _, rows = write(library, Recorded(), tries=1)
    renderer = renderer_for(write_model(tmp_path / "model", hermes_tokenizer(), TEMPLATE))
    (learned,) = chat_rows([tmp_path / "rows.jsonl"], lambda: renderer)
    assert isinstance(learned, chats.LearnedRow), learned
    ids, mask = learned.tokens
    assert renderer.text([int(i) for i, m in zip(ids, mask, strict=True) if m]).count("<tool_call>") == 3
    assert (learned.id, learned.source) == (rows[0]["id"], "shop")


def test_first_rollouts_are_rows_on_demand(library: Path) -> None:
    report, rows = write(library, Recorded(), first=True)
    assert (report.rows, report.kept) == (6, 3)
    assert [row["origin"]["rollout"] for row in rows] == [1, 2] * 3
    assert all(row["messages"][1]["content"].startswith("Look at `") for row in rows[::2])
    assert len({row["id"] for row in rows}) == 6


def test_the_threshold_decides_on_patches_that_agree_in_part(library: Path) -> None:
    def other(name: str) -> list[Turn]:
        return [edit(name, "    out = {0} + 1\n" if name == "mean" else "    out = {0} + 2\n"), FINISH]

    report, rows = write(library, Recorded(second=other), agreement=0.5)
    assert sorted(row["origin"]["agreement"] for row in rows) == [0.5, 0.5, 1.0], "the removed line is the same"
    report, rows = write(library, Recorded(second=other), "more.jsonl", agreement=0.51)
    assert [row["origin"]["function"] for row in rows] == ["mean"]
    assert report.left_out == {"its patches disagree": 2}


def only(name: str, bad: list[Turn], good: Callable[[str], list[Turn]]) -> Callable[[str], list[Turn]]:
    return lambda other: bad if other == name else good(other)


@pytest.mark.parametrize(("stage", "turns", "why"), [
    ("first", [FINISH], "its first rollout changes nothing"),
    ("first", ["I would not change it."], "its first rollout changes nothing"),
    ("first", [[("list", {})]] * 6, "its first rollout does not end by itself"),
    ("first", [new_file("word\n" * 3000), FINISH], "its first patch is too long"),
    ("second", [FINISH], "its second rollout changes nothing"),
    ("second", [new_file("x\n"), FINISH], "its patches disagree"),
    ("request", ["Only a title"], "its request is no title and body"),
    ("request", [FINISH], "its request is no title and body"),
    ("request", ["Short input of mean\n\nMake it `out = 0 + 1`, please."], "its request quotes the patch"),
    ("second", [None], "its model or box was lost twice"),
    ("second", [edit("mean", "    out = {0} + 1\n" + KEY), FINISH], "it holds a likely secret"),
])  # fmt: skip
def test_a_pair_that_is_no_use_is_left_out_by_its_reason(
    library: Path, stage: str, turns: list[Turn], why: str
) -> None:
    api = Recorded()
    api.stages[stage] = only("mean", turns, api.stages[stage])
    report, rows = write(library, api)
    assert report.left_out == {why: 1}
    assert {row["origin"]["function"] for row in rows} == {"largest", "joined"}


def test_a_malformed_call_is_context_and_no_target(library: Path) -> None:
    def second(name: str) -> list[Turn]:
        return [[("read", '{"path": ')], edit(name, "    out = {0} + 1\n"), FINISH]

    _, rows = write(library, Recorded(second=second), tries=1)
    turns = [message for message in rows[0]["messages"] if message["role"] == "assistant"]
    assert [turn.get("weight", 1) for turn in turns] == [0, 1, 1]
    assert turns[0]["tool_calls"][0]["function"] == {"name": "read", "arguments": "{}"}
    assert rows[0]["messages"][3]["content"].startswith("error: malformed call")


def test_the_rows_do_not_depend_on_the_workers(library: Path) -> None:
    write(library, Recorded(), "one.jsonl", workers=1, tries=4)
    write(library, Recorded(), "three.jsonl", workers=3, tries=4)
    written = [(library.parent / name).read_bytes() for name in ("one.jsonl", "three.jsonl")]
    assert written[0] == written[1]
    _, other = write(library, Recorded(), "seed.jsonl", seed=2, tries=1)
    assert other[0]["id"] != json.loads(written[0].splitlines()[0])["id"]


@pytest.fixture
def command(library: Path) -> Callable[[str], list[str]]:
    def words(url: str) -> list[str]:
        return ["corpus", "rollouts", "--own", str(library), "--own-licence", "Shop Inc.", "--model", f"{url}/v1",
                "--name", "m", "--tries", "3", "--workers", "1", "-o", str(library.parent / "rows.jsonl")]  # fmt: skip

    return words


def test_a_killed_command_goes_on(library: Path, command: Callable[[str], list[str]], capsys) -> None:
    _, whole = write(library, Recorded(), "whole.jsonl")
    api = Recorded()
    api.blocked = whole[1]["origin"]["function"]
    with answering(api.app()) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "etude.cli.main", *command(url)], start_new_session=True, stderr=subprocess.DEVNULL
        )
        try:
            assert api.reached.wait(60)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        assert not (library.parent / "rows.jsonl").exists()
        first, api.blocked = whole[0]["origin"]["function"], ""
        before = [name for _, name, _ in api.requests].count(first)
        with (library.parent / "rows.jsonl.partial").open("a") as partial:
            partial.write('{"name": "cut sho')
        with pytest.raises(SystemExit) as end:
            main([*command(url), "--agreement", "0.9"])
        assert end.value.code == 2
        assert "is of other options, model or sources" in capsys.readouterr().err
        with pytest.raises(SystemExit) as end:
            main(command(url))
        assert end.value.code == 0
        assert [name for _, name, _ in api.requests].count(first) == before == 7, "it is not played again"
    assert "3 of 3 pairs of rollouts agree" in capsys.readouterr().out
    assert (library.parent / "rows.jsonl").read_bytes() == (library.parent / "whole.jsonl").read_bytes()
    assert not list(library.parent.glob("rows.jsonl.*"))


def test_the_command_of_the_page(library: Path, monkeypatch, capsys) -> None:
    page = (Path(__file__).parents[2] / "docs/corpus.md").read_text()
    (text,) = re.findall(r"^etude (corpus rollouts .+)$", page, re.M)
    (library.parent / "here").mkdir()
    monkeypatch.chdir(library.parent / "here")
    with answering(Recorded().app()) as url, pytest.raises(SystemExit) as end:
        main([*shlex.split(text.replace("http://localhost:8000", url)), "--tries", "1"])
    assert end.value.code == 0, capsys.readouterr().err
    assert "1 rows in rollouts.jsonl: 1 of 1 pairs of rollouts agree" in capsys.readouterr().out


def test_without_a_row_nothing_is_written_and_the_tries_are_kept(library: Path) -> None:
    with pytest.raises(UserError, match="no pair of rollouts of 3 agrees: 3 because its first rollout changes nothing"):
        write(library, Recorded(first=lambda _: [FINISH]))
    assert not (library.parent / "rows.jsonl").exists()
    assert len((library.parent / "rows.jsonl.partial").read_text().splitlines()) == 4
    assert not (library.parent / "rows.jsonl.lock").exists()


def test_more_tries_go_on_from_fewer(library: Path, monkeypatch) -> None:
    monkeypatch.setattr(Remote, "__str__", lambda _: "m")  # each server here has a port of its own
    with pytest.raises(UserError, match="no pair of rollouts of 3 agrees"):
        write(library, Recorded(first=lambda _: [FINISH]))
    api = Recorded()
    report, rows = write(library, api, tries=4)
    assert (report.kept, report.tries, len(rows)) == (1, 4, 1)
    assert len({name for _, name, _ in api.requests}) == 1, "three tries are not played again"


@pytest.mark.parametrize(("words", "why"), [
    (("--own", "shop", "--model", "nano"), "nano speaks the compact dialect"),
    (("--own", "shop", "--model", "nano", "--name", "m"), "--name belongs to the URL of a chat API"),
    (("--own", "shop", "--model", "http://127.0.0.1:1/v1"), "say which model there by --name NAME"),
    (("--own", "shop", "--model", "http://127.0.0.1:1/v1", "--name", "m"), "nothing answers at"),
    (("--own", "shop", "--model", "http://127.0.0.1:1/v1", "--name", "m", "--threads", "1"), "--threads belongs to"),
    (("shop", "--model", "nano"), "is not permissive"),
    (("--model", "nano"), "needs sources"),
    (("--own", "shop", "--model", "nano", "--agreement", "0"), "agreement"),
])  # fmt: skip
def test_mistakes_are_one_sentence(library: Path, monkeypatch, capsys, words: tuple[str, ...], why: str) -> None:
    monkeypatch.chdir(library.parent)
    with pytest.raises(SystemExit) as end:
        main(["corpus", "rollouts", *words, "-o", "rows.jsonl"])
    assert end.value.code == 2
    assert why in capsys.readouterr().err
    assert [path.name for path in library.parent.iterdir()] == ["shop"]


def test_a_repository_without_functions_is_refused(library: Path) -> None:
    (library / "lib/core.py").write_text("X = 1\n")
    with pytest.raises(UserError, match="no Python function"):
        write(library, Recorded())
