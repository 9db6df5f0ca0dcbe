"""How likely a model's first edit restores a mutated function exactly: a cheap check of a repair model, without tests.

`python benchmarks/restoration.py MODEL --config recipes/nano-sft.toml [--package pydash==8.1.0] [--json
PATH]`

Nothing is sampled. The probability of saying the restoring edit is read from one forward pass over it, so the rate at
temperature 1 is exact and without sampling noise. Other edits that would restore the text too (a longer `old`, say) are
not counted, so every figure is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from etude.corpus import build, dialect
from etude.corpus import tokenizer as bpe
from etude.corpus.dialect import IDS, Call, message, prompt, turn
from etude.corpus.episodes import BrokenFunction, break_function, inferable
from etude.corpus.filters import Function
from etude.corpus.sources import fetch
from etude.trainer.finetune.config import load


@dataclass(frozen=True)
class Likelihood:
    """The restoring edit of one mutant: its probability at the given temperature, and whether greedy decoding is it."""

    operator: str
    probability: float
    greedy: bool


@dataclass(frozen=True)
class Restoration:
    """Means over mutants, in [0, 1]; `pass_k` is the chance that at least one of `k` samples restores."""

    mutants: int
    greedy: float
    sampled: float
    pass_8: float
    pass_16: float


def mutants(functions: Sequence[Function], count: int, seed: int) -> list[BrokenFunction]:
    """Up to `count` mutants of different functions whose repair needs no name from outside the function."""
    rng = random.Random(seed)
    broken_functions: list[BrokenFunction] = []
    for function in rng.sample(functions, len(functions)):
        broken = break_function(function, rng)
        if broken is not None and inferable(broken) and len(broken.source) < 1000:
            broken_functions.append(broken)
        if len(broken_functions) == count:
            break
    return broken_functions


@torch.no_grad()
def likelihoods(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    broken: Sequence[BrokenFunction],
    *,
    temperature: float = 1.0,
    batch: int = 16,
) -> list[Likelihood]:
    """The likelihood of every mutant's restoring edit, in order. Raises ValueError for a temperature of 0 or less."""
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, not {temperature}; greedy decoding is reported beside it")
    ends = [IDS["<|call|>"], IDS["<|end|>"]]
    documents = [
        message("user", prompt(b.function.name, b.path, b.source)) + turn([Call("edit", (b.edit.old, b.edit.new))])
        for b in broken
    ]
    encoded = dialect.encode(tokenizer, documents)
    order = sorted(range(len(broken)), key=lambda i: len(encoded[i][0]))
    out: dict[int, Likelihood] = {}
    for at in range(0, len(order), batch):
        some = order[at : at + batch]
        width = max(len(encoded[i][0]) for i in some)
        # Padding on the right is never attended to under a causal mask.
        ids_BT = torch.full((len(some), width), IDS["<|pad|>"])
        for row, i in enumerate(some):
            ids_BT[row, : len(encoded[i][0])] = torch.from_numpy(encoded[i][0].astype("int64"))
        logits_BTV = model(input_ids=ids_BT).logits.float() / temperature
        for row, i in enumerate(some):
            # The labelled tokens end with <|end|>; a further call ends the edit just as well.
            targets = [t for t, labelled in enumerate(encoded[i][1]) if labelled]
            logp_TV = logits_BTV[row, [t - 1 for t in targets]].log_softmax(-1)
            best_T = logp_TV.argmax(-1)
            target_ids = ids_BT[row, targets]
            edit = float(logp_TV[:-1].gather(1, target_ids[:-1, None]).sum())
            stop = float(logp_TV[-1, ends].logsumexp(0))
            greedy = bool((best_T[:-1] == target_ids[:-1]).all()) and int(best_T[-1]) in ends
            out[i] = Likelihood(broken[i].operator, math.exp(edit + stop), greedy)
    return [out[i] for i in range(len(broken))]


def summary(results: Sequence[Likelihood]) -> Restoration:
    """Means over the given mutants. Raises ValueError when there are none."""
    if not results:
        raise ValueError("there are no mutants to average over")
    n = len(results)
    return Restoration(
        mutants=n,
        greedy=sum(r.greedy for r in results) / n,
        sampled=sum(r.probability for r in results) / n,
        pass_8=sum(1 - (1 - r.probability) ** 8 for r in results) / n,
        pass_16=sum(1 - (1 - r.probability) ** 16 for r in results) / n,
    )


def main() -> None:
    """Prints the restoration rates of a model as JSON."""
    parser = argparse.ArgumentParser(prog="python benchmarks/restoration.py")
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", type=Path, required=True, help="stage TOML naming the evaluation packages")
    parser.add_argument("--package", help="one pinned package to evaluate on instead, as name==version")
    parser.add_argument("--mutants", type=int, default=800)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    corpus = load(arguments.config).corpus
    packages = [arguments.package] if arguments.package else corpus.evaluation
    functions = [f for package in packages for f in build.extract(fetch(package, corpus.cache))]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    broken = mutants(functions, arguments.mutants, seed=0)
    results = likelihoods(model, bpe.load(arguments.model), broken, temperature=arguments.temperature)
    operators = sorted({r.operator for r in results})
    report = {
        "packages": list(packages),
        "temperature": arguments.temperature,
        "all": asdict(summary(results)),
        "operators": {name: asdict(summary([r for r in results if r.operator == name])) for name in operators},
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
