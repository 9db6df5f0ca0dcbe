"""Compares the gradients of an execution with those of separate rows, at its first use on this machine. Opt-in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude.errors import RunFailed
from etude.trainer.rl.execution import run
from etude.trainer.rl.plan import Execution, ForwardPass, TokenRows, plan, rows, shape_of

SAMPLE_ROWS = 4
FLOAT32_LIMIT = 1e-5  # relative L2; measured up to 1.9e-6 (models/nano), and 2e-2 for one position off by one
NARROW_LIMIT = 1.5  # times the rows' own distance from the float32 gradient; measured 0.89 to 1.14 (11 models, seeds)


def check(
    model: PreTrainedModel, tokens: TokenRows, execution: Execution, trained: Collection[Tensor] | None = None
) -> float:
    """Relative L2 distance of the two gradients of `trained`, or of all parameters, on a few rows. Raises RunFailed
    beyond the limit. In float32 the execution is compared with separate rows. Narrower types round both by more than
    they differ, so there both are compared with separate rows in float32, on the model's widened weights. Leaves the
    parameters without gradients."""
    leaves = tuple(trained if trained is not None else model.parameters())
    sample = _sample(tokens)
    # A budget below the sample, so that a streamed prefix has several passes below it.
    budget = max(1, sum(map(len, sample.rows)) // 3)
    chosen = plan(sample, execution, budget, shape_of(model)).parts
    reference = rows(sample)
    ours, theirs = (_gradients(model, leaves, parts, sample.count) for parts in (chosen, reference))
    distance = _distance(ours, theirs)
    if next(model.parameters()).dtype == torch.float32:
        limit = FLOAT32_LIMIT
        wrong = distance
    else:
        with _widened(model):
            truth = _gradients(model, leaves, reference, sample.count)
        limit = NARROW_LIMIT * _distance(theirs, truth)
        wrong = _distance(ours, truth)
    if not wrong <= limit:
        raise RunFailed(
            f"self-check: gradients of {execution} execution are off by {wrong:.2g} where {limit:.2g} is allowed; "
            'set trainer.execution = "rows" and report this model'
        )
    return distance


@contextmanager
def _widened(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the weights are float32; afterwards they are as before, since widening is exact. A copy of the
    model would take twice the memory."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    types = [t.dtype for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in zip(tensors, types, strict=True):
            tensor.data = tensor.data.to(dtype)


def _sample(tokens: TokenRows) -> TokenRows:
    """The shortest of the rows with the most common beginning."""
    paths = tokens.tree().paths
    (root, _), *_ = Counter(path[0] for path in paths).most_common(1)
    alike = [i for i, path in enumerate(paths) if path[0] == root]
    return tokens.some(sorted(alike, key=lambda i: len(tokens.rows[i]))[:SAMPLE_ROWS])


def _gradients(
    model: PreTrainedModel, leaves: Collection[Tensor], parts: tuple[ForwardPass, ...], count: int
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight_N = torch.randn(count, generator=generator).to(next(model.parameters()).device)
    _drop(leaves)
    run(model, parts, count, lambda logprobs_M, item_M: (weight_N[item_M] * logprobs_M).sum() / count)
    # On the host: three of these would take more of the device's memory than the model.
    gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).to("cpu").float() for p in leaves]
    _drop(leaves)
    return gradients


def _drop(leaves: Collection[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _distance(ours: list[Tensor], truth: list[Tensor]) -> float:
    apart = sum((a - b).double().square().sum() for a, b in zip(ours, truth, strict=True))
    share = apart / sum(b.double().square().sum() for b in truth)
    return float(share.sqrt())  # pyright: ignore[reportAttributeAccessIssue]
