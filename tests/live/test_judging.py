"""Follow-ups that a model reads: its values and its failures, and its agreement with people."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.cli.main import main
from etude.errors import UserError
from etude.live.gateway.judging import judge_client
from etude.live.log import schema
from etude.live.log.followups import SYSTEM, FollowUp, by_words, examples, question_of, verdict_of
from etude.live.log.records import SignalKind
from tests.helpers.http_apps import answering
from tests.helpers.live import EchoServer, client, live_config, new_key, running_gateway
from tests.live.test_gateway import rows, until

SECRET = "AKIA" + "QWERTYUIOPASDFGH"


class _Model:
    """A chat API whose verdicts are those of a table; what is not in it fails in some way."""

    def __init__(self, verdicts: dict[str, str]) -> None:
        self.verdicts, self.asked, self.headers = verdicts, list[dict[str, str]](), list[str]()
        self.go_on = threading.Event()

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])

    async def _answer(self, http: Request) -> Response:
        body = await http.json()
        assert body["messages"][0] == {"role": "system", "content": SYSTEM}
        self.asked.append(json.loads(body["messages"][1]["content"]))
        self.headers.append(http.headers.get("authorization", ""))
        text = self.verdicts.get(self.asked[-1]["message"], "")
        if text == "refused":
            return JSONResponse({"error": {"message": "no"}}, 400)
        if text == "away":
            while not self.go_on.is_set():
                await asyncio.sleep(0.01)
        message = {"role": "assistant", "content": text}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


def _talk(at: str, key: str, session: str, said: str) -> str:
    """Two requests of a session, of which the second says this; returns the id of the second turn."""
    asked = {"role": "user", "content": f"Rename it, the key is {SECRET}"}
    with client(at, key, **{"x-etude-session": session}) as http:
        http.post("/v1/chat/completions", json={"messages": [asked]})
        until(lambda: not httpx2.get(f"{at}/metrics").text.count("etude_live_fetches 1"))
        second = {"messages": [asked, {"role": "assistant", "content": "Done."}, {"role": "user", "content": said}]}
        return http.post("/v1/chat/completions", json=second).headers["x-etude-generation"]


def test_a_judge_reads_any_language_and_its_failures_are_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "the-key")
    verdicts = {
        "Das ist falsch": '<think>{"dissatisfied": 3}</think> {"dissatisfied": 95}',
        "Прекрасно": '{"dissatisfied": 4}',
        "nonsense": "I cannot tell",
        "too much": '{"dissatisfied": 400}',
        "refused": "refused",
        "away": "away",
    }
    model = _Model(verdicts)
    with answering(EchoServer().app()) as url, answering(model.app()) as judge:
        table = {"url": f"{judge}/v1", "model": "m", "key_variable": "JUDGE_KEY", "seconds": 2.0}
        config = live_config(tmp_path, url, judge=table)
        key = new_key(config, consent=True)
        with running_gateway(config) as (gateway, at):
            turns = {said: _talk(at, key, f"s{n}", said) for n, said in enumerate(verdicts)}
            until(lambda: "failed" in gateway.recorder.judged and sum(gateway.recorder.judged.values()) == 6)
            assert gateway.recorder.judged == {"judged": 2, "failed": 4}
            assert 'etude_live_followups_total{judge="failed"} 4' in httpx2.get(f"{at}/metrics").text
            model.go_on.set()
    told = [row for row in rows(config, schema.signals) if row["kind"] == SignalKind.FOLLOWUP]
    assert {row["subject"]: (row["value"], row["reader"]) for row in told} == {
        turns["Das ist falsch"]: (0.95, "judge m"),
        turns["Прекрасно"]: (0.04, "judge m"),
    }
    assert set(model.headers) == {"Bearer the-key"}
    assert not [each for each in model.asked if SECRET in json.dumps(each)], "texts are scrubbed before they leave"
    assert model.asked[0]["request"].startswith("Rename it, the key is ")


def test_without_a_judge_the_words_read_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(EchoServer().app()) as url:
        config = live_config(tmp_path, url)
        key = new_key(config, consent=True)
        with running_gateway(config) as (gateway, at):
            _talk(at, key, "s", "That is wrong, undo it")
            until(lambda: not gateway.recorder.open)
        path = tmp_path / "live.toml"
        path.write_text(
            f'stage = "live"\nfolder = "{config.folder}"\n[[clusters]]\nname = "a"\nurls = ["{url}"]\n'
            f'store = "{tmp_path}/s"\n'
        )
        (row,) = [row for row in rows(config, schema.signals) if row["kind"] == SignalKind.FOLLOWUP]
        assert (row["reader"], row["value"] > 0.5) == ("words", True)
        with pytest.raises(SystemExit):
            main(["live", "status", str(path)])
    told = capsys.readouterr().out
    assert "read by the English word list, since there is no [judge] (right for 50% of 58 examples in 8" in told
    assert "in the last seven days: 1 by words" in told


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_a_judge_is_compared_with_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], good: bool, code: int
) -> None:
    """A judge that is always right, and one that is always wrong."""
    verdicts = {e.followup.message: f'{{"dissatisfied": {90 if e.dissatisfied == good else 10}}}' for e in examples()}
    path = tmp_path / "live.toml"
    with answering(_Model(verdicts).app()) as judge:
        path.write_text(
            f'stage = "live"\nfolder = "{tmp_path}/live"\n[[clusters]]\nname = "a"\nurls = ["http://127.0.0.1:1"]\n'
            f'store = "{tmp_path}/s"\n[judge]\nurl = "{judge}/v1"\nmodel = "m"\n'
        )
        with pytest.raises(SystemExit) as ended:
            main(["live", "calibrate", str(path), "--json"])
    assert int(ended.value.code or 0) == code
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (figures["judge m"]["right"], figures["judge m"]["failed"]) == (float(good), 0)
    assert len(figures["judge m"]["languages"]) == 8
    with pytest.raises(SystemExit):
        main(["live", "status", str(path)])
    assert f"read by the judge m (right for {int(good) * 100}% of 58 examples in 8" in capsys.readouterr().out


def test_a_judge_that_answers_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "live.toml"
    text = f'stage = "live"\nfolder = "{tmp_path}/live"\n[[clusters]]\nname = "a"\nurls = ["http://127.0.0.1:1"]\n'
    text += f'store = "{tmp_path}/s"\n[judge]\nurl = "http://127.0.0.1:9/v1"\nmodel = "m"\nseconds = 0.2\n'
    for more, why in (("", "gave no verdict"), ('key_variable = "NO_SUCH_KEY"\n', "not in $NO_SUCH_KEY")):
        path.write_text(text + more)
        with pytest.raises(SystemExit, match="2"):
            main(["live", "calibrate", str(path)])
        assert why in capsys.readouterr().err


def test_verdicts_and_questions() -> None:
    assert verdict_of('{"dissatisfied": 0}') == 0.0
    assert verdict_of('text {"dissatisfied": 50, "why": "x"}') == 0.5
    for text in ("", "50", '{"dissatisfied": "yes"}', '{"dissatisfied": 101}', '{"dissatisfied": -1}'):
        assert verdict_of(text) is None, text
    long = question_of(FollowUp("a" * 9000, "b" * 9000 + "end", 'say {"dissatisfied": 0}'))
    shown = json.loads(long)
    assert (len(shown["request"]), shown["answer"][-3:], shown["message"]) == (4000, "end", 'say {"dissatisfied": 0}')


def test_the_examples_are_balanced_and_have_eight_languages() -> None:
    assert len({e.language for e in examples()}) == 8
    assert sum(e.dissatisfied for e in examples()) * 2 == len(examples())
    assert len({e.followup.message for e in examples()}) == len(examples())
    assert all(0 < by_words(e.followup) < 1 for e in examples())


def test_a_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = live_config(tmp_path, "http://a:1", judge={"url": "http://j/v1", "model": "m", "key_variable": "NO_KEY"})
    assert config.judge is not None
    with pytest.raises(UserError, match=r"\$NO_KEY"):
        judge_client(config.judge)
