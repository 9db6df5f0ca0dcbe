"""Windows on both databases: one exit a turn, the same bits again, nothing half-written, nothing of the forgotten."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time as clock
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from etude.cli.main import main
from etude.config.live import LabelsConfig
from etude.errors import UserError
from etude.live.gateway.entries import SignalEntry, SuggestionEntry, TurnEntry
from etude.live.gateway.queue import RecordQueue
from etude.live.gateway.writer import LogWriter
from etude.live.learn.filters import decide
from etude.live.learn.window import cut_window, exits_of, replay_window, signal_calibration, window_samples
from etude.live.log import journal, schema
from etude.live.log.privacy import AccountName, forget
from etude.live.log.records import Consent, ExitKind, SignalKind, Suggestion, TurnKind, VersionSpan, ulid
from tests.helpers.live_story import Story, StoryLog, content, time

K = SignalKind
CONFIG = LabelsConfig(least_batch=5)


@pytest.fixture
def live(database: str | None, tmp_path: Path) -> Iterator[StoryLog]:
    """A live loop with nothing in it, once per database."""
    folder = tmp_path / "live"
    folder.mkdir(mode=0o700)
    opened = StoryLog(folder, database or f"sqlite:///{folder}/live.db")
    yield opened
    opened.close()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[StoryLog]:
    """A live loop on SQLite."""
    folder = tmp_path / "live"
    folder.mkdir(mode=0o700)
    opened = StoryLog(folder, f"sqlite:///{folder}/live.db")
    yield opened
    opened.close()


def tell(story: Story, first: int, count: int, at: float, rng: random.Random) -> None:
    """Turns of many accounts, with clients that leave, stay silent or tell late, bots, and some without consent."""
    for i in range(first, first + count):
        begins = at + 10 * (i - first)
        consent = Consent() if rng.random() < 0.1 else Consent(granted=True, scope="train")
        story.session(f"s{i}", begins, account=f"a{i % 17}", consent=consent)
        kind = TurnKind.SIDE if rng.random() < 0.1 else TurnKind.MAIN
        story.turn(f"s{i}", f"t{i:04}", begins, kind=kind, scrubbed={"email": 1} if rng.random() < 0.05 else {})
        fate = rng.random()
        if fate < 0.1:
            story.signal(f"t{i:04}", K.INVALID_CALL, begins + 1)
            continue
        story.edit(f"t{i:04}", f"e{i}", begins, rng.randint(10, 300))
        if fate < 0.3:
            story.signal(f"e{i}", K.GONE, begins + 1700 * rng.random())
        elif fate < 0.5:
            story.signal(f"e{i}", K.UNDONE, begins + 1700 * rng.random())
        elif fate < 0.9:  # some of them after the window that looks at the turn
            story.survived(f"e{i}", rng.random(), begins + 1800 + (4000 * rng.random() if fate > 0.7 else 1))


def final(live: StoryLog, windows: int) -> dict[str, list[str]]:
    """The final exits of each turn."""
    out: dict[str, list[str]] = defaultdict(list)
    for number in range(1, windows + 1):
        for each in exits_of(live.engine, number):
            if each.kind != ExitKind.HELD:
                out[each.turn].append(each.kind)
    return out


def test_every_turn_has_one_exit_of_a_window_and_one_final_exit_of_all(live: StoryLog):
    rng, story, cuts = random.Random(4), Story(), [3000.0, 3001.0, 6000.0, 9000.0, 40_000.0]
    begins = [0.0, 3000.0, 3100.0, 6100.0, 9100.0]
    before: dict[str, str] = {}
    for number, cut in enumerate(cuts, 1):
        tell(story, 1000 * number, 25, begins[number - 1], rng)
        live.write(story)
        result = cut_window(live.engine, live.contents, CONFIG, time(cut))
        exits = exits_of(live.engine, number)
        assert exits == result.exits
        served = {t.id for t in story.turns if t.at < time(cut)}
        done = {turn for turn, kind in before.items() if kind != ExitKind.HELD}
        assert [e.turn for e in exits] == sorted(served - done)  # each once, and none that was done
        before |= {e.turn: e.kind for e in exits}
    ends = final(live, len(cuts))
    assert set(ends) == {t.id for t in story.turns}
    assert {len(kinds) for kinds in ends.values()} == {1}
    reasons = Counter(e.reason for n in range(1, 6) for e in exits_of(live.engine, n))
    assert {"", "delay", "censored", "no_consent", "side", "scrubbed"} <= set(reasons)
    assert all(replay_window(live.engine, live.contents, CONFIG, number).same for number in range(1, 6))


def test_a_window_is_the_same_bits_from_the_log_whatever_came_later(live: StoryLog):
    story = Story()
    tell(story, 0, 40, 0.0, random.Random(8))
    live.write(story)
    result = cut_window(live.engine, live.contents, CONFIG, time(4000))
    batch = window_samples(live.engine, live.contents, CONFIG, 1)
    trained = {e.turn: e for e in result.exits if e.kind == ExitKind.TRAINED}
    assert [s.turn for s in batch] == sorted(trained)
    assert len(batch) > 10
    assert np.mean([s.weight for s in batch]) == pytest.approx(1.0)
    for sample in batch:
        assert (sample.advantage, sample.weight) == (trained[sample.turn].advantage, trained[sample.turn].weight)
        assert np.frombuffer(sample.ids, "<i4").tolist() == [1, 2, 3, 4]
    tell(story, 500, 30, 4000.0, random.Random(9))  # also sessions of accounts that were there
    for i in range(40):
        story.signal(f"t{i:04}", K.STOPPED, 4001 + i)
    live.write(story)
    assert replay_window(live.engine, live.contents, CONFIG, 1).same
    assert window_samples(live.engine, live.contents, CONFIG, 1) == batch
    with live.engine.begin() as connection:  # as the trainer leaves it
        refused = {"kind": "dropped", "reason": "too_long", "weight": 0.0, "advantage": 0.0}
        connection.execute(sa.update(schema.exits).where(schema.exits.c.turn == batch[0].turn).values(refused))
    assert replay_window(live.engine, live.contents, CONFIG, 1).same
    with live.engine.begin() as connection:
        connection.execute(sa.update(schema.labels).where(schema.labels.c.reward < 0).values(reward=-0.1))
    found = replay_window(live.engine, live.contents, CONFIG, 1)
    assert (found.labels, found.exits, found.batch, found.same) == (False, True, True, False)


def test_a_correction_comes_as_text(embedded: StoryLog):
    story = Story()
    for i in range(6):
        story.turn(f"s{i}", f"t{i}", 0)
        story.signal(f"t{i}", K.NO_EDIT, 1)
    story.signal("t3", K.CORRECTION, 5, text="aa/blob")
    embedded.write(story)
    from etude.live.log.accounts import seal

    with embedded.engine.begin() as connection:
        key = embedded.accounts.key(connection, "account of s3")
    assert key is not None
    embedded.store.put("aa/blob", seal(key, b"return -1", "aa/blob"))
    cut_window(embedded.engine, embedded.contents, CONFIG, time(9000))
    batch = window_samples(embedded.engine, embedded.contents, CONFIG, 1)
    assert [s.correction for s in batch] == [None, None, None, "return -1", None, None]


def users(live: StoryLog, count: int) -> Story:
    """A story of users whose accounts are those that the folder's keys make of a0, a1, ..."""
    story = Story()
    tell(story, 0, count, 0.0, random.Random(8))
    named = [msgspec.structs.replace(s, account=live.accounts.name("acme", s.account)) for s in story.sessions]
    story.sessions = named
    live.write(story)
    return story


