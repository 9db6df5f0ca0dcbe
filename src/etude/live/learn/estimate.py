"""Weights and advantages from the labels of a window. Pure functions of arrays, one entry a turn.

A turn has no group: its reward is compared with the other turns of its cell (tenant, kind of request, depth in the
session). A cell is known before the model answers, or the comparison would hide the effect of the answer. No account
and no organisation has more than its share of the weight, and no tenant with at most half of the accounts. An account
is what a key vouches for.
"""

from __future__ import annotations

import math

import numpy as np

YOUNG = 0.2
"""The weight of a new account, so that many new accounts count less."""
_ROUNDS = 16


def first_of(group_N: np.ndarray, order_N: np.ndarray, most: int) -> np.ndarray:
    """Mask of the first `most` turns of each group by `order_N`, which is unique within a group: bool [N]."""
    sorted_N = np.lexsort((order_N, group_N))
    group = group_N[sorted_N]
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]]) if len(group) else np.zeros(0, int)
    rank = np.arange(len(group)) - np.repeat(first, np.diff(np.r_[first, len(group)]))
    out = np.empty(len(group), bool)
    out[sorted_N] = rank < most
    return out


def age_weights(days_N: np.ndarray, full: float) -> np.ndarray:
    """Weights of accounts by their age: from YOUNG to 1 at `full` days, float64 [N]."""
    return YOUNG + (1.0 - YOUNG) * np.clip(np.asarray(days_N, float) / full, 0.0, 1.0)


def shares_capped(
    weight_N: np.ndarray,
    account_N: np.ndarray,
    organisation_N: np.ndarray,
    tenant_N: np.ndarray,
    account_share: float,
    organisation_share: float,
    tenant_share: float,
) -> np.ndarray:
    """Weights, mean 1, of which no account (int [N]) has more than `account_share`, no organisation more than
    `organisation_share`, and no tenant with at most half of the accounts more than `tenant_share`. Turns without an
    organisation (below 0) have no such bound. With too few accounts or organisations for a bound, the largest are made
    equal; tenants are then left as they are. If not all bounds can hold, the account's does."""
    out = np.asarray(weight_N, float)
    if not out.any():
        return out
    accounts, account_N = np.unique(account_N, return_inverse=True)
    names, organisation_N = np.unique(np.maximum(organisation_N, -1), return_inverse=True)
    tenants, tenant_N = np.unique(tenant_N, return_inverse=True)
    small_G = minorities(account_N, tenant_N)
    bounded = small_G.sum() < len(tenants) or len(tenants) * tenant_share > 1.0
    for _ in range(_ROUNDS):
        before = out
        out = _capped(out, tenant_N, small_G, tenant_share) if bounded else out
        out = _capped(out, organisation_N, names >= 0, organisation_share)
        out = _capped(out, account_N, np.ones(len(accounts), bool), account_share)
        if out is before:
            break
    return out * (len(out) / math.fsum(out))


def minorities(account_N: np.ndarray, tenant_N: np.ndarray) -> np.ndarray:
    """Which tenants (int [N], from 0) have at most half of the accounts: bool [G]."""
    _, first = np.unique(account_N, return_index=True)
    count_G = np.bincount(tenant_N[first], minlength=int(tenant_N.max(initial=-1)) + 1)
    return count_G * 2 <= len(first)


