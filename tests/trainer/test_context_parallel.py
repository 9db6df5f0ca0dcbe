"""Ranks that compute rows together against one process: log-probabilities, gradients, counts, replay, bits.

Two and four ranks are started once, and compute all cases. Limits: 5e-6 nats and a relative L2 of 1e-6 in float32,
where sums over tokens are taken in another order.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from etude.audit.architectures.families import FAMILIES, build
from etude.models import attention, context_parallel, experts
from etude.models.batch_invariant import batch_invariant
from etude.trainer.activations import checkpoint_activations
from etude.trainer.finetune import packed
from etude.trainer.rl.execution import BatchResult, ValueHead, evaluate, run
from etude.trainer.rl.plan import ForwardPass, TokenRows, rows, streaming
from etude.trainer.rl.plan import packed as packed_passes
from tests.helpers import forked_ranks
from tests.helpers.tiny_models import random_model

LOGPROBS, GRADIENTS = 5e-6, 1e-6
STAGES = 3e-6  # of the loss of equal weights; one process with sums in another order: 7e-7
COUNTS = (2, 4)
BY_TYPE = {family.model_type: family for family in FAMILIES}
_OWN = {"num_hidden_layers": 2, "initializer_range": 0.05}
_FAMILY = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_WINDOWS = _FAMILY | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
MODELS = {
    "qwen3": lambda: random_model("qwen3", **_OWN),
    "one key": lambda: random_model("qwen3", num_key_value_heads=1, **_OWN),
    "groups that ranks cut": lambda: random_model(
        "qwen3", num_attention_heads=12, num_key_value_heads=3, head_dim=16, **_OWN
    ),
    "moe": lambda: random_model("moe", decoder_sparse_step=1, **_OWN),
    "deepseek": lambda: random_model("deepseek", **_OWN),
    "gpt_oss": lambda: family("gpt_oss", _WINDOWS),
    "gemma3": lambda: family("gemma3_text", _WINDOWS),
}
ROWS = ("qwen3", "moe", "gpt_oss")  # models whose separate rows are computed, too


def family(name, sizes):
    one = BY_TYPE[name]
    return build(replace(one, options=one.options | sizes))


def a_model(name):
    model = MODELS[name]()
    model.set_attn_implementation(attention.NAME)
    with suppress(ValueError):  # a dense model has no experts
        model.set_experts_implementation(experts.NAME)
    return model


def a_group(routed=None):
    """Rows with a common prefix, of lengths that no number of ranks divides, and one shorter than four ranks. Their
    last tokens are sampled: the first slices predict nothing. `routed`: layers, experts of a token, experts."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 97, 22)
    out = [*(np.concatenate([shared, rng.integers(3, 97, own)]) for own in (17, 21)), rng.integers(3, 97, 3)]
    sampled = tuple(np.arange(max(1, len(row) - 15), len(row)) for row in out)
    if routed is None:
        return TokenRows(tuple(out), sampled)
    layers, slots, count = routed
    routes = [np.argsort(rng.random((len(row), layers, count)))[..., :slots].astype(np.int16) for row in out]
    routes[1][:22] = routes[0][:22]
    return TokenRows(tuple(out), sampled, tuple(routes))


@dataclass
class Case:
    """Passes over `tokens` in a model, with options of `run`."""

    model: str
    tokens: TokenRows
    parts: tuple[ForwardPass, ...]
    options: dict = field(default_factory=dict)
    again: bool = False  # activation checkpointing
    value: bool = False  # a value head
    exact: bool = False  # deterministic mode


