"""What a whole group shows, what a charge costs, and shifts of behaviour."""

from __future__ import annotations

import random

import msgspec
import pytest

from etude.config import RewardConfig
from etude.grading.cheats import has_violation
from etude.records import Budget, Episode, Outcome, StopReason, decode, encode
from etude.rollout.drift import BehaviourDrift, welch
from etude.rollout.group_audit import audit_group, without_grade
from etude.rollout.rewards import with_reward


def member(number: int, passed: bool, **metrics: float) -> Episode:
    metrics = {"path/added": 1.0, "path/removed": 1.0} | {
        name.replace("path_", "path/"): value for name, value in metrics.items()
    }
    return Episode(
        id=f"0-{number}-0", group_id=0, member=number, attempt=0, task_id="t", seed=0, outcome=Outcome.SCORED,
        stop_reason=StopReason.FINISHED, reward=float(passed), grade=float(passed), passed=passed, segments=(),
        turns=(), metrics=metrics,
    )  # fmt: skip


def test_a_lonely_way_to_the_reward_is_charged() -> None:
    group = [member(i, passed=i < 3) for i in range(8)] + [member(8, passed=True, path_reach=2.0)]
    found = audit_group(group)
    assert [has_violation(e) for e in found] == [False] * 8 + [True]
    assert found[8].flags == ("contrast",)
    assert (found[8].reward, found[8].passed) == (0.0, True)
    assert audit_group(found) == found, "the audit is repeated by the report"


@pytest.mark.parametrize("trait", ["path_reach", "path_special", "path_outside"])
def test_what_others_do_as_well_is_no_offence(trait: str) -> None:
    both = [member(i, passed=i % 2 == 0, **({trait: 1.0} if i < 4 else {})) for i in range(12)]
    assert audit_group(both) == both
    tried = [member(i, passed=i == 0, **({trait: 1.0} if i < 4 else {})) for i in range(12)]
    assert audit_group(tried) == tried, "failed tries of the same kind count"
    alone = [both[0], *(member(i, passed=False) for i in range(1, 3))]
    assert audit_group(alone) == alone, "two others say nothing"
    silent = [both[0], *(member(i, passed=False, path_added=0.0, path_removed=0.0) for i in range(1, 9))]
    assert audit_group(silent) == silent, "members that changed nothing took no path"


def test_a_charge_takes_the_grade_and_leaves_the_costs() -> None:
    config, budget = RewardConfig(refused_edits=0.2), Budget()
    honest = with_reward(member(0, True, edits=1.0, edit_errors=1.0), config, budget)
    assert without_grade(honest).reward == pytest.approx(honest.reward - 1.0) == pytest.approx(-0.1)
    assert without_grade(without_grade(honest)) == without_grade(honest)


def test_an_older_record_has_no_grade_and_is_audited_as_it_was() -> None:
    """Blobs of earlier releases have no key `grade`: the charge is their `reward/grade`, or what they were rewarded."""

    def older(episode: Episode) -> Episode:
        blob = msgspec.msgpack.decode(encode(episode))
        assert blob.pop("grade") is not None
        return decode(msgspec.msgpack.encode(blob), Episode)

    config, budget = RewardConfig(refused_edits=0.2), Budget()
    lonely = member(8, True, path_reach=2.0, edits=1.0, edit_errors=1.0)
    others = [member(i, passed=i < 3, edits=1.0) for i in range(8)]
    trained = [older(with_reward(each, config, budget)) for each in (*others, lonely)]
    assert {episode.grade for episode in trained} == {None}
    charged = audit_group(trained)
    assert charged[:8] == trained[:8]
    assert (trained[8].reward, charged[8].reward) == (pytest.approx(0.9), pytest.approx(-0.1))
    assert (charged[8].flags, charged[8].metrics["reward/grade"], charged[8].passed) == (("contrast",), 0.0, True)
    assert audit_group(charged) == charged, "the audit is repeated by the report"
    measured = audit_group([older(each) for each in (*others, lonely)])
    assert [episode.reward for episode in measured] == [1.0] * 3 + [0.0] * 6
    for reward in (-0.5, 0.25):
        plain = msgspec.structs.replace(older(member(0, True)), reward=reward)
        assert without_grade(plain).reward == min(reward, 0.0)


@pytest.mark.parametrize("flag", ["decoy", "command", "contrast", "tamper"])
def test_no_charged_episode_is_rewarded_or_better_than_failing(flag: str) -> None:
    config = RewardConfig(refused_edits=0.2, behaviour={"edit_errors": 0.1}, overlong=50)
    budget = Budget(turns=4, tokens=100)
    accused = msgspec.structs.replace(member(0, True, edits=3.0), metrics={"edits": 3.0}, flags=(flag,))
    worst = with_reward(member(1, False, edit_errors=9.0), config, budget)
    found = with_reward(accused, config, budget)
    assert found.reward <= min(0.0, worst.reward)
    assert found.metrics["reward/grade"] == 0.0
    assert found.reward == pytest.approx(sum(v for n, v in found.metrics.items() if n.startswith("reward/")))


@pytest.mark.parametrize("flag", ["tests-touched", "outside-roots", "gap", "effort"])
def test_notes_cost_nothing(flag: str) -> None:
    noted = msgspec.structs.replace(member(0, True), metrics={"edits": 1.0}, flags=(flag,))
    assert with_reward(noted, RewardConfig(), Budget()).reward == 1.0
    assert noted.flags == (flag,)
    assert not has_violation(noted)


def lines(count: int, *, jump: float = 0.0, seed: int = 0, episodes: int = 128) -> list[dict[str, float]]:
    """Means over episodes whose edits are 0 to 5, with a jump of their mean half way."""
    rng = random.Random(seed)
    found = []
    for step in range(count):
        edits = [rng.choice((0, 1, 1, 2, 3, 5)) + (jump if step >= count // 2 else 0.0) for _ in range(episodes)]
        found.append({"step": step + 1, "rollout/edits": sum(edits) / episodes})
    return found


def test_a_jump_is_seen_once_and_where_it_is() -> None:
    drift = BehaviourDrift(10)
    found = [shift for line in lines(60, jump=1.0) for shift in drift.observe(line)]
    assert {shift.metric for shift in found} == {"rollout/edits"}
    assert 31 <= found[0].step <= 41
    assert found[0].after > found[0].before
    assert "edits per episode" in found[0].sentence
    assert len(found) <= 2, "quiet for a window, then the jump has left it"


def test_steady_behaviour_is_left_alone() -> None:
    """4,000 steps of a policy that does not change: the law of the test says 1 alarm in some 100,000 comparisons."""
    drift = BehaviourDrift(10)
    assert not [shift for line in lines(4000, seed=5, episodes=32) for shift in drift.observe(line)]


def test_drift_goes_on_after_a_restart() -> None:
    whole = lines(60, jump=1.0)
    at_once = BehaviourDrift(10)
    expected = [shift for line in whole for shift in at_once.observe(line)]
    resumed = BehaviourDrift(10, whole[:33])
    early = BehaviourDrift(10)
    before = [shift for line in whole[:33] for shift in early.observe(line)]
    assert before + [shift for line in whole[33:] for shift in resumed.observe(line)] == expected


def test_welch_is_the_textbook_formula() -> None:
    assert welch([1.0, 2.0, 3.0], [4.0, 6.0, 8.0]) == pytest.approx(4.0 / (1 / 3 + 4 / 3) ** 0.5)
    assert welch([1.0, 1.0], [1.0, 1.0]) == 0.0
    assert welch([1.0, 1.0], [2.0, 2.0]) == float("inf")