def _capped(weight_N: np.ndarray, group_N: np.ndarray, bound_G: np.ndarray, share: float) -> np.ndarray:
    """Weights scaled down in each bound group so that none has more than `share` of the resulting sum; the same array
    if none has."""
    total_G = np.bincount(group_N, weight_N, len(bound_G))
    live = np.sort(total_G[bound_G & (total_G > 0)])[::-1]
    rest = math.fsum(total_G[~bound_G])
    below = np.r_[live[::-1].cumsum()[::-1], 0.0] + rest  # weight of all but the k largest
    share = max(share, 1.0 / max(1, len(live))) if rest == 0.0 else share
    if not len(live) or live[0] <= share * below[0] * (1.0 + 1e-9):
        return weight_N
    count = np.arange(len(live) + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        level = share * below / (1.0 - count * share)  # of the k largest, so that each has `share` of the sum
    fits = (count * share < 1.0) & (below > 0.0) & (level >= np.r_[live, 0.0] * (1.0 - 1e-12))
    limit = level[int(np.argmax(fits))] if fits.any() else live[-1]
    scale_G = np.where(bound_G & (total_G > limit), limit / np.maximum(total_G, 1e-300), 1.0)
    return weight_N * scale_G[group_N]


def trimmed_means(value_N: np.ndarray, weight_N: np.ndarray, cell_N: np.ndarray, trim: float) -> np.ndarray:
    """For each turn the weighted mean of the *other* turns of its cell (int [N]), without the share `trim` of their
    weight at either end: float64 [N], NaN for a turn without others. Linear but for a sort: the trimmed sum is an
    interval of the running sum over sorted values, from which the turn's own piece is taken out."""
    count = len(value_N)
    order = np.lexsort((np.arange(count), value_N, cell_N))
    value, weight, cell = value_N[order], np.asarray(weight_N, float)[order], cell_N[order]
    first = np.r_[True, cell[1:] != cell[:-1]] if count else np.zeros(0, bool)
    of = np.cumsum(first) - 1
    mass = np.r_[0.0, np.cumsum(weight)]
    total = np.r_[0.0, np.cumsum(weight * value)]
    start = mass[np.flatnonzero(first)][of] if count else np.zeros(0)
    whole = np.bincount(of, weight)[of] if count else np.zeros(0)
    left, right = mass[:-1], mass[1:]
    others = whole - weight

    def place(share: float) -> np.ndarray:  # of a share of the others' weight, on the axis of all turns
        at = start + share * others
        return np.where(at <= left, at, at + weight)

    low, high = place(trim), place(1.0 - trim)
    own = np.maximum(0.0, np.minimum(high, right) - np.maximum(low, left))
    kept = np.interp(high, mass, total) - np.interp(low, mass, total) - own * value
    size = (1.0 - 2.0 * trim) * others
    out = np.empty(count)
    with np.errstate(divide="ignore", invalid="ignore"):
        out[order] = np.where(others <= 1e-12 * whole, np.nan, kept / size)
    return out


def baselines(
    reward_N: np.ndarray, weight_N: np.ndarray, cell_N: np.ndarray, shrinkage: float, trim: float
) -> np.ndarray:
    """The mean reward of a turn's cell without the turn, b = (n m_cell + k m_all) / (n + k): m are trimmed means of the
    n other turns of the cell and of all other turns, k is `shrinkage`. float64 [N]. The baseline of a single turn is
    its own reward."""
    cell_mean_N = trimmed_means(reward_N, weight_N, cell_N, trim)
    mean_N = trimmed_means(reward_N, weight_N, np.zeros_like(cell_N), trim)
    others_N = np.where(np.isnan(cell_mean_N), 0, np.bincount(cell_N, minlength=1)[cell_N] - 1)
    mean_N = np.where(np.isnan(mean_N), reward_N, mean_N)
    total_N = others_N + shrinkage
    with np.errstate(divide="ignore", invalid="ignore"):
        shrunk_N = (others_N * np.nan_to_num(cell_mean_N) + shrinkage * mean_N) / total_N
    return np.where(total_N > 0, shrunk_N, mean_N)


def covered(
    cluster_N: np.ndarray, account_N: np.ndarray, tenant_N: np.ndarray, rated_N: np.ndarray, least: int
) -> np.ndarray:
    """Whether a turn's rating counts, bool [N]: at least `least` accounts rated turns whose prompts are in its cluster
    (int [N]). A single account has no influence by its ratings alone, and a tenant with at most half of the accounts
    counts for at most half of `least`."""
    if not len(cluster_N):
        return np.zeros(0, bool)
    pairs, first = np.unique(np.stack([cluster_N[rated_N], account_N[rated_N]]), axis=1, return_index=True)
    size, tenants = int(cluster_N.max()) + 1, int(tenant_N.max()) + 1
    count_KG = np.bincount(pairs[0] * tenants + tenant_N[rated_N][first], minlength=size * tenants).reshape(size, -1)
    most_G = np.where(minorities(account_N, tenant_N), least // 2, least)
    return rated_N & (np.minimum(count_KG, most_G).sum(1)[cluster_N] >= least)
