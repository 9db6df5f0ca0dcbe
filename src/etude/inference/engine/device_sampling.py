"""Draws tokens on a device, with the host's meaning of a draw (`etude.inference.engine.sampling`) and one wait of the
host for all rows.

Probabilities are integers in units of 2^-62 here: their sums are exact, so they have the same bits on every device and
in every order, and cumulating them is deterministic. A unit is 2^-39 of a float32's last digit in [0.5, 1); what is
smaller than a unit is never drawn. The host sums the same float32 probabilities as float64, so of equal
log-probabilities a draw is the host's, unless the random number lies within 1e-12 of an end of the token's interval.

Suffixes: N rows, V vocabulary, B blocks of `_BLOCK` tokens, T tokens of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_UNITS = 2.0**62
_BLOCK = 1024  # tokens whose probabilities are cumulated at once, after their sums
_ROWS = 64  # drawn at a time: a row takes some 25 bytes a token
_ONE = 0x3F800000  # bits of the float32 1.0: those of positive numbers are ordered as they are
_HALVINGS = 30  # of the bits from 0 to `_ONE`


class Picked(NamedTuple):
    """For N rows: the token (int64), its log-probability before any renormalisation and its margin (float32), the mass
    and the least probability of the kept tokens (float64). For M rows of `top_M`: the K most probable tokens (int64)
    and their log-probabilities (float32), [M, K]."""

    ids_N: np.ndarray
    log_probs_N: np.ndarray
    margin_N: np.ndarray
    mass_N: np.ndarray
    floor_N: np.ndarray
    top_ids_MK: np.ndarray
    top_log_probs_MK: np.ndarray


def pick(
    log_probs_NV: Tensor, greedy_N: np.ndarray, top_p_N: np.ndarray, uniform_N: np.ndarray, top_M: list[int], K: int
) -> Picked:
    """Draws a token of each row of float32 log-probabilities, on their device: the most probable one of `greedy_N`,
    else the one of the random number in [0, 1) among the tokens that `top_p_N` keeps."""
    kinds = np.where(greedy_N, 0, np.where(top_p_N < 1.0, 2, 1))
    order = np.argsort(kinds, kind="stable")
    draw_N2 = torch.from_numpy(np.stack([top_p_N, uniform_N], 1).astype(np.float64)[order]).to(log_probs_NV.device)
    sorted_N = torch.from_numpy(order).to(log_probs_NV.device)
    parts, first = [], 0
    for kind in range(3):
        end = first + int((kinds == kind).sum())
        for start in range(first, end, _ROWS):
            some = slice(start, min(start + _ROWS, end))
            rows_NV = log_probs_NV if len(order) == some.stop - some.start else log_probs_NV[sorted_N[some]]
            parts.append(_greedy(rows_NV) if kind == 0 else _drawn(rows_NV, draw_N2[some], nucleus=kind == 2))
        first = end
    columns = [torch.cat(parts).flatten()]
    if top_M:
        values_MK, ids_MK = _top(log_probs_NV[torch.tensor(top_M).to(log_probs_NV.device)], K)
        columns += [ids_MK.double().flatten(), values_MK.double().flatten()]
    flat = torch.cat(columns).cpu().numpy()
    picked_N5, tops_2MK = flat[: 5 * len(order)].reshape(-1, 5), flat[5 * len(order) :].reshape(2, len(top_M), K)
    picked_N5 = picked_N5[np.argsort(order)]
    ids_N, mass_N, floor_N = picked_N5[:, 0].astype(np.int64), picked_N5[:, 3], picked_N5[:, 4]
    log_probs_N, margin_N = picked_N5[:, 1:3].T.astype(np.float32)
    tops = tops_2MK[0].astype(np.int64), tops_2MK[1].astype(np.float32)
    return Picked(ids_N, log_probs_N, margin_N, mass_N, floor_N, *tops)


def _top(log_probs_MV: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """The K greatest log-probabilities of each row and their tokens, of equal ones those with the least ids."""
    sizes_MV = log_probs_MV.clamp(max=0.0).view(torch.int32) & 0x7FFFFFFF  # ordered as the absolute values are
    keys_MV = -(sizes_MV.long() << 32) - torch.arange(log_probs_MV.shape[1], device=log_probs_MV.device)
    ids_MK = keys_MV.topk(K).indices
    return log_probs_MV.gather(1, ids_MK), ids_MK


def _greedy(log_probs_NV: Tensor) -> Tensor:
    """Rows of `Picked`, float64 [N, 5]."""
    ids_N1 = log_probs_NV.argmax(1, keepdim=True)
    best_N2 = log_probs_NV.topk(2).values
    one_N1 = torch.ones_like(ids_N1, dtype=torch.float64)
    margin_N1 = best_N2[:, :1] - best_N2[:, 1:]
    return torch.cat([ids_N1.double(), best_N2[:, :1].double(), margin_N1.double(), one_N1, 0 * one_N1], 1)


def _drawn(log_probs_NV: Tensor, draw_N2: Tensor, *, nucleus: bool) -> Tensor:
    """Rows of `Picked`, float64 [N, 5]; `draw_N2` are top-p and random numbers."""
    top_p_N1, uniform_N1 = draw_N2[:, :1], draw_N2[:, 1:]
    probs_NV = log_probs_NV.exp()
    units_NV = (probs_NV.double() * _UNITS).long()
    floor_N1 = torch.zeros_like(units_NV[:, :1], dtype=torch.int32)
    if nucleus:
        bits_NV = probs_NV.view(torch.int32)
        floor_N1 = _floor(bits_NV, units_NV, top_p_N1)
        units_NV = units_NV.masked_fill(bits_NV < floor_N1, 0)
    units_NBT = F.pad(units_NV, (0, -units_NV.shape[1] % _BLOCK)).view(len(units_NV), -1, _BLOCK)
    sums_NB = units_NBT.sum(2)
    ends_NB = sums_NB.cumsum(1)
    mass_N1 = ends_NB[:, -1:]
    at_N1 = uniform_N1 * (mass_N1.double() if nucleus else _UNITS)  # the whole mass is 1 by definition
    target_N1 = torch.minimum(at_N1.long(), mass_N1 - 1)
    # Clamped for rows that are not numbers, whose indices would lead astray.
    block_N1 = (ends_NB <= target_N1).sum(1, keepdim=True).clamp_(max=ends_NB.shape[1] - 1)
    before_N1 = ends_NB.gather(1, block_N1) - sums_NB.gather(1, block_N1)
    inner_NT = units_NBT.gather(1, block_N1[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    ends_NT = inner_NT.cumsum(1) + before_N1
    token_N1 = (ends_NT <= target_N1).sum(1, keepdim=True).clamp_(max=_BLOCK - 1)
    end_N1 = ends_NT.gather(1, token_N1)
    begin_N1 = end_N1 - inner_NT.gather(1, token_N1)
    margin_N1 = torch.minimum((end_N1.double() - at_N1).abs(), (at_N1 - begin_N1.double()).abs()) / _UNITS
    ids_N1 = (block_N1 * _BLOCK + token_N1).clamp_(max=log_probs_NV.shape[1] - 1)
    chosen_N1, least_N1 = log_probs_NV.gather(1, ids_N1), floor_N1.view(torch.float32)
    return torch.cat([ids_N1.double(), chosen_N1.double(), margin_N1, mass_N1.double() / _UNITS, least_N1.double()], 1)


def _floor(bits_NV: Tensor, units_NV: Tensor, top_p_N1: Tensor) -> Tensor:
    """Bits of the least probability that is kept, int32 [N, 1]: the greatest float32 whose tokens and all more probable
    ones have top-p of the mass; by bisection, without the host."""
    target_N1 = top_p_N1 * units_NV.sum(1, keepdim=True).double()
    low_N1 = torch.zeros_like(bits_NV[:, :1])
    high_N1 = torch.full_like(low_N1, _ONE + 1)
    for _ in range(_HALVINGS):
        middle_N1 = (low_N1 + high_N1) // 2
        enough_N1 = units_NV.masked_fill(bits_NV < middle_N1, 0).sum(1, keepdim=True).double() >= target_N1
        low_N1 = torch.where(enough_N1, middle_N1, low_N1)
        high_N1 = torch.where(enough_N1, high_N1, middle_N1)
    return torch.minimum(low_N1, bits_NV.amax(1, keepdim=True))
