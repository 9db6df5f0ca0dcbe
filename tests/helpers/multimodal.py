"""Small random multimodal models of the real classes: a text model beside an encoder of images."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

_TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_IMAGE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}}
_QWEN_IDS = {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}
_CASES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _TEXT | _WINDOW, "vision_config": _IMAGE, "mm_tokens_per_image": 4, "image_token_index": 96,
        "boi_token_index": 95, "eoi_token_index": 94,
    },
    "gemma4": {
        "text_config": _TEXT | _WINDOW | {
            "global_head_dim": 64, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
        },
        "vision_config": _IMAGE | {"head_dim": 16, "num_key_value_heads": 2}, "image_token_id": 96,
        "boi_token_id": 95, "eoi_token_id": 94, "audio_token_id": 93, "boa_token_id": 92, "eoa_token_index": 91,
        "video_token_id": 90,
    },
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral"}, "image_token_index": 96,
        "vision_config": _IMAGE | {"model_type": "pixtral", "head_dim": 16},
    },
    "qwen2_5_vl": {
        "text_config": _TEXT | _ROTATED, "vision_config": _QWEN | {"fullatt_block_indexes": [0]}, **_QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": _TEXT | _ROTATED, "vision_config": _QWEN | {"deepstack_visual_indexes": [0]}, **_QWEN_IDS,
    },
}  # fmt: skip
MULTIMODAL = tuple(_CASES)


@torch.no_grad()
def write_multimodal(folder: Path, kind: str) -> Path:
    """A model of one of `MULTIMODAL` in bfloat16, its weights large enough for attention to matter."""
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(kind, **_CASES[kind]))
    for parameter in model.parameters():
        parameter.copy_(0.08 * torch.randn(parameter.shape))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
