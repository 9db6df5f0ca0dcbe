"""The stages before reinforcement learning: mid-training, and supervised fine-tuning, of any Hugging Face folder.

Both are one loop (`training_loop.py`) over packed rows (`packed.py`) or over prompts with documents
(`document_masks.py`). Rows come from a user's files (`data.py`) or from the corpus, in the tokens of the model.
Fine-tuning on edits is in `applied_edits.py`.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from etude import runfolder
from etude.corpus import (
    OPERATOR_WEIGHTS,
    SPECIAL_IDS,
    SPECIALS,
    Rows,
    TextPiece,
    build,
    load_rows,
    retrieval_samples,
    save_rows,
    special_piece,
)
from etude.corpus.vocabulary import Vocabulary
from etude.errors import UserError
from etude.models import check_device
from etude.renderers import Renderer, renderer_for, say_dropped
from etude.trainer.finetune import data, distillation, document_masks, folder, foreign_rows, packed
from etude.trainer.finetune import tokenizer_training as bpe
from etude.trainer.finetune.config import (
    ApplyConfig,
    CorpusConfig,
    DocumentsConfig,
    MidtrainConfig,
    NewModelConfig,
    OptimConfig,
    SftConfig,
)
from etude.trainer.finetune.streamed import StreamedRows
from etude.trainer.finetune.training_loop import FixedSteps, Show, StageRun, TrainingWork, fit
from etude.trainer.sharding import load_sharded
from etude.trainer.world import World

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
            eos_token_id=SPECIAL_IDS["<|end|>"],
            pad_token_id=SPECIAL_IDS["<|pad|>"],
        )
    )
    folder.cast(model, torch.bfloat16)  # not its rotary frequencies, which a loaded folder has in float32
    return model


def new_on_ranks(config: NewModelConfig, seed: int, optim: OptimConfig, output: Path, world: World) -> PreTrainedModel:
    """`new_model` on the device, or this rank's rows of it, which go through a folder in `output`."""
    if world.size == 1:
        return new_model(config, seed).to(optim.device)  # pyright: ignore[reportArgumentType]
    made = output / "new"
    world.only_first(lambda: new_model(config, seed).save_pretrained(made))
    model = load_sharded(made, folder.held(torch.bfloat16, optim), world)
    world.only_first(lambda: shutil.rmtree(made))
    return model


def _corpus(config: CorpusConfig, seed: int, output: Path) -> build.Corpus:
    """The corpus, whose report is written to corpus.json."""
    corpus = build.build_corpus(
        config.packages,
        config.held_out,
        config.evaluation,
        config.cache,
        standard=config.standard_library,
        per_package=config.per_package,
        seed=seed,
    )
    (output / "corpus.json").write_text(json.dumps(corpus.report, indent=1), encoding="utf-8")
    return corpus


def refuse(output: Path, config: MidtrainConfig | SftConfig | ApplyConfig, resume: bool) -> None:
    """Raises UserError if the folder holds a run and `resume` is off, or if `resume` is on and the folder holds no run,
    or one of another configuration, ranks left out; also if the device does not exist."""
    path = output / "config.json"
    if path.exists() and not resume:
        raise UserError(f"{output} already holds a run; choose another name, or continue the run with --resume")
    if resume and not path.exists():
        raise UserError(f"{output} holds no saved state to resume from; start it without --resume")
    if resume and _without_ranks(path.read_text(encoding="utf-8")) != _without_ranks(config.model_dump_json()):
        raise UserError(f"the configuration differs from that of {path}; resume with the same one")
    check_device(config.trainer.device, "trainer.device")


def _without_ranks(text: str) -> dict[str, Any]:
    """A configuration, but for the options of ranks, whose number may change in a run."""
    values = json.loads(text)
    for key in ("mesh", "collective_seconds"):
        values["trainer"].pop(key, None)
    return values


def prepare(output: Path, config: MidtrainConfig | SftConfig | ApplyConfig, resume: bool, world: World) -> None:
    """Makes the run folder and records its configuration; see `refuse`. A run that was killed before its first save is
    resumed from its beginning."""

    def make() -> None:
        refuse(output, config, resume)
        runfolder.make(output)
        (output / "config.json").write_text(config.model_dump_json(indent=1), encoding="utf-8")

    world.only_first(make)


def _held_out_rows(
    corpus: build.Corpus, words: Vocabulary, length: int, shapes: dict[str, float], operators: dict[str, float]
) -> Rows | None:
    if not corpus.evaluation:
        return None
    # The same rows for every size of batch, so that losses of different runs can be compared.
    return build.sft_rows(corpus.evaluation, words, shapes, operators, HELD_OUT_TOKENS, length, seed=7)


