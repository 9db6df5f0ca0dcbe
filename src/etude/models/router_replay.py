"""Router replay: a forward pass uses the experts that the engine recorded, with gates from its own router's logits.

A last-digit difference between engine and trainer can swap a token's K-th expert, and then the two compute different
functions (arXiv:2510.11370). Replay prevents this: `replay` hooks the routers of a model for one pass, and a token with
recorded experts goes through them, weighted by this router's formula. Gradients flow through those weights into router
and hidden state; there is none through the choice.

A recorded expert must be plausible, as in arXiv:2603.24477: an expert whose gate falls below `PLAUSIBLE` times the
least gate of the router's own choice is refused, and the router's own next one takes its slot.

Suffixes: T tokens of the pass, L MoE layers, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from etude.errors import RunFailed, UserError
from etude.models.batch_invariant import within

MISSING, UNFED = -1, -2
"""In place of ids: the engine recorded none; the token was never fed (the last of a row, which affects nothing)."""

PLAUSIBLE = 0.5
_now: ContextVar[_Hook | None] = ContextVar("etude_router_replay", default=None)
_FORMULAS = tuple((scores, norm) for scores in ("softmax", "sigmoid") for norm in (True, False))


@dataclass
class ReplayStatistics:
    """Sums over the tokens of passes, each token counted once per row that contains it."""

    fed: float = 0.0  # tokens that can have routes
    missing: float = 0.0  # such tokens without routes
    slots: float = 0.0  # recorded slots: tokens * layers * K
    refused: float = 0.0  # refused slots
    choices: float = 0.0  # tokens with routes, times layers
    flipped: float = 0.0  # choices where the router itself would have taken another set
    flipped_tokens: float = 0.0  # tokens with routes that flip in at least one layer

    def add(self, other: ReplayStatistics) -> None:
        """Add the sums of `other`."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def metrics(self) -> dict[str, float]:
        """Shares of missing, refused and flipped choices; empty without tokens."""
        if not self.fed:
            return {}
        shares = {"router/missing": self.missing / self.fed}
        if self.slots:
            shares |= {
                "router/replayed": 1 - self.refused / self.slots,
                "router/refused": self.refused / self.slots,
                "router/flip_layer": self.flipped / self.choices,
                "router/flip_token": self.flipped_tokens / (self.fed - self.missing),
            }
        return shares


def routers(model: nn.Module) -> list[nn.Module]:
    """The router of every MoE layer, in layer order; empty for a dense model. Raises UserError if one is missing."""
    routers = []
    for name, module in model.named_modules():
        if hasattr(getattr(module, "experts", None), "num_experts"):
            router = getattr(module, "gate", None) or getattr(module, "router", None)
            if router is None:
                raise UserError(f"no router is found in {name}: set trainer.router_replay to false")
            routers.append(router)
    return routers


def shape(model: Any) -> tuple[int, int]:
    """Number of MoE layers, and of experts per token. Raises UserError for a dense model."""
    layers = len(routers(model))
    if not layers:
        raise UserError("the model has no experts to replay: set trainer.router_replay to false")
    slots = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if slots is None:
        raise UserError("the model does not say how many experts a token has: set trainer.router_replay to false")
    return layers, int(slots)


@contextmanager
def replay(
    model: nn.Module, routes_TLK: np.ndarray | None, weight_T: Tensor, *, plausible: float = PLAUSIBLE
) -> Iterator[ReplayStatistics]:
    """A context in which the model's next forward pass, over T tokens, uses `routes_TLK`: ids, `MISSING` or `UNFED`.
    `weight_T` is the number of rows that contain a token. `plausible` 0 accepts every record, 1 only experts as good as
    the router's own. Without routes nothing is hooked. Raises RunFailed for routes of another model."""
    sums = ReplayStatistics()
    if routes_TLK is None:
        yield sums
        return
    hooked = routers(model)
    if routes_TLK.shape[1] != len(hooked):
        raise RunFailed(f"recorded experts of {routes_TLK.shape[1]} layers, but the model has {len(hooked)} with any")
    device = weight_T.device
    hook = _Hook(hooked, torch.from_numpy(routes_TLK).to(device).long(), weight_T.double(), plausible, sums)
    with within(_now, hook), _hooked(hooked, hook):
        yield sums
        hook.close()


def again() -> Callable[[], AbstractContextManager[None]]:
    """Called within `replay`: a factory of contexts in which layers of that pass are computed again, with the same
    experts and without counting. Without a replay, the contexts do nothing."""
    hook = _now.get()
    return nullcontext if hook is None else lambda: _hooked(hook.routers, hook.same)


