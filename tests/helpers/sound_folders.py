"""Model folders as their makers ship them, without numbers that matter: configurations, a template of `renderers/
families.py`, a tokenizer of bytes, and a few tensors of the right shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers.processors import TemplateProcessing

from tests.renderers.families import FAMILIES

BY_NAME = {family.name: family for family in FAMILIES}
QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
UNSET = 1000000000000000019884624838656
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
# By family: positions, model_max_length, padding, and what its configurations hold besides.
SOUND: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "qwen2.5": (32768, 131072, "<|endoftext|>", {"generation": QWEN3 | {"repetition_penalty": 1.05}}),
    "qwen3": (40960, 131072, "<|endoftext|>", {"generation": QWEN3, "stops": "<|endoftext|>"}),
    "qwen3-2507": (262144, 1010000, "<|endoftext|>", {"generation": QWEN3, "stops": "<|endoftext|>"}),
    "qwen3-coder": (262144, 1048576, "<|endoftext|>", {"generation": QWEN3 | {"temperature": 0.7}}),
    "qwen3.5": (262144, 262144, "<|endoftext|>", {"generation": QWEN3}),
    "qwen3.6": (262144, 262144, "<|endoftext|>", {}),
    "qwen3.8": (262144, 262144, "<|endoftext|>", {}),
    "nemotron-3": (262144, 262144, "", {}),
    "nemotron-nano-2": (131072, UNSET, "", {"begins": "<s>"}),
    "step-3.5": (262144, UNSET, "", {"begins": "<s>"}),
    "seed-oss": (524288, UNSET, "", {"generation": {"temperature": 1.1, "top_p": 0.95}}),
    "glm-4.5": (131072, 128000, "<|endoftext|>", {}),
    "kimi-k2": (131072, UNSET, "[EOS]", {"config": {"rope_scaling": YARN | {"factor": 32.0}}}),
    "deepseek-v3.1": (163840, 131072, "<｜end▁of▁sentence｜>", {
        "config": {"rope_scaling": YARN}, "generation": {"do_sample": True, "temperature": 0.6, "top_p": 0.95},
        "begins": "<｜begin▁of▁sentence｜>",
    }),
    "deepseek-v3.2": (163840, 131072, "<｜end▁of▁sentence｜>", {"config": {"rope_scaling": YARN}}),
    "minimax-m2": (196608, 40960000, "", {"generation": {"do_sample": True, "temperature": 1.0, "top_k": 40}}),
    "gpt-oss": (131072, UNSET, "<|endoftext|>", {"config": {"rope_scaling": YARN | {"factor": 32.0}}}),
    "granite-4": (131072, UNSET, "<|end_of_text|>", {"tied": True}),
    "llama-3.1": (131072, 131072, "", {
        "config": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}},
        "generation": {"do_sample": True, "temperature": 0.6, "top_p": 0.9}, "begins": "<|begin_of_text|>",
    }),
    "lfm2": (128000, UNSET, "", {"begins": "<|startoftext|>", "tied": True}),
    "ministral-3": (262144, UNSET, "", {"begins": "<s>"}),
    "mistral-small-3.2": (131072, UNSET, "", {"begins": "<s>", "generation": {"max_length": 131072}}),
    "gemma-4": (131072, UNSET, "<eos>", {"begins": "<bos>", "tied": True, "nested": True}),
    "smollm3": (65536, 131072, "<|im_end|>", {"generation": {"do_sample": True, "temperature": 0.6}, "tied": True}),
}  # fmt: skip


def sound_folder(folder: Path, name: str) -> Path:
    """The folder of a family, as its makers configure it."""
    positions, length, pad, more = SOUND[name]
    family = BY_NAME[name]
    family.write(folder)
    tokenizer, tied = family.tokenizer(), more.get("tied", False)
    if begins := more.get("begins"):
        number = tokenizer.token_to_id(begins)
        tokenizer.post_processor = TemplateProcessing(
            single=f"{begins} $A", pair=f"{begins} $A {begins} $B", special_tokens=[(begins, number)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    ends = [tokenizer.token_to_id(end) for end in (family.eos, *family.stops.split(), *more.get("stops", "").split())]
    text = {
        "model_type": "llama", "vocab_size": size, "hidden_size": 8, "num_hidden_layers": 2,
        "max_position_embeddings": positions, "tie_word_embeddings": tied, "eos_token_id": ends[0],
    } | more.get("config", {})  # fmt: skip
    named = {"pad_token": pad} if pad else {}
    padding = {"pad_token_id": tokenizer.token_to_id(pad)} if pad else {}
    write(folder, "config.json", {"text_config": text} if more.get("nested") else text | padding)
    write(folder, "generation_config.json", {"eos_token_id": ends} | padding | more.get("generation", {}))
    edit(folder, "tokenizer_config.json", {"model_max_length": length} | named)
    shapes = {"model.embed_tokens.weight": (size, 8)} | ({} if tied else {"lm_head.weight": (size, 8)})
    shapes |= {f"model.layers.{n}.mlp.up_proj.weight": (8, 8) for n in range(2)}
    noise = np.random.default_rng(0)
    save_file({n: noise.normal(size=s).astype(np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    return folder


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value), "utf-8")


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text("utf-8"))


def edit(folder: Path, name: str, values: Mapping[str, Any]) -> None:
    """Changes keys of a JSON file."""
    write(folder, name, read(folder, name) | dict(values))
