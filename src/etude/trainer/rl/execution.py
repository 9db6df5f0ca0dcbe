"""Runs the passes of a plan: loss, gradients and log-probabilities do not depend on how the batch was cut.

    forward of a part ──> loss of the tokens it predicts ──> passes below it, on its detached keys and values
         └───────────────── backward: that loss, and the passes' contributions to the keys' and values' gradients

The gradient of a shared prefix's keys and values is gathered in float32 and goes back through the prefix once.

Several ranks run passes of a part of the batch each (`divided`), and ranks that compute rows together
(`etude.models.context_parallel`) the same passes, each with its slice of every pass. A rank's gradients, and what a
loss records for itself, are those of its own tokens; a `BatchResult` is of all tokens, the same on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude.errors import RunFailed, UserError
from etude.models import batch_invariant, context_parallel
from etude.models.attention import KeyValues, SegmentLayout
from etude.models.document_spans import PlacedDocuments
from etude.models.experts import Choices, observe
from etude.models.head import head_of
from etude.models.router_replay import ReplayStatistics, replay
from etude.trainer.head import token_logprobs
from etude.trainer.rl.plan import ForwardPass
from etude.trainer.sharding import last_pass, reshard, within, world_of
from etude.trainer.world import World

Loss = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities [M] with gradient, indices [M] among the batch's sampled tokens) -> scalar. A loss that is a sum
over tokens is called once per pass; any other is called once, with the tokens of the whole batch (`separable=False`).
It sees every token once, and is not called without tokens."""


@dataclass(frozen=True)
class ValueHead:
    """A second prediction at the same positions: hidden states [S, D] to values [S]; its `loss` is separable."""

    head: Callable[[Tensor], Tensor]
    loss: Loss | None = None  # of values [M]; None in passes without gradient


@dataclass
class BatchResult:
    """The result of a batch: value of the loss, log-probabilities [N] without gradient, entropies of some positions.
    `values_N` are the value head's, 0 without one. `counts_LE` are the tokens per expert, over all rows; empty for a
    dense model. `aux` is the router's balance loss, 0 if it is off; `replayed` are the statistics of recorded
    experts."""

    logprobs_N: Tensor
    values_N: Tensor
    loss: float = 0.0
    aux: float = 0.0
    entropy_sum: float = 0.0
    entropies: int = 0
    counts_LE: Tensor = field(default_factory=lambda: torch.zeros((0, 0), dtype=torch.float64))
    replayed: ReplayStatistics = field(default_factory=ReplayStatistics)


@dataclass(frozen=True)
class _Pass:
    """The state of one walk over the parts. `loss` is None if only log-probabilities and counts are needed."""

    model: PreTrainedModel
    out: BatchResult
    temperature: float
    value: ValueHead | None
    loss: Loss | None
    aux: float
    share_LE: Tensor | None  # share of every expert in the batch's tokens; known if `aux` is not 0
    weight: float  # tokens of all rows
    replays: bool = True  # whether recorded experts are replayed


def evaluate(
    model: PreTrainedModel,
    parts: Sequence[ForwardPass],
    count: int,
    *,
    temperature: float = 1.0,
    value: ValueHead | None = None,
    replays: bool = True,
    divided: bool = False,
) -> BatchResult:
    """Log-probabilities of the `count` sampled tokens, and values if there is a head for them, without gradients.
    Without `replays` the model chooses its own experts. `divided`: the parts are this rank's, and others have the rest
    of the tokens."""
    out = _blank(model, count)
    walk = _Pass(model, out, temperature, value, None, 0.0, None, _weight(parts), replays)
    with torch.no_grad():
        _walk(walk, parts)
    return _of_all_ranks(out, world_of(model), divided)


def run(
    model: PreTrainedModel,
    parts: Sequence[ForwardPass],
    count: int,
    loss: Loss,
    *,
    temperature: float = 1.0,
    value: ValueHead | None = None,
    separable: bool = True,
    aux: float = 0.0,
    divided: bool = False,
) -> BatchResult:
    """Adds the gradients of `loss + value.loss + aux * balance` to the model's parameters. The loss sees
    log-probabilities at `temperature`, of the distribution that the tokens were drawn from. A loss that is not a sum
    over tokens, and a balance loss, need the whole batch before the first backward pass, so a pass over all parts
    without gradients comes first. `divided`: as in `evaluate`. Raises UserError for `aux` on a dense model."""
    share_LE, whole = None, None
    if aux or not separable:
        first = evaluate(model, parts, count, temperature=temperature, divided=divided)
        if aux:
            if not first.counts_LE.numel():
                raise UserError("the model has no experts to balance: set trainer.router_aux to 0")
            share_LE = first.counts_LE / first.counts_LE.sum(dim=1, keepdim=True)
        if not separable:
            loss, whole = _linear(loss, first.logprobs_N)
    out, world, weight = _blank(model, count), world_of(model), _weight(parts)
    if divided:
        weight = sum(world.gathered(weight)[:: world.mesh.context])
    _walk(_Pass(model, out, temperature, value, loss, aux, share_LE, weight), parts)
    out = _of_all_ranks(out, world, divided)
    if whole is not None:
        out.loss = whole
    return out


