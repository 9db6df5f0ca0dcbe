"""Writes what nano is trained on: `python -m models.make_nano [-o outputs/nano]`.

new/                          the tokenizer, and the model with random weights
midtrain.jsonl                code, fill-in-the-middle, and repair episodes without wrong edits
sft.jsonl repair.jsonl retry.jsonl
                              repair episodes of each round of fine-tuning
held-out-ROUND.jsonl          the same of four libraries that nothing is trained on
packages/                     the packages, unpacked
documents.toml                their folders, for the recipe of documents
corpus.json                   the functions that were kept and left out, and their sources

Then the recipes of models/nano/recipes train: midtrain.toml, sft.toml, repair.toml, retry.toml.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from models.make_nano import tokenizer
from models.make_nano.functions import collect_functions
from models.make_nano.packages import EVALUATION, HELD_OUT, PACKAGES
from models.make_nano.rows import Row, code_rows, middle_rows, repair_rows, tokenizer_texts

from etude.code import OPERATOR_WEIGHTS
from etude.corpus import FunctionText
from etude.trainer.finetune.config import NewModelConfig
from etude.trainer.finetune.pretrain import new_model

SEED = 20
PER_PACKAGE = 4000  # functions at most
HELD_OUT_ROWS = 150
SHAPE = NewModelConfig()
# Rows of 240 tokens or so each: for 14 million tokens of mid-training 45 % code, 15 % fill-in-the-middle, 40 % repair.
REPAIRS = 24_000
MENDABLE = {  # kinds of damage that so small a model can mend, in functions of at most 20 lines
    "op_flip": 14.0, "negate_cond": 22.0, "op_change": 10.0, "op_const": 9.0, "op_swap": 8.0, "shuffle_lines": 8.0,
    "bool_flip": 6.0, "wrong_name": 3.0, "invert_if": 2.0, "op_break_chain": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Round:
    """The repair episodes of a round of fine-tuning: their number, and the shares of their shapes (`episodes.py`)."""

    rows: int
    shapes: Mapping[str, float]
    operators: Mapping[str, float] = field(default_factory=lambda: MENDABLE)
    lines: int = 20  # of a function, at most


ROUNDS = {
    "sft": Round(
        100_000,
        {"blind": 0.35, "tested": 0.35, "recovers": 0.20, "no_match": 0.02, "gives_up": 0.08},
        OPERATOR_WEIGHTS,
        30,
    ),
    # Short functions, more failed tries.
    "repair": Round(
        110_000,
        {"blind": 0.20, "tested": 0.34, "recovers": 0.28, "no_match": 0.04, "no_change": 0.08, "gives_up": 0.06},
    ),
    # What to do after several failed tries.
    "retry": Round(
        50_000,
        {"blind": 0.18, "tested": 0.20, "recovers": 0.42, "no_match": 0.03, "no_change": 0.05, "gives_up": 0.12},
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="models.make_nano", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="NAME==VERSION, in place of nano's own")
    parser.add_argument("-o", "--output", type=Path, default=Path("outputs/nano"))
    parser.add_argument("--most", type=int, default=10**9, help="rows of a kind")
    options = parser.parse_args(arguments)
    output: Path = options.output
    packages = output / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    found = collect_functions(options.packages, HELD_OUT, EVALUATION, packages, per_package=PER_PACKAGE, seed=SEED)
    (output / "corpus.json").write_text(json.dumps(found.report, indent=1), encoding="utf-8")
    folders = [str(packages / requirement.replace("==", "-")) for requirement in options.packages]
    (output / "documents.toml").write_text(f"[documents]\nrepositories = {json.dumps(folders)}\n", encoding="utf-8")
    make(found.train, found.evaluation, output, most=options.most)


def make(
    train: Sequence[FunctionText],
    evaluation: Sequence[FunctionText],
    output: Path,
    *,
    shape: NewModelConfig = SHAPE,
    most: int = 10**9,
) -> None:
    """Writes the model and all rows, at most `most` of a kind."""
    rng = random.Random(SEED)
    new_model(shape, SEED).save_pretrained(output / "new")
    tokenizer.save(tokenizer.train(tokenizer_texts(train, rng), shape.vocab_size), output / "new", shape.max_positions)
    plain = {"blind": 0.5, "tested": 0.5}
    repairs = islice(repair_rows(train, plain, OPERATOR_WEIGHTS, rng), min(REPAIRS, most))
    every = [*islice(code_rows(train, rng), most), *islice(middle_rows(train, rng), most), *repairs]
    rng.shuffle(every)
    _write(output / "midtrain.jsonl", every)
    _write(output / "held-out-midtrain.jsonl", _held_out(evaluation, Round(0, plain, OPERATOR_WEIGHTS, 30)))
    for name, one in ROUNDS.items():
        short = [function for function in train if function.lines <= one.lines]
        rows = repair_rows(short, one.shapes, one.operators, random.Random(f"{SEED} {name}"))
        _write(output / f"{name}.jsonl", islice(rows, min(one.rows, most)))
        _write(output / f"held-out-{name}.jsonl", _held_out(evaluation, one))


def _held_out(evaluation: Sequence[FunctionText], one: Round) -> Iterator[Row]:
    """The same rows for every model, so that losses can be compared."""
    short = [function for function in evaluation if function.lines <= one.lines]
    return islice(repair_rows(short, one.shapes, one.operators, random.Random(7)), HELD_OUT_ROWS)


def _write(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
