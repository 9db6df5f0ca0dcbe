"""A window becomes a version of the candidates' store: by the ordinary trainer, once, from what the control serves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from etude import runfolder
from etude.cli.main import main
from etude.errors import UserError
from etude.ledger.ledger import Ledger
from etude.live.learn import train
from etude.live.learn.train import train_window
from etude.live.log.accounts import seal
from etude.live.log.records import VersionSpan
from etude.live.log.schema import exits as exits_table
from etude.live.log.schema import windows as windows_table
from etude.store import open_store
from etude.weights.content import load
from etude.weights.manifest import manifests
from tests.helpers.live_story import Story, StoryLog, content
from tests.helpers.live_windows import NANO, answered, begin_window, exits, new_loop, release, window
from tests.helpers.trainer_runs import run_trainer


@pytest.fixture
def trainer_here(monkeypatch):
    """The trainer runs in this process, which has torch loaded already."""
    monkeypatch.setattr(train, "_run_trainer", lambda folder, source, lock, seconds: run_trainer(folder, source))


def altered(sample, **changes):
    return msgspec.structs.replace(sample, **changes)


def test_a_window_becomes_a_version(tmp_path, trainer_here):
    loop = new_loop(tmp_path)
    samples = answered(loop, 1, 12)
    split = (VersionSpan(low=0, high=3, version=0), VersionSpan(low=3, high=8, version=0))
    samples[0] = altered(samples[0], spans=split)
    wrong = {
        "stale": altered(samples[11], manifest="0" * 32),
        "temperature": altered(samples[10], temperature=0.7),
        "tokens": altered(samples[9], logprobs=samples[9].logprobs[4:]),
        "too_long": altered(samples[8], prompt_ids=samples[8].prompt_ids * 40),
    }
    samples[8:] = wrong.values()
    done = train_window(loop.config, loop.log, 1, samples)
    assert (done.window, done.version, done.base, done.turns, done.action) == (1, 1, 0, 8, "go")
    assert done.refused == dict.fromkeys(wrong, 1)
    assert exits(loop, 1) == {sample.turn: ("dropped", why) for why, sample in wrong.items()}
    zero, one = manifests(loop.candidates)
    assert zero.live == manifests(loop.control)[0].live, "version 0 is what the control serves"
    assert (one.groups, one.live, one.live != zero.live) == (tuple(range(8)), done.digest, True)
    assert (window(loop, 1).version, window(loop, 1).base_version) == (1, 0)
    folder = tmp_path / "live/train"
    assert open_store(f"{folder}/rollouts").list() == [], "the tokens of users are gone"
    (line,) = runfolder.read_jsonl(folder / "metrics.jsonl")
    assert line["mismatch/k2"] < 1e-6, "trainer and server computed the same probabilities"
    assert line["mismatch/tokens"] == 64
    assert train_window(loop.config, loop.log, 1, samples) == done, "again is fine"
    assert len(manifests(loop.candidates)) == 2
    ledger = Ledger.open(f"sqlite:///{folder}/ledger.db")
    assert ledger.conservation(manifests(loop.candidates)).ok
    ledger.close()


def test_training_goes_on_from_what_the_control_serves(tmp_path, trainer_here):
    """A candidate that was not released is left behind; a released one is the base of the next."""
    loop = new_loop(tmp_path)
    first = answered(loop, 1, 6)
    assert train_window(loop.config, loop.log, 1, first).version == 1
    second = answered(loop, 2, 6)
    assert (train_window(loop.config, loop.log, 2, second).base, len(manifests(loop.candidates))) == (2, 4)
    digests = [m.live for m in manifests(loop.candidates)]
    assert digests[2] == digests[0]
    assert len(set(digests)) == 3
    release(loop, load(loop.candidates, 3)[1])  # the control's version 1
    late, third = answered(loop, 3, 2), answered(loop, 4, 6)
    early = [altered(s, manifest=digests[0], turn=s.turn + "X") for s in late]
    older = altered(third[0], manifest=digests[1])
    done = train_window(loop.config, loop.log, 4, [*early, *third[1:], older])
    assert (done.base, done.version, done.turns) == (3, 4, 7), "turns of the release before are taken"
    assert exits(loop, 4) == {older.turn: ("dropped", "stale")}, "those of a candidate that was never released not"
    line = runfolder.read_jsonl(tmp_path / "live/train/metrics.jsonl")[-1]
    assert line["off_policy/histogram"] == {"0": 40, "1": 16}


def test_what_cannot_be_trained_is_refused(tmp_path, trainer_here):
    loop = new_loop(tmp_path)
    samples = answered(loop, 1, 4)
    with pytest.raises(UserError, match="has no window 7"):
        train_window(loop.config, loop.log, 7, samples)
    with pytest.raises(UserError, match="has no turns"):
        train_window(loop.config, loop.log, 1, [])
    with pytest.raises(UserError, match="4 temperature"):
        train_window(loop.config, loop.log, 1, [altered(s, temperature=0.5) for s in samples])
    train_window(loop.config, loop.log, 1, samples)
    begin_window(loop, 2)
    with pytest.raises(UserError, match="in another window"):
        train_window(loop.config, loop.log, 2, [samples[0], *answered(loop, 3, 1)])
    noise = {n: t + 0.1 for n, t in load(loop.control, 0)[1].items()}
    release(loop, noise)
    with pytest.raises(UserError, match="is none of"):
        train_window(loop.config, loop.log, 3, answered(loop, 4, 2))


@pytest.mark.parametrize("model", [None, pytest.param(NANO, marks=pytest.mark.slow)])
def test_the_same_window_gives_the_same_weights(tmp_path, trainer_here, model):
    """Bit for bit, in deterministic mode; with corrections, which are shuffled and counted."""
    digests = []
    for run in ("a", "b", "other"):
        loop = new_loop(tmp_path / run, model=model, deterministic=True, more="[distill]\nshare = 1.0")
        samples = [altered(s, correction=f"Keep `f{i}`.") for i, s in enumerate(answered(loop, 1, 6))]
        if run == "other":
            samples[0] = altered(samples[0], advantage=0.5)
        done = train_window(loop.config, loop.log, 1, samples)
        assert (done.hints, done.hints_left_out) == (6, {})
        digests.append(done.digest)
    (line,) = runfolder.read_jsonl(tmp_path / "b/live/train/metrics.jsonl")
    assert line["distill/hints"] == 6
    assert digests[0] == digests[1] != digests[2]


def test_a_turn_whose_account_is_forgotten_meanwhile_is_not_trained_on(tmp_path, trainer_here, monkeypatch):
    """It was admitted, then the command was killed; its exit in the window is a tombstone's by now."""
    loop = new_loop(tmp_path)
    samples = answered(loop, 1, 4)
    with monkeypatch.context() as here:
        here.setattr(train, "_run_trainer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_window(loop.config, loop.log, 1, samples)
    begin_window(loop, 2)
    with pytest.raises(UserError, match="is not trained on yet"):
        train_window(loop.config, loop.log, 2, answered(loop, 3, 1))
    gone = {"turn": samples[2].turn, "window": 1, "kind": "dropped", "reason": "tombstone", "weight": 0, "advantage": 0}
    with loop.log.begin() as c:
        c.execute(sa.insert(exits_table), [gone])
    done = train_window(loop.config, loop.log, 1, [*samples[:2], samples[3]])
    assert (done.turns, done.refused) == (3, {})
    assert exits(loop, 1) == {samples[2].turn: ("dropped", "tombstone")}
    line = runfolder.read_jsonl(tmp_path / "live/train/metrics.jsonl")[-1]
    assert line["mismatch/tokens"] == 24
    assert open_store(str(tmp_path / "live/train/rollouts")).list() == []
    assert train_window(loop.config, loop.log, 1, [*samples[:2], samples[3]]) == done


POINTS = (
    "live.turn:3",
    "live.admitted:1",
    "trainer.stepped:1",
    "trainer.published:2",
    "trainer.consumed:2",
    "live.trained:1",
    "live.noted:1",
)


def killed(point, loop, samples, tmp_path):
    """The command in a process of its own, which is killed at a failpoint."""
    path = str(tmp_path / "samples")
    Path(path).write_bytes(msgspec.msgpack.encode(samples))
    code = (
        "import msgspec, pathlib, sys; from etude.config import LiveConfig; from etude.live.log import schema;"
        "from etude.live.log.records import LiveSample; from etude.live.learn.train import train_window;"
        f"config = LiveConfig.model_validate_json({loop.config.model_dump_json()!r});"
        f"samples = msgspec.msgpack.decode(pathlib.Path({path!r}).read_bytes(), type=list[LiveSample]);"
        f"train_window(config, schema.connect({str(loop.log.url)!r}), 1, samples)"
    )
    environment = os.environ | {"ETUDE_FAILPOINT": point}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=300).returncode


