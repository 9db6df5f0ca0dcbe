import itertools

import blake3
import msgspec
import numpy as np
import pytest
import torch

from etude.errors import RunFailed
from etude.records import Episode, Group, Outcome, Segment, StopReason, segment_digest
from etude.trainer.rl.advantages import advantages, turn_advantages
from etude.trainer.rl.batch import collate, make_batch, token_rows


def segment(
    prompt: list[int], completion: list[tuple[int, int]], version: int = 0, turn_starts: tuple[int, ...] = ()
) -> Segment:
    """`completion` is (id, mask) pairs."""
    ids = np.array(prompt + [i for i, _ in completion], "<i4")
    mask = np.array([0] * len(prompt) + [m for _, m in completion], "u1")
    logprobs = np.where(mask == 1, -1.0, 0.0).astype("<f4")
    versions = np.where(mask == 1, version, -1).astype("<i4")
    return Segment(
        digest=segment_digest(blake3.blake3(ids.tobytes()), blake3.blake3(mask.tobytes())),
        ids=ids.tobytes(),
        mask=mask.tobytes(),
        logprobs=logprobs.tobytes(),
        versions=versions.tobytes(),
        prompt_length=len(prompt),
        turn_starts=turn_starts,
    )


def episode(member: int, reward: float, segments: list[Segment], outcome: Outcome = Outcome.SCORED) -> Episode:
    return Episode(
        id=f"e{member}",
        group_id=1,
        member=member,
        attempt=0,
        task_id="t",
        seed=member,
        outcome=outcome,
        stop_reason=StopReason.FINISHED,
        reward=reward,
        passed=reward > 0,
        segments=tuple(segments),
        turns=(),
        metrics={},
    )


GROUP = Group(id=1, index=0, task_id="t", admitted_version=0, episodes=())


def test_advantage_is_the_reward_minus_the_groups_mean():
    assert advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]


def test_groups_without_variance_are_counted_and_carry_no_row():
    same = [episode(i, 1.0, [segment([1, 2], [(3, 1)])]) for i in range(3)]
    mixed = [episode(i, float(i == 0), [segment([1, 2], [(3, 1)])]) for i in range(3)]
    batch = make_batch([GROUP, GROUP], [same, mixed])
    assert batch.zero_variance == 1
    assert [len(row.completions) for row in batch.rows] == [3]


def test_groups_that_differ_too_little_carry_no_row():
    slightly = [episode(i, 0.1 * i, [segment([1, 2], [(3, 1)])]) for i in range(3)]  # sd 0.08
    plainly = [episode(i, float(i == 0), [segment([1, 2], [(3, 1)])]) for i in range(3)]  # sd 0.47
    batch = make_batch([GROUP, GROUP], [slightly, plainly], min_std=0.1)
    assert batch.zero_variance == 1
    assert [row.completions[0].advantages_C[0] for row in batch.rows] == pytest.approx([2 / 3])
    assert make_batch([GROUP], [slightly], min_std=0.08).zero_variance == 0


def test_a_turn_is_compared_with_those_who_came_as_far():
    """Solved at once, solved in the second turn, never solved in three: the second turn that helped is rewarded."""
    first, second, never = turn_advantages([1.0, 1.0, 0.0], [1, 2, 3])
    assert first.tolist() == pytest.approx([1 / 3])
    assert second.tolist() == pytest.approx([1 / 3, 1 / 2])
    assert never.tolist() == pytest.approx([-2 / 3, -1 / 2, 0.0])


TURN_REWARDS = {(1,): 0.3, (0, 0): 0.1, (0, 1): 1.0}
TURN_P = (0.6, 0.3)  # of action 1 in the first and second turn


def chance(path):
    return float(np.prod([TURN_P[t] if action else 1 - TURN_P[t] for t, action in enumerate(path)]))


def score(path):
    """d log P / d p of both turns."""
    one, two = (TURN_P[t] if a else TURN_P[t] - 1 for t, a in enumerate((*path, 1)[:2]))
    return np.array([1 / one, 1 / two if len(path) == 2 else 0.0])


def test_the_expected_gradient_does_not_depend_on_the_baseline():
    """Two turns of two actions each, enumerated: sums of P * A * grad log P, with baselines of a group of two members.

    An episode goes on only after action 0, and its reward is given by its actions; exact up to rounding (1e-12).
    """
    true = sum(chance(path) * r * score(path) for path, r in TURN_REWARDS.items())
    for baseline in ("turn", "group"):
        total = np.zeros(2)
        for one, two in itertools.product(TURN_REWARDS, repeat=2):
            rewards, turns = [TURN_REWARDS[one], TURN_REWARDS[two]], [len(one), len(two)]
            per_turn = turn_advantages(rewards, turns) if baseline == "turn" else [
                np.full(n, a) for a, n in zip(advantages(rewards), turns, strict=True)]  # fmt: skip
            for path, advantage_of_turn in zip((one, two), per_turn, strict=True):
                weights = np.array([*advantage_of_turn, 0.0])[:2]
                total += chance(one) * chance(two) * weights * score(path) / 2
        # A member is part of its own mean, which scales the first turn by (G - 1) / G and the second by less still:
        # its direction stays.
        assert total[0] == pytest.approx(true[0] / 2, abs=1e-12)
        assert np.sign(total[1]) == np.sign(true[1])


