"""Larger models of the bundled one's architecture (Qwen3-MoE), with random weights: what an engine costs where the
products outweigh everything else. What they say is noise, so nothing but speed can be measured on them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

MODEL = Path(__file__).parent.parent / "models" / "nano"
SIZES = {
    "60M": {
        "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
        "num_local_experts": 16, "moe_intermediate_size": 384, "decoder_sparse_step": 1,
    },
    "300M": {
        "hidden_size": 768, "num_hidden_layers": 10, "num_attention_heads": 12, "num_key_value_heads": 4,
        "num_local_experts": 16, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    },
}  # fmt: skip


def save(size: str, dtype: torch.dtype, folder: Path) -> None:
    """The model of that size in `folder`, with the bundled tokenizer: its weights are the same at every call."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MODEL, **SIZES[size])
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, folder)


def describe(model: PreTrainedModel) -> str:
    """Parameters, experts and parameters that a token meets, as text."""
    config = model.config
    total = sum(p.numel() for p in model.parameters())
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    layers = sum(hasattr(module, "num_experts") and hasattr(module, "gate_up_proj") for module in model.modules())
    active = total - layers * (config.num_experts - config.num_experts_per_tok) * expert
    return (
        f"{total / 1e6:.0f} M parameters, {active / 1e6:.0f} M active, {config.num_experts_per_tok} of "
        f"{config.num_experts} experts in {layers} layers"
    )
