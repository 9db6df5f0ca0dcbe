"""Hugging Face folders: random weights of real architectures, tokenizers of real sizes, a chat template."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from etude.trainer import checkpoint
from tests.helpers.speakers import ADDED, SPECIAL, TEMPLATE, write_model

SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # fmt: skip
GLM = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
NEXT = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 0, "mlp_only_layers": [0, 1],
}  # fmt: skip
KINDS = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "glm": (Glm4MoeConfig, Glm4MoeForCausalLM, GLM | {"num_attention_heads": 2, "n_shared_experts": 1}),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, NEXT),
}


@cache
def big_tokenizer(size: int) -> Tokenizer:
    """Byte-level BPE of `size` ids: the bytes, all pairs of them, three letters or more, and special tokens at the end,
    as Qwen's has them. So ordinary text has ids above 65,535."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = (*SPECIAL, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", *ADDED)
    letters = [c for c in alphabet if c.isascii() and c.islower()] + [c for c in alphabet if c == "Ġ"]
    pairs = itertools.product(sorted(alphabet, key=lambda c: c not in letters), alphabet)
    longer = (("".join(some), d) for n in (2, 3) for *some, d in itertools.product(letters, repeat=n + 1))
    merges = list(itertools.islice(itertools.chain(pairs, longer), size - len(alphabet) - len(names)))
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    pattern = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([name for name in names if name not in ADDED])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ADDED])
    assert tokenizer.get_vocab_size() == size
    return tokenizer


def random_weights(kind: str, vocabulary: int, dtype: torch.dtype, seed: int = 0, **options: object) -> PreTrainedModel:
    """A random model of one of KINDS; a few routers' biases are moved from 0, so that they can get lost."""
    torch.manual_seed(seed)
    config, model, own = KINDS[kind]
    made = model(config(vocab_size=vocabulary, **(SIZES | own | options))).to(dtype)
    for name, buffer in made.named_buffers():
        if "e_score_correction" in name:
            buffer.data = torch.linspace(0, 0.001, buffer.numel())
    return made


def write_folder(
    folder: Path, kind: str, size: int, dtype: torch.dtype = torch.float32, *, template: str | None = TEMPLATE,
    seed: int = 0, **options: object,
) -> Path:  # fmt: skip
    """A model of one of KINDS with a tokenizer of `size` ids."""
    write_model(folder, big_tokenizer(size), template)
    random_weights(kind, size, dtype, seed, **options).save_pretrained(folder)
    write_model(folder, big_tokenizer(size), template)  # its generation configuration over the model's
    return folder


def state_of(output: Path) -> dict[str, torch.Tensor]:
    """The newest state that a stage has saved for resuming."""
    newest = checkpoint.load_newest(output / "checkpoints")
    assert newest is not None
    return newest[1]
