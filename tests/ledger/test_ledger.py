import subprocess
import sys
import threading

import pytest
import sqlalchemy as sa

from etude.errors import UserError
from etude.ledger import conservation
from etude.ledger.database import Outage
from etude.ledger.ledger import MAX_RETRIES, Ledger
from etude.ledger.schema import RECOVERY
from etude.records import Anchor, EpisodeBlob, Outcome, PolicyVersion

LONG = 3600.0
OVER = -1.0  # a lease that has run out when it is given


def blob(group, member, attempt):
    return EpisodeBlob(key=f"{group}/{member}-{attempt}", digest=f"digest of {group}")


def finish(ledger, lease, outcome=Outcome.SCORED, passed=False, reason="", **rest):
    return ledger.finish(
        lease,
        outcome=outcome,
        reward=float(passed),
        passed=passed,
        blob=blob(lease.group_id, lease.member, lease.attempt),
        tokens=10,
        min_version=0,
        metrics={"turns": 2.0},
        reason=reason,
        **rest,
    )


def play(ledger, passed=lambda lease: False):
    """Finishes all that can be leased."""
    for lease in ledger.lease("player", 1000, LONG):
        assert finish(ledger, lease, passed=passed(lease))


def manifest(version, groups=()):
    return PolicyVersion(
        version=version,
        parent=None,
        run="r",
        writer="w",
        delta=(),
        anchor=Anchor(version=version, parts=()),
        schema="0" * 32,
        digest="d",
        changed=0,
        elements=1,
        groups=tuple(groups),
        created=0.0,
        metrics={},
    )


# Admission, leases, results


def test_an_episode_is_leased_once_finished_once_and_its_group_becomes_ready(ledger):
    group = ledger.admit(0, "task", 3, 7)
    leases = ledger.lease("a", 10, LONG)
    assert [(x.group_id, x.index, x.task_id, x.member, x.attempt) for x in leases] == [
        (group, 0, "task", member, 0) for member in range(3)
    ]
    assert ledger.lease("b", 10, LONG) == []
    assert finish(ledger, leases[2], passed=True)
    assert finish(ledger, leases[0])
    assert ledger.ready_groups(1, in_order=True) == []
    assert finish(ledger, leases[1])
    (ready,) = ledger.ready_groups(1, in_order=True)
    assert (ready.id, ready.index, ready.task_id, ready.admitted_version) == (group, 0, "task", 7)
    assert ready.episodes == tuple(blob(group, member, 0) for member in range(3))
    assert ledger.counts() == {"scored": 3, "infra": 0, "timeout": 0, "tampered": 0, "quarantined": 0}


def test_an_index_is_admitted_once(ledger):
    first = ledger.admit(0, "task", 2, 0)
    assert ledger.admit(0, "another", 5, 3) == first
    assert ledger.figures().groups == 1
    assert [lease.task_id for lease in ledger.lease("a", 10, LONG)] == ["task", "task"]
    assert ledger.conservation([]).admitted == 2


def test_the_oldest_group_is_played_first(ledger):
    for index in range(3):
        ledger.admit(index, f"t{index}", 2, 0)
    order = [(lease.index, lease.member) for _ in range(3) for lease in ledger.lease("a", 2, LONG)]
    assert order == [(index, member) for index in range(3) for member in range(2)]


def test_the_blobs_of_what_has_ended_are_known(ledger):
    for index in range(2):
        ledger.admit(index, f"t{index}", 2, 0)
    leases = ledger.lease("a", 4, LONG)
    for lease, outcome in zip(leases[:3], (Outcome.SCORED, Outcome.INFRA, Outcome.TIMEOUT), strict=True):
        assert finish(ledger, lease, outcome=outcome)
    assert ledger.blobs() == [blob(0, 0, 0), blob(1, 0, 0)]


