"""Runs the passes of a plan: loss, gradients and log-probabilities do not depend on how the batch was cut.

    forward of a part ──> loss of the tokens it predicts ──> passes below it, on its detached keys and values
         └───────────────── backward: that loss, and the passes' contributions to the keys' and values' gradients

The gradient of a shared prefix's keys and values is gathered in float32 and goes back through the prefix once.

Several ranks run passes of a part of the batch each (`divided`). What they computed is summed, so that each rank then
has the log-probabilities of the whole batch; gradients are summed where the optimizer collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude.errors import RunFailed, UserError
from etude.models import batch_invariant
from etude.models.attention import KeyValues, SegmentLayout
from etude.models.document_spans import PlacedDocuments
from etude.models.experts import Choices, observe
from etude.models.head import head_of
from etude.models.router_replay import UNFED, ReplayStatistics, replay
from etude.trainer.head import token_logprobs
from etude.trainer.rl.plan import ForwardPass
from etude.trainer.sharding import last_pass, reshard, within, world_of
from etude.trainer.world import World

Loss = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities [M] with gradient, indices [M] among the batch's sampled tokens) -> scalar. A loss that is a sum
over tokens is called once per pass; any other is called once, with the tokens of the whole batch (`separable=False`).
It sees every token once."""


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

    def sum_over_data(self, world: World) -> None:
        """Makes this the result of the whole batch, of which each rank has computed a part."""
        if world.mesh.data_ranks == 1:
            return
        world.total_of_data((self.logprobs_N, self.values_N))
        if self.counts_LE.numel():
            world.total_of_data((self.counts_LE,))
        names = ("loss", "aux", "entropy_sum", "entropies")
        replayed = vars(self.replayed)
        numbers = [getattr(self, name) for name in names] + list(replayed.values())
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.logprobs_N.device)
        world.total_of_data((sums,))
        whole = sums.tolist()
        self.loss, self.aux, self.entropy_sum = whole[:3]
        self.entropies = round(whole[3])
        self.replayed = ReplayStatistics(*whole[len(names) :])


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
    reshard(model)
    if divided:
        out.sum_over_data(world_of(model))
    return out


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
    out, weight = _blank(model, count), torch.tensor([_weight(parts)], dtype=torch.float64, device=_device(model))
    if divided:
        world_of(model).total_of_data((weight,))
    _walk(_Pass(model, out, temperature, value, loss, aux, share_LE, weight.item()), parts)
    reshard(model)
    if divided:
        out.sum_over_data(world_of(model))
    if whole is not None:
        out.loss = whole
    return out


def _walk(walk: _Pass, parts: Sequence[ForwardPass]) -> None:
    world, what = world_of(walk.model), "a pass without gradients" if walk.loss is None else "pass"
    for number, part in enumerate(parts, 1):
        world.at(f"{what} {number} of {len(parts)}")
        last_pass(walk.model, number == len(parts))
        _run_part(walk, part, ())


def _blank(model: PreTrainedModel, count: int) -> BatchResult:
    return BatchResult(torch.zeros(count, device=_device(model)), torch.zeros(count, device=_device(model)))


def _linear(loss: Loss, logprobs_N: Tensor) -> tuple[Loss, float]:
    """The loss as its first-order term at `logprobs_N`, with the same gradient there; and its value."""
    leaf_N = logprobs_N.clone().requires_grad_()
    value = loss(leaf_N, torch.arange(len(leaf_N), device=leaf_N.device))
    (gradient_N,) = torch.autograd.grad(value, leaf_N)
    return lambda logprobs_M, item_M: (gradient_N[item_M] * logprobs_M).sum(), value.item()


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
    layout, positions_T = None, part.positions_T
    if part.graph is not None and batch_invariant.is_on():
        layout = PlacedDocuments(walk.model, part.graph)
        positions_T = layout.positions_T
    elif part.graph is not None:
        layout = SegmentLayout(part.graph, above, keep=bool(part.children))
    options = {"output_router_logits": True} if walk.aux else {}
    extra = batch_invariant.padding(len(part.ids_T))
    ids_T, positions_T, weight_T = (np.pad(x, (0, extra)) for x in (part.ids_T, positions_T, part.weight_T))
    item_M, weight_T = (torch.from_numpy(x).to(device) for x in (part.item_M, weight_T))
    routes_TLK = part.routes_TLK if walk.replays else None
    if routes_TLK is not None and extra:
        routes_TLK = np.pad(routes_TLK, ((0, extra), (0, 0), (0, 0)), constant_values=UNFED)

    def computed() -> tuple[Any, ...]:
        output = walk.model.get_decoder()(
            input_ids=torch.from_numpy(ids_T).to(device)[None],
            position_ids=torch.from_numpy(positions_T).to(device)[None],
            layout=layout,
            use_cache=False,
            **options,
        )
        return *_predict(walk, output.last_hidden_state[0], part), output.router_logits if walk.aux else ()

    with observe() as choices, replay(walk.model.get_decoder(), routes_TLK, weight_T) as replayed:
        logprobs_M, values_M, entropy_E, router_logits = within(walk.model, computed)
    kept = (layout.kept or {}) if layout is not None else {}
    out = walk.out
    if first:
        out.replayed.add(replayed)
        counts_LE = choices.counts(weight_T)
        out.counts_LE = counts_LE + out.counts_LE if out.counts_LE.numel() else counts_LE
    if part.idle:  # what it computes has no weight
        terms = [x.sum() for x in (logprobs_M, values_M, *router_logits) if x is not None]
        return (0.0 * torch.stack(terms).sum() if walk.loss is not None else None), kept, choices
    if first:
        out.logprobs_N[item_M] = logprobs_M.detach()
        if values_M is not None:
            out.values_N[item_M] = values_M.detach()
        out.entropy_sum += entropy_E.sum().item()
        out.entropies += len(entropy_E)
    if walk.loss is None or not torch.is_grad_enabled():
        return None, kept, choices
    term = walk.loss(logprobs_M, item_M)
    out.loss += term.item()
    if values_M is not None and walk.value is not None and walk.value.loss is not None:
        term = term + walk.value.loss(values_M, item_M)
    if walk.aux:
        balance = _balance(router_logits, weight_T, walk)
        out.aux += balance.item()
        term = term + walk.aux * balance
    return term, kept, choices


def _predict(walk: _Pass, hidden_TD: Tensor, part: ForwardPass) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probability and value [M] of the sampled tokens, and entropy of every 16th source."""
    hidden_SD = hidden_TD.index_select(0, torch.from_numpy(part.source_S).to(hidden_TD.device))
    head = head_of(walk.model)
    of_M, target_M = (np.zeros(1, np.int64),) * 2 if part.idle else (part.of_M, part.target_M)
    chosen_M, entropy_E = token_logprobs(head, hidden_SD, of_M, target_M, temperature=walk.temperature)
    if walk.value is None:
        return chosen_M, None, entropy_E
    return chosen_M, walk.value.head(hidden_SD)[torch.from_numpy(of_M).to(hidden_SD.device)], entropy_E


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