def cases():
    """The cases by name."""
    tokens, tree = a_group(), a_group().tree()
    alone, together = rows(tokens), packed_passes(tokens, tree, 10_000)
    replayed = a_group((2, 2, 8))
    routed = packed_passes(replayed, replayed.tree(), 10_000)
    documents = TokenRows(tokens.rows[:2], tokens.sampled[:2], None, ((5, 12),) * 2)
    return {
        **{name: Case(name, tokens, together) for name in MODELS},
        **{f"{name}, rows": Case(name, tokens, alone) for name in ROWS},
        "streaming": Case("moe", tokens, streaming(tokens, tree, 40)),
        "checkpointing": Case("moe", tokens, together, again=True),
        "value head": Case("moe", tokens, together, value=True),
        "whole rows and balance": Case("moe", tokens, together, {"separable": False, "aux": 0.1}),
        "replay": Case("moe", replayed, routed),
        "replay, rows": Case("moe", replayed, rows(replayed)),
        "replay and checkpointing": Case("moe", replayed, routed, again=True),
        "exact": Case("moe", tokens, alone, exact=True),
        "exact documents": Case("moe", documents, rows(documents), exact=True),
    }


@dataclass
class Outcome:
    """A result, the gradients of a rank's tokens in float64, the parameters without one, and the number of tokens that
    the loss has seen."""

    result: BatchResult
    gradient: torch.Tensor
    lacking: list[str]
    seen: int


def learn(model, case):
    """The gradients of a case, of whole rows or of this rank's slices."""
    weight_N = torch.randn(case.tokens.count, generator=torch.Generator().manual_seed(0)) / case.tokens.count
    head, seen = torch.nn.Linear(model.config.hidden_size, 1), []
    for x in head.parameters():
        torch.nn.init.constant_(x, 0.1)

    def loss(logprobs_M, item_M):
        assert len(item_M), "a loss is not called without tokens: a mean over none is not a number"
        seen.append(len(item_M))
        return (weight_N[item_M] * logprobs_M).sum()

    def value_loss(values_M, item_M):
        assert len(item_M)
        return (values_M - weight_N[item_M]).square().sum() / case.tokens.count

    model.zero_grad(set_to_none=True)
    value = ValueHead(lambda hidden_SD: head(hidden_SD).squeeze(-1), value_loss) if case.value else None
    with batch_invariant(case.exact):
        out = run(model, case.parts, case.tokens.count, loss, temperature=0.8, value=value, **case.options)
    held = [*model.named_parameters(), *(head.named_parameters() if value else ())]
    made = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in held]
    flat = torch.cat([x.flatten().double() for x in made])
    return Outcome(out, flat, [name for name, p in held if p.grad is None], sum(seen))