@pytest.mark.parametrize("point", [
    pytest.param(point, marks=pytest.mark.slow if point == "trainer.published:2" else pytest.mark.release)
    for point in POINTS
])  # fmt: skip
def test_a_kill_anywhere_loses_no_turn_and_trains_none_twice(tmp_path, monkeypatch, point):
    """kill -9 of the command or of the trainer, then again: the weights of an undisturbed window, to the bit."""
    digests = []
    for disturbed in (False, True):
        loop = new_loop(tmp_path / str(disturbed), deterministic=True)
        samples = answered(loop, 1, 6)
        samples[5] = altered(samples[5], manifest="0" * 32)
        with monkeypatch.context() as here:
            if disturbed:
                assert killed(point, loop, samples, tmp_path) != 0
            else:
                here.setattr(train, "_run_trainer", lambda folder, source, *_: run_trainer(folder, source))
            done = train_window(loop.config, loop.log, 1, samples)
        assert (done.turns, done.refused, done.version) == (5, {"stale": 1}, 1)
        assert [m.groups for m in manifests(loop.candidates)] == [(), (0, 1, 2, 3, 4)]
        assert window(loop, 1).version == 1
        assert exits(loop, 1) == {samples[5].turn: ("dropped", "stale")}
        assert open_store(str(tmp_path / str(disturbed) / "live/train/rollouts")).list() == []
        digests.append(done.digest)
    assert digests[0] == digests[1]


