"""Activation checkpointing in every execution: the same gradients, experts and bits, and a fraction of the memory."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from etude.errors import UserError
from etude.models import router_replay
from etude.models.batch_invariant import batch_invariant
from etude.models.loading import load_model
from etude.models.segments import trie
from etude.trainer import activations
from etude.trainer.activations import checkpoint_activations
from etude.trainer.head import token_logprobs
from etude.trainer.rl import execution
from etude.trainer.rl.execution import run
from etude.trainer.rl.plan import TokenRows, packed, rows, streaming
from tests.helpers.tiny_models import random_model, save_random_model


@pytest.fixture(scope="module", params=["moe", "qwen3"])
def models(request, tmp_path_factory):
    """A model that keeps its activations, and the same one that computes them again."""
    folder = save_random_model(tmp_path_factory.mktemp("model") / "m", request.param, initializer_range=0.05)
    plain, again = load_model(folder).train(), load_model(folder).train()
    checkpoint_activations(again)
    return plain, again


def a_group(members=3, prompt=40, seed=0):
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 97, prompt)
    out = [np.concatenate([shared, rng.integers(0, 97, 12 + 3 * i)]) for i in range(members)]
    return TokenRows(tuple(out), tuple(np.arange(len(row) - 9, len(row)) for row in out))


def gradients(model, parts, tokens, **options):
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    out = run(model, parts, tokens.count, lambda l_M, at_M: (weight_N[at_M] * l_M).sum(), **options)
    return out, [p.grad.clone() for p in model.parameters()]


def same(ours, truth):
    """The layers are computed twice from the same input by the same kernels: equal bits, not only equal numbers."""
    return all(torch.equal(a, b) for a, b in zip(ours, truth, strict=True))


def ways(tokens):
    tree = trie(tokens.rows, marks=tokens.routes)
    yield rows(tokens)
    yield packed(tokens, tree, 10_000)
    yield streaming(tokens, tree, 60)
    yield streaming(tokens, tree, 60, recompute=True)


def test_every_execution_has_the_same_gradients_and_counts(models):
    plain, again = models
    tokens = a_group()
    aux = 0.1 if hasattr(plain.config, "num_experts") else 0.0
    for parts in ways(tokens):
        expected, truth = gradients(plain, parts, tokens, temperature=0.8, aux=aux)
        out, ours = gradients(again, parts, tokens, temperature=0.8, aux=aux)
        assert same(ours, truth)
        assert torch.equal(out.logprobs_N, expected.logprobs_N)
        assert torch.equal(out.counts_LE, expected.counts_LE), "tokens of a layer that is computed again count once"
        assert out.aux == expected.aux


def test_batch_invariant_mode_is_entered_again(models):
    plain, tokens = models[0], a_group()
    with batch_invariant():
        truth, ours = (gradients(model, rows(tokens), tokens)[1] for model in models)
    assert same(ours, truth)
    assert not same(ours, gradients(plain, rows(tokens), tokens)[1]), "else the mode was not felt, and nothing is shown"


def test_recorded_experts_are_replayed_again(models):
    """Routes that the router would not take by itself: without them the second pass would be another function."""
    plain, again = models
    if not hasattr(plain.config, "num_experts"):
        with pytest.raises(UserError, match="no experts to replay"):
            router_replay.shape(plain)
        return
    tokens = a_group()
    layers, slots = router_replay.shape(plain)
    rng = np.random.default_rng(3)
    routes = tuple(
        np.argsort(rng.random((len(row), layers, plain.config.num_experts)), axis=-1)[:, :, :slots].astype(np.int16)
        for row in tokens.rows
    )
    prompt = routes[0][:40]
    routes = tuple(np.concatenate([prompt, r[40:]]) for r in routes)
    replayed = TokenRows(tokens.rows, tokens.sampled, routes)
    for parts in ways(replayed):
        expected, truth = gradients(plain, parts, replayed)
        out, ours = gradients(again, parts, replayed)
        assert expected.replayed.flipped > 0
        assert vars(out.replayed) == vars(expected.replayed), "statistics of the first pass alone"
        # The second pass takes gates of the experts that the first has run: the same formula, the same bits.
        assert same(ours, truth)


def test_bfloat16_is_no_further_from_float32_than_plain_rows(tmp_path):
    """All levers, 32 passes of one row each, against the whole softmax and gradients summed in bfloat16. Both round
    activations alike: what differs is the sum over passes, and it must be nearer."""
    errors = {"plain": 0.0, "levers": 0.0}
    folder, rng = save_random_model(tmp_path / "m", "qwen3", initializer_range=0.05), np.random.default_rng(0)
    out = tuple(rng.integers(0, 97, 24) for _ in range(32))
    tokens = TokenRows(out, tuple(np.arange(8, 24) for _ in out))
    wide = load_model(folder, dtype=torch.bfloat16).float()
    truth = gradients(wide, rows(tokens), tokens)[1]
    for name in errors:
        model = load_model(folder, dtype=torch.bfloat16).train()
        if name == "levers":
            checkpoint_activations(model)
            for parameter in model.parameters():
                parameter.grad_dtype = torch.float32
        with patch.object(execution, "token_logprobs", token_logprobs if name == "levers" else whole_softmax):
            ours = gradients(model, rows(tokens), tokens)[1]
        off = sum((a.double() - b.double()).square().sum() for a, b in zip(ours, truth, strict=True))
        errors[name] = float((off / sum(b.double().square().sum() for b in truth)).sqrt())
    assert 0 < errors["levers"] < errors["plain"] < 0.2


def whole_softmax(head, hidden_SD, of_M, target_M, *, temperature, before):
    logprobs_SV = torch.log_softmax(head.logits(hidden_SD) / temperature, dim=-1)
    return logprobs_SV[torch.from_numpy(of_M), torch.from_numpy(target_M)], torch.zeros(0)


def test_what_is_kept_is_a_fifth_at_most():
    """Bytes that autograd keeps of the layers, weights left out; eight layers of the sizes' usual proportions."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8, "vocab_size": 32}
    plain, again = (random_model("qwen3", **sizes).train() for _ in range(2))
    checkpoint_activations(again)
    ids_1T = torch.arange(96)[None] % 32
    kept = [saved_bytes(model, ids_1T) for model in (plain, again)]
    assert 0 < kept[1] <= 0.2 * kept[0]


