"""Edits, tables and a model of a few thousand parameters for tests of the stage `apply`."""

from __future__ import annotations

import random
from pathlib import Path

from models.make_nano import tokenizer as bpe
from models.make_nano.tokenizer import save as save_tokenizer

from etude.edits import examples as tables
from etude.edits.examples import Example
from etude.edits.formats import edit_prompt
from etude.edits.sketch import draw_sketch
from etude.trainer.finetune import pretrain
from etude.trainer.finetune.config import ApplyConfig, NewModelConfig

MODEL = NewModelConfig(
    vocab_size=360, hidden_size=48, intermediate_size=64, layers=2, heads=2, kv_heads=1, head_dim=24, expert_size=32,
    experts=4, max_positions=512,
)  # fmt: skip


def example(number: int, repository: str = "lib-1.0") -> Example:
    """The value of one of four lines changes."""
    rng = random.Random(number)
    lines = [f"{name} = {rng.randrange(10)}" for name in rng.sample("abcdefgh", 6)]
    changed = [*lines[:2], f"{lines[2][0]} = {rng.randrange(10, 100)}", *lines[3:]]
    before, after = ("\n".join(x) + "\n" for x in (lines, changed))
    drawn = draw_sketch(before, after, "python", random.Random(0), kinds=0)
    assert drawn is not None
    return Example(
        id=str(number), repository=repository, licence="MIT", origin="files", path="a.py", language="python",
        kind="synthetic", noise=(), merges=True, instruction="", file=before, sketch=drawn.text, result=after, lines=6,
        fraction=0.2,
    )  # fmt: skip


def fill(folder: Path) -> Path:
    """A fresh model with a tokenizer, and tables of edits, in one folder."""
    train = [example(i) for i in range(40)]
    texts = [edit_prompt(e.file, e.sketch).content + "<updated-code>\n" + e.result + "</updated-code>" for e in train]
    save_tokenizer(bpe.train(texts, 360), folder / "model", 512)
    pretrain.new_model(MODEL, 0).save_pretrained(folder / "model")
    tables.write_examples(train, folder / "train.parquet")
    tables.write_examples([example(i, "other-1.0") for i in range(100, 108)], folder / "heldout.parquet")
    return folder


def config(folder: Path, **changes: object) -> ApplyConfig:
    """Of a short run in `folder`; `changes` are keys of the stage or of its table `trainer`."""
    trainer = {"tokens": 60_000, "batch": 4, "length": 256, "lr": 4e-3, "compile": False, "threads": 1, "log_every": 1}
    values: dict[str, object] = {
        "model": {"path": folder / "model"}, "data": folder / "train.parquet",
        "held_out": folder / "heldout.parquet", "context": 256, "phases": ({"share": 0.5, "longest": 180},
        {"share": 0.5, "longest": 256}),
    }  # fmt: skip
    values |= {key: value for key, value in changes.items() if key not in trainer}
    trainer |= {key: value for key, value in changes.items() if key in trainer}
    return ApplyConfig.model_validate(values | {"trainer": trainer})
