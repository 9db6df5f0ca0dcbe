"""Documents: runs of tokens that see only themselves, so their values and unrotated keys depend on nothing else.

Rotary positions are relative, so such a run can be computed once and placed anywhere: its keys are rotated once, when
it is placed, by the model's own function. To get keys before rotation no model is patched: a pass over documents tells
the model that every token has position 0, where rotating changes nothing, and the layout rotates queries and keys
itself. `refusal` names the models for which this is not the same function.

The mask is that of `segments.Graph` with nodes that see no other, and a tail that sees all of them.

Suffixes: n tokens of one document, E layers with experts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from etude.errors import first_line
from etude.models import attention_kernel, batch_invariant, gemm
from etude.models.attention import CausalLayout, KeyValues, causal
from etude.models.experts import few_shapes, observe
from etude.models.kernels import BLOCK, place
from etude.models.key_values import configured
from etude.models.segments import Graph

RECIPE = "own sink, no repair"
"""The treatment of documents: each begins with tokens of its own that attention can rest on, and none of its tokens is
computed again where it is placed. So the segment graph of a prompt decides its keys and values."""

_PROBED = 8  # tokens
_SLACK = 0.01  # share of the largest key; a wrong rotation differs by about the size of keys


class Rotation:
    """Rotates like the model, with its table of angles and its function. Raises AttributeError for a model that lacks
    one."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = model.get_decoder()
        self._table: Any = decoder.rotary_emb
        self._apply = sys.modules[type(decoder).__module__].apply_rotary_pos_emb
        self._like = next(model.parameters()).new_empty(0, dtype=model.dtype)
        self._head_dim = configured(model.config).key
        self._angles = self._computed(batch_invariant.TILE)

    def angles(self, length: int) -> Tensor:
        """Cosines and sines of positions 0 to `length` - 1: [2, 1, length, D]."""
        if length > self._angles.shape[2]:
            # A power of two, so that it is computed few times and is a multiple of the tile of batch-invariant mode.
            self._angles = self._computed(1 << (length - 1).bit_length())
        return self._angles[:, :, :length]

    def _computed(self, length: int) -> Tensor:
        position_1T = torch.arange(length, device=self._like.device)[None]
        # If a model scales them (YaRN, arXiv:2309.00071), its output at position 0 is scaled already.
        return torch.stack(self._table(self._like, position_1T)) / self._table.attention_scaling

    @torch.inference_mode()
    def placeable(self) -> bool:
        """Whether `kernels.place` gives the same bits, tried on random keys: rotation in halves, on the CPU in
        float32."""
        cos_1TD, sin_1TD = self.angles(_PROBED)
        if cos_1TD.device.type != "cpu" or cos_1TD.dtype != torch.float32 or cos_1TD.shape[2] != self._head_dim:
            return False
        keys, values = torch.randn(2, 1, 1, _PROBED, self._head_dim, generator=torch.Generator().manual_seed(0))
        pages = np.zeros((2, 1, 1, 1, BLOCK, self._head_dim), np.float32)
        angles = cos_1TD[0].numpy(), sin_1TD[0].numpy()
        place(keys.numpy(), values.numpy(), *angles, 0, 0, np.zeros(1, np.int32), *pages)
        return torch.equal(self(keys, self.angles(_PROBED)), torch.from_numpy(pages[0, 0, :, :, :_PROBED]))

    def __call__(self, x_BHTD: Tensor, angles: Tensor) -> Tensor:
        """`x_BHTD` rotated by the angles of its T positions."""
        return self._apply(x_BHTD[:0], x_BHTD, angles[0], angles[1])[1]


@dataclass(eq=False)
class CachedDocument:
    """Token ids, and for the first `computed` of them the keys before rotation, values and expert ids."""

    ids_n: np.ndarray
    keys_LKnD: Tensor
    values_LKnD: Tensor
    experts_nEK: Tensor | None = None
    computed: int = 0

    def __len__(self) -> int:
        return len(self.ids_n)


def empty_document(model: PreTrainedModel, ids: Sequence[int]) -> CachedDocument:
    """A document without computed tokens, its memory allocated."""
    kept = configured(model.config)
    shape = (kept.layers, kept.heads, len(ids), kept.key)
    like = next(model.parameters())
    keys, values = (like.new_empty(shape, dtype=model.dtype) for _ in range(2))
    return CachedDocument(np.array(ids, dtype=np.int64), keys.detach(), values.detach())


@torch.inference_mode()
def compute(
    model: PreTrainedModel, rotation: Rotation, parts: Sequence[tuple[CachedDocument, int]], routes: bool = False
) -> None:
    """Computes the next `count` tokens of each document, in one pass [1, sum of counts]. With `routes` also their
    expert ids. In batch-invariant mode the bits of a document are the same with any cuts and any other documents in the
    pass."""
    device = parts[0][0].keys_LKnD.device
    ids_N = np.concatenate([d.ids_n[d.computed : d.computed + count] for d, count in parts])
    padded_N = np.pad(ids_N, (0, gemm.padding(len(ids_N), device, model.dtype)))
    few = device.type == "cpu" and model.dtype == torch.bfloat16 and len(ids_N) > gemm.FEW
    with few_shapes() if few else nullcontext(), observe() if routes else nullcontext() as choices:
        model.get_decoder()(
            input_ids=torch.from_numpy(padded_N).to(device)[None],
            position_ids=torch.zeros((1, len(padded_N)), dtype=torch.int64, device=device),
            layout=_Apart(rotation, parts),
            use_cache=False,
        )
    experts_NEK = choices.stacked() if choices is not None and choices.layers else None
    at = 0
    for document, count in parts:
        if experts_NEK is not None:
            if document.experts_nEK is None:
                document.experts_nEK = experts_NEK.new_empty((len(document), *experts_NEK.shape[1:]))
            document.experts_nEK[document.computed : document.computed + count] = experts_NEK[at : at + count]
        document.computed += count
        at += count


