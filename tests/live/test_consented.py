"""The live loop's conversations as rows of a corpus: with consent, and only while it stands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from etude.cli.main import main
from etude.corpus.sessions import SessionReport, session_rows
from etude.live.learn.consented import committed_requests, consented_threads
from etude.live.log.accounts import seal
from etude.live.log.privacy import AccountName, forget
from etude.live.log.records import Consent, LivePolicy, TurnKind
from etude.live.log.tenants import set_policy
from etude.live.observe.agent_trace import TracedEdit, append_trace, trace_record
from tests.helpers.live_story import BASE, Story, StoryLog, content
from tests.rollout.test_pull_requests import History

ASKED, DONE = "Rename the flag.", "Renamed."


@pytest.fixture
def log(tmp_path: Path) -> StoryLog:
    (tmp_path / "loop").mkdir(mode=0o700)
    made = StoryLog(tmp_path / "loop", f"sqlite:///{tmp_path}/loop/live.db")
    set_policy(made.engine, "acme", LivePolicy(consent=True))
    return made


def tell(log: StoryLog, story: Story, **answers: dict[str, Any]) -> None:
    """Writes a story whose turns have these messages: {"asked": [...], "answer": text}."""
    log.write(story)
    owner = {session.id: session.account for session in story.sessions}
    with log.engine.begin() as connection:
        keys = log.accounts.keys(connection, dict.fromkeys(owner.values(), "acme"), BASE)
    for turn in story.turns:
        if turn.id in answers:
            request = json.dumps({"messages": answers[turn.id]["asked"]}).encode()
            response = json.dumps({"role": "assistant", "content": answers[turn.id]["answer"]}).encode()
            made = msgspec.structs.replace(content(""), request=request, response=response)
            log.store.put(
                turn.blob or "", seal(keys[owner[turn.session]], msgspec.msgpack.encode(made), turn.blob or "")
            )


def rows(log: StoryLog) -> tuple[list[dict[str, Any]], SessionReport]:
    report = SessionReport()
    threads = list(consented_threads(log.engine, log.contents, report))
    return list(session_rows([], report, threads=threads)), report


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def two_turns(log: StoryLog, **session: Any) -> None:
    story = Story()
    story.session("s", **session)
    story.turn("s", "t1", 1.0)
    story.turn("s", "t2", 2.0)
    more = [user(ASKED), assistant(DONE), user("And its test?")]
    tell(log, story, t1={"asked": [user(ASKED)], "answer": DONE}, t2={"asked": more, "answer": "Done, too."})


def test_a_session_with_consent_is_one_row_with_its_answers(log: StoryLog) -> None:
    two_turns(log)
    ((row,), report) = rows(log)
    shown = [(message["content"], message.get("weight")) for message in row["messages"]]
    assert shown == [(ASKED, None), (DONE, 1), ("And its test?", None), ("Done, too.", 1)]
    assert report.refused == {}


def test_a_session_whose_consent_was_taken_back_is_absent(log: StoryLog) -> None:
    account = log.accounts.name("acme", "ada")
    two_turns(log, account=account)
    assert len(rows(log)[0]) == 1
    forget(log.engine, log.store, log.accounts, log.folder, AccountName("acme", "ada"))
    none, report = rows(log)
    assert none == []
    assert report.refused == {"consent was taken back": 2}


def test_the_policy_of_a_tenant_takes_back_what_it_granted(log: StoryLog) -> None:
    two_turns(log)
    set_policy(log.engine, "acme", LivePolicy(consent=False))
    assert rows(log)[0] == []


def test_what_a_client_granted_stays_while_clients_may_grant(log: StoryLog) -> None:
    two_turns(log, consent=Consent(granted=True, scope="train", policy="header"))
    set_policy(log.engine, "acme", LivePolicy(consent=False))
    assert len(rows(log)[0]) == 1
    set_policy(log.engine, "acme", LivePolicy(consent=False, may_grant=False))
    assert rows(log)[0] == []


@pytest.mark.parametrize(
    ("session", "turn"),
    [
        ({"consent": Consent()}, {}),
        ({"consent": Consent(granted=True, scope="other")}, {}),
        ({}, {"kind": TurnKind.SIDE}),
        ({}, {"blob": None}),
    ],
)
def test_other_turns_are_absent(log: StoryLog, session: dict[str, Any], turn: dict[str, Any]) -> None:
    story = Story()
    story.session("s", **session)
    story.turn("s", "t1", 1.0, **turn)
    tell(log, story)
    none, report = rows(log)
    assert none == []
    assert report.refused.total() == 1


def test_an_answer_in_which_something_was_replaced_is_not_learned(log: StoryLog) -> None:
    story = Story()
    story.turn("s", "t1", 1.0, scrubbed={"email": 1})
    story.turn("s2", "t2", 1.0, scrubbed={"email": 1})
    asked = [user("Write to <email>.")]
    tell(log, story, t1={"asked": asked, "answer": "To <email>: hello"}, t2={"asked": asked, "answer": "Written."})
    ((row,), _) = rows(log)
    assert [m["content"] for m in row["messages"] if m.get("weight")] == ["Written."]


def test_requests_whose_changes_were_committed_become_words_for_tasks(log: StoryLog, tmp_path: Path) -> None:
    two_turns(log)
    edits = [TracedEdit("a.py", "c1", 1, 2, "t1", shown=2.0), TracedEdit("b.py", "c1", 1, 2, "t2", shown=1.0)]
    append_trace(tmp_path, trace_record("c1", edits, "1.0", 5.0))
    append_trace(tmp_path, trace_record("c2", [TracedEdit("a.py", "c2", 1, 2, "stranger")], "1.0", 5.0))
    report = SessionReport()
    (row,) = committed_requests(log.engine, log.contents, tmp_path, report)
    assert row == {"commit": "c1", "request": "And its test?", "turn": "t2"}, "of the turn that was shown first"
    set_policy(log.engine, "acme", LivePolicy(consent=False, may_grant=False))
    assert list(committed_requests(log.engine, log.contents, tmp_path, report)) == []


def test_the_commands_of_the_page(log: StoryLog, tmp_path: Path, monkeypatch, capsys) -> None:
    page = (Path(__file__).parents[2] / "docs" / "corpus.md").read_text()
    two_turns(log)
    shop = History(tmp_path / "shop")
    commit = shop.commit("Rename", {"a.py": "x = 1\n"})
    append_trace(shop.root, trace_record(commit, [TracedEdit("a.py", commit, 1, 1, "t1", shown=1.0)], "1.0", 5.0))
    here = tmp_path / "here"
    here.mkdir()
    clusters = '[[clusters]]\nname = "a"\nurls = ["http://127.0.0.1:1"]\nstore = "s"\n'
    database = f'database = "sqlite:///{log.folder}/live.db"\n'
    (here / "live.toml").write_text(f'stage = "live"\nfolder = "{log.folder}"\n{database}{clusters}')
    monkeypatch.chdir(here)
    for command in re.findall(r"etude (corpus sessions --live [^\n`]+|live requests [^`]+)[\n`]", page):
        with pytest.raises(SystemExit) as end:
            main([*shlex.split(command)])
        assert end.value.code in (0, None), capsys.readouterr().err
    (row,) = map(json.loads, (here / "users.jsonl").read_text().splitlines())
    assert [m["content"] for m in row["messages"] if m.get("weight")] == [DONE, "Done, too."]
    assert json.loads((here / "requests.jsonl").read_text()) == {"commit": commit, "request": ASKED, "turn": "t1"}
    with pytest.raises(SystemExit) as end:
        main(["live", "requests", "live.toml", "--repository", "../shop", "-o", "requests.jsonl"])
    assert end.value.code == 2
