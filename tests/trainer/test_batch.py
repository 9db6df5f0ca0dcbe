import itertools

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from etude.models.loading import load_model
from etude.records import Episode, Group, Outcome, Segment, StopReason
from etude.trainer.batch import advantages, make_batch, pack, turn_advantages, unshare
from etude.trainer.step import score


def segment(
    prompt: list[int], completion: list[tuple[int, int]], version: int = 0, turn_starts: tuple[int, ...] = ()
) -> Segment:
    """`completion` is (id, mask) pairs."""
    ids = np.array(prompt + [i for i, _ in completion], "<i4")
    mask = np.array([0] * len(prompt) + [m for _, m in completion], "u1")
    logprobs = np.where(mask == 1, -1.0, 0.0).astype("<f4")
    versions = np.where(mask == 1, version, -1).astype("<i4")
    return Segment(
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return load_model(path)


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


def test_the_expected_gradient_does_not_depend_on_the_baseline():
    """Two turns of two actions each, enumerated: sums of P * A * grad log P, with baselines of a group of two members.

    An episode goes on only after action 0, and its reward is given by its actions; exact up to rounding (1e-12).
    """
    reward = {(1,): 0.3, (0, 0): 0.1, (0, 1): 1.0}
    p = [0.6, 0.3]  # of action 1 in the first and second turn

    def log_gradient(path):
        return np.array([1 / p[0] if path[0] else -1 / (1 - p[0]),
                         0.0 if len(path) == 1 else (1 / p[1] if path[1] else -1 / (1 - p[1]))])  # fmt: skip

    def probability(path):
        return np.prod([p[t] if action else 1 - p[t] for t, action in enumerate(path)])

    true = sum(probability(path) * r * log_gradient(path) for path, r in reward.items())
    for baseline in ("turn", "group"):
        total = np.zeros(2)
        for one, two in itertools.product(reward, reward):
            rewards, turns = [reward[one], reward[two]], [len(one), len(two)]
            per_turn = turn_advantages(rewards, turns) if baseline == "turn" else [
                np.full(n, a) for a, n in zip(advantages(rewards), turns, strict=True)]  # fmt: skip
            for path, advantage_of_turn in zip((one, two), per_turn, strict=True):
                weights = np.array([*advantage_of_turn, 0.0])[:2]
                total += probability(one) * probability(two) * weights * log_gradient(path) / 2
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


def random_members(rng: np.random.Generator, prompt: list[int], count: int) -> list[Episode]:
    members = []
    for i in range(count):
        length = int(rng.integers(1, 9))
        mask = rng.integers(0, 2, length)
        mask[rng.integers(length)] = 1
        members.append(
            episode(i, float(i % 2), [segment(prompt, list(zip(rng.integers(0, 64, length), mask, strict=True)))])
        )
    return members


def test_a_shared_prompt_gives_the_logprobs_and_gradients_of_separate_rows(model):
    """Tolerance 2e-5: float32 sums over at most 20 tokens in another order; measured below 2e-6."""
    rng = np.random.default_rng(0)
    groups = [random_members(rng, rng.integers(0, 64, n).tolist(), 5) for n in (7, 3)]
    batch = make_batch([GROUP, GROUP], groups)

    def run(rows, micro_tokens):
        model.zero_grad()
        values = []
        for micro in pack(rows, micro_tokens):
            logprobs_N, _ = score(model, micro)
            (micro.advantages_N * logprobs_N).sum().backward()
            values.append(logprobs_N.detach())
        return torch.cat(values), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    shared, shared_grads = run(batch.rows, 10_000)
    alone, alone_grads = run(unshare(batch.rows), 1)
    assert torch.allclose(shared, alone, atol=2e-5)
    for name, grad in alone_grads.items():
        assert torch.allclose(shared_grads[name], grad, atol=2e-5), name


def test_scores_are_those_of_a_plain_forward_pass(model):
    """Tolerance 2e-5: the same float32 sums in another order."""
    ids = [5, 9, 3, 7, 1, 22]
    (micro,) = pack(make_batch([GROUP], [[
        episode(0, 1.0, [segment(ids[:3], [(7, 1), (1, 0), (22, 1)])]),
        episode(1, 0.0, [segment(ids[:3], [(8, 1)])]),
    ]]).rows, 100)  # fmt: skip
    logprobs_N, entropy_N = score(model, micro)
    logits_TV = model(input_ids=torch.tensor([ids])).logits[0].float()
    expected_TV = torch.log_softmax(logits_TV, -1)
    assert micro.target_N.tolist() == [7, 22, 8]
    assert torch.allclose(logprobs_N[:2], torch.stack([expected_TV[2, 7], expected_TV[4, 22]]), atol=2e-5)
    assert torch.allclose(logprobs_N[2], expected_TV[2, 8], atol=2e-5)
    assert torch.allclose(entropy_N[0], -(expected_TV[2].exp() * expected_TV[2]).sum(), atol=1e-4)


def test_micro_batches_hold_whole_rows_and_respect_the_limit():
    groups = [[episode(i, float(i), [segment([1] * 5, [(2, 1)] * 5)]) for i in range(2)] for _ in range(4)]
    micros = list(pack(make_batch([GROUP] * 4, groups).rows, 30))
    assert [m.ids_1T.shape[1] for m in micros] == [30, 30]