class _Apart:
    """The layout of a pass over documents, for whose tokens the model sees position 0."""

    def __init__(self, rotation: Rotation, parts: Sequence[tuple[CachedDocument, int]]) -> None:
        self._rotation, self._parts = rotation, parts
        self._angles = rotation.angles(max(document.computed + count for document, count in parts))

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        out = torch.zeros_like(query_BHTD)
        at = 0
        for document, count in self._parts:
            begin, end, here = document.computed, document.computed + count, slice(at, at + count)
            document.keys_LKnD[layer, :, begin:end] = key_BKTD[0, :, here]
            document.values_LKnD[layer, :, begin:end] = value_BKTD[0, :, here]
            query = self._rotation(query_BHTD[:, :, here], self._angles[:, :, begin:end])
            key = self._rotation(document.keys_LKnD[layer, None, :, :end], self._angles[:, :, :end])
            out[:, :, here] = attention_kernel.causal(query, key, document.values_LKnD[layer, None, :, :end], scale)
            at += count
        return out


class PlacedDocuments:
    """The layout of one row that begins with documents, computed and placed like the engine's, with gradients. In
    batch-invariant mode the row has the engine's bits. The model must see position 0 for the tokens of its documents:
    `positions_T`. Raises ValueError for a graph of several rows."""

    kept: KeyValues | None = None  # no later pass continues such a row

    def __init__(self, model: PreTrainedModel, graph: Graph) -> None:
        *self._documents, self._tail = graph.nodes
        if any(node.sees for node in self._documents) or self._tail.sees != tuple(range(len(self._documents))):
            raise ValueError("only a row of documents and a tail that sees them all can be placed")
        self._rotation = Rotation(model)
        self._angles = self._rotation.angles(self._tail.start)
        self.positions_T = np.concatenate([np.zeros(self._tail.start, np.int64), graph.positions_T[self._tail.start :]])

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        """Attention output, [1, H, T, D], zero at the padding."""
        outs, keys, angles = [], [], self._angles
        for node in self._documents:
            here, length = slice(node.start, node.start + len(node)), len(node)
            query, key = (self._rotation(x[:, :, here], angles[:, :, :length]) for x in (query_BHTD, key_BKTD))
            outs.append(causal(query, key, value_BKTD[:, :, here], scale))
            keys.append(self._rotation(key_BKTD[:, :, here], angles[:, :, here]))
        begin, end = self._tail.start, len(self.positions_T)
        keys.append(key_BKTD[:, :, begin:end])
        outs.append(causal(query_BHTD[:, :, begin:end], torch.cat(keys, dim=2), value_BKTD[:, :, :end], scale))
        padding = query_BHTD[:, :, end:]
        return torch.cat([*outs, torch.zeros_like(padding)], dim=2)


def token_bytes(config: PretrainedConfig, itemsize: int) -> int:
    """Bytes of the keys and values of one token."""
    return configured(config).elements * itemsize


def config_refusal(config: PretrainedConfig) -> str:
    """The reason why documents cannot be placed exactly in models of this configuration; "" if only a trial can
    decide."""
    config = config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if others:
        return f"this model has layers of the kind {others[0]}, which see by distance or carry a state"
    if getattr(config, "kv_lora_rank", None):
        return "this model rotates only a part of its keys, which all heads share (MLA)"
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "dynamic" or kind == "longrope":
        return f"this model's rotary frequencies depend on the length of the whole prompt ({kind})"
    return ""


def refusal(model: PreTrainedModel) -> str:
    """The reason why documents cannot be placed exactly in this model, or "". Runs two passes over a few tokens."""
    if why := config_refusal(model.config):
        return why
    try:
        same = _rotates_alike(model)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as e:
        reason = first_line(e)
        return f"keys before rotation cannot be taken from this model ({reason})"
    return "" if same else "this model does not rotate the keys of all layers in the one way that is known"


@torch.inference_mode()
def _rotates_alike(model: PreTrainedModel) -> bool:
    """Whether our rotated keys equal those of the model, in every layer."""
    rotation = Rotation(model)
    document = empty_document(model, [i % model.config.get_text_config().vocab_size for i in range(_PROBED)])
    compute(model, rotation, [(document, _PROBED)])
    angles, kept, device = rotation.angles(_PROBED), CausalLayout(), document.keys_LKnD.device
    ids_1n = torch.from_numpy(document.ids_n).to(device)[None]
    position_1n = torch.arange(_PROBED, device=device)[None]
    model.get_decoder()(input_ids=ids_1n, position_ids=position_1n, layout=kept, use_cache=False)
    for layer, expected in kept.keys.items():
        difference = (rotation(document.keys_LKnD[layer, None], angles) - expected).abs().max()
        # Broken weights (not a number) are reported by the engine, not here.
        if difference > _SLACK * expected.abs().max():
            return False
    return len(kept.keys) == model.config.get_text_config().num_hidden_layers