def saved_bytes(model, ids_1T):
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.get_decoder()(input_ids=ids_1T, use_cache=False).last_hidden_state
    total = sum(storage.nbytes() for storage in saved.values())
    out.sum().backward()
    return total


def test_layers_that_are_computed_again_ask_the_device_for_no_more_numbers(models):
    """Values that a pass waits for: of the metrics, and of router replay in its first pass alone."""
    plain, _ = models
    tokens = a_group()
    if hasattr(plain.config, "num_experts"):
        layers, slots = router_replay.shape(plain)
        same = np.arange(slots, dtype=np.int16)
        routes = tuple(np.broadcast_to(same, (len(row), layers, slots)).copy() for row in tokens.rows)
        tokens = TokenRows(tokens.rows, tokens.sampled, routes)
    counts = []
    for model in models:
        with Waits() as waits:
            gradients(model, rows(tokens), tokens)
        counts.append(waits.count)
    assert counts[1] == counts[0] > 0


class Waits(TorchDispatchMode):
    """Counts values of tensors that Python asks for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_inputs_of_layers_go_to_the_host(monkeypatch):
    """The hooks of `torch.autograd.graph.save_on_cpu` hold the layers' inputs, and nothing else."""
    plain, offloaded = (random_model("qwen3").train() for _ in range(2))
    packed_shapes = []

    class Recording(saved_tensors_hooks):
        def __init__(self, pin_memory):
            assert not pin_memory, "there is nothing to copy from fast memory"
            super().__init__(lambda x: packed_shapes.append(x.shape) or x.clone(), lambda x: x)

    monkeypatch.setattr(activations, "save_on_cpu", Recording)
    checkpoint_activations(offloaded, offload=True)
    tokens = a_group()
    truth, ours = (gradients(model, rows(tokens), tokens)[1] for model in (plain, offloaded))
    assert same(ours, truth)
    width = offloaded.config.hidden_size
    assert packed_shapes == [(1, len(row), width) for row in tokens.rows for _ in range(3)]


def test_a_model_whose_layers_cannot_be_computed_again_is_refused():
    model = random_model("qwen3")
    del model.model.layers[:]
    with pytest.raises(UserError, match="drop trainer"):
        checkpoint_activations(model)
