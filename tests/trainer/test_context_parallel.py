"""Ranks that compute rows together against one process: log-probabilities, gradients, counts, replay, bits.

Two and four ranks are started once, and compute all cases. Limits: 5e-6 nats and a relative L2 of 1e-6 in float32,
where sums over tokens are taken in another order.
"""

from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from etude.audit.architectures.families import FAMILIES, build
from etude.models import attention, context_parallel, experts, router_replay
from etude.models.batch_invariant import batch_invariant
from etude.models.segments import trie
from etude.trainer.activations import checkpoint_activations
from etude.trainer.finetune import folder, packed
from etude.trainer.rl.execution import ValueHead, evaluate, run
from etude.trainer.rl.plan import TokenRows, rows, streaming
from etude.trainer.rl.plan import packed as packed_passes
from tests.helpers import ranks
from tests.helpers.tiny_models import random_model

LOGPROBS, GRADIENTS = 5e-6, 1e-6
BY_TYPE = {family.model_type: family for family in FAMILIES}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MODELS = {
    "qwen3": lambda: random_model("qwen3", initializer_range=0.05),
    "qwen3, one key": lambda: random_model("qwen3", num_key_value_heads=1, initializer_range=0.05),
    "qwen3, groups that ranks cut": lambda: random_model(
        "qwen3", num_attention_heads=12, num_key_value_heads=3, head_dim=16, initializer_range=0.05
    ),
    "moe": lambda: random_model("moe", initializer_range=0.05),
    "deepseek": lambda: random_model("deepseek", initializer_range=0.05),
    "gpt_oss": lambda: family("gpt_oss"),
    "gemma3": lambda: family("gemma3_text"),
}
FULL = "moe"  # the model of the cases that concern only one


def family(name):
    one = BY_TYPE[name]
    return build(replace(one, options=one.options | HEADS))


def a_model(name):
    model = MODELS[name]()
    model.set_attn_implementation(attention.NAME)
    with suppress(ValueError):  # a dense model has no experts
        model.set_experts_implementation(experts.NAME)
    return model


def a_group(routed=None):
    """Rows with a common prefix, whose last tokens are sampled, and one shorter than four ranks."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 97, 22)
    out = [np.concatenate([shared, rng.integers(3, 97, 12 + 3 * i)]) for i in range(3)]
    out.append(rng.integers(3, 97, 3))
    routes = None
    if routed is not None:
        layers, slots, count = routed
        routes = [np.argsort(rng.random((len(row), layers, count)), axis=-1)[..., :slots] for row in out]
        routes = tuple(np.concatenate([routes[0][:22], r[22:]]).astype(np.int16) for r in routes[:3]) + (
            routes[3].astype(np.int16),
        )
    return TokenRows(tuple(out), tuple(np.unique([max(1, len(row) - 9), len(row) - 2, len(row) - 1]) for row in out), routes)


def ways(tokens):
    tree = trie(tokens.rows, marks=tokens.routes)
    return {
        "rows": rows(tokens),
        "packed": packed_passes(tokens, tree, 10_000),
        "streaming": streaming(tokens, tree, 40),
    }


def gradients(model, parts, tokens, **options):
    """Result, and all gradients of the ranks' tokens, [sum of sizes], in float64."""
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(0)) / tokens.count
    head = torch.nn.Linear(model.config.hidden_size, 1)
    torch.nn.init.constant_(head.weight, 0.1)
    seen = []

    def loss(logprobs_M, item_M):
        assert len(item_M)
        seen.append(len(item_M))
        return (weight_N[item_M] * logprobs_M).sum()

    def value_loss(values_M, item_M):
        assert len(item_M)
        return (values_M - weight_N[item_M]).square().sum() / tokens.count

    model.zero_grad(set_to_none=True)
    value = ValueHead(lambda hidden_SD: head(hidden_SD).squeeze(-1), value_loss) if options.pop("value", False) else None
    out = run(model, parts, tokens.count, loss, temperature=0.8, value=value, **options)
    held = [*model.named_parameters(), *(head.named_parameters() if value else ())]
    # No rank may lack a gradient that another has: their reductions are collective.
    lacking = [name for name, p in held if p.grad is None]
    return out, torch.cat([(0 * p if p.grad is None else p.grad).detach().flatten().double() for _, p in held]), lacking, sum(seen)


def summed(group, *tensors):
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return tensors


