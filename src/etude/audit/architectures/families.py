"""Small random models of the real classes: each family's sizes, and a folder with one.

Weights are large enough for logits to differ and attention to matter. Attention windows are shorter than the trial's
rows. Parameters with a neutral initial value (biases, sinks, scales of logits) get another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16}
_GRANITE = {
    "logits_scaling": 4.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
}
_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Family:
    """A name for people, transformers' model type, the sizes of its small model, and the name of a chat template of its
    makers ("": none is at hand)."""

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    template: str = ""


FAMILIES = (
    Family("Qwen2, Qwen2.5", "qwen2", template="qwen2.5"),
    Family("Qwen2-MoE", "qwen2_moe", _SHARED),
    Family("Seed-OSS", "seed_oss", template="seed-oss"),
    Family("Qwen3", "qwen3", template="qwen3"),
    Family("Qwen3-MoE, Qwen3-Coder", "qwen3_moe", _EXPERTS, "qwen3-coder"),
    Family("Qwen3-Next", "qwen3_next", {**_SHARED, **_DELTA}),
    Family("Qwen3.5", "qwen3_5_text", _DELTA, "qwen3.5"),
    Family("Qwen3.5-MoE", "qwen3_5_moe_text", {**_SHARED, **_DELTA}, "qwen3.5"),
    Family("Llama 3", "llama", {"rope_parameters": _LLAMA3}, "llama-3.1"),
    Family("Llama 4", "llama4_text", {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 8,
    }),
    Family("Mistral, no window", "mistral", {"sliding_window": None}, "mistral-small-3.2"),
    Family("Mistral, window", "mistral", {"sliding_window": 8}),
    Family("Mixtral", "mixtral", _LOCAL),
    Family("Gemma", "gemma"),
    Family("Gemma 2", "gemma2", {"sliding_window": 8}),
    Family("Gemma 3", "gemma3_text", _WINDOW),
    Family("Gemma 4", "gemma4_text", {**_WINDOW, "global_head_dim": 32, "final_logit_softcapping": 5.0}, "gemma-4"),
    Family("GLM-4.5", "glm4_moe", {**_ROUTED, "n_group": 1, "use_qk_norm": True}, "glm-4.5"),
    Family("GLM-5", "glm_moe_dsa", {**_ROUTED, **_LATENT, **_INDEXER}),
    Family("DeepSeek-V3, Kimi-K2", "deepseek_v3", {**_ROUTED, **_LATENT}, "deepseek-v3.1"),
    Family("DeepSeek-V3.2", "deepseek_v32", {**_ROUTED, **_LATENT, **_INDEXER}, "deepseek-v3.2"),
    Family("Kimi-Linear", "kimi_linear", {
        **_LOCAL, **_LATENT, "moe_intermediate_size": 32, "linear_num_heads": 4, "linear_head_dim": 16,
    }),
    Family("gpt-oss", "gpt_oss", {**_LOCAL, **_WINDOW}, "gpt-oss"),
    Family("OLMo2", "olmo2"),
    Family("OLMo3", "olmo3", _WINDOW),
    Family("Cohere Command-R", "cohere", {"logit_scale": 0.25}),
    Family("Cohere2 Command-A", "cohere2", {**_WINDOW, "logit_scale": 0.25}),
    Family("Granite", "granite", _GRANITE),
    Family("GraniteMoE", "granitemoe", {**_GRANITE, **_LOCAL}),
    Family("Granite 4", "granitemoehybrid", {
        **_GRANITE, **_LOCAL, **_MAMBA, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"] * 2,
    }, "granite-4"),
    Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 1, 1, 0]}, "smollm3"),
    Family("Phi-4 (phi3)", "phi3"),
    Family("Phi-2", "phi", {"partial_rotary_factor": 0.5}),
    Family("MiniMax-M2", "minimax_m2", {**_LOCAL, "rotary_dim": 32}, "minimax-m2"),
    Family("LFM2, attention only", "lfm2", {"layer_types": ["full_attention"] * 4}),
    Family("LFM2", "lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "lfm2"),
    Family("Nemotron-H", "nemotron_h", {
        "hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16,
        "n_groups": 2,
    }, "nemotron-3"),
    Family("Nemotron-4", "nemotron"),
    Family("StableLM", "stablelm"),
    Family("Ernie 4.5", "ernie4_5"),
    Family("Exaone 4", "exaone4", _WINDOW),
)  # fmt: skip

_LEFT = ("A_log", "dt_bias", ".D", "conv")  # of recurrent layers: their initial ranges keep states finite


def make(family: Family, folder: Path) -> Path:
    """Writes the family's small model to `folder`, the same at every call. Raises the errors of transformers."""
    build(family).save_pretrained(folder)
    return folder


@torch.no_grad()
def build(family: Family) -> PreTrainedModel:
    """The family's small model, in memory."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **(_SIZES | family.options))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    noise = torch.Generator().manual_seed(0)
    saved = model.state_dict()
    for name, tensor in sorted(saved.items()):
        if not tensor.is_floating_point() or any(word in name for word in _LEFT):
            continue
        if tensor.ndim < 2:
            tensor += 0.1 * torch.randn(tensor.shape, generator=noise)
        else:
            tensor.copy_(0.08 * torch.randn(tensor.shape, generator=noise))
    return model
