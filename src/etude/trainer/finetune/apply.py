"""Fine-tuning on applied edits: from a file and a sketch of its edit to the new file, or to another format's answer.

Only the answer is learned (formats: `edits/formats.py`). The hard part for a small model is to copy without a slip, so
short files come first. With every checkpoint the likelihood of some held-out edits is measured: an answer is right
under greedy decoding exactly if each of its tokens is the most likely one after those before it, so one pass decides.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from etude.corpus import dialect, packing
from etude.corpus import tokenizer as bpe
from etude.corpus.dialect import IDS, Document, TextPiece, message, special
from etude.corpus.edits import rename_augmentation
from etude.edits import examples as tables
from etude.edits import formats
from etude.edits.examples import Example
from etude.errors import UserError
from etude.trainer.finetune import distillation, packed, pretrain
from etude.trainer.finetune.config import ApplyConfig
from etude.trainer.finetune.loop import StageRun

log = logging.getLogger(__name__)


def finetune(config: ApplyConfig, *, resume: bool = False, stop_after: int | None = None) -> Path:
    """Fine-tunes a model on applied edits; returns its Hugging Face folder. Raises UserError for bad input. `resume`
    continues from the saved state; `stop_after` ends after that many steps in all."""
    output, optim, form = config.output, config.optim, config.format
    folder = distillation.tokenizer_folder(config)
    train, held_out = tables.load(config.data), tables.load(config.held_out)
    if shared := {e.repository for e in train} & {e.repository for e in held_out}:
        raise UserError(
            f"{min(shared)} is both trained on and held out: make the tables with one `etude tasks fast-apply`"
        )
    model = distillation.student(config)
    teacher = distillation.teacher(config) if config.distill else None
    pretrain.prepare(output, config, resume)
    tokenizer = bpe.load(folder)
    if not (output / "rows.safetensors").is_file():
        rows = rows_of(train, tokenizer, config)
        log.info("rows: %s, %d labelled tokens", rows.ids.shape, rows.labelled)
        packing.save(rows, output / "rows.safetensors")
    rows = packing.load(output / "rows.safetensors")
    tests = measured(held_out, tokenizer, config.measured, optim.length, config.seed, form)
    model.config.max_position_embeddings = optim.length  # a longer context has not been learned
    if optim.compile:
        model.set_experts_implementation("grouped_mm")
    compute = None
    if teacher is not None and config.distill is not None:
        compute = distillation.loss_function(model, teacher, config.distill.share)
    packed.train(
        model, rows, None, optim, StageRun(output, folder, resume, stop_after), compute=compute,
        measure=lambda current: summary(likelihoods(current, tests)),
    )  # fmt: skip
    return output / "checkpoint"


def document(example: Example, form: str = "rewrite") -> Document:
    """The example as training text; the answer, its closing tag and the end of the turn are labelled."""
    prompt = formats.question(example.file, example.sketch, example.instruction, form)
    answer = formats.answer(example.file, example.result, form)
    return (
        *message("user", prompt.content), special("<|assistant|>", False), TextPiece(prompt.opening, False),
        TextPiece(answer + prompt.close), special("<|end|>"),
    )  # fmt: skip


def encode(examples: Sequence[Example], tokenizer: Tokenizer, form: str = "rewrite") -> list[packing.Encoded]:
    """Ids and labels of every example."""
    return dialect.encode(tokenizer, [document(example, form) for example in examples])


def rows_of(examples: Sequence[Example], tokenizer: Tokenizer, config: ApplyConfig) -> packing.Rows:
    """Packed rows, phase after phase. In each phase examples come by weight, those not seen yet before the others, and
    a share of them under other names. An edit is as long as its whole-file answer, if not longer, so that every format
    is taught the same edits in the same order, for as long as the tokens last. Raises UserError if a phase has no
    example short enough."""
    rng = random.Random(config.seed)
    # An answer is not read as the result if the file itself holds lines of the format.
    answers = [formats.answer(e.file, e.result, config.format) for e in examples]
    pairs = zip(examples, answers, strict=True)
    examples = [e for e, answer in pairs if formats.read_answer(e.file, answer, config.format) == e.result]
    words = rename_augmentation.rare(examples)
    encoded = zip(encode(examples, tokenizer), encode(examples, tokenizer, config.format), strict=True)
    lengths = [max(len(whole), len(ids)) for (whole, _), (ids, _) in encoded]
    used = [0] * len(examples)
    parts: list[packing.Rows] = []
    for number, phase in enumerate(config.phases):
        pool = [i for i, length in enumerate(lengths) if length <= phase.longest]
        if not pool:
            raise UserError(f"no edit has at most {phase.longest} tokens: raise phases.longest or give shorter files")
        budget, chosen = phase.share * config.optim.tokens, list[packing.Encoded]()
        while budget > 0:
            # Exponential keys divided by weights order a weighted sample without replacement.
            keys = {i: (used[i], rng.expovariate(1.0) / examples[i].weight) for i in pool}
            order = sorted(pool, key=keys.__getitem__)
            shown = [
                rename_augmentation.renamed(examples[i], words, rng) if rng.random() < phase.renamed else examples[i]
                for i in order
            ]
            for i, (ids, mask) in zip(order, encode(shown, tokenizer, config.format), strict=True):
                if budget <= 0:
                    break
                used[i] += 1
                if len(ids) <= phase.longest:  # other names may be longer
                    chosen.append((ids, mask))
                    budget -= len(ids)
        rows = packing.pack(
            chosen, config.optim.length, pad=IDS["<|pad|>"], separator=IDS["<|endoftext|>"], label_separator=False
        )
        parts.append(packing.shuffled(rows, config.seed + number))
    return packing.Rows(np.concatenate([p.ids for p in parts]), np.concatenate([p.mask for p in parts]))


@dataclass(frozen=True)
class HeldOutEdit:
    """A held-out edit, encoded; `changed_T` marks the answer's tokens that are not the file's at their place."""

    ids_T: np.ndarray
    label_T: np.ndarray
    changed_T: np.ndarray


@dataclass(frozen=True)
class AnswerLikelihood:
    """Whether greedy decoding gives the answer, how many of its tokens come before the first slip, and the losses."""

    exact: bool
    right: float  # share of the answer's tokens that are the most likely ones
    loss: float  # per token of the answer
    changed_loss: float  # per changed token; 0 if there is none
    changed: int
    tokens: int


def measured(
    examples: Sequence[Example], tokenizer: Tokenizer, count: int, longest: int, seed: int, form: str = "rewrite"
) -> list[HeldOutEdit]:
    """Up to `count` of the examples that have at most `longest` tokens, both with an answer of `form` and whole."""
    chosen = random.Random(seed).sample(list(examples), len(examples))
    tests: list[HeldOutEdit] = []
    for example in chosen:
        if len(tests) == count:
            break
        ((whole, _),), ((ids, mask),) = encode([example], tokenizer), encode([example], tokenizer, form)
        if max(len(whole), len(ids)) > longest:
            continue
        file = tokenizer.encode(example.file, add_special_tokens=False).ids
        answer = ids[mask > 0].tolist()
        same = np.zeros(len(answer), dtype=bool)
        for block in SequenceMatcher(None, file, answer, autojunk=False).get_matching_blocks():
            same[block.b : block.b + block.size] = True
        changed = np.zeros(len(ids), dtype=bool)
        changed[mask > 0] = ~same
        tests.append(HeldOutEdit(ids.astype(np.int64), mask > 0, changed))
    return tests


@torch.no_grad()
def likelihoods(model: PreTrainedModel, tests: Sequence[HeldOutEdit]) -> list[AnswerLikelihood]:
    """One pass per edit."""
    results = []
    for test in tests:
        ids_T = torch.from_numpy(test.ids_T).to(model.device)
        # The token at t is predicted at t - 1.
        index_K = torch.from_numpy(np.flatnonzero(test.label_T) - 1).to(model.device)
        hidden_KD = model.model(input_ids=ids_T[None], use_cache=False).last_hidden_state[0, index_K]
        logits_KV = model.lm_head(hidden_KD).float()
        target_K = ids_T[index_K + 1]
        loss_K = torch.nn.functional.cross_entropy(logits_KV, target_K, reduction="none").cpu().numpy()
        right_K = (logits_KV.argmax(-1) == target_K).cpu().numpy()
        changed_K = test.changed_T[test.label_T]
        results.append(
            AnswerLikelihood(
                exact=bool(right_K.all()), right=float(right_K.mean()), loss=float(loss_K.mean()),
                changed_loss=float(loss_K[changed_K].mean()) if changed_K.any() else 0.0,
                changed=int(changed_K.sum()), tokens=len(loss_K),
            )
        )  # fmt: skip
    return results


def summary(results: Sequence[AnswerLikelihood]) -> dict[str, float]:
    """Means over edits (`exact`) and over tokens (the rest), named as in metrics.jsonl."""
    if not results:
        return {}
    tokens, changed = sum(r.tokens for r in results), sum(r.changed for r in results)
    return {
        "eval/heldout/edits": float(len(results)),
        "eval/heldout/exact": sum(r.exact for r in results) / len(results),
        "eval/heldout/tokens_right": sum(r.right * r.tokens for r in results) / tokens,
        "eval/heldout/loss": sum(r.loss * r.tokens for r in results) / tokens,
        "eval/heldout/loss_changed": sum(r.changed_loss * r.changed for r in results) / max(changed, 1),
    }
