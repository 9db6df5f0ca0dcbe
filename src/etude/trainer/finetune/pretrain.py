"""The stages before reinforcement learning: mid-training, and supervised fine-tuning, of any Hugging Face folder.

Both are one loop (`training_loop.py`) over packed rows (`packed.py`) or over prompts with documents
(`document_masks.py`). Rows come from a user's files (`data.py`), in the tokens of the model.
Fine-tuning on edits is in `applied_edits.py`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from etude import runfolder
from etude.corpus import (
    SPECIAL_IDS,
    Rows,
    folder_functions,
    load_rows,
    retrieval_samples,
    save_rows,
)
from etude.corpus.streams import StreamFile
from etude.corpus.windows import SourceReport, write_report
from etude.errors import UserError
from etude.models import check_device
from etude.renderers import Renderer, renderer_for, say_dropped
from etude.trainer.finetune import data, distillation, document_masks, folder, packed
from etude.trainer.finetune.config import (
    ApplyConfig,
    DocumentsConfig,
    MidtrainConfig,
    NewModelConfig,
    OptimConfig,
    SftConfig,
)
from etude.trainer.finetune.reading import FILE_LIST, REPORT, report_of
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
    world.gathered(True)  # every rank has read the folder
    world.only_first(lambda: shutil.rmtree(made))
    return model


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
        runfolder.write(output / "config.json", config.model_dump_json(indent=1).encode())

    world.only_first(make)


@contextmanager
def _streamed(output: Path, pad: int, world: World) -> Iterator[StreamedRows]:
    """The rows of a user's files, which are read meanwhile."""
    rows = StreamedRows(output, pad, world)
    try:
        yield rows
    finally:
        rows.close()


def rows_once(output: Path, make: Callable[[], Rows], world: World) -> Rows:
    """The rows of `make`, which is called once, by rank 0: a resumed run trains on the saved rows."""
    train, done = output / "rows.safetensors", output / "rows.done"

    def save() -> None:
        if done.is_file():
            return
        try:
            rows = make()
        except UserError:
            (output / "config.json").unlink()  # the run has not begun
            raise
        log.info("rows: %s, %d labelled tokens", rows.ids.shape, rows.labelled)
        save_rows(rows, train)
        done.touch()

    world.only_first(save)
    return load_rows(train)


def midtrain(
    config: MidtrainConfig,
    output: Path,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    show: Show | None = None,
) -> Path:
    """Trains the model of a folder on every token of texts and conversations; returns its Hugging Face folder. `resume`
    continues from the saved state; `stop_after` ends after that many steps in all. Raises UserError."""
    optim, source = config.trainer, config.model.path
    refuse(output, config, resume)
    data.check(config)
    world = World.join(optim.mesh, optim.device, optim.collective_seconds)
    model = folder.load(source, optim, world)
    kind, pad = folder.packing_of(model, optim.packing), folder.pad_of(model)
    run = StageRun(output, source, resume, stop_after, folder.types_of(source, model), config.seed, show)
    prepare(output, config, resume, world)
    with _streamed(output, pad, world) as rows:
        packed.train(model, rows, None, optim, run, kind=kind, pad=pad)
    world.close()
    return output / "checkpoint"


def sft(
    config: SftConfig, output: Path, *, resume: bool = False, stop_after: int | None = None, show: Show | None = None
) -> Path:
    """Fine-tunes a model on conversations, or on prompts with documents. Returns its Hugging Face folder. `resume`
    continues from the saved state; `stop_after` ends after that many steps in all. Raises UserError."""
    optim, source = config.trainer, config.model.path
    refuse(output, config, resume)
    folder.check(source)
    data.check(config)
    if config.distill is not None:
        distillation.check_tokenizers([source, config.distill.teacher])
    renderer = renderer_for(source, tools=False)  # raises for a wrong template before anything is written
    world = World.join(optim.mesh, optim.device, optim.collective_seconds)
    if world.first:
        say_dropped(renderer)
    model = folder.load(source, optim, world)
    kind, pad = folder.packing_of(model, optim.packing), folder.pad_of(model)
    run = StageRun(output, source, resume, stop_after, folder.types_of(source, model), config.seed, show)
    compute = None
    if config.distill is not None:
        teacher = distillation.teacher(config.distill, optim, kind, world)
        compute = distillation.loss_function(model, teacher, config.distill.share)
    if config.documents is not None:
        if kind != "isolated":
            raise UserError(f'{source} cannot be trained on documents: trainer.packing is "{kind}", not "isolated"')
        work, files, report = _document_work(model, config, config.documents, renderer)
        prepare(output, config, resume, world)
        data.keep_files(files, output / FILE_LIST)
        if report is not None:
            write_report(output / REPORT, report)
        fit(model, work, optim, run)
        return output / "checkpoint"
    prepare(output, config, resume, world)
    with _streamed(output, pad, world) as rows:
        packed.train(model, rows, None, optim, run, kind=kind, pad=pad, compute=compute)
    world.close()
    return output / "checkpoint"


def _document_work(
    model: PreTrainedModel,
    config: SftConfig,
    chosen: DocumentsConfig,
    renderer: Renderer,
) -> tuple[TrainingWork, list[StreamFile], dict[str, SourceReport] | None]:
    """Samples of cross-file retrieval, and for the share of tokens without documents, rows of the data; also the
    repositories and files, and the report of the data. Raises UserError for too few functions or rows."""
    optim, options, seed = config.trainer, chosen.options(), chosen.seed
    length, tokens = optim.batch * optim.length, optim.made_tokens
    code = {folder: folder_functions(folder) for folder in (*chosen.repositories, *chosen.held_out)}
    files = [data.repository_file(folder, functions) for folder, functions in code.items()]
    wanted, report = int(chosen.share * tokens), None

    def samples_of(key: str, seed: int, wanted: int) -> list[document_masks.DocumentSample]:
        functions = [function for folder in getattr(chosen, key) for function in code[folder]]
        try:
            return document_masks.take(retrieval_samples(functions, options, seed), renderer, wanted, length)
        except ValueError as e:
            raise UserError(f"documents.{key}: {e}") from None

    samples = samples_of("repositories", seed, wanted)
    if config.data is not None:
        stream = data.StreamData.of(config)
        readers, files = stream.readers(), [*files, *stream.files]
        samples += [document_masks.DocumentSample((), (row,)) for row in data.first_rows(readers, tokens - wanted)]
        report = report_of(readers, ())
    batches = document_masks.DocumentBatches.of(samples, length, chosen.own, seed, folder.pad_of(model))
    log.info("%d samples in %d rows of %d tokens", len(samples), len(batches), length)
    tests: list[document_masks.DocumentSample] = []
    if chosen.held_out:
        tests = samples_of("held_out", 7, HELD_OUT_TOKENS)

    def evaluate() -> dict[str, float]:
        figures = {own: document_masks.measure(model, tests, own == "own", length) for own in ("full", "own") if tests}
        return {f"eval/{own}/{name}": value for own, row in figures.items() for name, value in row.items()}

    work = TrainingWork(FixedSteps(batches), length, document_masks.loss_function(model, chosen.kl), evaluate)
    return work, files, report
