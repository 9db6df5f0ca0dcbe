"""A device draws the host's tokens from the same logits. Its operations are tried on the CPU here; `make device` has
them on the stand-in, `make gpu` on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.inference.engine.sampling import Draws, on_device, on_host, uniform
from etude.inference.engine.sampling_params import SamplingParams
from etude.models import batch_invariant


def both(log_probs_NV: torch.Tensor, temperature_N, top_p_N, seed: int, tops=None) -> tuple[Draws, Draws]:
    rows = np.arange(len(log_probs_NV))
    uniform_N = uniform(np.full(len(rows), seed), rows)
    return tuple(
        draw(log_probs_NV, np.asarray(temperature_N), np.asarray(top_p_N), uniform_N, tops or {})
        for draw in (on_host, on_device)
    )


def logits_of(seed: int, rows: int, width: int, spread: float) -> torch.Tensor:
    return spread * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [2, 97, 1024, 2500])
def test_ten_thousand_draws_are_the_host_s(width: int) -> None:
    """Mixed rows: greedy, plain, and nuclei of all sizes; some logits are excluded, some rounded, so that many are
    equal. Tolerances: float64 sums of float32 probabilities on the host, exact ones here."""
    rng = np.random.default_rng(width)
    for seed in range(5):
        logits_NV = logits_of(seed, 500, width, [0.1, 1.0, 3.0, 8.0, 30.0][seed])
        if seed % 2:
            logits_NV = (4 * logits_NV).round() / 4
        if width > 2:
            logits_NV.masked_fill_(torch.from_numpy(rng.random((500, width)) < 0.3), -torch.inf)
            logits_NV[:, 0] = 0.0  # something is left
        temperature_N, top_p_N = (
            rng.choice([0.0, 1.0], 500, p=[0.2, 0.8]),
            rng.choice([1.0, 0.99, 0.9, 0.3, 0.001], 500),
        )
        log_probs_NV = batch_invariant.log_probs(logits_NV)
        tops = {int(n): int(n % 20) + 1 for n in rng.choice(500, 12, replace=False)}
        host, there = both(log_probs_NV, temperature_N, top_p_N, seed, tops)
        assert np.array_equal(host.ids_N, there.ids_N)
        assert np.allclose(host.log_probs_N, there.log_probs_N, rtol=0, atol=1e-6)
        assert np.allclose(host.margin_N, there.margin_N, rtol=1e-5, atol=1e-9)
        for n in tops:
            assert [i for i, _ in host.tops[n]] == [i for i, _ in there.tops[n]]
            assert [t for _, t in host.tops[n]] == pytest.approx([t for _, t in there.tops[n]], abs=1e-6)


@pytest.mark.parametrize("width", [3, 1025, 40_000])
def test_of_equal_tokens_those_with_the_least_ids_are_listed(width: int) -> None:
    logits_NV = torch.zeros(3, width)
    logits_NV[1, width // 2] = 1.0
    logits_NV[2, : width - 1] = -torch.inf
    tops = {0: 2, 1: 3, 2: 3}
    host, there = both(batch_invariant.log_probs(logits_NV), [1.0] * 3, [1.0, 0.9, 1.0], 0, tops)
    wanted = {0: [0, 1], 1: [width // 2, *(n for n in range(3) if n != width // 2)][:3], 2: [width - 1]}
    for draws in (host, there):
        assert {n: [i for i, _ in draws.tops[n]] for n in tops} == wanted


def test_min_p_top_k_and_penalties_come_before_the_draw() -> None:
    """The same function changes logits everywhere; what is left is drawn alike."""
    ids = np.arange(40) % 7
    every = (
        SamplingParams(top_k=5, min_p=0.05, logit_bias={3: 2.0}),
        SamplingParams(presence_penalty=0.5, repetition_penalty=1.3, min_tokens=50),
        SamplingParams(allowed=tuple(range(9, 80)), bad_words=((8,), (6, 9))),
    )
    logits_NV = logits_of(1, 300, 97, 2.0)
    for n, row_V in enumerate(logits_NV):
        every[n % 3].process(row_V, ids, 10, 0.7, (1, 2))
    host, there = both(batch_invariant.log_probs(logits_NV / 0.7), np.full(300, 0.7), np.full(300, 0.95), 3)
    assert np.array_equal(host.ids_N, there.ids_N)


def test_draws_follow_the_distribution() -> None:
    """Of 20,000 draws each token's count is that of its probability; five standard deviations."""
    log_probs_V = batch_invariant.log_probs(logits_of(2, 1, 12, 1.0))[0]
    draws = both(log_probs_V.expand(20_000, -1), np.ones(20_000), np.ones(20_000), 5)[1]
    found, wanted = np.bincount(draws.ids_N, minlength=12), 20_000 * log_probs_V.exp().numpy()
    assert (abs(found - wanted) < 5 * np.sqrt(wanted)).all()


def test_rows_that_are_not_numbers_stay_so_alone() -> None:
    logits_NV = logits_of(3, 4, 3000, 1.0)
    logits_NV[1], logits_NV[2, 7] = -torch.inf, torch.nan
    host, there = both(batch_invariant.log_probs(logits_NV), np.ones(4), np.array([1.0, 0.9, 0.9, 1.0]), 1, {2: 3})
    assert np.array_equal(np.isfinite(there.log_probs_N), [True, False, False, True])
    assert np.array_equal(host.ids_N[[0, 3]], there.ids_N[[0, 3]])
    assert (there.ids_N < 3000).all()