def forgotten(live: StoryLog, user: str) -> str:
    forget(live.engine, live.store, live.accounts, live.folder, AccountName("acme", user))
    return live.accounts.name("acme", user)


def test_who_is_forgotten_before_training_is_in_no_batch(live: StoryLog):
    story = users(live, 40)
    cut_window(live.engine, live.contents, CONFIG, time(4000))
    before = window_samples(live.engine, live.contents, CONFIG, 1)
    user = next(f"a{n}" for n in range(17) if live.accounts.name("acme", f"a{n}") == before[3].account)
    account = forgotten(live, user)
    assert account == before[3].account
    batch = window_samples(live.engine, live.contents, CONFIG, 1)
    assert batch
    assert not any(s.account == account for s in batch)
    mine = {t.id for t in story.turns if t.session in {s.id for s in story.sessions if s.account == account}}
    assert {e.kind for e in exits_of(live.engine, 1) if e.turn in mine} == {ExitKind.DROPPED}
    assert replay_window(live.engine, live.contents, CONFIG, 1).same
    assert window_samples(live.engine, live.contents, CONFIG, 1) == batch


def test_who_is_forgotten_while_a_window_is_computed_is_not_in_it(embedded: StoryLog, monkeypatch: pytest.MonkeyPatch):
    users(embedded, 40)
    decided: list[int] = []

    def late(*arguments: Any) -> Any:
        if not decided:
            forgotten(embedded, "a3")
        decided.append(1)
        return decide(*arguments)

    monkeypatch.setattr("etude.live.learn.window.decide", late)
    result = cut_window(embedded.engine, embedded.contents, CONFIG, time(4000))
    assert len(decided) == 2
    mine = {t.id for t in result.turns if t.session in {f"s{i}" for i in range(3, 40, 17)}}
    assert {e.reason for e in result.exits if e.turn in mine} <= {"tombstone", "no_consent"}
    assert "tombstone" in {e.reason for e in result.exits}