@contextmanager
def rows_of_stage(
    output: Path, make: Callable[[], tuple[Rows, Rows | None]] | None, pad: int, world: World
) -> Iterator[tuple[Rows | StreamedRows, Rows | None]]:
    """The rows to train on and the held-out ones: those of a user's files, which are read meanwhile, or those that
    `make` makes."""
    if make is not None:
        yield rows_once(output, make, world)
        return
    rows = StreamedRows(output, pad, world)
    try:
        yield rows, None
    finally:
        rows.close()


def rows_once(output: Path, make: Callable[[], tuple[Rows, Rows | None]], world: World) -> tuple[Rows, Rows | None]:
    """The rows of `make`, which is called once, by rank 0: a resumed run trains on the saved rows."""
    train, held_out, done = (output / name for name in ("rows.safetensors", "heldout.safetensors", "rows.done"))

    def save() -> None:
        if done.is_file():
            return
        try:
            rows, tests = make()
        except UserError:
            (output / "config.json").unlink()  # the run has not begun
            raise
        log.info("rows: %s, %d labelled tokens", rows.ids.shape, rows.labelled)
        if tests is not None:
            save_rows(tests, held_out)
        save_rows(rows, train)
        done.touch()

    world.only_first(save)
    return load_rows(train), load_rows(held_out) if held_out.is_file() else None


def _check_mix(model: Path, config: MidtrainConfig, words: Vocabulary, renderer: Callable[[], Renderer]) -> None:
    """Raises UserError if the folder's tokenizer or template cannot represent a part of the mix."""
    if config.mix.fim:
        names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
        words.encode([tuple(piece for name in names for piece in (special_piece(name), TextPiece("a")))])
    if config.mix.repair:
        try:
            renderer()
        except UserError as e:
            raise UserError(f"{model} cannot hold conversations: set mix.repair to 0 ({e})") from None


def midtrain(
    config: MidtrainConfig,
    output: Path,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    show: Show | None = None,
) -> Path:
    """Trains a model, new or of a folder, on code, fill-in-the-middle and repair episodes, or on texts; returns its
    Hugging Face folder. `resume` continues from the saved state; `stop_after` ends after that many steps in all. Raises
    UserError."""
    optim, wanted = config.trainer, config.model
    refuse(output, config, resume)
    data.check(config.data)
    world = World.join(optim.mesh, optim.device, optim.collective_seconds)
    model, types = None, dict[str, torch.dtype]()
    if not isinstance(wanted, NewModelConfig):
        model = folder.load(wanted.path, optim, world)
        types = folder.types_of(wanted.path, model)
        if config.data is None:
            renderer = cache(partial(renderer_for, wanted.path, tools=False))
            _check_mix(
                wanted.path, config, foreign_rows.vocabulary_of(wanted.path, folder.pad_of(model), renderer), renderer
            )
    prepare(output, config, resume, world)
    corpus = cache(partial(_corpus, config.corpus, config.seed, output))
    if isinstance(wanted, NewModelConfig):
        source = output / "tokenizer"
        world.only_first(lambda: _make_tokenizer(wanted, corpus, source, config.seed))
        model = new_on_ranks(wanted, config.seed, optim, output, world)
    else:
        source = wanted.path
    assert model is not None
    pad, renderer = folder.pad_of(model), cache(partial(renderer_for, source, tools=False))
    words = foreign_rows.vocabulary_of(source, pad, renderer)

    def make() -> tuple[Rows, Rows | None]:
        mix = config.mix.model_dump()
        rows, counts = build.midtrain_rows(corpus().train, words, mix, optim.corpus_tokens, optim.length, config.seed)
        (output / "mix.json").write_text(json.dumps(counts), encoding="utf-8")
        held_out = None
        if config.mix.repair:
            held_out = _held_out_rows(corpus(), words, optim.length, {"blind": 0.5, "tested": 0.5}, OPERATOR_WEIGHTS)
        return rows, held_out

    kind = folder.packing_of(model, optim.packing)
    run = StageRun(output, source, resume, stop_after, types, config.seed, show)
    with rows_of_stage(output, None if config.data is not None else make, pad, world) as (rows, held_out):
        packed.train(model, rows, held_out, optim, run, kind=kind, pad=pad)
    world.close()
    return output / "checkpoint"


def _make_tokenizer(wanted: NewModelConfig, corpus: Callable[[], build.Corpus], target: Path, seed: int) -> None:
    if not (target / "tokenizer.json").is_file():
        texts = build.tokenizer_texts(corpus().train, random.Random(seed))
        save_tokenizer(bpe.train(texts, wanted.vocab_size), target, wanted.max_positions)