def _walk(walk: _Pass, parts: Sequence[ForwardPass]) -> None:
    world, what = world_of(walk.model), "a pass without gradients" if walk.loss is None else "pass"
    for number, part in enumerate(parts, 1):
        world.at(f"{what} {number} of {len(parts)}")
        last_pass(walk.model, number == len(parts))
        _run_part(walk, part, ())
    reshard(walk.model)


def _blank(model: PreTrainedModel, count: int) -> BatchResult:
    return BatchResult(torch.zeros(count, device=_device(model)), torch.zeros(count, device=_device(model)))


def _linear(loss: Loss, logprobs_N: Tensor) -> tuple[Loss, float]:
    """The loss as its first-order term at `logprobs_N`, with the same gradient there; and its value. Of the ranks that
    compute rows together one calls it, so that what it records is recorded once."""
    whole_N = logprobs_N.new_zeros(len(logprobs_N) + 1)
    if context_parallel.leads():
        leaf_N = logprobs_N.clone().requires_grad_()
        value = loss(leaf_N, torch.arange(len(leaf_N), device=leaf_N.device))
        whole_N[:-1], whole_N[-1] = torch.autograd.grad(value, leaf_N)[0], value.detach()
    gradient_N, value = context_parallel.total(whole_N).split([len(logprobs_N), 1])
    return lambda logprobs_M, item_M: (gradient_N[item_M] * logprobs_M).sum(), value.item()


def _of_all_ranks(out: BatchResult, world: World, divided: bool) -> BatchResult:
    """The result of all slices, and of all parts of a divided batch, from this rank's: each token and each count
    belongs to one rank."""
    divided = divided and world.mesh.data_ranks > 1
    if context_parallel.alone() and not divided:
        return out
    names, replayed = ("loss", "aux", "entropy_sum", "entropies"), vars(out.replayed)
    numbers = [*(getattr(out, name) for name in names), *replayed.values()]
    parts = [
        torch.tensor(numbers, dtype=torch.float64, device=out.logprobs_N.device),
        out.logprobs_N,
        out.values_N,
        out.counts_LE.flatten(),
    ]
    whole = torch.cat([x.double() for x in parts])
    if divided:
        world.total((whole,))
    else:
        context_parallel.total(whole)
    numbers_K, logprobs_N, values_N, counts = whole.split([x.numel() for x in parts])
    loss, aux, entropy_sum, entropies, *sums = numbers_K.tolist()
    return BatchResult(
        logprobs_N.to(out.logprobs_N.dtype),
        values_N.to(out.values_N.dtype),
        loss,
        aux,
        entropy_sum,
        int(entropies),
        counts.view_as(out.counts_LE),
        ReplayStatistics(**dict(zip(replayed, sums, strict=True))),
    )


def _run_part(walk: _Pass, part: ForwardPass, above: tuple[KeyValues, ...]) -> None:
    """Forward pass, the passes below, backward pass."""
    learns = walk.loss is not None
    again = learns and part.recompute
    with torch.set_grad_enabled(learns and not again):
        scalar, kept, choices = _forward(walk, part, above)

    def leaf(x: Tensor) -> Tensor:  # in float32, to sum gradients from many passes below without rounding
        return x.detach().float().requires_grad_(learns)

    leaves = {layer: (leaf(key), leaf(value)) for layer, (key, value) in kept.items()}
    for child in part.children:
        _run_part(walk, child, (*above, leaves))
    if again:
        first = choices
        scalar, kept, choices = _forward(walk, part, above, first=False)
        if not all(torch.equal(a, b) for a, b in zip(first.layers, choices.layers, strict=True)):
            raise RunFailed("the router chose other experts when a prompt was computed again; use a larger budget")
    if scalar is not None:
        roots = [x for layer in kept for x in kept[layer] if part.children]
        grads = [x.grad for layer in leaves for x in leaves[layer]]
        # Before the first adapter of a model nothing has a gradient.
        pairs = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
        wanted = [(root, grad.to(root.dtype)) for root, grad in pairs if root.requires_grad]
        tensors = [scalar, *(root for root, _ in wanted)]
        torch.autograd.backward(tensors, [torch.ones_like(scalar), *(grad for _, grad in wanted)])


