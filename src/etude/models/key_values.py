"""The sizes of the keys and values of a model's layers, from which the engine sizes its cache."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from etude.models.block_attention import PLAIN, AttentionVariant
from etude.models.kernels import BLOCK

CPU_CACHE_MB, CPU_SEQUENCES = 512, 16


@dataclass(frozen=True)
class KeyValueShape:
    """The keys and values of one token in each of `layers`: `heads` keys of `key` numbers and as many values of `value`
    numbers. With multi-head latent attention (MLA, arXiv:2405.04434) these are the expanded keys and values of every
    head."""

    layers: int
    heads: int
    key: int
    value: int

    @property
    def elements(self) -> int:
        """Numbers per token, over all layers."""
        return self.layers * self.heads * (self.key + self.value)


def cache_mb(shape: KeyValueShape, tokens: int, itemsize: int) -> int:
    """MB (2^20 bytes), rounded up, of a cache for one sequence of so many tokens."""
    pages = max(2, -(-tokens // BLOCK))
    return -(-pages * BLOCK * shape.elements * itemsize // 2**20)


def cpu_cache_mb(shape: KeyValueShape, tokens: int) -> int:
    """Default MB of an engine's cache on the CPU: the float32 memory of `CPU_SEQUENCES` sequences of so many tokens, at
    least `CPU_CACHE_MB` and at most an eighth of the machine's memory. With less, the sequences of a larger model wait
    for each other, and their common prefix is computed again."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    return max(CPU_CACHE_MB, min(cache_mb(shape, CPU_SEQUENCES * tokens, 4), memory // 8))


def configured(config: PretrainedConfig) -> KeyValueShape:
    """The shape by a configuration, for estimates before a model is loaded."""
    config = config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        return KeyValueShape(config.num_hidden_layers, config.num_attention_heads, key, config.v_head_dim)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return KeyValueShape(config.num_hidden_layers, heads, size, size)


def positions(config: PretrainedConfig) -> int:
    """The most tokens of a sequence, by a configuration; 2^31 if it names no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31


@torch.inference_mode()
def measured(model: PreTrainedModel) -> KeyValueShape:
    """The shape measured in a pass over one token. Raises ValueError if layers differ, or if some keep no keys."""
    probe = _ShapeProbe()
    token = torch.zeros((1, 1), dtype=torch.int64, device=next(model.parameters()).device)
    model.get_decoder()(input_ids=token, position_ids=token, layout=probe, use_cache=False)
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(probe.shapes) != list(range(layers)):
        raise ValueError(f"{len(probe.shapes)} of its {layers} layers keep keys and values")
    kinds = set(probe.shapes.values())
    if len(kinds) > 1:
        raise ValueError("its layers have keys and values of different sizes")
    return KeyValueShape(layers, *kinds.pop())


class _ShapeProbe:
    """A layout that attends to nothing and records heads, key and value size of every layer."""

    takes_variants = True

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def attend(
        self,
        layer: int,
        query_BHTD: Tensor,
        key_BKTD: Tensor,
        value_BKTD: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
    ) -> Tensor:
        self.shapes[layer] = (key_BKTD.shape[1], key_BKTD.shape[3], value_BKTD.shape[3])
        return query_BHTD.new_zeros((*query_BHTD.shape[:3], value_BKTD.shape[3]))
