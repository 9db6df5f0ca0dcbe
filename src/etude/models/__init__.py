"""The single definition of the model for trainer and engine: transformers' modelling code with our attention and
experts.

`loading.load_model` loads any Hugging Face causal language model, dense or mixture of experts. The `layout=` keyword of
its forward (`attention.py`) decides which tokens see which, and `experts.observe` records the router's choices. This
room imports neither `trainer` nor `inference`.
"""

PUBLIC = (
    "activations",
    "attention",
    "attention_kernel",
    "batch_invariant",
    "block_attention",
    "devices",
    "document_spans",
    "dtypes",
    "experts",
    "files",
    "fused",
    "gemm",
    "gguf",
    "head",
    "kernels",
    "key_values",
    "loading",
    "lora",
    "router_replay",
    "segments",
    "support",
)
