"""Scores recorded tokens again with the trainer's code, under hypotheses about the engine.

Each hypothesis changes one thing: the weights, the temperature, top-p, the head's precision, the experts, or stale keys
and values under the prompt. Suffixes: T tokens of a piece, N of them sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from etude.models.attention import SegmentLayout, causal
from etude.models.block_attention import PLAIN, AttentionVariant
from etude.models.experts import observe
from etude.models.head import head_of
from etude.models.loading import named_tensors
from etude.models.router_replay import PLAUSIBLE, replay
from etude.models.segments import Graph, row_graph


@dataclass(frozen=True)
class VersionPiece:
    """The leading tokens of an episode's segment that a single version sampled."""

    episode: str
    group: int
    version: int
    ids_T: np.ndarray
    prompt_length: int
    at_N: np.ndarray  # positions of the sampled tokens
    recorded_N: np.ndarray  # log-probability by the engine
    seed_N: np.ndarray  # of the turn that sampled the token
    routes_TLK: np.ndarray | None = None  # experts recorded by the engine, if any
    documents: tuple[int, ...] = ()  # their lengths at the beginning of the prompt

    @property
    def graph(self) -> Graph | None:
        """Which tokens see which; None: each sees all earlier tokens."""
        return row_graph(self.ids_T, self.documents) if self.documents else None


@torch.no_grad()
def set_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Writes the named tensors into the model, widening them exactly."""
    live = named_tensors(model)
    for name, tensor in tensors.items():
        live[name].copy_(tensor)


@dataclass
class Keys:
    """An attention layout that keeps the keys and values of a row, or puts kept ones under the beginning of another
    row."""

    graph: Graph | None = None  # of the row; None: every token sees all earlier ones
    under: int = 0  # positions whose keys and values come from `kept`
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    takes_variants = True

    def attend(
        self,
        layer: int,
        query_BHTD: Tensor,
        key_BKTD: Tensor,
        value_BKTD: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
    ) -> Tensor:
        """Attention of a layer, [B, H, T, D], over the kept keys and values or over the row's own."""
        if self.under:
            old_key, old_value = self.kept[layer]
            key_BKTD = torch.cat([old_key[:, :, : self.under], key_BKTD[:, :, self.under :]], dim=2)
            value_BKTD = torch.cat([old_value[:, :, : self.under], value_BKTD[:, :, self.under :]], dim=2)
        else:
            self.kept[layer] = (key_BKTD, value_BKTD)
        if self.graph is not None:
            return SegmentLayout(self.graph).attend(layer, query_BHTD, key_BKTD, value_BKTD, scale, variant)
        return causal(query_BHTD, key_BKTD, value_BKTD, scale, variant)


@torch.no_grad()
def logits(
    model: PreTrainedModel,
    piece: VersionPiece,
    *,
    layout: Keys | None = None,
    head: str = "float32",
    replays: bool = False,
    plausible: float = PLAUSIBLE,
) -> Tensor:
    """Logits of the sampled tokens' distributions, float32 [N, V]. `head` is the precision of the last product; with
    `replays` the piece's recorded experts are used."""
    device = next(model.parameters()).device
    ids_1T = torch.from_numpy(piece.ids_T.astype(np.int64)).to(device)[None]
    positions_1T = torch.arange(ids_1T.shape[1], device=device)[None]
    decoder, once_T = model.get_decoder(), torch.ones(ids_1T.shape[1], device=device)
    seen = layout if layout is not None or piece.graph is None else SegmentLayout(piece.graph)
    with replay(decoder, piece.routes_TLK if replays else None, once_T, plausible=plausible):
        output = decoder(input_ids=ids_1T, position_ids=positions_1T, layout=seen, use_cache=False)
    hidden_ND = output.last_hidden_state[0].index_select(0, torch.from_numpy(piece.at_N - 1).to(device))
    dtype, last = getattr(torch, head), head_of(model)
    return last.finish(F.linear(hidden_ND.to(dtype), last.weight_VD.to(dtype)).float())


def chosen(logits_NV: Tensor, piece: VersionPiece, *, temperature: float = 1.0, top_p: float = 1.0) -> np.ndarray:
    """Log-probability of the sampled tokens, float64 [N], renormalised over the nucleus when top-p is below 1."""
    logprobs_NV = torch.log_softmax(logits_NV / temperature if temperature != 1.0 else logits_NV, dim=-1)
    ids_N = torch.from_numpy(piece.ids_T[piece.at_N].astype(np.int64)).to(logits_NV.device)
    chosen_N = logprobs_NV.gather(1, ids_N[:, None]).squeeze(1).double()
    if top_p < 1.0:
        sorted_NV = logprobs_NV.exp().double().sort(dim=1, descending=True).values
        mass_NV = sorted_NV.cumsum(dim=1)
        last_N = (mass_NV < top_p).sum(dim=1).clamp_max(mass_NV.shape[1] - 1)
        chosen_N = chosen_N - mass_NV.gather(1, last_N[:, None]).squeeze(1).log()
    return chosen_N.cpu().numpy()


@dataclass(frozen=True)
class Flips:
    """The sensitivity of the choice of experts to bfloat16 products. `share` of the tokens change experts in some
    layer; `difference_N` is the resulting change of the log-probability of the sampled tokens, float64 [N]."""

    share: float
    difference_N: np.ndarray


def route_flips(model: PreTrainedModel, piece: VersionPiece) -> Flips | None:
    """The effect of replaying the experts of bfloat16 products; None if the model is dense."""
    routes = []
    for dtype in (torch.float32, torch.bfloat16):
        device = next(model.parameters()).device
        enabled = dtype is torch.bfloat16
        with observe() as choices, torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            logits(model, piece)
        if not choices.layers:
            return None
        routes.append(choices.stacked())
    own, narrow = (r.sort(dim=-1).values for r in routes)
    share = (own != narrow).any(dim=-1).any(dim=-1).float().mean().item()
    other = replace(piece, routes_TLK=routes[1].cpu().numpy().astype(np.int16))
    plain, flipped = logits(model, piece), logits(model, other, replays=True, plausible=0.0)
    return Flips(share, chosen(flipped, piece) - chosen(plain, piece))
