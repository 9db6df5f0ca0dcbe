"""One pass of the model over a flat batch of tokens, and the cost of such passes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude.inference.engine.attention_metadata import PagedBatch
from etude.inference.engine.cache import PagedCache
from etude.inference.engine.costs import LARGEST, CostCurve, measure
from etude.inference.engine.sampling import sample
from etude.inference.engine.sampling_params import TopLogprobs
from etude.models import batch_invariant, gemm
from etude.models.experts import few_shapes, observe
from etude.models.head import head_of
from etude.models.kernels import BLOCK

_CONTEXT = 256  # tokens before those of a measured pass

_curves: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], CostCurve]] = weakref.WeakKeyDictionary()


def logits_of(
    model: PreTrainedModel,
    cache: PagedCache,
    table: np.ndarray,
    ids_N: np.ndarray,
    slot_N: np.ndarray,
    position_N: np.ndarray,
    sampled_S: np.ndarray,
    alone: bool = False,
    routes: bool = False,
) -> Tensor:
    """Float32 logits [S, V] at the tokens `sampled_S` of the batch. The cache gets its keys and values, and with
    `routes` its expert ids. `alone` leaves padding out, so that the bits are those of a plain pass over these tokens.
    In batch-invariant mode (`etude.models.batch_invariant`) a token's bits are the same in every pass."""
    device = cache.keys.device
    batch = PagedBatch(cache, table, slot_N.astype(np.int32), position_N.astype(np.int32))
    padding, more = (
        batch_invariant.padding(len(x)) if alone else gemm.padding(len(x), device, model.dtype)
        for x in (ids_N, sampled_S)
    )
    few = not alone and device.type == "cpu" and model.dtype == torch.bfloat16 and len(ids_N) > gemm.FEW
    with few_shapes() if few else nullcontext(), observe() if routes else nullcontext() as choices:
        hidden_1ND = model.get_decoder()(
            input_ids=torch.from_numpy(_padded(ids_N, padding)).to(device)[None],
            position_ids=torch.from_numpy(_padded(position_N, padding)).to(device)[None],
            layout=batch,
            use_cache=False,
        ).last_hidden_state
    # In float32 on both sides: the trainer computes its log-probabilities in the same way.
    hidden_SD = hidden_1ND[0].index_select(0, torch.from_numpy(_padded(sampled_S, more)).to(device))
    logits_SV = head_of(model).logits(hidden_SD, gemm.head)
    if choices is not None and choices.layers:
        experts_NLK = choices.stacked()
        pages_N = torch.from_numpy(table[slot_N, position_N // BLOCK]).to(device).long()
        offset_N = torch.from_numpy(position_N % BLOCK).to(device)
        cache.hold_experts(experts_NLK)[pages_N, offset_N] = experts_NLK[: len(ids_N)]
    return logits_SV[: len(sampled_S)]


def _padded(x_N: np.ndarray, padding: int) -> np.ndarray:
    return np.pad(x_N, (0, padding)) if padding else x_N


class PromptScores(NamedTuple):
    """Log-probabilities [T - 1] of tokens, their ranks from 1 on, and the most probable tokens at each position."""

    log_probs: np.ndarray
    ranks: np.ndarray
    tops: list[TopLogprobs]


def score(
    model: PreTrainedModel, like: PagedCache, ids: Sequence[int], top: int = 0, *, alone: bool = False
) -> PromptScores:
    """Log-probabilities, float32 [T - 1], of the tokens `ids` [T] after the first, each given those before it, at
    temperature 1; with `top`, also the most probable tokens at each position. It is one pass of `logits_of` with a
    cache of its own: the cache `like` is neither read nor written. May be called between two passes of an engine."""
    scratch = _scratch(like, len(ids))
    ids_T, position_T = np.array(ids, dtype=np.int64), np.arange(len(ids))
    table, slot_T = np.arange(scratch.num_pages, dtype=np.int32)[None], np.zeros(len(ids), np.int64)
    logits_SV = logits_of(model, scratch, table, ids_T, slot_T, position_T, position_T[:-1], alone=alone)
    next_S1 = torch.from_numpy(ids_T[1:]).to(logits_SV.device)[:, None]
    log_probs_SV = batch_invariant.log_probs(logits_SV)
    log_probs_S1 = log_probs_SV.gather(1, next_S1)
    tops: list[TopLogprobs] = []
    if top:
        values, tokens = log_probs_SV.topk(min(top, log_probs_SV.shape[1]))
        tops = [list(zip(t, v, strict=True)) for t, v in zip(tokens.tolist(), values.tolist(), strict=True)]
    ranks_S = 1 + (log_probs_SV > log_probs_S1).sum(1)
    return PromptScores(log_probs_S1.squeeze(1).cpu().numpy(), ranks_S.cpu().numpy(), tops)


def _scratch(like: PagedCache, tokens: int) -> PagedCache:
    """An empty cache of the same kind for one sequence of so many tokens."""
    blocks = max(2, -(-tokens // BLOCK))
    return PagedCache(
        like.kept,
        num_bytes=blocks * like.page_bytes,
        max_length=blocks * BLOCK,
        dtype=like.keys.dtype,
        device=like.keys.device,
    )


def cost_curve(model: PreTrainedModel, cache: PagedCache) -> CostCurve:
    """Seconds of verifying n tokens after a context of some hundred, sampling included; measured once per model. The
    measurement has a cache of its own, so it may run between two passes of an engine."""
    kept = _curves.setdefault(model, {})
    largest = max(2, min(LARGEST, cache.max_length // 2))
    key = (model.dtype, str(cache.keys.device), torch.get_num_threads(), largest)
    if key not in kept:
        kept[key] = _measure(model, cache, largest)
    return kept[key]


@torch.inference_mode()
def _measure(model: PreTrainedModel, cache: PagedCache, largest: int) -> CostCurve:
    context = max(0, min(_CONTEXT, cache.max_length - largest))
    scratch = _scratch(cache, context + largest)
    table = np.arange(scratch.num_pages, dtype=np.int32)[None]
    ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, context + largest)

    def run(size: int) -> None:
        position_N = np.arange(context, context + size)
        slot_N, every_N = np.zeros(size, np.int64), np.arange(size)
        logits = logits_of(model, scratch, table, ids[context : context + size], slot_N, position_N, every_N)
        ones = np.ones(size)
        sample(logits, ones, ones, slot_N, position_N)

    return measure(run, largest)