def told(capsys, *words):
    """The JSON of a command of `etude live`."""
    with pytest.raises(SystemExit) as ended:
        main(["live", *words, "--json"])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_from_the_log_to_a_candidate(tmp_path, trainer_here, capsys):
    """`etude live window`, then `etude live train`, on turns whose contents are encrypted in the log."""
    loop = new_loop(tmp_path)
    served = answered(loop, 1, 6)
    with loop.log.begin() as c:
        c.execute(sa.delete(windows_table))
    story, opened = Story(), StoryLog(tmp_path / "live", str(loop.log.url))
    for i, sample in enumerate(served):
        fields = {"manifest": sample.manifest, "spans": sample.spans, "cluster": "one", "sampled_tokens": 8}
        story.turn(f"s{i}", sample.turn, 60.0 * i, **fields)
        story.edit(sample.turn, f"edit{i}", 60.0 * i)
        story.survived(f"edit{i}", float(i % 2), 60.0 * i + 1800)
    opened.write(story)
    keys = opened.contents.keys(session.account for session in story.sessions)
    for turn, session, sample in zip(story.turns, story.sessions, served, strict=True):
        made = msgspec.structs.replace(
            content(f"fix the {turn.id}", sample.ids), prompt_ids=sample.prompt_ids, logprobs=sample.logprobs
        )
        key = keys[session.account]
        assert key is not None
        assert turn.blob is not None
        opened.store.put(turn.blob, seal(key, msgspec.msgpack.encode(made), turn.blob))
    opened.close()
    toml = tmp_path / "live.toml"
    toml.write_text(f"""
folder = "{tmp_path}/live"
train = "{tmp_path}/recipe.toml"
[[clusters]]
name = "one"
urls = ["http://127.0.0.1:1"]
store = "{tmp_path}/control"
[labels]
least_batch = 1
""")
    cut = told(capsys, "window", str(toml), "--cut", "2026-01-02T00:00:00Z")
    assert sum(cut["exits"]["trained"].values()) == 6, cut
    done = told(capsys, "train", str(toml), "--window", "1")
    assert (done["turns"], done["version"], done["refused"], done["action"]) == (6, 1, {}, "go")
    assert window(loop, 1).version == 1
    line = runfolder.read_jsonl(tmp_path / "live/train/metrics.jsonl")[-1]
    assert line["mismatch/k2"] < 1e-6, "the probabilities are those of the answers"