def test_groups_of_a_version_on_its_way_are_not_trained_on_again(ledger):
    ids = [ledger.admit(index, f"t{index}", 1, 0) for index in range(4)]
    play(ledger)
    for in_order in (False, True):
        found = ledger.ready_groups(2, in_order=in_order, without=ids[:2])
        assert [group.id for group in found] == ids[2:]
        assert len(ledger.ready_groups(3, in_order=in_order, without=ids[:2])) == 2
    assert ledger.ready_groups(2, in_order=False, due=0, without=ids[:2]), "what is on its way is no straggler"


def test_an_expired_lease_is_taken_over_under_a_new_attempt_and_its_late_result_is_ignored(ledger):
    group = ledger.admit(0, "t", 1, 0)
    (late,) = ledger.lease("a", 1, OVER)
    (taken,) = ledger.lease("b", 1, LONG)
    assert (late.attempt, taken.attempt) == (0, 1), "so the two never write the same blob"
    assert not finish(ledger, late, passed=True)
    assert finish(ledger, taken)
    assert not finish(ledger, taken), "a repeated result changes nothing"
    (ready,) = ledger.ready_groups(1, in_order=True)
    assert ready.episodes == (blob(group, 0, 1),)
    conservation = ledger.conservation([])
    assert conservation.ok
    assert conservation.late == 2


def test_an_expired_lease_that_nobody_took_still_counts(ledger):
    ledger.admit(0, "t", 1, 0)
    (lease,) = ledger.lease("a", 1, OVER)
    assert finish(ledger, lease)


def test_renewed_leases_are_not_taken_over(ledger):
    ledger.admit(0, "t", 2, 0)
    ledger.lease("a", 2, OVER)
    assert ledger.renew("b", LONG) == 0
    assert ledger.renew("a", LONG) == 2
    assert ledger.lease("b", 2, LONG) == []


def test_infrastructure_failures_are_played_again_and_then_leave_the_group(ledger):
    group = ledger.admit(0, "t", 2, 0)
    good, bad = ledger.lease("a", 2, LONG)
    finish(ledger, good, passed=True)
    for attempt in range(1, MAX_RETRIES + 1):
        assert finish(ledger, bad, Outcome.INFRA)
        assert not finish(ledger, bad, Outcome.INFRA), "reported twice, counted once"
        assert ledger.ready_groups(1, in_order=True) == []
        (bad,) = ledger.lease("a", 2, LONG)
        assert bad.attempt == attempt
    assert finish(ledger, bad, Outcome.INFRA)
    (ready,) = ledger.ready_groups(1, in_order=True)
    assert ready.episodes == (blob(group, 0, 0),)
    assert ledger.counts() == {"scored": 1, "infra": 1, "timeout": 0, "tampered": 0, "quarantined": 0}
    (result,) = ledger.results(0, consumed_only=False)
    assert (result.passed, result.episodes) == (1, 1)
    assert ledger.conservation([]).retried == MAX_RETRIES


def test_failures_of_a_broken_host_are_no_tries_of_the_episode(ledger):
    ledger.admit(0, "t", 1, 0)
    for attempt in range(3 * MAX_RETRIES):
        (lease,) = ledger.lease("a", 1, LONG)
        assert lease.attempt == attempt
        assert finish(ledger, lease, Outcome.INFRA, blamed=False)
    for _ in range(MAX_RETRIES + 1):
        (lease,) = ledger.lease("b", 1, LONG)
        assert finish(ledger, lease, Outcome.INFRA)
    assert ledger.lease("b", 1, LONG) == []
    assert ledger.counts()["infra"] == 1


def test_some_groups_are_leased_only_where_there_are_no_others(ledger):
    for index in range(3):
        ledger.admit(index, "t", 2, 0)
    assert [lease.group_id for lease in ledger.lease("a", 3, LONG, rather_not=[0, 1])] == [2, 2]
    assert [lease.group_id for lease in ledger.lease("a", 3, LONG, rather_not={0, 1})] == [0, 0, 1]


