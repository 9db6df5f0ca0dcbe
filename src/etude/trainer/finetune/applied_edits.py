"""Fine-tuning on applied edits: from a file and a sketch of its edit to the new file, or to another format's answer.

Only the answer is learned (formats: `edits/formats.py`). Small models mainly fail to copy without a slip, so short
files come first. With every checkpoint the likelihood of some held-out edits is measured: greedy decoding gives an
answer exactly if each of its tokens is the most likely one after those before it, so one pass decides.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from etude.corpus import Encoded, Rows, join_rows, pack_rows, shuffle_rows
from etude.edits import Example, edit_prompt, load_examples
from etude.errors import UserError
from etude.models.head import head_of
from etude.renderers import Renderer, renderer_for
from etude.trainer.finetune import distillation, folder, packed, pretrain, rename_augmentation
from etude.trainer.finetune.config import ApplyConfig, NewModelConfig
from etude.trainer.finetune.texts import TextEncoder
from etude.trainer.finetune.training_loop import Show, StageRun
from etude.trainer.sharding import reshard, within, world_of
from etude.trainer.world import World

log = logging.getLogger(__name__)


def finetune(
    config: ApplyConfig, output: Path, *, resume: bool = False, stop_after: int | None = None, show: Show | None = None
) -> Path:
    """Fine-tunes a model on applied edits; returns its Hugging Face folder. Raises UserError for bad input. `resume`
    continues from the saved state; `stop_after` ends after that many steps in all."""
    optim, source = config.trainer, config.model
    pretrain.refuse(output, config, resume)
    folders = [*([] if isinstance(source, NewModelConfig) else [source.path])]
    folders += [config.distill.teacher] if config.distill else []
    distillation.check_tokenizers(folders)
    train, held_out = load_examples(config.data), load_examples(config.held_out)
    if shared := {e.repository for e in train} & {e.repository for e in held_out}:
        raise UserError(
            f"{min(shared)} is both trained on and held out: make the tables with one `etude tasks fast-apply`"
        )
    world = World.join(optim.mesh, optim.device, optim.collective_seconds)
    model, types = _student(config, output, world)
    kind = folder.packing_of(model, optim.packing)
    compute = None
    if config.distill is not None:
        teacher = distillation.teacher(config.distill, optim, kind, world)
        size = teacher.config.get_text_config().vocab_size
        if isinstance(source, NewModelConfig) and source.vocab_size != size:
            raise UserError(f"model.vocab_size = {source.vocab_size}, and {folders[0]} has {size}: use the latter")
        compute = distillation.loss_function(model, teacher, config.distill.share)
    renderer = renderer_for(folders[0], tools=False)
    separator, pad = TextEncoder(folders[0]).separator, folder.pad_of(model)
    pretrain.prepare(output, config, resume, world)
    rows = pretrain.rows_once(output, lambda: rows_of(train, renderer, separator, pad, config), world)
    tests = measured(held_out, renderer, config.measured, optim.length, config.seed)
    if config.context is not None:
        model.config.get_text_config().max_position_embeddings = config.context
    packed.train(
        model,
        rows,
        None,
        optim,
        StageRun(output, folders[0], resume, stop_after, types, config.seed, show),
        kind=kind,
        pad=pad,
        compute=compute,
        measure=lambda current: summary(likelihoods(current, tests)),
    )
    world.close()
    return output / "checkpoint"


def _student(config: ApplyConfig, output: Path, world: World) -> tuple[PreTrainedModel, dict[str, torch.dtype]]:
    """The model to train, from a folder or new, and the types in which it is saved."""
    if isinstance(config.model, NewModelConfig):
        return pretrain.new_on_ranks(config.model, config.seed, config.trainer, output, world), {}
    model = folder.load(config.model.path, config.trainer, world)
    return model, folder.types_of(config.model.path, model)


def encode(examples: Sequence[Example], renderer: Renderer) -> list[Encoded]:
    """Ids and mask of every example, with the prompt of `/v1/apply`: the answer, its closing tag and the end of the
    turn are learned."""
    encoded: list[Encoded] = []
    for example in examples:
        prompt = edit_prompt(example.file, example.sketch, example.instruction)
        seen = [*renderer.prompt([{"role": "user", "content": prompt.content}]), *renderer.plain(prompt.opening)]
        answer = renderer.plain(example.result + prompt.close)
        ids = np.array([*seen, *answer, renderer.stop_ids[0]], dtype=np.uint32)
        encoded.append((ids, (np.arange(len(ids)) >= len(seen)).astype(np.uint8)))
    return encoded


def rows_of(examples: Sequence[Example], renderer: Renderer, separator: int, pad: int, config: ApplyConfig) -> Rows:
    """Packed rows, phase after phase. In each phase examples come by weight, unused ones first, and a share of them
    with other names. Raises UserError if a phase has no example short enough."""
    rng = random.Random(config.seed)
    names = rename_augmentation.rare(examples)
    lengths = [len(ids) for ids, _ in encode(examples, renderer)]
    used = [0] * len(examples)
    parts: list[Rows] = []
    for number, phase in enumerate(config.phases):
        pool = [i for i, length in enumerate(lengths) if length <= phase.longest]
        if not pool:
            raise UserError(f"no edit has at most {phase.longest} tokens: raise phases.longest or give shorter files")
        budget, chosen = phase.share * config.trainer.made_tokens, list[Encoded]()
        while budget > 0:
            # Exponential keys divided by weights order a weighted sample without replacement.
            keys = {i: (used[i], rng.expovariate(1.0) / examples[i].weight) for i in pool}
            order = sorted(pool, key=keys.__getitem__)
            shown = [
                rename_augmentation.renamed(examples[i], names, rng) if rng.random() < phase.renamed else examples[i]
                for i in order
            ]
            for i, (ids, mask) in zip(order, encode(shown, renderer), strict=True):
                if budget <= 0:
                    break
                used[i] += 1
                if len(ids) <= phase.longest:  # other names may be longer
                    chosen.append((ids, mask))
                    budget -= len(ids)
        rows = pack_rows(chosen, config.trainer.length, pad=pad, separator=separator)
        parts.append(shuffle_rows(rows, config.seed + number))
    return join_rows(parts)


@dataclass(frozen=True)
class HeldOutEdit:
    """A held-out edit, encoded; `changed_T` marks the answer's tokens that differ from the file's at their place."""

    ids_T: np.ndarray
    label_T: np.ndarray
    changed_T: np.ndarray


@dataclass(frozen=True)
class AnswerLikelihood:
    """Whether greedy decoding gives the answer, the share of right tokens, and the losses."""

    exact: bool
    right: float  # share of the answer's tokens that are the most likely ones
    loss: float  # per token of the answer
    changed_loss: float  # per changed token; 0 if there is none
    changed: int
    tokens: int


def measured(examples: Sequence[Example], renderer: Renderer, count: int, longest: int, seed: int) -> list[HeldOutEdit]:
    """Up to `count` of the examples, each with its answer of at most `longest` tokens."""
    chosen = random.Random(seed).sample(list(examples), len(examples))
    tests: list[HeldOutEdit] = []
    for example in chosen:
        if len(tests) == count:
            break
        ((ids, mask),) = encode([example], renderer)
        if len(ids) > longest:
            continue
        file = renderer.plain(example.file)
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
    """The likelihood of each held-out edit, in one pass per edit. Each rank computes some of them, as many as any
    other; ranks that share rows compute the same."""
    world = world_of(model)
    ranks, own = world.mesh.data_ranks, list[AnswerLikelihood]()
    for first in range(0, len(tests), ranks):
        world.at(f"held-out edits from {first + 1} on")
        test = tests[min(first + world.data_rank, len(tests) - 1)]
        loss_K, right_K = (x.cpu().numpy() for x in within(model, partial(_of_answer, model, test)))
        changed_K = test.changed_T[test.label_T]
        own.append(
            AnswerLikelihood(
                exact=bool(right_K.all()),
                right=float(right_K.mean()),
                loss=float(loss_K.mean()),
                changed_loss=float(loss_K[changed_K].mean()) if changed_K.any() else 0.0,
                changed=int(changed_K.sum()),
                tokens=len(loss_K),
            )
        )
    reshard(model)
    every = world.gathered(own, list[AnswerLikelihood])[:: world.mesh.context]
    return [one for together in zip(*every, strict=True) for one in together][: len(tests)]


def _of_answer(model: PreTrainedModel, test: HeldOutEdit) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss [K] of an answer's tokens, and whether each is the most likely one."""
    ids_T = torch.from_numpy(test.ids_T).to(model.device)
    # The token at t is predicted at t - 1.
    index_K = torch.from_numpy(np.flatnonzero(test.label_T) - 1).to(model.device)
    hidden_KD = model.get_decoder()(input_ids=ids_T[None], use_cache=False).last_hidden_state[0, index_K]
    head = head_of(model)
    logits_KV = head.finish(torch.nn.functional.linear(hidden_KD, head.weight_VD)).float()
    target_K = ids_T[index_K + 1]
    loss_K = torch.nn.functional.cross_entropy(logits_KV, target_K, reduction="none")
    return loss_K, logits_KV.argmax(-1) == target_K


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