def sft(
    config: SftConfig, output: Path, *, resume: bool = False, stop_after: int | None = None, show: Show | None = None
) -> Path:
    """Fine-tunes a model on conversations, on repair episodes with its tools, or on prompts with documents. Returns its
    Hugging Face folder. `resume` continues from the saved state; `stop_after` ends after that many steps in all. Raises
    UserError."""
    optim, source = config.trainer, config.model.path
    refuse(output, config, resume)
    folder.check(source)
    data.check(config.data)
    if config.distill is not None:
        distillation.check_tokenizers([source, config.distill.teacher])
    renderer = cache(partial(renderer_for, source, tools=False))
    dropped = renderer()  # raises for a wrong template before anything is written
    world = World.join(optim.mesh, optim.device, optim.collective_seconds)
    if world.first:
        say_dropped(dropped)
    model = folder.load(source, optim, world)
    kind, pad = folder.packing_of(model, optim.packing), folder.pad_of(model)
    run = StageRun(output, source, resume, stop_after, folder.types_of(source, model), config.seed, show)
    compute = None
    if config.distill is not None:
        teacher = distillation.teacher(config.distill, optim, kind, world)
        compute = distillation.loss_function(model, teacher, config.distill.share)
    prepare(output, config, resume, world)
    corpus = cache(partial(_corpus, config.corpus, config.seed, output))
    words = foreign_rows.vocabulary_of(source, pad, renderer) if config.data is None else None
    if config.documents is not None:
        assert words is not None
        if kind != "isolated":
            raise UserError(f'{source} cannot be trained on documents: trainer.packing is "{kind}", not "isolated"')
        work = _document_work(model, config, config.documents, corpus(), words, renderer())
        fit(model, work, optim, run)
        return output / "checkpoint"

    def make() -> tuple[Rows, Rows | None]:
        assert words is not None
        shapes, length = config.shapes.model_dump(), optim.length
        short = [function for function in corpus().train if function.lines <= config.max_lines]
        tokens, seed = optim.corpus_tokens, config.seed + 1
        rows = build.sft_rows(short, words, shapes, config.operators, tokens, length, seed)
        return rows, _held_out_rows(corpus(), words, length, shapes, config.operators)

    with rows_of_stage(output, None if config.data is not None else make, pad, world) as (rows, held_out):
        packed.train(model, rows, held_out, optim, run, kind=kind, pad=pad, compute=compute)
    world.close()
    return output / "checkpoint"


def _document_work(
    model: PreTrainedModel,
    config: SftConfig,
    chosen: DocumentsConfig,
    corpus: build.Corpus,
    words: Vocabulary,
    renderer: Renderer,
) -> TrainingWork:
    """Samples of cross-file retrieval, and for the share of tokens without documents, repair episodes."""
    optim, options, seed = config.trainer, chosen.options(), chosen.seed
    length, tokens = optim.batch * optim.length, optim.corpus_tokens
    wanted = int(chosen.share * tokens)
    samples = document_masks.take(retrieval_samples(corpus.train, options, seed), renderer, wanted, length)
    if wanted < tokens:
        short = [function for function in corpus.train if function.lines <= config.max_lines]
        episodes = build.repair_documents(short, config.shapes.model_dump(), config.operators, random.Random(seed))
        plain = build.take(episodes, words, tokens - wanted, optim.length)
        samples += [document_masks.DocumentSample((), (encoded,)) for encoded in plain]
    batches = document_masks.DocumentBatches.of(samples, length, chosen.own, seed, folder.pad_of(model))
    log.info("%d samples in %d rows of %d tokens", len(samples), len(batches), length)
    tests: list[document_masks.DocumentSample] = []
    if corpus.evaluation:
        tests = document_masks.take(retrieval_samples(corpus.evaluation, options, 7), renderer, HELD_OUT_TOKENS, length)

    def evaluate() -> dict[str, float]:
        figures = {own: document_masks.measure(model, tests, own == "own", length) for own in ("full", "own") if tests}
        return {f"eval/{own}/{name}": value for own, row in figures.items() for name, value in row.items()}

    return TrainingWork(FixedSteps(batches), length, document_masks.loss_function(model, chosen.kl), evaluate)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes the tokenizer files of a Hugging Face model folder, with the chat template in chat_template.jinja."""
    # Texts for the saved tokenizer (a rendered chat template) may contain special tokens.
    tokenizer.encode_special_tokens = False
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=list(SPECIALS),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = bpe.CHAT_TEMPLATE
    fast.save_pretrained(directory)