def _forward(
    walk: _Pass, part: ForwardPass, above: tuple[KeyValues, ...], first: bool = True
) -> tuple[Tensor | None, KeyValues, Choices]:
    """The part's term of the loss, its keys and values if a pass below needs them, and its chosen experts. The loss is
    computed in the pass with a backward, everything else is recorded in the first pass."""
    device = _device(walk.model)
    layout = None
    if part.graph is not None and batch_invariant.is_on():
        layout = PlacedDocuments(walk.model, part.graph)
        part = replace(part, positions_T=layout.positions_T)
    elif part.graph is not None:
        layout = SegmentLayout(part.graph, above, keep=bool(part.children))
    options = {"output_router_logits": True} if walk.aux else {}
    row = context_parallel.row_slice(len(part.ids_T))
    part = part.slice_of(row)
    item_M, weight_T = (torch.from_numpy(x).to(device) for x in (part.item_M, part.weight_T))
    routes_TLK = part.routes_TLK if walk.replays else None

    def computed() -> tuple[Any, ...]:
        output = walk.model.get_decoder()(
            input_ids=torch.from_numpy(part.ids_T).to(device)[None],
            position_ids=torch.from_numpy(part.positions_T).to(device)[None],
            layout=layout,
            use_cache=False,
            **options,
        )
        return *_predict(walk, output.last_hidden_state[0], part), output.router_logits if walk.aux else ()

    with (
        context_parallel.computing(row),
        observe() as choices,
        replay(walk.model.get_decoder(), routes_TLK, weight_T) as replayed,
    ):
        logprobs_M, values_M, entropy_E, router_logits = within(walk.model, computed)
    kept = (layout.kept or {}) if layout is not None else {}
    out = walk.out
    if first:
        out.replayed.add(replayed)
        counts_LE = choices.counts(weight_T)
        out.counts_LE = counts_LE + out.counts_LE if out.counts_LE.numel() else counts_LE
        out.logprobs_N[item_M] = logprobs_M.detach()
        if values_M is not None:
            out.values_N[item_M] = values_M.detach()
        out.entropy_sum += entropy_E.sum().item()
        out.entropies += len(entropy_E)
    if walk.loss is None or not torch.is_grad_enabled():
        return None, kept, choices
    term = _loss(walk, logprobs_M, values_M, item_M)
    if walk.aux:
        balance = _balance(router_logits, weight_T, walk)
        out.aux += balance.item()
        term = term + walk.aux * balance
    return term, kept, choices


def _loss(walk: _Pass, logprobs_M: Tensor, values_M: Tensor | None, item_M: Tensor) -> Tensor:
    """The term of a pass. Without tokens it is 0, with gradients of 0 for every parameter: ranks that hold parts of
    tensors run the same backward passes, whatever they predict in them."""
    learned = values_M if walk.value is not None and walk.value.loss is not None else None
    if not len(item_M):
        return logprobs_M.sum() if learned is None else logprobs_M.sum() + learned.sum()
    assert walk.loss is not None
    term = walk.loss(logprobs_M, item_M)
    walk.out.loss += term.item()
    if learned is not None and walk.value is not None and walk.value.loss is not None:
        term = term + walk.value.loss(learned, item_M)
    return term


def _predict(walk: _Pass, hidden_TD: Tensor, part: ForwardPass) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probability and value [M] of the sampled tokens, and entropy of every 16th source."""
    hidden_SD = hidden_TD.index_select(0, torch.from_numpy(part.source_S).to(hidden_TD.device))
    head = head_of(walk.model)
    chosen_M, entropy_E = token_logprobs(
        head, hidden_SD, part.of_M, part.target_M, temperature=walk.temperature, before=part.before
    )
    if walk.value is None:
        return chosen_M, None, entropy_E
    return chosen_M, walk.value.head(hidden_SD)[torch.from_numpy(part.of_M).to(hidden_SD.device)], entropy_E


def _balance(router_logits: Sequence[Tensor], weight_T: Tensor, walk: _Pass) -> Tensor:
    """This pass's share of the balance loss: E * sum over experts of (share of tokens) * (mean probability). Switch
    Transformer (arXiv:2101.03961, equation 4) over the tokens of all rows, mean over layers: a token that w rows share
    has weight w, as if each row had computed it."""
    assert walk.share_LE is not None
    terms = []
    for layer, logits_TE in enumerate(router_logits):
        probability_TE = torch.softmax(logits_TE.float(), dim=-1)
        mean_E = (weight_T.float()[:, None] * probability_TE).sum(0) / walk.weight
        terms.append(logits_TE.shape[1] * (walk.share_LE[layer].float() * mean_E).sum())
    return torch.stack(terms).mean()


def _weight(parts: Sequence[ForwardPass]) -> float:
    """Number of tokens of all rows, however they are shared."""
    return sum(float(part.weight_T.sum()) + _weight(part.children) for part in parts)


def _device(model: PreTrainedModel) -> torch.device:
    return next(model.parameters()).device