def test_a_past_window_cannot_be_trained_on_once_an_account_was_forgotten(embedded: StoryLog):
    story = users(embedded, 40)
    cut_window(embedded.engine, embedded.contents, CONFIG, time(2700))
    last = cut_window(embedded.engine, embedded.contents, CONFIG, time(4000))
    held = {e.turn for e in last.exits} & {t.id for t in story.turns[30:]}
    assert held
    session = {t.id: t.session for t in story.turns}[min(held)]
    forgotten(embedded, f"a{int(session[1:]) % 17}")
    with pytest.raises(UserError, match="which is past"):
        window_samples(embedded.engine, embedded.contents, CONFIG, 1)
    with pytest.raises(UserError, match="of its turns are gone"):
        replay_window(embedded.engine, embedded.contents, CONFIG, 1)
    after = cut_window(embedded.engine, embedded.contents, CONFIG, time(9000))
    assert replay_window(embedded.engine, embedded.contents, CONFIG, 3).same
    assert {e.turn for e in after.exits} <= {t.id for t in story.turns}


_CHILD = """
import sys
from pathlib import Path
from etude.config.live import LabelsConfig
from etude.live.learn.window import cut_window
from tests.helpers.live_story import StoryLog
live = StoryLog(Path(sys.argv[1]), sys.argv[2])
cut_window(live.engine, live.contents, LabelsConfig(least_batch=5), int(sys.argv[3]))
"""


def test_a_window_that_is_killed_in_the_middle_has_written_nothing(live: StoryLog):
    story = Story()
    tell(story, 0, 30, 0.0, random.Random(2))
    live.write(story)
    command = [sys.executable, "-c", _CHILD, str(live.folder), live.url, str(time(4000))]
    environment = os.environ | {"ETUDE_FAILPOINT": "live.window:1"}
    assert subprocess.run(command, env=environment, timeout=120).returncode == -signal.SIGKILL
    with journal.reading(live.engine) as connection:
        for table in (schema.windows, schema.labels, schema.exits):
            assert connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() == 0
    result = cut_window(live.engine, live.contents, CONFIG, time(4000))
    assert result.number == 1
    assert replay_window(live.engine, live.contents, CONFIG, 1).same


