"""The stages before reinforcement learning: mid-training of a new model, and supervised fine-tuning of one.

Both are one loop (`loop.py`) over packed rows (`packed.py`) or over prompts with documents (`documents.py`), on a CPU.
Fine-tuning on edits is in `apply.py`.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from etude.corpus import build, packing, retrieval
from etude.corpus import tokenizer as bpe
from etude.corpus.dialect import IDS, SPECIALS
from etude.corpus.episodes import WEIGHTS
from etude.errors import UserError
from etude.models.loading import load_model
from etude.trainer.finetune import documents
from etude.trainer.finetune.config import (
    ApplyConfig,
    CorpusConfig,
    DocumentsConfig,
    MidtrainConfig,
    NewModelConfig,
    SftConfig,
)
from etude.trainer.finetune.loop import StageRun, TrainingWork, fit
from etude.trainer.finetune.packed import train

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
            head_dim=config.head_dim,  # pyright: ignore[reportCallIssue]
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
    return model.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]


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
    """Makes the run folder and records its configuration; an existing run is continued only with `resume`. Raises
    UserError if the folder holds a run and `resume` is off, or no saved state and `resume` is on."""
    if (output / "config.json").exists() and not resume:
        raise UserError(f"{output} already holds a run; choose another output, or continue the run with --resume")
    if resume and not (output / "state.safetensors").is_file():
        raise UserError(f"{output} holds no saved state to resume from; start it without --resume")
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(config.model_dump_json(indent=1), encoding="utf-8")


def _held_out_rows(
    corpus: build.Corpus, tokenizer: Tokenizer, length: int, shapes: dict[str, float], operators: dict[str, float]
) -> packing.Rows | None:
    if not corpus.evaluation:
        return None
    # The same rows whatever the batch, so that losses of different runs can be compared.
    return build.sft_rows(corpus.evaluation, tokenizer, shapes, operators, HELD_OUT_TOKENS, length, seed=7)


def midtrain(config: MidtrainConfig, *, resume: bool = False, stop_after: int | None = None) -> Path:
    """Trains a new model on code, fill-in-the-middle and repair episodes; returns its Hugging Face folder. `resume`
    continues from the saved state; `stop_after` ends after that many steps in all. Raises UserError."""
    output = config.output
    prepare(output, config, resume)
    corpus = _corpus(config.corpus, config.seed)
    (output / "corpus.json").write_text(json.dumps(corpus.report, indent=1), encoding="utf-8")
    folder = output / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        texts = build.tokenizer_texts(corpus.train, random.Random(config.seed))
        tokenizer = bpe.train(texts, config.model.vocab_size)
        save_tokenizer(tokenizer, folder, config.model.max_positions)
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
    held_out = _held_out_rows(corpus, tokenizer, optim.length, {"blind": 0.5, "tested": 0.5}, WEIGHTS)
    train(model, rows, held_out, optim, StageRun(output, folder, resume, stop_after))
    return output / "checkpoint"


def sft(config: SftConfig, *, resume: bool = False, stop_after: int | None = None) -> Path:
    """Fine-tunes a mid-trained model on repair episodes in its tool dialect, or on prompts with documents. Returns its
    Hugging Face folder. `resume` continues from the saved state; `stop_after` ends after that many steps in all. Raises
    UserError."""
    output = config.output
    if not (config.model / "tokenizer.json").is_file():
        raise UserError(f"{config.model} is not a model folder; run mid-training first")
    prepare(output, config, resume)
    corpus = _corpus(config.corpus, config.seed)
    (output / "corpus.json").write_text(json.dumps(corpus.report, indent=1), encoding="utf-8")
    tokenizer = bpe.load(config.model)
    optim, shapes = config.optim, config.shapes.model_dump()
    run = StageRun(output, config.model, resume, stop_after)
    if config.documents is not None:
        model = load_model(config.model, dtype=torch.bfloat16)
        work = _document_work(model, config, config.documents, corpus, tokenizer)
        fit(model, work, optim, run)
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
    held_out = _held_out_rows(corpus, tokenizer, optim.length, shapes, config.operators)
    train(model, rows, held_out, optim, run)
    return output / "checkpoint"


def _document_work(
    model: PreTrainedModel, config: SftConfig, chosen: DocumentsConfig, corpus: build.Corpus, tokenizer: Tokenizer
) -> TrainingWork:
    """Samples of cross-file retrieval, and for the share of tokens without documents, repair episodes."""
    optim, options, seed = config.optim, chosen.options(), chosen.seed
    length, wanted = optim.batch * optim.length, int(chosen.share * optim.tokens)
    samples = documents.take(retrieval.samples(corpus.train, options, seed), tokenizer, wanted, length)
    if wanted < optim.tokens:
        short = [function for function in corpus.train if function.lines <= config.max_lines]
        episodes = build.repair_documents(short, config.shapes.model_dump(), config.operators, random.Random(seed))
        plain = build.take(episodes, tokenizer, optim.tokens - wanted, optim.length)
        samples += [documents.DocumentSample((), (encoded,)) for encoded in plain]
    batches = documents.DocumentBatches.of(samples, length, chosen.own, seed)
    log.info("%d samples in %d rows of %d tokens", len(samples), len(batches), length)
    tests: list[documents.DocumentSample] = []
    if corpus.evaluation:
        tests = documents.take(retrieval.samples(corpus.evaluation, options, 7), tokenizer, HELD_OUT_TOKENS, length)

    def evaluate() -> dict[str, float]:
        figures = {own: documents.measure(model, tests, own == "own", length) for own in ("full", "own") if tests}
        return {f"eval/{own}/{name}": value for own, row in figures.items() for name, value in row.items()}

    return TrainingWork(batches, length, documents.loss_function(model, chosen.kl), evaluate)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write the tokenizer files of a Hugging Face model folder, with the chat template in chat_template.jinja."""
    # Texts given to the saved tokenizer (a rendered chat template) do hold special tokens.
    tokenizer.encode_special_tokens = False
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=None, eos_token="<|end|>", pad_token="<|pad|>",
        extra_special_tokens=list(SPECIALS), model_max_length=max_length, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = bpe.CHAT_TEMPLATE
    fast.save_pretrained(directory)