def test_tokens_get_the_advantage_of_their_turn():
    """Turns start at 2 and 5; a second segment goes on counting turns."""
    one = segment([1, 2], [(3, 1), (4, 0), (5, 0), (6, 1)], turn_starts=(2, 5))
    two = segment([9], [(8, 1)], turn_starts=(1,))
    solved = episode(0, 1.0, [segment([1, 2], [(3, 1)], turn_starts=(2,))])
    batch = make_batch([GROUP], [[solved, episode(1, 0.0, [one, two])]], baseline="turn")
    found = {tuple(c.ids_C.tolist()): c.advantages_C.tolist() for row in batch.rows for c in row.completions}
    assert found == {(3,): [0.5], (3, 4, 5, 6): [-0.5, -0.5, -0.5, 0.0], (8,): [0.0]}


def test_infrastructure_failures_never_reach_the_loss():
    with pytest.raises(AssertionError, match="infrastructure"):
        make_batch([GROUP], [[episode(0, 0.0, [segment([1], [(2, 1)])], Outcome.INFRA)]])


def test_a_trailing_tool_result_is_cut_and_an_episode_without_samples_is_left_out():
    members = [
        episode(0, 1.0, [segment([1, 2], [(3, 1), (4, 0), (5, 1), (6, 0), (7, 0)])]),
        episode(1, 0.0, [segment([1, 2], [(9, 0)])]),
    ]
    (row,) = make_batch([GROUP], [members]).rows
    assert [c.ids_C.tolist() for c in row.completions] == [[3, 4, 5]]


def test_segments_of_one_episode_carry_the_same_advantage_under_their_own_prompts():
    members = [
        episode(0, 1.0, [segment([1, 2], [(3, 1)]), segment([7, 8, 9], [(4, 1)])]),
        episode(1, 0.0, [segment([1, 2], [(5, 1)])]),
    ]
    rows = make_batch([GROUP], [members]).rows
    assert [(row.prompt_P.tolist(), [c.advantages_C.max() for c in row.completions]) for row in rows] == [
        ([1, 2], [0.5, -0.5]),
        ([7, 8, 9], [0.5]),
    ]


def test_samples_follow_the_rows_token_by_token():
    """Offsets count the prompt; a row ends with its last sampled token; tool output carries nothing."""
    batch = make_batch([GROUP], [[
        episode(0, 1.0, [segment([5, 9, 3], [(7, 1), (1, 0), (22, 1), (4, 0)], version=2)]),
        episode(1, 0.0, [segment([5, 9, 3], [(8, 1)]), segment([6], [(2, 1)])]),
    ]])  # fmt: skip
    tokens, samples = token_rows(batch.rows), collate(batch.rows)
    assert [row.tolist() for row in tokens.rows] == [[5, 9, 3, 7, 1, 22], [5, 9, 3, 8], [6, 2]]
    assert [offsets.tolist() for offsets in tokens.sampled] == [[3, 5], [3], [1]]
    assert tokens.count == 4
    assert samples.advantages_N.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert samples.versions_N.tolist() == [2, 2, 0, 0]
    assert samples.logprobs_N.tolist() == [-1.0] * 4
    assert samples.episode_N.tolist() == [0, 0, 1, 1]
    assert samples.order_N.tolist() == [0, 1, 0, 1]
    assert samples.length_N.tolist() == [2.0] * 4
    assert samples.select(torch.tensor([2, 0])).advantages_N.tolist() == [-0.5, 0.5]


def test_tokens_that_changed_after_they_were_sampled_stop_the_run():
    """G1: an id, or which positions were sampled, of one member; whether or not the group has a gradient."""
    good = segment([1, 2], [(3, 1), (4, 0), (5, 1)])
    others = [
        msgspec.structs.replace(good, ids=np.array([1, 2, 3, 4, 6], "<i4").tobytes()),
        msgspec.structs.replace(good, mask=np.array([0, 0, 1, 1, 0], "u1").tobytes()),
        msgspec.structs.replace(good, digest=""),
    ]
    for rewards in ((1.0, 0.0), (1.0, 1.0)):
        for wrong in others:
            members = [episode(0, rewards[0], [good]), episode(1, rewards[1], [wrong])]
            with pytest.raises(RunFailed, match="episode e1 does not hold the tokens that were sampled"):
                make_batch([GROUP], [members])
    assert make_batch([GROUP], [[episode(0, 1.0, [good]), episode(1, 0.0, [good])]]).rows


def test_a_failure_of_ours_that_was_scored_stops_the_run():
    lost = msgspec.structs.replace(episode(0, 0.0, []), stop_reason=StopReason.ERROR, detail="EngineError: gone")
    with pytest.raises(RunFailed, match=r"episode e0 was lost to infrastructure and scored 0 .*EngineError: gone"):
        make_batch([GROUP], [[lost, episode(1, 1.0, [segment([1, 2], [(3, 1)])])]])
