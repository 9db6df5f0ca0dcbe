"""The sizes of a pass, measured on PyTorch's meta device, where tensors have sizes and no memory."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from etude.models import attention
from etude.models.head import head_of
from etude.models.loading import read_config
from etude.models.lora import one_expert, weight_names
from etude.models.text_models import auto_class, keep_text
from etude.trainer.head import token_logprobs
from etude.trainer.rl.memory import LiveBytes

_SIZES = "etude-sizes"  # name of an experts function with only the sizes of ours


def sizes_of(path: str, dtype: str) -> PreTrainedModel:
    """The model of a folder's config.json on the meta device, in the type `dtype`."""
    return on_meta(read_config(Path(path)), getattr(torch, dtype))


def on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a configuration on the meta device, for `activation_bytes`."""
    with torch.device("meta"):
        model = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=attention.NAME, experts_implementation=_SIZES
        )
    keep_text(model)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model.eval()


def activation_bytes(model: PreTrainedModel, tokens: int, *, narrow: bool = True) -> tuple[int, int]:
    """Bytes that the decoder's forward pass over a row of so many tokens keeps for the backward pass, and the peak of
    either, including the weight gradient that is being computed but no other. Of equal layers one is measured. `model`
    is on the meta device; `narrow`: attention computes in the model's type, as on a GPU."""
    decoder = cast(Any, model.get_decoder())
    layers = decoder.layers
    kinds: dict[Any, list[torch.nn.Module]] = defaultdict(list)
    for layer in layers:
        kinds[type(layer), tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())].append(layer)
    try:
        kept, most = 0, 0
        for alike in kinds.values():
            decoder.layers = torch.nn.ModuleList(alike[:1])
            once, peak = _measured(model, tokens, narrow)
            decoder.layers = torch.nn.ModuleList(alike[:1] * 2)
            of_layer = _measured(model, tokens, narrow)[0] - once
            # The first kind's pass measures what is kept outside of layers.
            kept += len(alike) * of_layer + (0 if kept else once - of_layer)
            most = max(most, peak - once)
        return kept, kept + most
    finally:
        decoder.layers = layers


def _measured(model: PreTrainedModel, tokens: int, narrow: bool) -> tuple[int, int]:
    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    trained = [p for p in model.get_decoder().parameters() if p.requires_grad]
    hooks: list[Any] = [p.register_post_accumulate_grad_hook(drop) for p in trained]
    # As behind a layer with adapters: one without them keeps its activations there, too.
    embedding = cast(torch.nn.Module, model.get_input_embeddings())
    hooks.append(embedding.register_forward_hook(lambda module, args, out: out.requires_grad_()))
    ids_1T = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    try:
        with LiveBytes() as live:
            options = {"position_ids": ids_1T, "layout": _Sizes(narrow), "use_cache": False}
            hidden_1TD = cast(Any, model.get_decoder())(input_ids=ids_1T, **options).last_hidden_state
            kept = live.now
            hidden_1TD.backward(torch.empty_like(hidden_1TD))
        return kept, live.peak
    finally:
        for hook in hooks:
            hook.remove()


def head_bytes(model: PreTrainedModel, positions: int) -> int:
    """Peak bytes of the head's forward and backward passes over so many positions, of a model on the meta device."""
    head = head_of(model)
    hidden_SD = torch.empty(
        positions, head.weight_VD.shape[1], dtype=head.weight_VD.dtype, device="meta", requires_grad=True
    )
    at_S = np.arange(positions)
    with LiveBytes() as live:
        logprobs_S, _ = token_logprobs(head, hidden_SD, at_S, np.zeros_like(at_S))
        logprobs_S.backward(torch.empty_like(logprobs_S))
    head.weight_VD.grad = None
    return live.peak


class _Sizes:
    """A layout whose attention keeps the tensors of a flash kernel: queries, keys, values, outputs, log-sum-exps."""

    kept = None

    def __init__(self, narrow: bool) -> None:
        self._narrow = narrow

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        """Attention output, [B, H, T, value size]."""
        parts = (query_BHTD, key_BKTD.clone(), value_BKTD.clone())
        wide = parts if self._narrow else tuple(x.float() for x in parts)
        return _SizedAttention.apply(*wide).to(query_BHTD.dtype)


class _SizedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def _sized_experts(module: Any, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """The sizes of `etude.models.experts.etude_experts`, which do not depend on the choice of experts."""
    K = index_TK.shape[1]
    first, second = (one_expert(module, name) for name in weight_names(module))
    made = first(0, hidden_TD.repeat_interleave(K, dim=0))
    out = second(0, module._apply_gate(made) if module.has_gate else module.act_fn(made))
    return (out.view(len(hidden_TD), K, -1) * weight_TK.unsqueeze(-1)).sum(dim=1).to(hidden_TD.dtype)


ExpertsInterface.register(_SIZES, _sized_experts)
