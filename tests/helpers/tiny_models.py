"""Small random models with the shapes of the real ones, saved as Hugging Face folders."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # the bundled model's: one compiled kernel serves both
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.25,  # wide, so that logits differ and attention matters
    "eos_token_id": 6,
}
MOE = {
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 2,
    "norm_topk_prob": True,
}


def random_model(kind: str = "moe", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random model of kind "moe" (Qwen3-MoE), "qwen3" or "llama"."""
    torch.manual_seed(seed)
    if kind == "moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SIZES | MOE | {"num_hidden_layers": 4} | overrides))).eval()
    if kind == "llama":
        overrides = {"num_attention_heads": 3, "num_key_value_heads": 1} | overrides  # an odd number of heads per key
    config, model = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
    return model(config(**(SIZES | {"num_hidden_layers": 3} | overrides))).eval()


def save_random_model(folder: Path, kind: str = "moe", seed: int = 0, **overrides: object) -> Path:
    random_model(kind, seed, **overrides).save_pretrained(folder)
    return folder