def test_a_result_whose_reply_is_lost_counts_what_was_recovered_once(ledger, monkeypatch):
    ledger.admit(0, "t", 2, 0)
    committed = ledger._finish

    def lost(*arguments):
        committed(*arguments)
        monkeypatch.setattr(ledger, "_finish", committed)
        raise Outage("the reply is lost")

    for lease, outcome in zip(ledger.lease("a", 2, LONG), (Outcome.SCORED, Outcome.QUARANTINED), strict=True):
        monkeypatch.setattr(ledger, "_finish", lost)
        assert finish(ledger, lease, outcome, recovered={"continued": 1, "recovered_tokens": 7, "begun_anew": 0})
    expected = {"continued": 1, "recovered_tokens": 7}
    assert ledger.recovered() == dict.fromkeys(RECOVERY, 0) | expected, "nothing of a lost episode was recovered"


def test_the_proof_reads_one_moment(ledger, url, monkeypatch):
    """Another process finishes the group between two statements of the proof."""
    ledger.admit(0, "t", 1, 0)
    (lease,) = ledger.lease("a", 1, LONG)
    other, count = Ledger.open(url), conservation.count_outcomes

    def between(connection):
        assert finish(other, lease)
        return count(connection)

    monkeypatch.setattr(conservation, "count_outcomes", between)
    proof = ledger.conservation([])
    other.close()
    assert (proof.ok, proof.leased, sum(proof.done.values())) == (True, 1, 0), proof.sentence
    monkeypatch.undo()
    assert ledger.conservation([]).done["scored"] == 1


def test_quarantined_episodes_leave_the_group_at_once_with_their_reason(ledger):
    group = ledger.admit(0, "t", 3, 0)
    good, bad, lost = ledger.lease("a", 3, LONG)
    finish(ledger, good, passed=True)
    assert finish(ledger, bad, Outcome.QUARANTINED, reason="TypeError: x (verdict.py:3)")
    for _ in range(MAX_RETRIES + 1):
        assert finish(ledger, lost, Outcome.INFRA, reason="BoxDead: gone")
        (lost,) = ledger.lease("a", 3, LONG) or [lost]
    (ready,) = ledger.ready_groups(1, in_order=True)
    assert ready.episodes == (blob(group, 0, 0),)
    assert ledger.counts() == {"scored": 1, "infra": 1, "timeout": 0, "tampered": 0, "quarantined": 1}
    assert ledger.lost() == {"TypeError: x (verdict.py:3)": 1, "BoxDead: gone": 1}
    (result,) = ledger.results(0, consumed_only=False)
    assert (result.passed, result.episodes) == (1, 1)
    assert ledger.conservation([]).ok
    assert ledger.left_behind()["left/episodes"] == 1
    assert ledger.represented()[1].outcomes == {"scored": 1}


def test_an_expiry_does_not_use_up_the_retries_of_infrastructure(ledger):
    ledger.admit(0, "t", 1, 0)
    for _ in range(4):
        ledger.lease("dies", 1, OVER)
    (lease,) = ledger.lease("a", 1, LONG)
    finish(ledger, lease, Outcome.INFRA)
    assert ledger.counts()["infra"] == 0
    assert len(ledger.lease("a", 1, LONG)) == 1


# Training


