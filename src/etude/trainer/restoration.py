"""How often a model's first edit restores a mutated function exactly: a cheap check of a repair model, without tests.

`python -m etude.trainer.restoration MODEL --config recipes/nano-sft.toml [--package pydash==8.1.0] [--json PATH]`
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from etude.corpus import build, dialect
from etude.corpus import tokenizer as bpe
from etude.corpus.dialect import IDS, message, prompt, special
from etude.corpus.episodes import Broken, Edit, break_function, inferable
from etude.corpus.sources import fetch
from etude.trainer.pretrain_config import load


@dataclass(frozen=True)
class Restoration:
    """Shares of mutants in [0, 1]: `greedy` and `sampled` (temperature 1) first edits that restore the text exactly.

    `pass_k` is the share with at least one restoring edit among `k` samples; `valid` the share of greedy first calls
    that are edits which apply.
    """

    mutants: int
    k: int
    greedy: float
    sampled: float
    pass_k: float
    valid: float
    tests_first: float


def mutants(functions: Sequence[build.Function], count: int, seed: int) -> list[Broken]:
    """`count` mutants of different functions whose repair needs no name from outside the function."""
    rng = random.Random(seed)
    found: list[Broken] = []
    for function in rng.sample(functions, len(functions)):
        broken = break_function(function, rng)
        if broken is not None and inferable(broken) and len(broken.source) < 1000:
            found.append(broken)
        if len(found) == count:
            break
    return found


def first_edit(tokenizer: Tokenizer, ids: Sequence[int]) -> Edit | None:
    """The first `edit` call of an assistant turn, or None when the turn has none that is well formed."""
    calls: list[list[list[int]]] = []
    for token in ids:
        if token == IDS["<|end|>"]:
            break
        if token == IDS["<|call|>"]:
            calls.append([[]])
        elif token == IDS["<|arg|>"] and calls:
            calls[-1].append([])
        elif calls:
            calls[-1][-1].append(token)
    for call in calls:
        name, *arguments = (tokenizer.decode(part, skip_special_tokens=False) for part in call)
        if name == "edit" and len(arguments) == 2:
            return Edit(arguments[0], arguments[1])
    return None


def restores(broken: Broken, edit: Edit | None) -> tuple[bool, bool]:
    """Whether the edit applies, and whether it gives back the original text."""
    if edit is None:
        return False, False
    try:
        return True, edit.apply(broken.source) == broken.function.source
    except ValueError:
        return False, False


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    sample: bool,
    max_new_tokens: int = 128,
    batch: int = 64,
) -> list[list[int]]:
    """One assistant turn per prompt, generated in left-padded batches of prompts of similar length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out: list[list[int]] = [[] for _ in prompts]
    for at in range(0, len(order), batch):
        some = order[at : at + batch]
        width = max(len(prompts[i]) for i in some)
        ids_BT = torch.full((len(some), width), IDS["<|pad|>"])
        mask_BT = torch.zeros_like(ids_BT)
        for row, i in enumerate(some):
            ids_BT[row, width - len(prompts[i]) :] = torch.tensor(list(prompts[i]))
            mask_BT[row, width - len(prompts[i]) :] = 1
        new = model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            max_new_tokens=max_new_tokens,
            eos_token_id=IDS["<|end|>"],
            pad_token_id=IDS["<|pad|>"],
            **({"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}),
        )
        for row, i in enumerate(some):
            out[i] = new[row, width:].tolist()
    return out


def measure(model: PreTrainedModel, tokenizer: Tokenizer, found: Sequence[Broken], *, k: int = 8) -> Restoration:
    """Greedy and sampled exact restoration over the given mutants."""
    documents = [
        (*message("user", prompt(b.function.name, b.path, b.source)), special("<|assistant|>", False)) for b in found
    ]
    prompts = [ids.tolist() for ids, _ in dialect.encode(tokenizer, documents)]
    turns = generate(model, prompts, sample=False)
    greedy = [restores(b, first_edit(tokenizer, ids)) for b, ids in zip(found, turns, strict=True)]
    tests = 0
    exact = [0] * len(found)
    for _ in range(k):
        for i, ids in enumerate(generate(model, prompts, sample=True)):
            exact[i] += restores(found[i], first_edit(tokenizer, ids))[1]
            text = tokenizer.decode(ids, skip_special_tokens=False)
            tests += "<|call|>test" in text
    n = max(1, len(found))
    return Restoration(
        mutants=len(found),
        k=k,
        greedy=sum(right for _, right in greedy) / n,
        sampled=sum(exact) / n / k,
        pass_k=sum(count > 0 for count in exact) / n,
        valid=sum(applied for applied, _ in greedy) / n,
        tests_first=tests / n / k,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m etude.trainer.restoration")
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", type=Path, required=True, help="stage TOML naming the evaluation packages")
    parser.add_argument("--package", help="one pinned package to evaluate on instead, as name==version")
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    corpus = load(arguments.config).corpus
    packages = [arguments.package] if arguments.package else corpus.evaluation
    functions = [f for package in packages for f in build.extract(fetch(package, corpus.cache))]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    found = mutants(functions, arguments.mutants, seed=0)
    result = measure(model, bpe.load(arguments.model), found, k=arguments.k)
    text = json.dumps({"packages": list(packages), **asdict(result)}, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
