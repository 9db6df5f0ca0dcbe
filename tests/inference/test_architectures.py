"""The engine against transformers' own forward pass, for attention that is not that of the bundled model.

Tolerance 2e-5 for log-probabilities: float32 on both sides, sums in another order. The reference is transformers'
eager attention and its own loop over experts, so that nothing of ours is in it.
"""

import numpy as np
import pytest
import torch

from etude.audit.architectures.families import FAMILIES, Family, build, make
from etude.config import EngineConfig
from etude.errors import UserError
from etude.inference.engine.engine import Engine
from etude.inference.engine.loading import load_engine
from etude.inference.engine.requests import Request
from etude.models import attention, experts, support
from etude.models.kernels import BLOCK
from etude.models.key_values import configured, measured
from tests.helpers.tiny_models import random_model

TOLERANCE = 2e-5
BY_NAME = {family.name: family for family in FAMILIES}
FAST = ["DeepSeek-V3, Kimi-K2", "Mistral, window", "gpt-oss"]


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(7, 97, length).tolist()


def ours(model):
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    return model


def run(engine, *requests):
    sequences = [engine.submit(request) for request in requests]
    for _ in range(500):
        if all(sequence.future.done() for sequence in sequences):
            return [sequence.future.result() for sequence in sequences]
        engine.step()
    raise AssertionError("the requests did not finish")


def check(model):
    """Prompts below a block, of many blocks and cut into chunks, that decode beside each other; scores of them; and a
    next turn, which finds the keys of the last one."""
    engine = Engine(model, EngineConfig(prefill_tokens=37))
    requests = [Request(ids=prompt(n, n), max_tokens=m, seed=n) for n, m in ((3, 40), (70, 9), (130, 25), (33, 33))]
    for request, generation in zip(requests, run(engine, *requests), strict=True):
        ids = request.ids + generation.ids
        expected = support.plain_log_probs(model, np.array(ids))
        np.testing.assert_allclose(generation.logprobs, expected[len(request.ids) - 1 :], atol=TOLERANCE)
        scored = engine.score(ids)
        engine.step()
        np.testing.assert_allclose(scored.result()[1], expected, atol=TOLERANCE)
    ids += prompt(11, 3)
    (turn,) = run(engine, Request(ids=ids, max_tokens=8, seed=2))
    assert turn.cached_tokens == len(ids) - 12  # the last sampled token was never fed
    expected = support.plain_log_probs(model, np.array(ids + turn.ids))[len(ids) - 1 :]
    np.testing.assert_allclose(turn.logprobs, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", FAST)
def test_prefill_chunks_ragged_decoding_and_the_next_turn_are_exact(name):
    check(ours(build(BY_NAME[name])))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - set(FAST)))
def test_every_family_is_exact_or_refused_in_a_sentence(name, tmp_path):
    """What is not refused decodes, too, beyond what the trial at the start has tried."""
    folder, said = make(BY_NAME[name], tmp_path / "m"), ""
    try:
        check(load_engine(folder, EngineConfig(cache_mb=16)).model)
    except UserError as e:
        said = str(e)
    assert said == "" or (said.endswith('use inference.engine = "vllm"') and "\n" not in said)


@pytest.mark.slow
def test_a_family_whose_layers_differ_in_size_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"gemma4_text .*of different sizes.* use inference.engine"):
        load_engine(make(BY_NAME["Gemma 4"], tmp_path / "m"), EngineConfig())


def test_pages_are_as_wide_as_the_layers_keys_and_values():
    """Keys of MLA have 48 + 16 numbers, its values 32; the configuration's head_dim is that of the rotated part, 16."""
    model = ours(random_model("deepseek"))
    shape = measured(model)
    assert shape == configured(model.config)
    assert (shape.layers, shape.heads, shape.key, shape.value) == (3, 4, 64, 32)
    cache = Engine(model).cache
    assert (cache.keys.shape[2:], cache.values.shape[2:]) == ((4, BLOCK, 64), (4, BLOCK, 32))
    for kind in ("moe", "qwen3", "llama", "glm"):
        other = ours(random_model(kind))
        assert measured(other) == configured(other.config)


@pytest.mark.parametrize("name", ["DeepSeek-V3, Kimi-K2", "gpt-oss"])
def test_the_path_of_accelerators_is_exact(name):
    """Pages are gathered where there is no kernel for them, as for caches in float64."""
    model = ours(build(BY_NAME[name]))
    request = Request(ids=prompt(70), max_tokens=20, seed=1)
    engine = Engine(model)
    engine.cache.keys, engine.cache.values = engine.cache.keys.double(), engine.cache.values.double()
    (generation,) = run(engine, request)
    expected = support.plain_log_probs(model, np.array(request.ids + generation.ids))[69:]
    np.testing.assert_allclose(generation.logprobs, expected, atol=TOLERANCE)


@pytest.mark.parametrize("window", [100, 2000])
def test_windows_longer_than_the_first_rows_of_the_trial_are_served(window, tmp_path):
    """Keys of one length of windows must not be taken for those of another."""
    folder = make(Family("window", "mistral", {"sliding_window": window}), tmp_path / "m")
    check(load_engine(folder, EngineConfig(cache_mb=16)).model)


def test_a_window_in_bfloat16():
    """bfloat16 keeps 8 bits: in four layers roundings of 2^-8 move log-probabilities by some hundredths; a window that
    is not kept moves them by tenths."""
    model = ours(build(BY_NAME["Mistral, window"])).to(torch.bfloat16)
    request = Request(ids=prompt(70), max_tokens=20, seed=1)
    (generation,) = run(Engine(model), request)
    expected = support.plain_log_probs(model.float(), np.array(request.ids + generation.ids))[69:]
    assert np.abs(np.array(generation.logprobs) - expected).mean() < 0.05


def test_deterministic_mode_of_mla_runs_alone():
    model = ours(random_model("deepseek"))
    requests = [Request(ids=prompt(33), max_tokens=12, seed=i) for i in range(3)]
    engine = Engine(model, deterministic=True)
    assert engine.serial, "keys are wider than values, which batch-invariant mode does not know"
    assert run(engine, *requests) == [run(Engine(model, deterministic=True), request)[0] for request in requests]