def test_ready_groups_come_oldest_first_with_or_without_waiting_for_stragglers(ledger):
    for index in range(4):
        ledger.admit(index, f"t{index}", 1, index // 2)
    leases = ledger.lease("a", 4, LONG)
    finish(ledger, leases[3])
    finish(ledger, leases[1])
    assert [g.index for g in ledger.ready_groups(4, in_order=False)] == [1, 3]
    assert [g.index for g in ledger.ready_groups(1, in_order=False)] == [1]
    assert ledger.ready_groups(4, in_order=True) == []
    finish(ledger, leases[0])
    assert [g.index for g in ledger.ready_groups(4, in_order=True)] == [0, 1]
    ledger.consume([0, 1], 1)
    assert [g.index for g in ledger.ready_groups(4, in_order=False)] == [3]


def test_a_straggler_is_overtaken_only_while_it_is_in_time(ledger):
    for index in range(4):
        ledger.admit(index, f"t{index}", 1, 0)
    for lease in ledger.lease("a", 4, LONG)[1:]:
        finish(ledger, lease)
    # O = 1. From version 0, groups 1 and 2 go first: version 1 can still take 0 and 3, in one batch.
    assert [g.index for g in ledger.ready_groups(2, in_order=False, due=0 - 1)] == [1, 2]
    assert ledger.ready_groups(1, in_order=False, due=0 - 1) == [], "one at a time, the last would be two versions late"
    ledger.consume([1, 2], 1)
    ledger.admit(4, "t4", 1, 1)
    play(ledger)
    assert ledger.ready_groups(2, in_order=False, due=1 - 1) == [], "3 and 4 are ready, but 0 cannot wait any longer"


def test_a_group_is_consumed_by_one_version(ledger):
    for index in range(2):
        ledger.admit(index, "t", 1, 0)
    (first, _) = ledger.lease("a", 2, LONG)
    finish(ledger, first)
    ledger.consume([0], 1)
    ledger.consume([0], 1)
    with pytest.raises(ValueError, match="group 0 of version 2 was consumed by version 1"):
        ledger.consume([0], 2)
    with pytest.raises(ValueError, match="group 1 of version 2 has episodes without a result"):
        ledger.consume([1], 2)
    with pytest.raises(ValueError, match="group 7 of version 2 was never admitted"):
        ledger.consume([7], 2)
    ledger.consume([], 3)
    assert ledger.conservation([manifest(1, [0])]).ok


def test_results_are_reported_once_each_in_order_of_completion(ledger):
    for index in range(3):
        ledger.admit(index, f"t{index}", 2, 0)
    leases = ledger.lease("a", 6, LONG)
    for lease in leases[4:] + leases[:2]:
        finish(ledger, lease, passed=lease.member == 0)
    results = ledger.results(0, consumed_only=False)
    assert [(r.index, r.task_id, r.passed, r.episodes) for r in results] == [(2, "t2", 1, 2), (0, "t0", 1, 2)]
    assert ledger.results(results[-1].mark, consumed_only=False) == []
    for lease in leases[2:4]:
        finish(ledger, lease)
    assert [r.index for r in ledger.results(results[-1].mark, consumed_only=False)] == [1]


def test_results_of_trained_groups_do_not_depend_on_timing(ledger):
    for index in range(4):
        ledger.admit(index, f"t{index}", 1, 0)
    for lease in reversed(ledger.lease("a", 4, LONG)):
        finish(ledger, lease, passed=True)
    assert ledger.results(0, consumed_only=True) == []
    ledger.consume([1, 0], 1)
    first = ledger.results(0, consumed_only=True)
    assert [r.index for r in first] == [0, 1]
    ledger.consume([3, 2], 2)
    assert [r.index for r in ledger.results(first[-1].mark, consumed_only=True)] == [2, 3]
    assert [r.index for r in ledger.results(0, consumed_only=True)] == [0, 1, 2, 3], "the same again after a restart"


def test_mixed_groups_are_the_last_consumed_ones_whose_members_disagree(ledger):
    for index in range(4):
        ledger.admit(index, f"t{index}", 2, 0)
    play(ledger, passed=lambda lease: lease.index != 3 and (lease.index == 1 or lease.member == 0))
    ledger.consume([0, 1], 1)
    ledger.consume([2, 3], 2)
    assert [g.index for g in ledger.mixed_groups(5)] == [2, 0]
    assert [g.index for g in ledger.mixed_groups(1)] == [2]


def test_figures_feed_admission(ledger):
    empty = ledger.figures()
    assert (empty.groups, empty.accepted, empty.reserved, empty.in_flight) == (0, 0, 0, 0)
    assert (empty.open_tasks, empty.consumed_version) == ((), -1)
    for index in range(3):
        ledger.admit(index, f"t{index}", 4, 0)
    leases = ledger.lease("a", 6, LONG)
    for lease in leases:
        finish(ledger, lease)
    figures = ledger.figures()
    assert (figures.groups, figures.accepted, figures.reserved, figures.in_flight) == (3, 4, 8, 6)
    assert figures.open_tasks == ("t1", "t2")
    ledger.consume([0], 5)
    assert ledger.figures().accepted == 4, "a group that was trained on stays accepted"
    assert ledger.figures().consumed_version == 5


# Recovery and conservation


def test_the_ledger_follows_from_the_manifests(ledger):
    for index in range(5):
        ledger.admit(index, f"t{index}", 1, 0)
    for lease in ledger.lease("dead", 5, LONG)[:4]:
        finish(ledger, lease)
    ledger.consume([2], 2)  # of a version that the store has lost
    published = [manifest(0), manifest(1, [0, 1])]  # version 1 came out, and the trainer died before it could note it
    assert not ledger.conservation(published).ok
    ledger.recover(published)
    ledger.recover(published)
    assert [g.index for g in ledger.ready_groups(5, in_order=False)] == [2, 3]
    conservation = ledger.conservation(published)
    assert conservation.ok, conservation.sentence
    assert conservation.pending == 1
    assert conservation.sentence == (
        "5 episodes admitted: 4 scored, 0 infra, 0 timeout, 0 tampered, 0 quarantined, 0 in flight, 1 pending; "
        "2 groups trained on, each by one version"
    )


def test_recovery_takes_the_leases_of_the_dead_and_ignores_what_they_still_do(ledger):
    ledger.admit(0, "t", 1, 0)
    (dead,) = ledger.lease("dead", 1, LONG)
    ledger.recover([])
    assert not finish(ledger, dead)
    (lease,) = ledger.lease("alive", 1, LONG)
    assert lease.attempt == dead.attempt + 1
    assert finish(ledger, lease)


def test_recovery_refuses_manifests_of_another_run(ledger):
    ledger.admit(0, "t", 1, 0)
    play(ledger)
    ledger.consume([0], 1)
    with pytest.raises(UserError, match="does not belong to the published versions: group 9 of version 1 was never"):
        ledger.recover([manifest(1, [9])])
    assert ledger.figures().consumed_version == 1, "nothing was changed"


@pytest.mark.parametrize(
    ("published", "why"),
    [
        ([manifest(1, [0]), manifest(2, [0])], "group 0 was trained on twice, by versions 1 and 2"),
        ([manifest(2, [0])], "group 0 is named by version 2 but the ledger says that version 1 consumed it"),
        ([], "group 0 is named by no version but the ledger says that version 1 consumed it"),
        ([manifest(1, [0, 1])], "group 1 is named by version 1 but the ledger says that no version consumed it"),
    ],
)
def test_conservation_says_which_group_is_wrong(ledger, published, why):
    for index in range(2):
        ledger.admit(index, "t", 1, 0)
    play(ledger)
    ledger.consume([0], 1)
    conservation = ledger.conservation(published)
    assert not conservation.ok
    assert conservation.sentence == why


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("DELETE FROM episodes WHERE member = 0", "4 episodes were admitted but the ledger holds 2"),
        ("UPDATE groups SET state = 'ready' WHERE id = 1", "the state of group 1 does not match its members"),
        ("UPDATE episodes SET outcome = NULL WHERE group_id = 0", "2 episodes are done but only 0 have an outcome"),
    ],
)
def test_conservation_finds_lost_rows_and_wrong_states(ledger, url, damage, why):
    for index in range(2):
        ledger.admit(index, "t", 2, 0)
    for lease in ledger.lease("a", 2, LONG):
        finish(ledger, lease)
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sa.text(damage))
    engine.dispose()
    assert ledger.conservation([]).sentence == why


