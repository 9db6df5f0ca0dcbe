"""The single definition of the model for trainer and engine: transformers' modelling code with our attention and
experts.

`loading.load_model` loads any Hugging Face causal language model, dense or mixture of experts. The `layout=` keyword of
its forward (`attention.py`) decides which tokens see which, and `experts.observe` records the router's choices. This
room imports neither `trainer` nor `inference`.
"""

from etude.models.devices import check_device, check_devices
from etude.models.files import (
    INDEX,
    check_folder,
    check_present,
    check_safetensors,
    expert_layers,
    has_weights,
    headers,
    is_gguf,
    is_quantised,
    shards,
    size_of,
)
from etude.models.gguf import gguf_folder

PUBLIC = (
    "",
    "attention",
    "attention_kernel",
    "batch_invariant",
    "block_attention",
    "context_parallel",
    "dequantise",
    "document_spans",
    "dtypes",
    "experts",
    "gemm",
    "head",
    "kernels",
    "key_values",
    "loading",
    "lora",
    "router_replay",
    "segments",
    "support",
    "text_models",
)