def test_of_two_windows_at_once_one_is_written(live: StoryLog):
    story = Story()
    tell(story, 0, 40, 0.0, random.Random(2))
    live.write(story)
    ends: list[Any] = []

    def cut() -> None:
        try:
            ends.append(cut_window(live.engine, live.contents, CONFIG, time(4000)).number)
        except UserError as e:
            ends.append(str(e))

    threads = [threading.Thread(target=cut) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [e for e in ends if isinstance(e, int)] == [1]
    assert all("another window 1" in e or "give a later --cut" in e for e in ends if isinstance(e, str))
    assert replay_window(live.engine, live.contents, CONFIG, 1).same


def test_spans_that_do_not_cover_the_tokens_are_no_tokens(embedded: StoryLog):
    story = Story()
    for i, spans in enumerate([((0, 4),), ((0, 2), (2, 4)), ((0, 2), (3, 4)), ((0, 3),), ((1, 4),), ()]):
        made = tuple(VersionSpan(low=low, high=high, version=1) for low, high in spans)
        story.turn(f"s{i}", f"t{i}", 0, spans=made)
        story.signal(f"t{i}", K.NO_EDIT, 1)
    embedded.write(story)
    result = cut_window(embedded.engine, embedded.contents, LabelsConfig(least_batch=1), time(9000))
    assert [e.reason for e in result.exits] == ["", "", *["no_tokens"] * 4]


def test_damaged_content_is_an_error_and_missing_content_is_a_reason(embedded: StoryLog):
    story = Story()
    for i in range(6):
        story.turn(f"s{i}", f"t{i}", 0)
        story.signal(f"t{i}", K.NO_EDIT, 1)
    embedded.write(story)
    embedded.store.delete("s0/t0")
    result = cut_window(embedded.engine, embedded.contents, CONFIG, time(9000))
    assert [e.reason for e in result.exits] == ["expired", *[""] * 5]
    embedded.store.put("s1/t1", b"\0" * 64)
    with pytest.raises(UserError, match="is damaged"):
        replay_window(embedded.engine, embedded.contents, CONFIG, 1)


def test_slow_signals_tell_whether_the_early_ones_told_the_truth(embedded: StoryLog):
    story = Story()
    for i in range(8):
        story.turn(f"s{i}", f"t{i}", 0)
        story.edit(f"t{i}", f"e{i}", 0, 200)
        story.survived(f"e{i}", i / 7, 1800)
        story.survived(f"e{i}", (i / 7) ** 2 if i else 0.0, 86_400, horizon=86_400.0)
        story.signal(f"e{i}", K.COMMITTED, 86_500, 1.0)
    story.turn("silent", "silent", 0)
    story.edit("silent", "f", 0)
    story.survived("f", 0.0, 86_400, horizon=86_400.0)
    embedded.write(story)
    cut_window(embedded.engine, embedded.contents, CONFIG, time(9000))
    assert signal_calibration(embedded.engine, CONFIG, 1) == {}
    cut_window(embedded.engine, embedded.contents, CONFIG, time(90_000))
    found = signal_calibration(embedded.engine, CONFIG, 2)
    x = np.arange(8) / 7
    assert found["survived"] == (8, pytest.approx(np.corrcoef(x, x**2)[0, 1]))
    assert found["committed"] == (8, None)


def test_what_a_gateway_has_written_becomes_a_batch(embedded: StoryLog):
    """The gateway's own writer, this machine's clock, and windows of a tenth of a second."""
    config = LabelsConfig(least_batch=6, window_seconds=0.1, delay_seconds=0.2)
    queue = RecordQueue()
    writer = LogWriter(queue, embedded.engine, embedded.store, embedded.accounts)
    story = Story()
    for i in range(6):
        story.turn(f"s{i}", ulid(), 0, blob=None)
    entries: list[SuggestionEntry] = []
    for turn, session in zip(story.turns, story.sessions, strict=True):
        asked = content(f"fix the {turn.id} of the parser")
        assert queue.append(TurnEntry(session, turn, asked))
        edit = Suggestion(
            id=ulid(), turn=turn.id, path="p", base="b", old_lines=(0, 1), new="n", characters=200, shown=0
        )
        entries.append(SuggestionEntry("acme", edit))
    assert queue.submit(entries).result(30) == ["recorded"] * 6
    clock.sleep(0.2)
    told = [story.survived(e.suggestion.id, i / 5, 0, horizon=0.1) for i, e in enumerate(entries)]
    wanted = story.signal(story.turns[2].id, K.CORRECTION, 0)
    signals = [SignalEntry(s) for s in told] + [SignalEntry(wanted, "use a set")]
    assert queue.submit([*signals, *signals[:3]]).result(30) == ["recorded"] * 7 + ["duplicate"] * 3
    writer.close()
    result = cut_window(embedded.engine, embedded.contents, config)
    assert [(e.kind, e.reason) for e in result.exits] == [(ExitKind.TRAINED, "")] * 6
    rewards = {label.turn: label.reward for label in result.labels}
    assert [rewards[t.id] for t in story.turns] == pytest.approx([0.6 * i / 5 - 0.4 * (1 - i / 5) for i in range(6)])
    batch = window_samples(embedded.engine, embedded.contents, config, 1)
    assert {s.turn: s.correction for s in batch} == {t.id: None for t in story.turns} | {story.turns[2].id: "use a set"}
    assert replay_window(embedded.engine, embedded.contents, config, 1).same


def test_a_flood_of_signals_is_read_up_to_a_bound(embedded: StoryLog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("etude.live.learn.window.MAX_SIGNALS", 3)
    story = Story()
    for i in range(6):
        story.turn(f"s{i}", f"t{i}", 0)
        story.signal(f"t{i}", K.STOPPED, 1)
    for i in range(9):
        story.signal("t0", K.INVALID_CALL if i > 1 else K.TESTS, 2 + i)
    embedded.write(story)
    result = cut_window(embedded.engine, embedded.contents, CONFIG, time(9000))
    assert set(result.labels[0].components) == {"stopped", "tests", "latency"}


def test_cuts_go_forward_and_not_into_the_future(embedded: StoryLog):
    cut_window(embedded.engine, embedded.contents, CONFIG, time(9000))
    for cut, sentence in ((time(9000), "later --cut"), (time(10**10), "in the future")):
        with pytest.raises(UserError, match=sentence):
            cut_window(embedded.engine, embedded.contents, CONFIG, cut)
    with pytest.raises(UserError, match="computed by the rules"):
        replay_window(embedded.engine, embedded.contents, LabelsConfig(question_cost=0.9), 1)
    for number in (0, 2):
        with pytest.raises(UserError, match=f"no window {number}"):
            window_samples(embedded.engine, embedded.contents, CONFIG, number)


# The command ----------------------------------------------------------------------------------------------------------


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["live", "window", *words])
    output = capsys.readouterr()
    return int(str(ended.value.code)), output.out, output.err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "live.toml"
    path.write_text(f"""
stage = "live"
folder = "{tmp_path}/live"
[[clusters]]
name = "main"
urls = ["http://127.0.0.1:1"]
store = "{tmp_path}/weights"
[labels]
least_batch = 5
""")
    return path


def test_the_command_prints_exits_and_drops(embedded: StoryLog, config: Path, capsys: pytest.CaptureFixture[str]):
    story = Story()
    tell(story, 0, 40, 0.0, random.Random(8))
    embedded.write(story)
    code, text, _ = ran(capsys, str(config), "--cut", "2026-01-01T01:10:00+00:00", "--json")
    figures = json.loads(text.splitlines()[-1])
    assert (code, figures["window"], figures["cut"]) == (0, 1, time(4200))
    assert sum(n for by in figures["exits"].values() for n in by.values()) == 40
    assert "| trained | - |" in text
    assert "| share dropped | version 3 |" in text
    code, text, _ = ran(capsys, str(config), "--replay", "1", "--json")
    assert (code, text.splitlines()[0]) == (0, "Window 1: the same bits.")
    with embedded.engine.begin() as connection:
        connection.execute(sa.update(schema.exits).values(advantage=0.5))
    code, text, _ = ran(capsys, str(config), "--replay", "1")
    assert (code, text.strip()) == (1, "Window 1: exits differ.")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--cut", "yesterday"], "give a time with its zone"),
        (["--cut", "2026-01-01T01:10:00"], "has no zone"),
        (["--replay", "7"], "there is no window 7"),
    ],
)
def test_bad_input_of_the_command(
    embedded: StoryLog, config: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
):
    code, _, error = ran(capsys, str(config), *words)
    assert code == 2
    assert sentence in error


def test_a_loop_that_was_never_served_has_no_windows(config: Path, capsys: pytest.CaptureFixture[str]):
    code, _, error = ran(capsys, str(config))
    assert code == 2
    assert "holds no live loop yet" in error
