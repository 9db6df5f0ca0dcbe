"""All processes of a run are killed in the middle of its episodes, which go on from their journals."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from etude.ledger import Ledger
from etude.records import Episode, decode
from etude.store import Store, open_store
from etude.weights.manifest import manifests
from tests.run.test_run import CONFIG, SECONDS, etude, finished, start, versions

KILLS = 3
LONG = CONFIG.replace("turns = 2", "turns = 12").replace("tokens = 48", "tokens = 240").replace("512", "1200")
LONG = LONG.replace("steps = 3", "steps = 2")


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    pids = [pid]
    for parent in pids:  # it grows
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return pids


def sampled(store: Store) -> dict[str, Episode]:
    """The finished episodes by group and member."""
    keys = [key for key in store.list() if key[0].isdigit()]
    return {key.partition("-")[0]: decode(store.get(key), Episode) for key in keys}


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