def apart(group, model, parts, tokens, options, expected):
    """The figures of a case, on each rank."""
    with context_parallel.over(group):
        out, gradient, lacking, seen = gradients(model, parts, tokens, **options)
        alone = evaluate(model, parts, tokens.count, temperature=0.8)
    everything, tokens_seen = summed(group, gradient, torch.tensor(seen))
    if expected is None:
        return None
    truth, true_gradient, true_lacking, true_seen = expected
    return {
        "logprobs": float((out.logprobs_N - truth.logprobs_N).abs().max()),
        "without gradients": float((alone.logprobs_N - truth.logprobs_N).abs().max()),
        "values": float((out.values_N - truth.values_N).abs().max()),
        "gradients": float((everything - true_gradient).norm() / true_gradient.norm()),
        "counts": torch.equal(out.counts_LE, truth.counts_LE),
        "replayed": vars(out.replayed) == vars(truth.replayed),
        "flipped": truth.replayed.flipped,
        "entropies": (out.entropies, truth.entropies),
        "entropy": abs(out.entropy_sum - truth.entropy_sum) / max(1, truth.entropies),
        "loss": abs(out.loss - truth.loss),
        "aux": abs(out.aux - truth.aux),
        "lacking": (lacking, true_lacking),
        "seen": (int(tokens_seen), true_seen),
    }


def cases():
    """(name, model, tokens, passes, options of `gradients`, activation checkpointing)."""
    for name in MODELS:
        tokens = a_group()
        for way, parts in ways(tokens).items():
            yield f"{name}: {way}", name, tokens, parts, {}, False
    tokens = a_group()
    yield "checkpointing", FULL, tokens, ways(tokens)["packed"], {}, True
    yield "value head", FULL, tokens, ways(tokens)["packed"], {"value": True}, False
    yield "whole rows and balance", FULL, tokens, ways(tokens)["packed"], {"separable": False, "aux": 0.1}, False
    layers, slots = router_replay.shape(MODELS[FULL]())
    replayed = a_group((layers, slots, 8))
    for way, parts in ways(replayed).items():
        yield f"replay: {way}", FULL, replayed, parts, {}, False
    yield "replay with checkpointing", FULL, replayed, ways(replayed)["packed"], {}, True


def compute():
    """On every rank: the figures of all cases by number of ranks, on rank 0."""
    groups = {2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    figures, models = {}, {}
    rank = dist.get_rank()
    for name, kind, tokens, parts, options, again in cases():
        if (kind, again) not in models:
            models[kind, again] = a_model(kind)
            if again:
                checkpoint_activations(models[kind, again])
        model = models[kind, again]
        expected = gradients(model, parts, tokens, **options) if rank == 0 else None
        for count, group in groups.items():
            if rank < count:
                figures[name, count] = apart(group, model, parts, tokens, options, expected)
    for count, group in groups.items():
        if rank < count:
            figures |= {(name, count): value for name, value in exactly(group, models[FULL, False]).items()}
            figures |= {(name, count): value for name, value in of_stages(group, models["qwen3", False]).items()}
    return figures


def exactly(group, model):
    """Deterministic mode: whether log-probabilities have the bits of one process, with and without documents."""
    tokens = a_group()
    documents = TokenRows(tokens.rows[:3], tokens.sampled[:3], None, ((5, 12),) * 3)
    same = {}
    with batch_invariant():
        for name, some in (("exact", tokens), ("exact, documents", documents)):
            alone = gradients(model, rows(some), some)
            with context_parallel.over(group):
                out, gradient, _, _ = gradients(model, rows(some), some)
                again = gradients(model, rows(some), some)[1]
            bits = torch.equal(gradient, again)
            (whole,) = summed(group, gradient)
            same[name] = {
                "bits": torch.equal(out.logprobs_N, alone[0].logprobs_N),
                "again": bits,
                "gradients": float((whole - alone[1]).norm() / alone[1].norm()),
            }
    return same


def of_stages(group, model):
    """The passes of the other stages: loss and gradients of packed examples."""
    tokens = a_group()
    examples = [(row, np.isin(np.arange(len(row)), at)) for row, at in zip(tokens.rows, tokens.sampled, strict=True)]
    part = packed._of_nodes(examples, torch.tensor(float(tokens.count)), 0, isolated=True)
    compute = packed.loss_function(model)

    def learn():
        model.zero_grad(set_to_none=True)
        loss = compute(part)[0]
        loss.backward()
        return torch.cat([loss.detach()[None].double(), *(p.grad.flatten().double() for p in model.parameters())])

    alone = learn()
    with context_parallel.over(group):
        (ours,) = summed(group, learn())
    return {"stages": {"loss": float((ours - alone)[0].abs()), "gradients": float((ours - alone)[1:].norm() / alone[1:].norm())}}


@pytest.fixture(scope="module")
def figures():
    return ranks.run(compute, 4)[0]


@pytest.mark.parametrize("count", [2, 4])
def test_every_case_agrees_with_one_process(figures, count):
    for (name, ranks_, ), x in figures.items():
        print(name, ranks_, x)
