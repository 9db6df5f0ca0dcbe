"""What whole runs have recorded: every token is drawn from its seed, said again by the harness, and exported."""

import json

import blake3
import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from etude.ledger.digests import EPISODE, seal
from etude.ledger.schema import episodes
from etude.records import Episode, decode, encode
from etude.store import open_store
from tests.run.test_run import CONFIG, etude, finished, start

TURNS = CONFIG.replace("group = 3", "group = 4").replace("turns = 2\ntokens = 48", "turns = 3\ntokens = 90")
TURNS += "\n[reward]\nlength = { weight = 1e-3 }\n"  # conduct differs, so there is something to train on


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    code, output = finished(start(folder, config=TURNS))
    assert code == 0, output
    return folder


def episodes_of(folder):
    """The episodes of a run."""
    store = open_store(str(folder / "outputs/run/rollouts"))
    return [decode(store.get(key), Episode) for key in sorted(store.list()) if key[0].isdigit()]


def replace(folder, store, key, data):
    """Puts other bytes in the place of a blob, as if they had been recorded."""
    store.delete(key)
    store.put(key, data)
    engine = sa.create_engine(f"sqlite:///{folder}/outputs/run/ledger.db")
    with engine.begin() as c:
        row = dict(c.execute(sa.select(episodes).where(episodes.c.blob == key)).mappings().one())
        row["digest"] = blake3.blake3(data).hexdigest()
        values = {"digest": row["digest"], "seal": seal(EPISODE, row)}
        c.execute(sa.update(episodes).where(episodes.c.blob == key).values(values))
    engine.dispose()


@pytest.mark.slow
def test_every_token_is_what_the_seed_of_its_member_draws(recorded):
    code, output = finished(etude(recorded, "doctor", "mismatch", "outputs/run", "--json"))
    assert code == 0, output
    found = json.loads(output.splitlines()[-1])
    assert (found["cause"], found["wrong_draws"]) == ("healthy", 0.0)


@pytest.mark.slow
def test_every_episode_of_the_ledger_is_replayed_token_by_token(recorded):
    code, output = finished(etude(recorded, "doctor", "replay", "outputs/run", "--json"))
    assert code == 0, output
    found = json.loads(output.splitlines()[-1])
    assert (found["episodes"], found["exact"]) == (24, 24)
    assert {r["episode"] for r in found["replayed"]} == {e.id for e in episodes_of(recorded)}


@pytest.mark.slow
def test_every_episode_of_the_ledger_is_exported(recorded):
    code, output = finished(etude(recorded, "export", "outputs/run", "-o", "out"))
    assert code == 0, output
    episodes = {e.id: e for e in episodes_of(recorded)}
    assert {path.stem for path in (recorded / "out").iterdir()} == episodes.keys()
    for name, episode in episodes.items():
        found = json.loads((recorded / "out" / f"{name}.json").read_text())
        assert found["final_metrics"]["total_completion_tokens"] == episode.sampled_tokens > 0
    code, output = finished(etude(recorded, "export", "outputs/run", "-o", "out"))
    assert code == 2
    assert "out cannot be made (File exists); name a folder that does not exist yet" in output


@pytest.mark.slow
def test_a_token_that_the_harness_would_not_say_is_named(recorded):
    """Other ids in a blob, of the prompt and of a tool's result: the first place that differs is said."""
    store = open_store(str(recorded / "outputs/run/rollouts"))
    chosen = next(e for e in episodes_of(recorded) if len(e.segments[0].turn_starts) > 1)
    key = next(key for key in store.list() if key[0].isdigit() and decode(store.get(key), Episode).id == chosen.id)
    kept = store.get(key)
    (segment,) = chosen.segments
    for at, turn in ((3, 0), (segment.turn_starts[1] - 1, 1)):
        ids = np.frombuffer(segment.ids, "<i4").copy()
        ids[at] += 1
        other = msgspec.structs.replace(chosen, segments=(msgspec.structs.replace(segment, ids=ids.tobytes()),))
        replace(recorded, store, key, encode(other))
        code, output = finished(etude(recorded, "doctor", "replay", "outputs/run", chosen.id))
        assert code == 1, output
        assert f"{chosen.id}: turn {turn} was sampled from" in output
        assert f"the first that differs is number {at}\n" in output
        assert "0 of 1 episodes are token-exact" in output
    replace(recorded, store, key, kept)
    code, output = finished(etude(recorded, "doctor", "replay", "outputs/run", "9-9"))
    assert code == 2
    assert "no episode '9-9'; give GROUP-MEMBER-ATTEMPT" in output


@pytest.mark.slow
def test_an_asynchronous_run_of_chains_is_replayed(tmp_path):
    """Episodes of several segments, with the experts of each token."""
    config = TURNS.replace("deterministic = true", "").replace("staleness = 0", "staleness = 1")
    config = config.replace("tokens = 90", "tokens = 160\nsummarise_at = 60")
    overrides = ["--trainer.steps", "4", "--trainer.router_replay", "true", "--trainer.execution", "packed"]
    overrides += ["--rollout.summary_tokens", "16", "--reward.length.calls", "30", "--reward.length.output", "1"]
    code, output = finished(start(tmp_path, *overrides, config=config))
    assert code == 0, output
    run = tmp_path / "outputs/run"
    report = json.loads((run / "report.json").read_text())
    assert all(report["checks"].values()), report["checks"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line["off_policy/max"] for line in lines) <= 1
    assert all(line["router/missing"] == 0 for line in lines if "router/missing" in line)
    assert any(len(e.segments) > 1 for e in episodes_of(tmp_path)), "nobody summarised: the comparison is void"
    code, output = finished(etude(tmp_path, "doctor", "replay", "outputs/run"))
    assert code == 0, output
    assert output.startswith("32 of 32 episodes are token-exact")
