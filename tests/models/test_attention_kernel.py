"""Attention of many queries on the CPU: that of float64, whatever the tiles, and only where it should be taken."""

import numba
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from etude.inference.engine import attention_metadata
from etude.models import attention, attention_kernel, batch_invariant
from etude.models.kernels import exponential, highest_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random(B: int, H: int, K: int, T: int, S: int, D: int = 64) -> list[Tensor]:
    noise = torch.Generator().manual_seed(S)
    return [torch.randn(B, heads, length, D, generator=noise) for heads, length in ((H, T), (K, S), (K, S))]


def in_float64(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    repeats, (T, S) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = (x.repeat_interleave(repeats, dim=1).double() for x in (key, value))
    seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    return F.scaled_dot_product_attention(query.double(), key, value, attn_mask=seen, scale=scale)


@pytest.mark.parametrize(
    ("B", "H", "K", "T", "S"),
    [
        (1, 4, 2, 16, 16), (1, 4, 2, 17, 17), (2, 4, 4, 33, 50), (1, 6, 2, 300, 300), (1, 4, 2, 40, 512),
        (1, 4, 2, 40, 513), (1, 8, 2, 129, 1100), (1, 2, 1, 600, 700), (1, 3, 3, 16, 2000), (1, 64, 1, 40, 90),
    ],
)  # fmt: skip
def test_it_is_that_of_float64(B: int, H: int, K: int, T: int, S: int) -> None:
    query, key, value = random(B, H, K, T, S)
    query *= 8  # some queries look at one key almost alone
    with torch.inference_mode():
        assert attention_kernel.takes(query, key, value)
        ours, true = attention_kernel.causal(query, key, value, 0.2), in_float64(query, key, value, 0.2)
        by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
        strided = attention_kernel.causal(*by_token, 0.2)
    # Scores of size 100 in float32 are off by some 1e-5, and so are their exponentials, relatively.
    assert (ours - true).abs().max() < 2e-4
    assert (strided - true).abs().max() < 2e-4


def test_later_keys_are_not_seen() -> None:
    query, key, value = random(1, 4, 2, 600, 1300)
    with torch.inference_mode():
        before = attention_kernel.causal(query, key, value, 0.1)
        key[:, :, 1000:], value[:, :, 1000:] = 50.0, torch.nan
        after = attention_kernel.causal(query, key, value, 0.1)
    first = 1000 - 700  # the query of key 1000
    assert torch.equal(before[:, :, : first // 2], after[:, :, : first // 2]), "tiles that end before it"
    assert after[:, :, first:].isnan().all(), "what is not a number stays so"


def test_scores_of_any_size() -> None:
    query, key, value = random(1, 2, 2, 20, 700)
    with torch.inference_mode():
        for size in (0.0, 1e-30, 1e4):
            ours = attention_kernel.causal(query * size, key, value, 1.0)
            true = in_float64(query * size, key, value, 1.0)
            # At 1e4 float32's scores are off by some 1e-2; where two keys are that near, so are their shares.
            assert (ours - true).abs().max() < (3e-2 if size > 1 else 1e-5), size


@numba.njit
def softmax(scores, exponents, length):  # type: ignore[no-untyped-def]
    highest = highest_of(scores, exponents, length)
    return highest, exponential(scores, exponents, length, highest, np.float32(1))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100])
def test_the_highest_score(length: int) -> None:
    rng = np.random.default_rng(length)
    for shift in (-3.0, 0.0, 3.0):
        scores = (rng.standard_normal(100) + shift).astype(np.float32)
        scores[length:] = np.inf
        true = scores[:length].copy()
        highest, total = softmax(scores, np.empty(100, np.int32), length)
        assert highest == true.max()
        np.testing.assert_allclose(scores[:length], np.exp(true - true.max()), rtol=2e-6, atol=0)
        np.testing.assert_allclose(total, np.exp(true - true.max()).sum(), rtol=2e-6)
        assert np.isinf(scores[length:]).all()
    extremes = np.array([-np.inf, -1e38, -0.0, -1e-40], np.float32)
    assert softmax(extremes, np.empty(4, np.int32), 2)[0] == np.float32(-1e38)


def test_who_takes_it() -> None:
    query, key, value = random(1, 4, 2, 32, 64)
    assert not attention_kernel.takes(query, key, value), "gradients may be kept"
    with torch.inference_mode():
        assert attention_kernel.takes(query, key, value)
        assert not attention_kernel.takes(query[:, :, : attention_kernel.MANY - 1], key, value)
        assert not attention_kernel.takes(query, key, value[..., :32])
        assert not attention_kernel.takes(*(x.bfloat16() for x in (query, key, value)))
        with batch_invariant.batch_invariant():
            assert not attention_kernel.takes(query, key, value)
        torch.set_num_threads(2)
        assert not attention_kernel.takes(query, key, value), "its kernel has one thread"


@pytest.mark.parametrize("keys", [40, 600])
def test_the_engine_takes_it_and_the_trainer_does_not(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = random(1, 4, 2, 40, keys)
    with torch.inference_mode():
        ours, theirs = (f(query, key, value, 0.125) for f in (attention_kernel.causal, attention.causal))
        assert not torch.equal(ours, theirs), "both are the same way"
        assert (ours - theirs).abs().max() < 2e-6
        monkeypatch.setattr(attention_kernel, "MANY", 1000)
        assert torch.equal(attention_kernel.causal(query, key, value, 0.125), theirs)
    assert attention_metadata.causal is attention_kernel.causal
