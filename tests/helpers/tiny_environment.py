"""A random model of a few thousand parameters in the compact dialect, and a configuration that teaches it words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.make_nano import tokenizer as bpe
from models.make_nano.tokenizer import save as save_tokenizer

from etude.trainer.finetune import pretrain
from etude.trainer.finetune.config import NewModelConfig

SHAPE = NewModelConfig(
    vocab_size=320, hidden_size=64, intermediate_size=128, layers=2, heads=2, kv_heads=1, head_dim=64, expert_size=64,
    experts=4, max_positions=256,
)  # fmt: skip


def save_model(folder: Path) -> Path:
    """The model and its tokenizer, in which the words of `ReverseText` are made of letters."""
    save_tokenizer(bpe.train(["Reverse: abc cab bca"] * 10, SHAPE.vocab_size), folder, SHAPE.max_positions)
    pretrain.new_model(SHAPE, 0).save_pretrained(folder)
    return folder


def tables(model: Path, steps: int) -> dict[str, Any]:
    """The configuration of a run: 4 groups of 8 episodes a step, of one turn each."""
    environment = {"environment": "recipes.environments.reverse_text:ReverseText", "arguments": {"count": 40}}
    return {
        "name": "run",
        "model": {"path": str(model)},
        "tasks": environment,
        "rollout": {
            "prompts": 4, "group": 8, "staleness": 1, "max_in_flight": 64, "turns": 1, "tokens": 8, "context": 256,
        },
        "trainer": {"steps": steps, "lr": 1e-2, "warmup_steps": 0},
        "guards": {"act": False},
        "eval": {"samples": 1},
    }  # fmt: skip
