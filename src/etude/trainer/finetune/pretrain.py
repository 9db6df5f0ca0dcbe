"""Mid-training and supervised fine-tuning of a small mixture-of-experts model on a CPU.

The stages (fine-tuning on edits is in `apply.py`) are one loop over packed rows of fixed shape, so that the compiled
step is compiled once. Weights and gradients are bfloat16; AdamW (Loshchilov & Hutter 2019) keeps float32 master weights
and copies them down after each step, because updates smaller than a bfloat16 rounding step would otherwise be lost.
"""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from etude.corpus import build, packing, retrieval
from etude.corpus import tokenizer as bpe
from etude.corpus.dialect import IDS
from etude.corpus.episodes import WEIGHTS
from etude.models.loading import load_model
from etude.trainer.finetune import documents
from etude.trainer.finetune.config import (
    ApplyConfig,
    CorpusConfig,
    DocumentsConfig,
    MidtrainConfig,
    NewModelConfig,
    OptimConfig,
    SftConfig,
    load,
)
from etude.trainer.optimizer import MasterAdamW, Settings
from etude.trainer.rl.routers import Routers

log = logging.getLogger(__name__)

HELD_OUT_TOKENS = 36_864


def new_model(config: NewModelConfig, seed: int) -> PreTrainedModel:
    """A freshly initialised Qwen3-MoE in bfloat16 with tied embeddings."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            moe_intermediate_size=config.expert_size,
            num_experts=config.experts,
            num_experts_per_tok=config.experts_per_token,
            decoder_sparse_step=config.sparse_step,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            max_position_embeddings=config.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            eos_token_id=IDS["<|end|>"],
            pad_token_id=IDS["<|pad|>"],
        )
    )
    return model.to(torch.bfloat16)


Loss = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def loss_function(model: PreTrainedModel) -> Callable[..., Loss]:
    """A function (ids_BT, index_K, targets_K, weights_K) -> (token loss, router balance, expert load [L, E], {}).

    Logits are computed only at the flat positions `index_K`, which are those that predict a labelled token; `weights_K`
    is 0 on padding.
    """
    routers = Routers.of(model)

    def compute(ids_BT: torch.Tensor, index_K: torch.Tensor, targets_K: torch.Tensor, weights_K: torch.Tensor) -> Loss:
        routers.clear()
        hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        logits_KV = model.lm_head(hidden_BTD.flatten(0, 1)[index_K])
        losses_K = F.cross_entropy(logits_KV.float(), targets_K, reduction="none")
        loss = (losses_K * weights_K).sum() / weights_K.sum().clamp_min(1)
        return loss, *routers.balance(loss), {}

    return compute


def optimizer_of(model: PreTrainedModel, config: OptimConfig) -> MasterAdamW:
    """AdamW over float32 masters of the trained parameters. Matrices decay, vectors (norms) do not."""
    live = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return MasterAdamW(live, Settings(config.betas, config.weight_decay, config.clip, "paper", decay_vectors=False))


def learning_rate(config: OptimConfig, progress: float) -> float:
    """Warm-up, plateau, linear decay to zero; `progress` in [0, 1]."""
    rise = min(1.0, progress / config.warmup) if config.warmup > 0 else 1.0
    fall = min(1.0, max(0.0, 1.0 - progress) / config.decay)
    # The first step has progress 0 and would otherwise be wasted.
    return config.lr * min(max(rise, 0.02), fall)


@dataclass(frozen=True)
class _PackedBatches:
    """Fixed-shape batches of rows: labelled positions are gathered and padded to the same `width` in every batch."""

    rows: packing.Rows
    batch: int
    width: int

    @classmethod
    def of(cls, rows: packing.Rows, batch: int) -> _PackedBatches:
        if len(rows.ids) < batch:
            raise ValueError(
                f"the corpus gives {len(rows.ids)} rows, fewer than one batch of {batch}; give it more code"
            )
        whole = len(rows.ids) // batch
        counts = rows.mask[: whole * batch, 1:].reshape(whole, -1).sum(axis=1, dtype=np.int64)
        return cls(rows, batch, min(-(-int(counts.max()) // 64) * 64, batch * (rows.ids.shape[1] - 1)))

    def __len__(self) -> int:
        return len(self.rows.ids) // self.batch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        at = slice(index * self.batch, (index + 1) * self.batch)
        ids_BT, mask_BT = self.rows.ids[at].astype(np.int64), self.rows.mask[at].astype(bool)
        ahead = np.zeros_like(mask_BT)
        ahead[:, :-1] = mask_BT[:, 1:]
        found = np.flatnonzero(ahead)
        index_K, weights_K = np.zeros(self.width, dtype=np.int64), np.zeros(self.width, dtype=np.float32)
        index_K[: len(found)], weights_K[: len(found)] = found, 1.0
        targets_K = np.roll(ids_BT, -1, axis=1).reshape(-1)[index_K]
        return tuple(torch.from_numpy(a) for a in (ids_BT, index_K, targets_K, weights_K))


def _save_checkpoint(output: Path, model: PreTrainedModel, tokenizer_dir: Path) -> None:
    """Replace output/checkpoint by the current model; a reader never sees half of one."""
    partial, final = output / "checkpoint.incomplete", output / "checkpoint"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for file in tokenizer_dir.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            shutil.copy(file, partial / file.name)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def _save_state(output: Path, optimizer: MasterAdamW, steps: int, elapsed: float) -> None:
    metadata = {"steps": str(steps), "elapsed": str(elapsed)}
    save_file(optimizer.state(), output / "state.incomplete", metadata=metadata)
    (output / "state.incomplete").rename(output / "state.safetensors")


def _load_state(output: Path, optimizer: MasterAdamW) -> tuple[int, float]:
    """Steps and seconds that the saved run has behind it."""
    from safetensors import safe_open

    path = output / "state.safetensors"
    with safe_open(path, "pt") as stored:
        metadata = stored.metadata()
    optimizer.load(load_file(path))
    return int(metadata["steps"]), float(metadata["elapsed"])


@torch.no_grad()
def evaluate_loss(compute: Callable[..., Loss], batches: _PackedBatches) -> float:
    """Mean token loss over all batches, weighted by labelled tokens."""
    total = count = 0.0
    for index in range(len(batches)):
        batch = batches[index]
        labelled = float(batch[-1].sum())
        total += float(compute(*batch)[0]) * labelled
        count += labelled
    return total / max(count, 1.0)


@dataclass(frozen=True)
class Work:
    """What a stage trains on: `batches[i]` are the arguments of `compute`, each of `tokens` tokens; `evaluate` gives
    the figures of a checkpoint."""

    batches: _PackedBatches | documents.DocumentBatches
    tokens: int
    compute: Callable[..., Loss]
    evaluate: Callable[[], dict[str, float]]


def train(
    model: PreTrainedModel,
    rows: packing.Rows,
    held_out: packing.Rows | None,
    config: OptimConfig,
    output: Path,
    tokenizer_dir: Path,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    measure: Callable[[PreTrainedModel], dict[str, float]] | None = None,
    compute: Callable[..., Loss] | None = None,
) -> PreTrainedModel:
    """Train on all rows once, in order, by `compute` if it is given, else by `loss_function`. See `fit`."""
    torch.set_num_threads(config.threads)
    tests = _PackedBatches.of(held_out, config.batch) if held_out is not None else None
    eager = loss_function(model) if compute is None else compute

    def evaluated() -> dict[str, float]:
        loss = {} if tests is None else {"eval/heldout/loss": evaluate_loss(eager, tests)}
        return loss if measure is None else loss | measure(model)

    work = Work(
        _PackedBatches.of(rows, config.batch),
        config.batch * rows.ids.shape[1],
        torch.compile(eager) if config.compile else eager,
        evaluated,
    )
    return fit(model, work, config, output, tokenizer_dir, resume=resume, stop_after=stop_after)


def fit(
    model: PreTrainedModel,
    work: Work,
    config: OptimConfig,
    output: Path,
    tokenizer_dir: Path,
    *,
    resume: bool = False,
    stop_after: int | None = None,
) -> PreTrainedModel:
    """Train on all batches once, in order, or until the token target or the time budget is reached.

    Writes output/metrics.jsonl, output/checkpoint (a Hugging Face folder) and output/state.safetensors (for `resume`).
    `stop_after` ends after that many steps in all, with the state saved and the schedule unfinished, as a preempted run
    would. `measure` adds its figures to every checkpoint's line. Returns the model in evaluation mode.
    """
    torch.set_num_threads(config.threads)
    model.train()
    optimizer = optimizer_of(model, config)
    steps, before = _load_state(output, optimizer) if resume else (0, 0.0)
    batches, per_step = work.batches, work.tokens
    started = time.monotonic() - before
    saved = logged = time.monotonic()
    logged_steps = steps
    metrics = (output / "metrics.jsonl").open("a", encoding="utf-8")

    def checkpoint() -> None:
        elapsed = time.monotonic() - started
        model.eval()
        row = {"step": steps, "time": elapsed} | work.evaluate()
        model.train()
        metrics.write(json.dumps(row) + "\n")
        metrics.flush()
        log.info("checkpoint %s", row)
        _save_checkpoint(output, model, tokenizer_dir)
        _save_state(output, optimizer, steps, elapsed)

    while steps < len(batches) and steps != stop_after:
        elapsed = time.monotonic() - started
        progress = steps * per_step / min(config.tokens, len(batches) * per_step)
        if config.max_minutes is not None:
            progress = max(progress, elapsed / 60 / config.max_minutes)
        if progress >= 1:
            break
        lr = learning_rate(config, progress)
        loss, balance, load_LE, parts = work.compute(*batches[steps])
        (loss + config.router_aux * balance).backward()
        norm = optimizer.collect()
        if not math.isfinite(norm):
            raise ValueError(f"the gradient is not finite at step {steps + 1}; lower optim.lr")
        optimizer.apply(lr)
        steps += 1
        if steps % config.log_every == 0 or steps == 1:
            now = time.monotonic()
            row = {
                "step": steps,
                "time": round(now - started, 2),
                "tokens": steps * per_step,
                "loss/token": float(loss.detach()),
                **{name: float(value) for name, value in parts.items()},
                "loss/aux": float(balance.detach()),
                "optim/lr": lr,
                "optim/grad_norm": norm,
                "router/load_min": float(load_LE.min()) if load_LE.numel() else 0.0,
                "router/load_max": float(load_LE.max()) if load_LE.numel() else 0.0,
                "perf/tokens_per_s": (steps - logged_steps) * per_step / (now - logged),
            }
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()
            log.info("%s", {k: round(v, 4) for k, v in row.items()})
            logged, logged_steps = now, steps
        if time.monotonic() - saved > 60 * config.checkpoint_minutes:
            checkpoint()
            saved = time.monotonic()
    checkpoint()
    metrics.close()
    return model.eval()


def _corpus(config: CorpusConfig, seed: int) -> build.Corpus:
    return build.build_corpus(
        config.packages,
        config.held_out,
        config.evaluation,
        config.cache,
        standard=config.standard_library,
        allow_tests=config.allow_tests,
        per_package=config.per_package,
        seed=seed,
    )


def prepare(output: Path, config: MidtrainConfig | SftConfig | ApplyConfig, resume: bool) -> None:
    """Make the run folder and record its configuration; an existing run is continued only when asked."""
    if (output / "config.json").exists() and not resume:
        raise ValueError(f"{output} already holds a run; choose another output or resume it")
    if resume and not (output / "state.safetensors").is_file():
        raise ValueError(f"{output} holds no saved state to resume from; start it without resume")
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(config.model_dump_json(indent=1), encoding="utf-8")


def _held_out_rows(
    corpus: build.Corpus,
    tokenizer: Tokenizer,
    config: OptimConfig,
    shapes: dict[str, float],
    operators: dict[str, float],
) -> packing.Rows | None:
    if not corpus.evaluation:
        return None
    # The same rows whatever the batch, so that losses of different runs can be compared.
    return build.sft_rows(corpus.evaluation, tokenizer, shapes, operators, HELD_OUT_TOKENS, config.length, seed=7)


def midtrain(config: MidtrainConfig, *, resume: bool = False, stop_after: int | None = None) -> Path:
    """Train a new model on code, fill-in-the-middle and repair episodes; returns its Hugging Face folder."""
    output = config.output
    prepare(output, config, resume)
    corpus = _corpus(config.corpus, config.seed)
    (output / "corpus.json").write_text(json.dumps(corpus.report, indent=1), encoding="utf-8")
    folder = output / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        texts = build.tokenizer_texts(corpus.train, random.Random(config.seed))
        tokenizer = bpe.train(texts, config.model.vocab_size)
        bpe.save(tokenizer, folder, config.model.max_positions)
    tokenizer = bpe.load(folder)
    optim = config.optim
    if not (output / "rows.safetensors").is_file():
        rows, counts = build.midtrain_rows(
            corpus.train, tokenizer, config.mix.model_dump(), optim.tokens, optim.length, config.seed
        )
        (output / "mix.json").write_text(json.dumps(counts), encoding="utf-8")
        log.info("mid-training rows: %s; tokens per part: %s", rows.ids.shape, counts)
        packing.save(rows, output / "rows.safetensors")
    rows = packing.load(output / "rows.safetensors")
    model = new_model(config.model, config.seed)
    if optim.compile:
        model.set_experts_implementation("grouped_mm")
    held_out = _held_out_rows(corpus, tokenizer, optim, {"blind": 0.5, "tested": 0.5}, WEIGHTS)
    train(model, rows, held_out, optim, output, folder, resume=resume, stop_after=stop_after)
    return output / "checkpoint"


def sft(config: SftConfig, *, resume: bool = False, stop_after: int | None = None) -> Path:
    """Fine-tune a mid-trained model on repair episodes in its tool dialect, or on prompts with documents; returns its
    Hugging Face folder."""
    output = config.output
    if not (config.model / "tokenizer.json").is_file():
        raise ValueError(f"{config.model} is not a model folder; run mid-training first")
    prepare(output, config, resume)
    corpus = _corpus(config.corpus, config.seed)
    (output / "corpus.json").write_text(json.dumps(corpus.report, indent=1), encoding="utf-8")
    tokenizer = bpe.load(config.model)
    optim, shapes = config.optim, config.shapes.model_dump()
    if config.documents is not None:
        model = load_model(config.model, dtype=torch.bfloat16)
        work = _document_work(model, config, config.documents, corpus, tokenizer)
        fit(model, work, optim, output, config.model, resume=resume, stop_after=stop_after)
        return output / "checkpoint"
    if not (output / "rows.safetensors").is_file():
        short = [function for function in corpus.train if function.lines <= config.max_lines]
        rows = build.sft_rows(short, tokenizer, shapes, config.operators, optim.tokens, optim.length, config.seed + 1)
        log.info("fine-tuning rows: %s, %d labelled tokens", rows.ids.shape, rows.labelled)
        packing.save(rows, output / "rows.safetensors")
    rows = packing.load(output / "rows.safetensors")
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.bfloat16)
    if optim.compile:
        model.set_experts_implementation("grouped_mm")
    held_out = _held_out_rows(corpus, tokenizer, optim, shapes, config.operators)
    train(model, rows, held_out, optim, output, config.model, resume=resume, stop_after=stop_after)
    return output / "checkpoint"


def _document_work(
    model: PreTrainedModel, config: SftConfig, chosen: DocumentsConfig, corpus: build.Corpus, tokenizer: Tokenizer
) -> Work:
    """Samples of cross-file retrieval, and for the share of tokens without documents, repair episodes."""
    optim, options, seed = config.optim, chosen.options(), chosen.seed
    length, asked = optim.batch * optim.length, int(chosen.share * optim.tokens)
    samples = documents.take(retrieval.samples(corpus.train, options, seed), tokenizer, asked, length)
    if asked < optim.tokens:
        short = [function for function in corpus.train if function.lines <= config.max_lines]
        episodes = build.repair_documents(short, config.shapes.model_dump(), config.operators, random.Random(seed))
        plain = build.take(episodes, tokenizer, optim.tokens - asked, optim.length)
        samples += [documents.DocumentSample((), (encoded,)) for encoded in plain]
    batches = documents.DocumentBatches.of(samples, length, chosen.own, seed)
    log.info("%d samples in %d rows of %d tokens", len(samples), len(batches), length)
    tests: list[documents.DocumentSample] = []
    if corpus.evaluation:
        tests = documents.take(retrieval.samples(corpus.evaluation, options, 7), tokenizer, HELD_OUT_TOKENS, length)

    def evaluate() -> dict[str, float]:
        figures = {own: documents.measure(model, tests, own == "own", length) for own in ("full", "own") if tests}
        return {f"eval/{own}/{name}": value for own, row in figures.items() for name, value in row.items()}

    return Work(batches, length, documents.loss_function(model, chosen.kl), evaluate)


def main(arguments: Sequence[str]) -> None:
    """`python -m etude.trainer.finetune.pretrain CONFIG.toml [--resume]`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    config = load(Path(arguments[0]))
    resume = "--resume" in arguments[1:]
    if isinstance(config, MidtrainConfig):
        midtrain(config, resume=resume)
    elif isinstance(config, SftConfig):
        sft(config, resume=resume)
    else:
        raise ValueError("run the stage apply with `etude train`")


if __name__ == "__main__":
    main(sys.argv[1:])