# Many users, sudden deaths


def test_workers_that_share_a_ledger_never_play_the_same_episode(url):
    ledger = Ledger.open(url)
    for index in range(12):
        ledger.admit(index, f"t{index}", 4, 0)
    taken, errors = [], []

    def work(owner):
        mine = Ledger.open(url)
        try:
            while leases := mine.lease(owner, 3, LONG):
                for lease in leases:
                    assert finish(mine, lease)
                    taken.append((lease.group_id, lease.member))
        except BaseException as e:
            errors.append(e)
        finally:
            mine.close()

    threads = [threading.Thread(target=work, args=(f"owner {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert sorted(taken) == [(group, member) for group in range(12) for member in range(4)]
    assert len(ledger.ready_groups(12, in_order=True)) == 12
    ledger.close()


PLAYER = """
import sys
from etude.records import EpisodeBlob, Outcome
from etude.ledger.ledger import Ledger
ledger = Ledger.open(sys.argv[1])
for index in range(int(sys.argv[2])):
    ledger.admit(index, "t", 4, 0)
    for lease in ledger.lease("player", 4, 3600):
        ledger.finish(lease, outcome=Outcome.SCORED, reward=0.0, passed=False, tokens=1, min_version=0,
                      blob=EpisodeBlob(key="b", digest="d"),
                      metrics={})
    if index == 5:
        print("going", flush=True)
"""


def test_a_player_and_a_trainer_in_two_processes_never_see_a_locked_database(url):
    ledger = Ledger.open(url)
    player = subprocess.Popen([sys.executable, "-c", PLAYER, url, "30"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    version, published = 0, []
    while version < 15:
        groups = ledger.ready_groups(2, in_order=True)
        if len(groups) == 2:
            version += 1
            published.append(manifest(version, [g.id for g in groups]))
            ledger.consume(published[-1].groups, version)
        elif player.poll() is not None and len(ledger.ready_groups(2, in_order=True)) < 2:
            break
    _, errors = player.communicate(timeout=60)
    assert player.returncode == 0, errors.decode()
    assert version == 15
    conservation = ledger.conservation(published)
    assert conservation.ok, conservation.sentence
    ledger.close()


def test_a_player_killed_in_the_middle_leaves_a_ledger_that_conserves_and_goes_on(url):
    ledger = Ledger.open(url)
    player = subprocess.Popen([sys.executable, "-c", PLAYER, url, "1000000"], stdout=subprocess.PIPE)
    assert player.stdout.readline() == b"going\n"
    player.kill()
    player.communicate(timeout=60)
    assert ledger.conservation([]).ok
    ledger.recover([])
    index = ledger.figures().groups
    assert index >= 6
    ledger.admit(index, "t", 4, 0)
    play(ledger)
    assert len(ledger.ready_groups(index + 2, in_order=True)) == index + 1
    conservation = ledger.conservation([])
    assert conservation.ok, conservation.sentence
    assert conservation.admitted == 4 * (index + 1)
    ledger.close()


# Opening


def test_a_ledger_is_read_back_by_the_next_process(url):
    first = Ledger.open(url, "run")
    first.admit(0, "t", 1, 0)
    first.close()
    second = Ledger.open(url, "run")
    assert second.figures().groups == 1
    second.close()


def test_a_ledger_belongs_to_one_run(url):
    Ledger.open(url, "one").close()
    with pytest.raises(UserError, match="belongs to run 'one'; give this run a database of its own"):
        Ledger.open(url, "two")


def test_a_ledger_of_another_schema_is_refused(url):
    Ledger.open(url).close()
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE meta SET value = '0' WHERE key = 'schema'"))
    engine.dispose()
    with pytest.raises(UserError, match="has schema 0, this etude reads 6"):
        Ledger.open(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nonsense", "'nonsense' is not a ledger URL"),
        ("mysql://host/db", "a ledger cannot live in mysql"),
        ("sqlite://", "a ledger in memory would be lost"),
        ("sqlite:////nonexistent/ledger.db", "cannot be opened: unable to open database file"),
        ("postgresql://u:secret@/db?host=/nonexistent", "cannot be opened: "),
    ],
)
def test_what_cannot_be_opened_is_refused_in_one_sentence(url, why):
    with pytest.raises(UserError) as error:
        Ledger.open(url)
    assert why in str(error.value)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_a_damaged_file_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"not a database" * 1000)
    with pytest.raises(UserError, match="file is not a database"):
        Ledger.open(f"sqlite:///{tmp_path}/ledger.db")


def test_a_statement_of_postgresql_has_a_deadline(postgres):
    ledger = Ledger.open(postgres)
    with ledger._engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW statement_timeout").scalar_one() == "30s"
    ledger.close()


def test_engines_come_and_go(ledger):
    assert ledger.members.engines() == []
    ledger.members.join("http://b", "eu-1")
    ledger.members.join("http://a", "eu-0")
    assert [(e.url, e.name, e.state, e.version) for e in ledger.members.engines()] == [
        ("http://a", "eu-0", "joining", -1), ("http://b", "eu-1", "joining", -1),
    ]  # fmt: skip
    ledger.members.set([("http://a", "serving", "", 3), ("http://never", "serving", "", 3)])
    ledger.members.join("http://a", "eu-0")  # once more: it serves already
    assert (ledger.members.engines()[0].state, ledger.members.engines()[0].version) == ("serving", 3)
    assert ledger.members.drain("http://a", "by its operator")
    ledger.members.set([("http://a", "draining", "by its operator", 3)])
    assert ledger.members.engines()[0].leaving == "by its operator"
    ledger.members.set([("http://a", "gone", "it was killed", 3)])
    assert not ledger.members.drain("http://a", "again"), "one that is gone cannot be asked"
    assert not ledger.members.drain("http://c", "it never joined")
    ledger.members.join("http://a", "eu-0")  # started anew
    again = ledger.members.engines()[0]
    assert (again.state, again.version, again.why, again.leaving) == ("joining", -1, "", "")


def test_players_say_how_many_episodes_they_play(ledger):
    ledger.members.offer("players-0.a", 8)
    ledger.members.offer("elsewhere/players-1.b", 8)
    ledger.members.offer("players-0.a", 0, "its host is broken")
    rows = [(row.owner, row.episodes, row.why, row.beat) for row in ledger.members.offers()]
    assert rows == [("elsewhere/players-1.b", 8, "", 0), ("players-0.a", 0, "its host is broken", 1)]
    ledger.members.part("the run was resumed")
    assert [row.owner for row in ledger.members.offers()] == ["elsewhere/players-1.b"]
    ledger.members.withdraw("elsewhere/players-1.b")
    assert ledger.members.offers() == []


def test_the_stage_and_its_beats(ledger):
    assert ledger.members.stage() == ("ended", 0)
    ledger.members.set_stage("training")
    ledger.members.set_stage("training")
    assert ledger.members.stage() == ("training", 2)


def test_a_lease_names_the_version_of_its_group_and_players_elsewhere_keep_theirs(ledger):
    ledger.admit(0, "t", 2, 4)
    (here,), (away,) = ledger.lease("controller", 1, LONG), ledger.lease("elsewhere/eu-0", 1, LONG)
    assert (here.version, away.version) == (4, 4)
    assert ledger.members.players() == {"controller": 1, "elsewhere/eu-0": 1}
    ledger.recover([])
    assert ledger.members.players() == {"elsewhere/eu-0": 1}
    assert finish(ledger, away), "its player goes on, and its result counts"
    assert not finish(ledger, here), "its player has ended with the controller"
