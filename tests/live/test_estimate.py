"""Weights and advantages of a window: bounds of accounts, trimmed leave-one-out means, coverage, the sybils."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.live.learn.estimate import age_weights, baselines, covered, first_of, shares_capped, trimmed_means

NONE = np.zeros(2000, np.int64)
"""Turns of one tenant."""
CLOSE = {"rel": 1e-9, "abs": 1e-12}  # sums of at most 4,000 float64 in another order


def test_the_first_of_each_group_are_chosen_by_the_order_given():
    group = np.array([7, 3, 7, 7, 3, 9])
    assert first_of(group, np.array([5, 1, 2, 9, 0, 4]), 1).tolist() == [False, False, True, False, True, True]
    assert first_of(group, np.array([5, 1, 2, 9, 0, 4]), 2).tolist() == [True, True, True, False, True, True]
    assert first_of(np.zeros(0, int), np.zeros(0), 2).tolist() == []


def test_a_new_account_weighs_a_fifth_and_grows_to_one():
    assert age_weights(np.array([0.0, 3.5, 7.0, 700.0]), 7.0).tolist() == pytest.approx([0.2, 0.6, 1.0, 1.0])


def _largest(weight_N: np.ndarray, group_N: np.ndarray) -> float:
    return max(weight_N[group_N == g].sum() for g in np.unique(group_N)) / weight_N.sum()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_no_account_and_no_organisation_has_more_than_its_share(seed: int):
    rng = np.random.default_rng(seed)
    account = rng.choice(300, 2000, p=(p := np.arange(1, 301) ** -1.5) / p.sum())
    organisation = np.where(account < 280, account % 40, -1)
    weight = rng.exponential(1.0, 2000) ** 3
    capped = shares_capped(weight, account, organisation, NONE[:2000], 0.02, 0.05, 0.25)
    assert capped.mean() == pytest.approx(1.0, **CLOSE)
    assert _largest(capped, account) <= 0.02 * (1 + 1e-6)
    inside = organisation >= 0
    most = max(capped[organisation == o].sum() for o in np.unique(organisation[inside])) / capped.sum()
    assert most <= 0.05 * (
        1 + 1e-3
    )  # the account's bound is the last to be applied, and gives the others back a little
    for one in (0, 17):  # turns of one account keep their proportions
        mine = account == one
        assert np.ptp(capped[mine] / weight[mine]) <= 1e-9 * capped[mine].max() / weight[mine].min()


def test_weights_within_the_bounds_stay_as_they_are():
    weight = np.array([1.0, 2.0, 1.5, 1.5] * 50)
    account = np.arange(200)
    assert shares_capped(weight, account, np.full(200, -1), NONE[:200], 0.02, 0.05, 0.25) == pytest.approx(
        weight / 1.5, **CLOSE
    )


def test_too_few_accounts_for_the_bound_are_equal():
    capped = shares_capped(
        np.array([1.0, 9.0, 2.0, 2.0]), np.array([0, 1, 2, 2]), np.full(4, -1), NONE[:4], 0.01, 0.05, 0.25
    )
    assert capped == pytest.approx([4 / 3, 4 / 3, 2 / 3, 2 / 3], **CLOSE)
    assert shares_capped(np.zeros(3), np.arange(3), np.full(3, -1), NONE[:3], 0.1, 0.1, 0.25).tolist() == [
        0.0,
        0.0,
        0.0,
    ]


def test_an_account_stays_bounded_where_its_organisation_cannot_be():
    account, organisation = np.arange(101), np.r_[0, np.ones(100, int)]
    capped = shares_capped(np.ones(101), account, organisation, NONE[:101], 0.01, 0.05, 0.25)
    assert _largest(capped, account) <= 0.01 * (1 + 1e-9)


def _trimmed(values: list[float], weights: list[float], trim: float) -> float:
    """By hand: each value is a piece of the axis; what lies beyond `trim` at either end is left out."""
    total, at, out = sum(weights), 0.0, 0.0
    low, high = trim * total, (1 - trim) * total
    for value, weight in sorted(zip(values, weights, strict=True)):
        out += value * max(0.0, min(high, at + weight) - max(low, at))
        at += weight
    return out / (high - low)


@given(seed=st.integers(0, 2**32 - 1), trim=st.sampled_from([0.0, 0.1, 0.25, 0.49]))
@settings(max_examples=60, deadline=None)
def test_a_trimmed_mean_is_that_of_the_other_turns_of_the_cell(seed: int, trim: float):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    value, weight = rng.choice([-1.0, 0.0, 0.25, 1.0], count), rng.uniform(0.1, 3.0, count)
    cell = rng.integers(0, 4, count)
    found = trimmed_means(value, weight, cell, trim)
    for i in range(count):
        others = [j for j in range(count) if cell[j] == cell[i] and j != i]
        expected = _trimmed([value[j] for j in others], [weight[j] for j in others], trim) if others else np.nan
        assert found[i] == pytest.approx(expected, nan_ok=True, rel=1e-9, abs=1e-9)


def test_a_baseline_is_the_cell_mean_drawn_to_the_global_one():
    reward, cell = np.array([1.0, 0.0, 0.5, -1.0]), np.array([0, 0, 0, 1])
    found = baselines(reward, np.ones(4), cell, 20.0, 0.0)
    assert found[0] == pytest.approx((2 * 0.25 + 20 * (-0.5 / 3)) / 22, **CLOSE)
    assert found[3] == pytest.approx(0.5, **CLOSE)  # alone in its cell: the mean of all others
    assert baselines(np.array([0.7]), np.ones(1), np.zeros(1, int), 20.0, 0.1).tolist() == [0.7]  # advantage 0
    assert baselines(reward, np.ones(4), cell, 0.0, 0.0)[0] == pytest.approx(0.25, **CLOSE)


def test_a_turn_does_not_move_its_own_baseline():
    rng = np.random.default_rng(3)
    reward, weight, cell = rng.uniform(-1, 1, 30), rng.uniform(0.5, 2, 30), rng.integers(0, 3, 30)
    changed = reward.copy()
    changed[4] = -changed[4]
    before, after = (baselines(r, weight, cell, 20.0, 0.1)[4] for r in (reward, changed))
    assert after == pytest.approx(before, **CLOSE)


def test_ratings_count_where_enough_accounts_rated_similar_prompts():
    cluster = np.array([0] * 25 + [1] * 25 + [2])
    account = np.array([*range(25), *([1] * 25), 3])
    rated = np.ones(51, bool)
    assert covered(cluster, account, NONE[: len(rated)], rated, 20).tolist() == [True] * 25 + [False] * 26
    rated[:6] = False  # 19 are left
    assert not covered(cluster, account, NONE[: len(rated)], rated, 20).any()
    assert covered(NONE[:0], NONE[:0], NONE[:0], np.zeros(0, bool), 20).tolist() == []


def _sybils(share: float, times: float, seed: int) -> dict[str, float]:
    """Votes of 2,000 accounts of which `share` always vote 1 and are `times` as active; the mean of the honest is -0.6.
    A sample-weighted mean with one defence after the other."""
    rng = np.random.default_rng(seed)
    accounts = 2000
    attacker = np.arange(accounts) < share * accounts
    activity = rng.permutation(np.arange(1, accounts + 1) ** -1.0)
    activity[attacker] = times * activity.mean()
    account = rng.choice(accounts, 20_000, p=activity / activity.sum())
    vote = np.where(attacker[account], 1.0, np.where(rng.random(20_000) < 0.2, 1.0, -1.0))
    capped = first_of(account, np.arange(20_000), 5)
    vote5, account5 = vote[capped], account[capped]
    aged = age_weights(np.where(attacker[account5], 0.0, 30.0), 7.0)
    one = np.zeros(len(vote5), int)
    return {
        "raw": vote.mean(),
        "cap": vote5.mean(),
        "age": float((aged * vote5).sum() / aged.sum()),
        "trim": float(trimmed_means(vote5, aged, one, 0.1).mean()),
    }


def test_each_defence_takes_the_mean_of_votes_closer_to_that_of_the_honest():
    for seed in (11, 12, 13):
        found = _sybils(0.1, 10.0, seed)
        assert found["raw"] > 0.0, "undefended, a tenth of the accounts turns the sign"
        assert -0.6 < found["age"] < found["cap"] < -0.1
        assert found["trim"] < found["age"]
        assert found["trim"] == pytest.approx(-0.66, abs=0.06)  # trimming both ends of votes of -1 and 1 moves it down
        few = _sybils(0.01, 50.0, seed)
        assert few["raw"] > -0.3
        assert few["cap"] == pytest.approx(-0.57, abs=0.04)


def test_a_tenant_with_few_accounts_has_no_more_than_its_share() -> None:
    """A tenant of 40 names, each of which weighs ten times as much as an account of the other tenants."""
    account, none = np.arange(140), np.full(140, -1)
    tenant = np.r_[np.zeros(40, int), 1 + np.arange(100) % 4]
    weight = np.where(tenant == 0, 10.0, 1.0)
    capped = shares_capped(weight, account, none, tenant, 0.05, 0.05, 0.25)
    assert capped[tenant == 0].sum() / capped.sum() == pytest.approx(0.25, rel=1e-6)
    most = np.r_[np.zeros(100, int), 1 + np.arange(40)]  # most accounts are its own: it is not cut for the others' gain
    assert shares_capped(np.ones(140), account, none, most, 0.05, 0.05, 0.25) == pytest.approx(np.ones(140), **CLOSE)
    two = np.repeat([0, 1], 70)  # too few tenants for the bound
    assert shares_capped(np.ones(140), account, none, two, 0.05, 0.05, 0.25) == pytest.approx(np.ones(140), **CLOSE)


def test_a_tenant_of_few_accounts_alone_covers_no_ratings() -> None:
    account, rated = np.arange(60), np.arange(60) < 25
    cluster, small = NONE[:60], np.where(np.arange(60) < 25, 1, 0)
    assert not covered(cluster, account, small, rated, 20).any()
    assert covered(cluster, account, 1 - np.where(np.arange(60) < 45, 1, 0), rated, 20).sum() == 25
