"""Draws tokens. Randomness is counter-based: a draw depends on (seed, position in the sequence) and the logits alone,
never on the other sequences of a batch.

The log-probability of a token is that under the distribution it was drawn from: logits divided by the temperature, fp32
log-softmax, then, with top-p below 1, renormalised over the kept tokens. The kept set is the smallest set of most
probable tokens whose mass reaches top-p, ties included. At temperature 0 the most probable token is taken and its
log-probability at temperature 1 is reported. `SequenceStates.open` turns a temperature below 1e-4 into 0.

Host and devices draw alike: the same tokens of the same logits (`device_sampling` says how exactly). On the CPU
compiled loops over a row take a fifth of the time of the tensor operations that a device needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from etude.inference.engine.device_sampling import pick
from etude.inference.engine.sampling_params import TopLogprobs, listed, top_logprobs
from etude.models import batch_invariant

# Below this margin, rounding could change a draw: a few times the measured differences between float32
# log-probabilities of passes of different sizes (1e-5 to 5e-5 in models with wide weights).
MARGIN = 2e-4
_ULP = 1e-6  # relative: exp and log of a float32 do not give the same number back


class Draws(NamedTuple):
    """N drawn tokens: ids (int64), log-probabilities and margins (float32), and the most probable tokens of some."""

    ids_N: np.ndarray
    log_probs_N: np.ndarray
    margin_N: np.ndarray
    tops: dict[int, TopLogprobs]


def sample(
    logits_NV: Tensor,
    temperature_N: np.ndarray,
    top_p_N: np.ndarray,
    seed_N: np.ndarray,
    position_N: np.ndarray,
    top_N: Mapping[int, int] | None = None,
) -> Draws:
    """N draws, each with its margin, the distance to another token: at temperature 0 that of the log-probability to the
    second best, else that of the random number to the ends of the token's interval, in probability. `top_N` is the
    number of most probable tokens to return with each draw; they come from the same distribution."""
    greedy_N = temperature_N == 0.0
    if not (greedy_N | (temperature_N == 1.0)).all():
        divisor = np.where(greedy_N, 1.0, temperature_N).astype(np.float32)
        logits_NV = logits_NV.float() / torch.from_numpy(divisor).to(logits_NV.device)[:, None]
    log_probs_NV = batch_invariant.log_probs(logits_NV)
    draw = on_host if logits_NV.device.type == "cpu" else on_device
    return draw(log_probs_NV, temperature_N, top_p_N, uniform(seed_N, position_N), top_N or {})


def on_host(
    log_probs: Tensor, temperature_N: np.ndarray, top_p_N: np.ndarray, uniform_N: np.ndarray, top_N: Mapping[int, int]
) -> Draws:
    """Draws with random numbers in [0, 1) from log-probabilities [N, V] on the CPU."""
    ids_N = np.empty(len(log_probs), np.int64)
    log_probs_N, margin_N, floor_N = np.empty((3, len(log_probs)), np.float32)
    # Greedy draws need no probabilities, and verifying hundreds of tokens would compute millions of them.
    probs = log_probs if (temperature_N == 0.0).all() else log_probs.exp()
    all_NV = log_probs.numpy()
    _draw(all_NV, probs.numpy(), temperature_N, top_p_N, uniform_N, ids_N, log_probs_N, margin_N, floor_N)
    tops = {
        n: top_logprobs(all_NV[n], count, _least(floor_N[n]), log_probs_N[n] - all_NV[n, ids_N[n]])
        for n, count in top_N.items()
    }
    return Draws(ids_N, log_probs_N, margin_N, tops)


def on_device(
    log_probs_NV: Tensor,
    temperature_N: np.ndarray,
    top_p_N: np.ndarray,
    uniform_N: np.ndarray,
    top_N: Mapping[int, int],
) -> Draws:
    """The same from log-probabilities on any device, for which the host waits once."""
    greedy_N, most = temperature_N == 0.0, min(max(top_N.values(), default=0), log_probs_NV.shape[1])
    picked = pick(log_probs_NV, greedy_N, top_p_N, uniform_N, list(top_N), most)
    less_N = np.where(greedy_N | (top_p_N >= 1.0), 0.0, np.log(np.maximum(picked.mass_N, 2.0**-62)))
    log_probs_N = (picked.log_probs_N - less_N).astype(np.float32)
    tops = {
        n: listed(ids, values, count, _least(picked.floor_N[n]), log_probs_N[n] - picked.log_probs_N[n])
        for (n, count), ids, values in zip(top_N.items(), picked.top_ids_MK, picked.top_log_probs_MK, strict=True)
    }
    return Draws(picked.ids_N, log_probs_N, picked.margin_N, tops)


def _least(floor: float) -> float:
    """The least log-probability of the tokens whose probability is at least `floor`."""
    return (math.log(floor) if floor > 0 else -math.inf) - _ULP


def uniform(seed_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """Float64 in [0, 1) per (seed, position): two rounds of the SplitMix64 finaliser (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = _mix(seed_N.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        x = _mix(x ^ (position_N.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(nogil=True, cache=True)
def _draw(log_probs_NV, probs_NV, temperature_N, top_p_N, uniform_N, ids_N, log_probs_N, margin_N, floor_N) -> None:  # type: ignore[no-untyped-def]
    for n in range(len(ids_N)):
        probs = probs_NV[n]
        floor_N[n] = 0.0
        if temperature_N[n] == 0.0:
            mass = 1.0
            choice, margin_N[n] = _best(log_probs_NV[n])
        else:
            floor, mass = (np.float32(0.0), 1.0) if top_p_N[n] >= 1.0 else _nucleus(probs, top_p_N[n])
            choice, margin_N[n] = _inverse(probs, floor, uniform_N[n] * mass)
            floor_N[n] = floor
        ids_N[n] = choice
        log_probs_N[n] = log_probs_NV[n, choice]
        if top_p_N[n] < 1.0 and temperature_N[n] != 0.0:
            log_probs_N[n] -= math.log(mass)


@numba.njit(nogil=True, cache=True)
def _mass(probs, floor):  # type: ignore[no-untyped-def]
    total = 0.0
    for p in probs:
        if p >= floor:
            total += p
    return total


@numba.njit(nogil=True, cache=True)
def _nucleus(probs, top_p):  # type: ignore[no-untyped-def]
    """The least probability that is kept, and the mass of the kept tokens: bisection on the threshold."""
    target = top_p * _mass(probs, 0.0)
    low, high = np.float32(0.0), np.max(probs)
    if _mass(probs, high) >= target:
        return high, _mass(probs, high)
    # Invariant: mass(low) >= target > mass(high). Ends when no float lies between them.
    while True:
        middle = np.float32(0.5) * (low + high)
        if middle <= low or middle >= high:
            return low, _mass(probs, low)
        if _mass(probs, middle) >= target:
            low = middle
        else:
            high = middle


@numba.njit(nogil=True, cache=True)
def _inverse(probs, floor, target):  # type: ignore[no-untyped-def]
    """The first kept token at which the cumulated mass exceeds `target`, and the distance to the nearest other
    token."""
    cumulated, before, last = 0.0, 0.0, 0
    for i in range(len(probs)):
        if probs[i] >= floor and probs[i] > 0.0:
            before = cumulated
            cumulated += probs[i]
            last = i
            if cumulated > target:
                break
    return last, min(abs(cumulated - target), abs(target - before))


@numba.njit(nogil=True, cache=True)
def _best(values):  # type: ignore[no-untyped-def]
    """The index of the greatest value, the first of equal ones, and its distance to the second greatest."""
    best, highest, second = 0, values[0], np.float32(-np.inf)
    for i in range(1, len(values)):
        if values[i] > highest:
            best, highest, second = i, values[i], highest
        elif values[i] > second:
            second = values[i]
    return best, highest - second