def compute():
    """On each rank, figures by case and number of ranks; those of rank 0 compare with one process."""
    groups = {2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    rank, models, figures = dist.get_rank(), {}, {}
    for name, case in cases().items():
        if (case.model, case.again) not in models:
            models[case.model, case.again] = model = a_model(case.model)
            if case.again:
                checkpoint_activations(model)
        model = models[case.model, case.again]
        truth = learn(model, case) if rank == 0 else None
        for count, group in groups.items():
            if rank < count:
                figures[name, count] = compared(group, model, case, truth)
    for count, group in groups.items():
        if rank < count:
            figures["stages", count] = of_stages(group, models["moe", False])
            figures["kept", count] = kept_share(group)
    return figures


def compared(group, model, case, truth):
    """The figures of a case, on rank 0."""
    with context_parallel.over(group):
        ours = learn(model, case)
        scored = (
            evaluate(model, case.parts, case.tokens.count, temperature=0.8) if len(case.parts) == 1 else ours.result
        )
    whole, seen = ours.gradient.clone(), torch.tensor(ours.seen)
    dist.all_reduce(whole, group=group)
    dist.all_reduce(seen, group=group)
    if truth is None:
        return None
    out, true = ours.result, truth.result
    return {
        "logprobs": float((out.logprobs_N - true.logprobs_N).abs().max()),
        "scored": float((scored.logprobs_N - true.logprobs_N).abs().max()),
        "values": float((out.values_N - true.values_N).abs().max()),
        "gradients": float((whole - truth.gradient).norm() / truth.gradient.norm()),
        "counts": torch.equal(out.counts_LE, true.counts_LE) and torch.equal(scored.counts_LE, true.counts_LE),
        "replayed": vars(out.replayed) == vars(true.replayed),
        "flipped": true.replayed.flipped,
        "entropies": (out.entropies, true.entropies),
        "entropy": abs(out.entropy_sum - true.entropy_sum) / max(1, true.entropies),
        "loss": abs(out.loss - true.loss),
        "aux": abs(out.aux - true.aux),
        "lacking": (ours.lacking, truth.lacking),
        "seen": (int(seen), truth.seen),
        "bits": torch.equal(out.logprobs_N, true.logprobs_N),
    }


def of_stages(group, model):
    """The loss of packed examples and of their routers, in the other stages."""
    tokens = a_group()
    examples = [(row, np.isin(np.arange(len(row)), at)) for row, at in zip(tokens.rows, tokens.sampled, strict=True)]
    part = packed._of_nodes(examples, torch.tensor(float(tokens.count)), 0, isolated=True)
    loss_of = packed.loss_function(model)

    def learn():
        model.zero_grad(set_to_none=True)
        loss, balance, load_LE, _ = loss_of(part)
        (loss + 0.1 * balance).backward()
        numbers = [
            torch.stack([loss, balance]).detach().double(),
            *(p.grad.flatten().double() for p in model.parameters()),
        ]
        return torch.cat(numbers), load_LE

    whole, load_LE = learn()
    with context_parallel.over(group):
        ours, our_load_LE = learn()
    dist.all_reduce(ours, group=group)
    return {
        "loss": float((ours - whole)[:2].abs().max()),
        "gradients": float((ours - whole)[2:].norm() / whole[2:].norm()),
        "load": torch.equal(our_load_LE, load_LE),
    }


def kept_share(group):
    """Bytes that autograd keeps for a row on a rank, weights left out, as a share of one process's."""
    model = a_model("qwen3")
    row = np.arange(192) % 97
    (part,) = rows(TokenRows((row,), (np.arange(1, len(row)),)))
    alone = kept_bytes(model, part)
    with context_parallel.over(group):
        return kept_bytes(model, part) / alone


def kept_bytes(model, part):
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run(model, [part], len(part.item_M), lambda logprobs_M, _: logprobs_M.sum())
    return sum(storage.nbytes() for storage in saved.values())


@pytest.fixture(scope="module")
def figures():
    return forked_ranks.run(compute, max(COUNTS))[0]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", cases())
def test_ranks_agree_with_one_process(figures, name, count):
    case, x = cases()[name], figures[name, count]
    assert max(x["logprobs"], x["scored"], x["values"]) <= LOGPROBS
    assert x["gradients"] <= GRADIENTS
    assert x["counts"], "each token is counted once"
    assert x["replayed"]
    assert (x["flipped"] > 0) == name.startswith("replay")
    assert x["entropies"][0] == x["entropies"][1] > 0, "the same sources have entropies"
    assert max(x["entropy"], x["loss"], x["aux"]) <= LOGPROBS
    assert x["lacking"] == ([], []), "a rank without tokens has gradients of 0: their reduction is collective"
    assert x["seen"] == (case.tokens.count,) * 2, "a loss sees a token once"
    assert x["bits"] or not case.exact, "deterministic mode does not depend on the number of ranks"


@pytest.mark.parametrize("count", COUNTS)
def test_stages_agree_with_one_process(figures, count):
    x = figures["stages", count]
    assert x["loss"] <= LOGPROBS
    assert x["gradients"] <= STAGES
    assert x["load"], "the load is the row's, on every rank"


@pytest.mark.parametrize("count", COUNTS)
def test_a_rank_keeps_its_share_of_a_row(figures, count):
    """Attention keeps whole rows of some heads, all else some tokens of all heads. Half of its keys are kept twice
    where four ranks have two of them."""
    assert figures["kept", count] <= 1.15 / count