@contextmanager
def _hooked(routers: Sequence[nn.Module], hook: Callable[..., tuple[Tensor, ...]]) -> Iterator[None]:
    handles = [router.register_forward_hook(partial(hook, layer)) for layer, router in enumerate(routers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Hook:
    """Gives the routers of one pass their experts, and sums up statistics."""

    def __init__(
        self,
        routers: Sequence[nn.Module],
        routes_TLK: Tensor,
        weight_T: Tensor,
        plausible: float,
        sums: ReplayStatistics,
    ) -> None:
        self.routers = routers
        self.routes_TLK, self.weight_T, self.plausible, self.sums = routes_TLK, weight_T, plausible, sums
        self.known_T = routes_TLK[:, 0, 0] >= 0
        self.flipped_T = torch.zeros_like(self.known_T)
        self.ran: dict[int, tuple[Tensor, str, bool]] = {}  # by layer: the experts, and the formula of their gates

    def __call__(self, layer: int, router: nn.Module, _args: object, output: object) -> tuple[Tensor, ...]:
        """The router's output with the recorded experts in place of its own."""
        if not (isinstance(output, tuple) and len(output) == 3):
            raise UserError(f"{type(router).__name__} is an unknown kind of router: set trainer.router_replay to false")
        logits_TE, own_weight_TK, own_TK = output
        recorded_TK = self.routes_TLK[:, layer]
        if recorded_TK.shape != own_TK.shape or int(recorded_TK.max()) >= logits_TE.shape[1]:
            raise RunFailed(
                f"recorded experts {list(recorded_TK.shape)}, highest id {int(recorded_TK.max())}, do not fit a router "
                f"that chooses {list(own_TK.shape)} of {logits_TE.shape[1]} experts"
            )
        scores, normalised = _formula(router, logits_TE, own_TK, own_weight_TK)
        scores_TE = _scores(logits_TE, scores)
        known_T1 = self.known_T[:, None]
        wanted_TK = torch.where(known_T1, recorded_TK, own_TK)
        score_TK = scores_TE.detach().gather(1, wanted_TK)
        least_T1 = scores_TE.detach().gather(1, own_TK).amin(dim=1, keepdim=True)
        keep_TK = (score_TK >= self.plausible * least_T1) | ~known_T1
        run_TK = wanted_TK if bool(keep_TK.all()) else _filled(wanted_TK, own_TK, keep_TK)
        self._count(wanted_TK, own_TK, keep_TK)
        self.ran[layer] = run_TK, scores, normalised
        weight_TK = _weights(router, scores_TE, run_TK, normalised).to(own_weight_TK.dtype)
        return logits_TE, weight_TK, run_TK

    def same(self, layer: int, router: nn.Module, _args: object, output: Any) -> tuple[Tensor, ...]:
        """The router's output with the experts of its first call in this pass."""
        logits_TE, own_weight_TK, _ = output
        run_TK, scores, normalised = self.ran[layer]
        weight_TK = _weights(router, _scores(logits_TE, scores), run_TK, normalised)
        return logits_TE, weight_TK.to(own_weight_TK.dtype), run_TK

    def _count(self, wanted_TK: Tensor, own_TK: Tensor, keep_TK: Tensor) -> None:
        differs_T = ~(wanted_TK[:, :, None] == own_TK[:, None, :]).any(dim=2).all(dim=1)
        self.flipped_T |= differs_T
        self.sums.refused += float((self.weight_T * (~keep_TK).sum(dim=1)).sum())
        self.sums.flipped += float(self.weight_T[differs_T].sum())

    def close(self) -> None:
        """Adds the statistics per token."""
        fed_T = self.routes_TLK[:, 0, 0] != UNFED
        known, (_, layers, slots) = float(self.weight_T[self.known_T].sum()), self.routes_TLK.shape
        self.sums.fed = float(self.weight_T[fed_T].sum())
        self.sums.missing = self.sums.fed - known
        self.sums.slots, self.sums.choices = known * layers * slots, known * layers
        self.sums.flipped_tokens = float(self.weight_T[self.flipped_T].sum())


def _filled(wanted_TK: Tensor, own_TK: Tensor, keep_TK: Tensor) -> Tensor:
    """The recorded experts; rejected slots get the best of the router's own experts that are not among them."""
    taken_TK = ((own_TK[:, :, None] == wanted_TK[:, None, :]) & keep_TK[:, None, :]).any(dim=2)
    free_TK = own_TK.gather(1, taken_TK.long().argsort(dim=1, stable=True))
    number_TK = ((~keep_TK).cumsum(dim=1) - 1).clamp_min(0)
    return torch.where(keep_TK, wanted_TK, free_TK.gather(1, number_TK))


def _scores(logits_TE: Tensor, kind: str) -> Tensor:
    logits_TE = logits_TE.float()
    return torch.softmax(logits_TE, dim=-1) if kind == "softmax" else logits_TE.sigmoid()


def _weights(router: nn.Module, scores_TE: Tensor, ids_TK: Tensor, normalised: bool) -> Tensor:
    """Gates of these experts. Some routers add a bias to sigmoid scores, which affects only the choice."""
    weight_TK = scores_TE.gather(1, ids_TK)
    if normalised:
        weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    return weight_TK if scale == 1.0 else weight_TK * scale


@torch.no_grad()
def _formula(router: nn.Module, logits_TE: Tensor, own_TK: Tensor, own_weight_TK: Tensor) -> tuple[str, bool]:
    """The formula (kind of scores, normalised or not) that gives the router's own weights. Raises UserError if none
    does."""
    tolerance = 1e-5 if own_weight_TK.dtype == torch.float32 else 2e-2
    for kind, normalised in _FORMULAS:
        weight_TK = _weights(router, _scores(logits_TE, kind), own_TK, normalised)
        if torch.allclose(weight_TK, own_weight_TK.float(), rtol=tolerance, atol=1e-6):
            return kind, normalised
    raise UserError(f"the gates of {type(router).__name__} follow no known formula: set trainer.router_replay to false")
