"""A model small enough to publish many times, and the bytes that its trainer would write."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def write(of: Qwen3ForCausalLM, folder: Path) -> Path:
    of.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@torch.no_grad()
def step(of: Qwen3ForCausalLM) -> None:
    """Some elements move by about one unit in the last place."""
    for parameter in of.parameters():
        parameter.mul_(torch.where(torch.rand(parameter.shape) < 0.05, 1.01, 1.0).to(parameter.dtype))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
