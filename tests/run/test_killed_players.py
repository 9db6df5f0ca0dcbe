"""All processes of a run are killed in the middle of its episodes, which go on from their journals."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.fleet_run import tree

from etude.ledger import Ledger
from etude.ledger.schema import RECOVERY
from etude.records import Episode, Generation, Outcome, StopReason, decode
from etude.rollout.journal import EpisodeJournal, TurnEnd, open_journal
from etude.run.episodes import _record
from etude.store import Store, open_store
from etude.weights.manifest import manifests
from tests.run.test_run import CONFIG, SECONDS, etude, finished, start, versions

KILLS = 3
LONG = CONFIG.replace("turns = 2", "turns = 12").replace("tokens = 48", "tokens = 240").replace("512", "1200")
LONG = LONG.replace("steps = 3", "steps = 2")


def sampled(store: Store) -> dict[str, Episode]:
    """The finished episodes by group and member."""
    keys = [key for key in store.list() if key[0].isdigit()]
    return {key.partition("-")[0]: decode(store.get(key), Episode) for key in keys}


def lost_or_not(outcome: Outcome) -> Episode:
    return Episode(
        id="0-0-0", group_id=0, member=0, attempt=0, task_id="t", seed=0, outcome=outcome,
        stop_reason=StopReason.FINISHED, reward=0.0, passed=False, segments=(), turns=(), metrics={},
    )  # fmt: skip


def test_a_journal_lasts_until_its_episode_has_a_result(tmp_path: Path) -> None:
    """What infrastructure loses goes on from its journal, once; a journal that only leads there again is forgotten."""
    ledger, store = Ledger.open(f"sqlite:///{tmp_path}/ledger.db", "run"), open_store(str(tmp_path / "rollouts"))
    run: Any = SimpleNamespace(ledger=ledger, rollouts=store, row=None)
    ledger.admit(0, "t", 1, 0)

    def attempt(outcome: Outcome, entries: int) -> int:
        """The recorded tokens that the attempt found."""
        (lease,) = ledger.lease("me", 1, 60.0)

        async def play() -> EpisodeJournal:
            journal = await open_journal(store, 0, 0, lease.attempt)
            while (turn := journal.take(TurnEnd, b"")) is not None:
                journal.recovered["recovered_tokens"] += len(turn.generation.ids)
            generation = Generation(ids=[1], logprobs=[0.0], versions=[0], finish_reason="stop")
            for _ in range(entries):
                journal.add(TurnEnd(request=b"", after=0, generation=generation, at=0.0))
            await journal.close(keep=outcome is Outcome.INFRA)
            return journal

        journal = asyncio.run(play())
        _record(run, lease, lost_or_not(outcome), journal)
        return journal.recovered["recovered_tokens"]

    assert [attempt(Outcome.INFRA, 2), attempt(Outcome.INFRA, 0)] == [0, 2]
    assert store.list("journal") == []
    assert attempt(Outcome.SCORED, 3) == 0
    assert store.list("journal") == []
    assert ledger.unfinished() == set()
    assert ledger.recovered() == dict.fromkeys(RECOVERY, 0)
    ledger.admit(1, "t", 1, 0)
    assert ledger.unfinished() == {(1, 0)}
    ledger.close()


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_its_episodes(tmp_path: Path) -> None:
    """The same weights and tokens as undisturbed, though no recorded token is sampled again."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    code, output = finished(start(whole, config=LONG))
    assert code == 0, output
    process = start(cut, config=LONG)
    begun = time.monotonic()
    while not (cut / "outputs/run/rollouts").exists():
        assert time.monotonic() < begun + SECONDS
        time.sleep(0.02)
    store = open_store(str(cut / "outputs/run/rollouts"))
    for _ in range(KILLS):
        deadline, known = time.monotonic() + SECONDS, set(store.list("journal"))
        while len(set(store.list("journal")) - known) < 3:  # episodes that this attempt records
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        pids = tree(process.pid)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none notices that another is gone
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        process.communicate()
        process = etude(cut, "train", "run.toml", "--resume")
    code, output = finished(process)
    assert code == 0, output
    assert versions(cut) == versions(whole)
    ledger = Ledger.open(f"sqlite:///{cut}/outputs/run/ledger.db", "run")
    counts = ledger.recovered()
    assert ledger.conservation(manifests(open_store(str(cut / "outputs/run/weights")))).ok
    ledger.close()
    assert counts["continued"] > 0
    assert counts["recovered_tokens"] > 0
    assert counts["begun_anew"] == 0, output
    assert store.list("journal") == [], "nothing is left of finished episodes"
    before, after = (sampled(open_store(str(folder / "outputs/run/rollouts"))) for folder in (whole, cut))
    assert {key: episode.segments for key, episode in before.items()} == {
        key: episode.segments for key, episode in after.items()
    }
