"""Releases, rollbacks and drills on two clusters with real weight stores; their servers follow the stores."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from etude.cli import live_releases
from etude.cli.main import main
from etude.config import validate
from etude.config.live import LiveConfig
from etude.errors import UserError
from etude.live.log import schema
from etude.live.log.records import Arm, ReleaseStage
from etude.live.release import operations, overview, releases
from etude.store import open_store
from etude.weights.manifest import read_manifest
from tests.helpers.followers import Follower, Site, site
from tests.helpers.small_tensors import nudged, tensors

QUICK = {
    "labels": {"window_seconds": 0.01, "delay_seconds": 0.01},
    "canary": {"stages": [0.5, 1.0], "minutes": 0.0, "least": 4, "holdback": 0.0, "slot_minutes": 0.0005},
}
FIRST = tensors(1)
SECOND = nudged(FIRST, 2)


@pytest.fixture
def two(tmp_path: Path):
    """A site whose first release is out."""
    with site(tmp_path, **QUICK) as made:
        operations.start(made.site, made.passed(FIRST, 0), 0)
        yield made


def use(made: Site, **canary: int) -> None:
    """Sixty accounts of each arm use the model in two slots from now, and these have matured at the return."""
    slot = round(0.0005 * 60e9)
    first, log = -(-time.time_ns() // slot), made.site.read()
    trial = log.trial.release.number if log.trial else 1
    rows = []
    for arm in ("control", "canary"):
        counts = {"requests": 4, "edits": 2, "labelled": 2, "applied": 2, "undone": 0}
        counts |= canary if arm == "canary" else {}
        rows += [
            {
                "release": 1 if arm == "control" else trial,
                "arm": arm,
                "account": f"{arm}{number}",
                "slot": at,
                "name": name,
                "tenant": "acme",
                "count": n,
                "total": n,
            }
            for number in range(60)
            for at in (first, first + 1)
            for name, n in counts.items()
        ]
    with made.site.engine.begin() as connection:
        connection.execute(sa.insert(schema.tallies), rows)
    time.sleep(0.15)


def stages(made: Site) -> list[str]:
    return [str(state.stage) for state in made.site.read().states]


def test_the_first_release_reaches_every_store_at_once_and_only_once(two: Site) -> None:
    digest = two.site.read().states[0].release.manifest
    assert two.held() == dict.fromkeys(two.followers, (0, digest))
    assert operations.start(two.site, digest, 0).stage is ReleaseStage.RELEASED
    assert two.held() == dict.fromkeys(two.followers, (0, digest))
    assert [event.reason for event in two.site.read().states[0].events] == ["passed", "the first release"]


def test_a_release_goes_from_the_canary_to_all(two: Site) -> None:
    old, new = two.site.read().states[0].release.manifest, two.passed(SECOND, 1)
    assert operations.start(two.site, new, 1).stage is ReleaseStage.STAGED
    assert two.held()["east-canary"] == (1, new)
    assert two.held()["west-control"] == (0, old)
    assert operations.tick(two.site).text == "release 2: goes to 50% of the accounts"
    assert operations.tick(two.site).text.startswith("release 2 at 50%: hold, 0 of 4 accounts")
    use(two)
    assert operations.tick(two.site).text.startswith("release 2 at 50%: go on")
    assert two.held() == dict.fromkeys(two.followers, (1, new))
    use(two)
    assert operations.tick(two.site).text.startswith("release 2 at 100%: done")
    assert stages(two) == ["released", "released"]
    assert operations.tick(two.site).text == "no release is on trial"


def test_a_bad_version_is_taken_back_by_the_canary_under_higher_numbers(two: Site) -> None:
    old, new = two.site.read().states[0].release.manifest, two.passed(SECOND, 1)
    operations.start(two.site, new, 1)
    operations.tick(two.site)
    use(two, undone=2)
    assert "roll back, undone edits" in operations.tick(two.site).text
    assert two.held() == {
        "east-control": (0, old),
        "east-canary": (2, old),
        "west-control": (0, old),
        "west-canary": (2, old),
    }
    assert stages(two) == ["released", "rolled_back", "released"]
    again = two.site.read().states[2].release
    assert (again.number, again.parent, again.manifest) == (3, 2, old)
    manifest = read_manifest(open_store(str(two.followers["east-canary"].store)), 2)
    assert manifest is not None
    assert manifest.kind == "delta"  # not the whole weights


def test_a_release_that_everybody_has_is_taken_back_and_forth(two: Site) -> None:
    old, new = two.site.read().states[0].release.manifest, two.passed(SECOND, 1)
    operations.start(two.site, new, 1)
    operations.tick(two.site)
    for _ in range(2):
        use(two)
        operations.tick(two.site)
    assert two.site.read().current.release.manifest == new
    assert operations.rollback(two.site, "a complaint", "ada").release.number == 3
    assert two.held() == dict.fromkeys(two.followers, (2, old))
    assert stages(two) == ["released", "rolled_back", "released"]
    with pytest.raises(UserError, match="no release before 3 has other content"):
        operations.rollback(two.site, "again", "ada")
    with pytest.raises(UserError, match="release 2 is rolled_back"):
        operations.rollback(two.site, "again", "ada", to=2)


def test_what_cannot_be_released_is_refused(two: Site) -> None:
    new = two.passed(SECOND, 1)
    with pytest.raises(UserError, match="version 7 has not passed the gate"):
        operations.start(two.site, "another", 7)
    operations.start(two.site, new, 1)
    with pytest.raises(UserError, match=r"release 2 \(version 1\) is in its staged stage"):
        operations.start(two.site, "another", 7)
    with pytest.raises(UserError, match="no release waits for an approval"):
        operations.approve(two.site, "ada")
    with pytest.raises(UserError, match="there is no release 9"):
        operations.rollback(two.site, "", "ada", to=9)


def test_a_gate_beside_a_release_that_is_no_longer_the_current_one_does_not_count(two: Site) -> None:
    stale = two.passed(SECOND, 1)
    other = two.passed(nudged(FIRST, 3), 2)
    operations.start(two.site, other, 2)
    operations.tick(two.site)
    for _ in range(2):
        use(two)
        operations.tick(two.site)
    with pytest.raises(UserError, match="has not passed the gate beside the current release"):
        operations.start(two.site, stale, 1)


def test_a_person_may_have_to_approve_each_stage(tmp_path: Path) -> None:
    canary = QUICK["canary"] | {"approval": True}
    with site(tmp_path, **QUICK | {"canary": canary}) as made:
        operations.start(made.site, made.passed(FIRST, 0), 0)
        operations.start(made.site, made.passed(SECOND, 1), 1)
        operations.tick(made.site)
        with pytest.raises(UserError, match="cannot go on yet: 0 of 4 accounts"):
            operations.approve(made.site, "ada")
        use(made)
        assert "waits for a person" in operations.tick(made.site).text
        assert operations.approve(made.site, "ada").share == 1.0
        assert made.site.read().states[1].events[-1].decided_by == "ada"


def test_a_cluster_that_does_not_follow_is_named_drained_and_comes_back(two: Site, monkeypatch) -> None:
    new = two.passed(SECOND, 1)
    east = two.followers["east-canary"]
    east.stuck = True
    operations.start(two.site, new, 1)
    assert operations.tick(two.site).text == "release 2: the canary's servers of east do not serve it yet"
    told = {(c["cluster"], c["arm"]): c for c in overview.status(two.site)["clusters"]}
    assert told["east", "canary"]["lagging"] == [east.url]
    assert told["west", "canary"]["lagging"] == []
    monkeypatch.setattr(operations, "DEADLINE", 0.0)
    assert operations.tick(two.site).text == "release 2: goes to 50% of the accounts, without east"
    assert {key for key, event in releases.drained(two.site.engine).items() if event.drained} == {("east", Arm.CANARY)}
    east.stuck = False
    operations.tick(two.site)
    assert not any(event.drained for event in releases.drained(two.site.engine).values())


def test_a_store_that_is_away_gets_the_rollback_at_its_return(two: Site) -> None:
    old = two.site.read().states[0].release.manifest
    operations.start(two.site, two.passed(SECOND, 1), 1)
    operations.tick(two.site)
    store, elsewhere = two.followers["west-canary"].store, two.folder / "elsewhere"
    store.rename(elsewhere)
    store.write_bytes(b"")  # no folder: neither listed nor written
    operations.rollback(two.site, "a complaint", "ada")
    store.unlink()
    elsewhere.rename(store)
    assert two.held()["east-canary"] == (2, old)
    assert two.held()["west-canary"][0] == 1
    operations.tick(two.site)
    assert two.held()["west-canary"] == (2, old)


def test_no_canary_server_in_time_is_a_rollback(two: Site, monkeypatch) -> None:
    for cluster in ("east", "west"):
        two.followers[f"{cluster}-canary"].stuck = True
    operations.start(two.site, two.passed(SECOND, 1), 1)
    monkeypatch.setattr(operations, "DEADLINE", 0.0)
    assert operations.tick(two.site).text == "release 2: rolled back: no canary server serves it"
    assert stages(two) == ["released", "rolled_back", "released"]


KILLED = """
import json, sys
from etude.config import validate
from etude.config.live import LiveConfig
from etude.live.release import operations
site = operations.open_site(validate(LiveConfig, json.loads(sys.argv[1]), "test"))
operations.start(site, sys.argv[2], 1)
operations.tick(site)
operations.rollback(site, "a complaint", "ada")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["release.event:1", "publisher.payload:1", "release.rolled_back:1", "publisher.payload:4"]
)
def test_killed_anywhere_the_next_command_goes_on(two: Site, place: str) -> None:
    old, new = two.site.read().states[0].release.manifest, two.passed(SECOND, 1)
    command = [sys.executable, "-c", KILLED, json.dumps(two.options), new]
    killed = subprocess.run(command, env=os.environ | {"ETUDE_FAILPOINT": place}, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    overview.status(two.site)
    decided = "rolled_back" in stages(two)
    if not decided:
        operations.start(two.site, new, 1)
        operations.tick(two.site)
        operations.rollback(two.site, "a complaint", "ada")
    operations.tick(two.site)
    assert stages(two) == ["released", "rolled_back", "released"]
    held = two.held()
    assert {digest for _, digest in held.values()} == {old}
    assert held["east-control"] == held["west-control"] == (0, old)
    assert {held["east-canary"][0], held["west-canary"][0]} <= {0, 2}  # killed before a store had the new version: none


def test_a_drill_goes_back_and_forth_on_the_canary_and_is_in_the_log(two: Site) -> None:
    with pytest.raises(UserError, match="only one release"):
        operations.drill(two.site, print)
    new = two.passed(SECOND, 1)
    operations.start(two.site, new, 1)
    with pytest.raises(UserError, match="release 2 is on trial"):
        operations.drill(two.site, print)
    operations.tick(two.site)
    for _ in range(2):
        use(two)
        operations.tick(two.site)
    took = operations.drill(two.site, print)
    assert {name for name, _ in took} == {"east", "west"}
    assert two.held() == {
        "east-control": (1, new),
        "east-canary": (3, new),
        "west-control": (1, new),
        "west-canary": (3, new),
    }
    last = two.site.read().states[1].events[-1]
    assert last.decided_by == "drill"
    assert last.stage is ReleaseStage.RELEASED
    assert last.reason.startswith("drill: ")


def test_a_rolled_back_window_names_its_turns_and_accounts(two: Site) -> None:
    operations.start(two.site, two.passed(SECOND, 1, window=4), 1)
    with two.site.engine.begin() as connection:
        for number, kind in enumerate(("trained", "trained", "dropped")):
            session = {
                "id": f"s{number}",
                "tenant": "t",
                "account": f"a{number}",
                "voucher": f"a{number}",
                "organisation": "",
                "client": "",
                "consent": "{}",
                "arm": "control",
                "release": 1,
                "propensity": 1.0,
                "opened": 1,
            }
            turn = {
                "id": f"t{number}",
                "session": f"s{number}",
                "sequence": 0,
                "kind": "main",
                "release": 1,
                "manifest": "",
                "spans": "[]",
                "prompt_tokens": 1,
                "sampled_tokens": 1,
                "reason": "",
                "scrubbed": "{}",
                "rules": "",
                "stop": "",
                "seconds": 1.0,
                "cluster": "east",
                "at": 1,
            }
            exit_ = {"turn": f"t{number}", "window": 4, "kind": kind, "reason": "", "weight": 1.0, "advantage": 0.0}
            connection.execute(sa.insert(schema.sessions), [session])
            connection.execute(sa.insert(schema.turns), [turn])
            connection.execute(sa.insert(schema.exits), [exit_])
    assert releases.taints(two.site.engine) == []
    operations.rollback(two.site, "a complaint", "ada")
    (taint,) = overview.status(two.site)["tainted"]
    assert taint == {"release": 2, "window": 4, "turns": ("t0", "t1"), "accounts": ("a0", "a1")}


def test_two_deciders_cannot_both_decide(two: Site) -> None:
    new = two.passed(SECOND, 1)
    operations.start(two.site, new, 1)
    trial = two.site.read().trial
    assert trial is not None
    releases.append(two.site.engine, trial, ReleaseStage.CANARY, 0.5, "", "canary")
    with pytest.raises(UserError, match="another process has decided"):
        releases.append(two.site.engine, trial, ReleaseStage.CANARY, 0.5, "", "canary")


def test_the_status_shows_the_lift_since_the_anchor(tmp_path: Path, monkeypatch, capsys) -> None:
    """Of outcomes that have matured, of the control against the holdback, since the first release after the anchor:
    each account of the control keeps 3 of 4 edits, or of 2 edits and 2 invalid calls 1; each of the holdback 1 of 4."""
    slot = round(0.0005 * 60e9)
    with site(tmp_path, **QUICK) as made, closing(Follower(tmp_path / "holdback")) as holdback:
        holdback.store.mkdir()
        options = {**made.options, "canary": {**QUICK["canary"], "holdback": 0.2}}
        east, west = made.options["clusters"]
        held = {"holdback_urls": [holdback.url], "holdback_store": str(holdback.store)}
        options["clusters"] = [east | held, west]
        anchored = operations.ReleaseSite(validate(LiveConfig, options, "test"), made.site.engine)
        operations.start(made.site, made.passed(FIRST, 0), 0)
        count(anchored, "control", range(60), time.time_ns() // slot - 1, edits=4, survived=0)  # before the release
        assert overview.status(anchored)["lift"] is None, "the control is the anchor"
        operations.start(anchored, made.passed(SECOND, 1, anchor=1), 1)
        (second,) = (s for s in anchored.read().states if s.release.number == 2)
        releases.append(anchored.engine, second, ReleaseStage.RELEASED, 1.0, "", "ada")
        assert overview.status(anchored)["lift"] is None, "nobody has used it"
        now = -(-time.time_ns() // slot)
        count(anchored, "control", range(30), now, edits=4, survived=3)
        count(anchored, "control", range(30, 60), now + 1, edits=2, invalid_call=2, survived=1)
        count(anchored, "holdback", range(60, 120), now, edits=4, survived=1)
        count(anchored, "holdback", range(60, 120), now + 10**6, edits=4, survived=4)  # not matured
        for arm in ("control", "holdback"):  # after a change of the holdback's share
            count(anchored, arm, [120], now, edits=4, survived=0)
        time.sleep(0.15)
        monkeypatch.setattr(live_releases, "opened", lambda config, make: nullcontext(SimpleNamespace(site=anchored)))
        live_releases.run_status(argparse.Namespace(config=tmp_path, json=True))
    printed = capsys.readouterr().out
    lift = json.loads(printed.splitlines()[-1])["lift"]
    assert lift["anchor"] == 1
    assert lift["mean"] == pytest.approx((3 / 4 + 1 / 4) / 2 - 1 / 4)
    assert lift["accounts"] == [60, 60]
    low, high = lift["low"], lift["high"]
    assert 0 < low < 0.25 < high
    said = f"edits kept, of edits and invalid calls: +25.0 points [{100 * low:+.1f}, {100 * high:+.1f}], better"
    assert f"\nSince release 1, on which the holdback of 60 accounts stays, {said}\n" in printed


def count(site: operations.ReleaseSite, arm: str, accounts: Iterable[int], slot: int, **counts: int) -> None:
    """Adds counters of one slot."""
    with site.engine.begin() as connection:
        connection.execute(
            sa.insert(schema.tallies),
            [
                {
                    "release": 1,
                    "arm": arm,
                    "account": f"a{number}",
                    "slot": slot,
                    "name": name,
                    "tenant": "acme",
                    "count": n,
                    "total": float(n),
                }
                for number in accounts
                for name, n in counts.items()
            ],
        )


def test_commands_say_what_they_did(two: Site, tmp_path: Path, capsys) -> None:
    config = tmp_path / "live.toml"
    clusters = "".join(
        f"[[clusters]]\nname = {c['name']!r}\nurls = {c['urls']}\nstore = {c['store']!r}\n"
        f"canary_urls = {c['canary_urls']}\ncanary_store = {c['canary_store']!r}\n"
        for c in two.options["clusters"]
    )
    config.write_text(f"folder = {two.options['folder']!r}\n{clusters}")

    def said(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["live", words[0], str(config), *words[1:]])
        assert (ended.value.code or 0) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert "give the weight store of a run" in said("release", "--store", str(tmp_path / "none"), code=2)
    assert "no window was trained on yet" in said("release", code=2)
    assert "version 0): released at 100%, the first release" in said("release", "--store", str(two.trained))
    two.passed(SECOND, 1)
    assert "release 2 (version 1): staged at 0%" in said("release", "--store", str(two.trained), "--version", "1")
    assert "no release waits for an approval" in said("approve", "--by", "ada", code=2)
    told = json.loads(said("rollback", "--reason", "a complaint", "--by", "ada", "--json").splitlines()[-1])
    assert (told["release"], told["lagging"]) == (3, [])
    table = said("status")
    assert "| 2 | 1 | rolled_back | 0% | ada | a complaint |" in table
    assert "| east | canary | 3 | 2 | all |" in table
    assert json.loads(said("status", "--json").splitlines()[-1])["current"] == 3
