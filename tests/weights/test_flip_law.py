"""How many weights a step changes, predicted from the exponents alone."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.weights.flip_law import adam_move, density
from etude.weights.ulpd.chunk_grid import FORMATS, bits

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("dtype", "sd"), [("bfloat16", 2e-7), ("bfloat16", 2e-6), ("bfloat16", 1e-5), ("float16", 2e-7), ("float16", 2e-6)]
)
def test_the_law_holds_for_masters_that_move_at_random(dtype: str, sd: float) -> None:
    """10 %: where moves are about as large as cells, the mean of the minimum is below the minimum of the means.

    Moves of 1e-5 are as large as most cells of float16, and the law does not hold there.
    """
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1 << 20, generator=generator) * 0.02
    new = old + torch.randn(old.shape, generator=generator) * sd
    before, after = (bits(master.to(getattr(torch, dtype))) for master in (old, new))
    measured = float((before != after).mean())
    assert density([before], FORMATS[dtype], sd * (2 / torch.pi) ** 0.5) == pytest.approx(measured, rel=0.1)


def test_what_cannot_change_and_what_always_does() -> None:
    form = FORMATS["bfloat16"]
    zeros = np.zeros(10, np.uint16)
    assert density([zeros], form, 0.0) == 0.0
    assert density([zeros], form, 1e-6) == 1.0, "next to zero every move shows"
    assert density([], form, 1e-6) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [1e-6, 3e-6, 1e-5])
def test_the_law_holds_for_policy_gradient_on_the_nano_model(
    learning_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    benchmark = importlib.import_module("benchmarks.weights")
    pair = benchmark.real_pair(learning_rate, steps=24, settled=True)
    predicted = density(pair.old.values(), FORMATS["bfloat16"], adam_move(learning_rate))
    assert predicted == pytest.approx(pair.density, rel=0.1)
