"""llama.cpp on the weights of a Hugging Face folder: a GGUF file of them, and a child process that answers rounds of
requests (`llama_cpp_side.py`) where ETUDE_LLAMA_CPP_PYTHON names a Python with the package `xllamacpp`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from safetensors import safe_open

from benchmarks.side_process import SideProcess

PYTHON = "ETUDE_LLAMA_CPP_PYTHON"
START_SECONDS, ROUND_SECONDS = 120.0, 900.0
_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def missing() -> str:
    """Why llama.cpp cannot be run, or nothing."""
    python = os.environ.get(PYTHON)
    if python is None:
        return f"{PYTHON} names no Python with the package xllamacpp"
    return "" if Path(python).is_file() else f"{PYTHON} names {python}, which is no file"


class LlamaCpp(SideProcess):
    """`options` are those of `llama_cpp_side.py`."""

    def __init__(self, **options: Any) -> None:
        super().__init__("llama.cpp", os.environ[PYTHON], "benchmarks.llama_cpp_side", {})
        self.about = self.exchange(options, START_SECONDS)

    def ask(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """One round."""
        return self.exchange({"prompts": prompts, "tokens": tokens}, ROUND_SECONDS)


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of a Llama model."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight_ND: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a head as llama.cpp rotates them: pairs are neighbours, and not half a head apart."""
    halves = weight_ND.reshape(heads, 2, -1, weight_ND.shape[1])
    return halves.swapaxes(1, 2).reshape(weight_ND.shape)


def write_gguf(folder: Path, file: Path, kind: str) -> None:
    """The Llama model of `folder`, with one weight matrix for embeddings and head, as a GGUF file whose matrices have
    the type `kind`: "BF16", "F16" or "F32"."""
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
    _add_tokenizer(writer, folder, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  no dictionary
            if name == "lm_head.weight":
                continue
            value = tensors.get_tensor(name).float().numpy()
            for part, count in heads.items():
                value = interleaved(value, count) if part in name else value
            dtype = GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
            data = quants.quantize(value, dtype) if dtype != GGMLQuantizationType.F32 else value
            writer.add_tensor(gguf_name(name), data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """llama.cpp loads no model without one; prompts are ids."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
