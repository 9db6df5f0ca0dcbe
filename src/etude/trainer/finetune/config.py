"""Configuration of the stages that come before reinforcement learning. No torch here."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from etude.config import LoraConfig, Section, find_model
from etude.config.sections import option
from etude.corpus.episodes import WEIGHTS
from etude.corpus.retrieval import KINDS, RetrievalOptions
from etude.errors import UserError


def _model_folder(path: Path) -> Path:
    """The folder of a bundled model by its name; any other path as it is, for it may be made later."""
    try:
        return find_model(path)
    except UserError:
        return path


ModelFolder = Annotated[Path, AfterValidator(_model_folder)]


class NewModelConfig(Section):
    """Shape of a new Qwen3-MoE model; sizes in elements. Every second layer is sparse when `sparse_step` is 2."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    expert_size: int = 256
    experts: int = 8
    experts_per_token: int = 2
    sparse_step: int = 2
    max_positions: int = 4096
    rope_theta: float = 10_000.0


class CorpusConfig(Section):
    """Where functions come from. `held_out` packages are never trained on, nor is any function that overlaps them."""

    packages: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = ()
    standard_library: bool = True
    allow_tests: bool = False
    per_package: int = Field(default=4000, gt=0)
    cache: Path = Path("outputs/corpus")


class MixConfig(Section):
    """Shares of mid-training tokens; they must sum to 1."""

    code: float = 0.45
    fim: float = 0.15
    repair: float = 0.40

    @model_validator(mode="after")
    def _sums_to_one(self) -> MixConfig:
        if abs(self.code + self.fim + self.repair - 1) > 1e-6:
            raise ValueError("the shares in [mix] must sum to 1")
        return self


class ShapesConfig(Section):
    """Shares of the episode shapes of supervised fine-tuning; they must sum to 1."""

    blind: float = 0.35
    tested: float = 0.35
    recovers: float = 0.20
    no_match: float = 0.02
    no_change: float = 0.0
    gives_up: float = 0.08

    @model_validator(mode="after")
    def _sums_to_one(self) -> ShapesConfig:
        if abs(sum(self.model_dump().values()) - 1) > 1e-6:
            raise ValueError("the shares in [shapes] must sum to 1")
        return self


class DocumentsConfig(Section):
    """Prompts with documents instead of repair episodes, for a `share` of the tokens: cross-file retrieval, with from
    `least` to `most` excerpts of at most `chars` characters, and up to `questions` prompts that see them. In a share
    `own` of the samples each document sees itself only, as the engine's documents do; there the loss has, by weight
    `kl`, the divergence from the same weights with all documents visible to each other."""

    least: int = Field(default=4, ge=2)
    most: int = Field(default=10, le=30)
    chars: int = Field(default=320, ge=80)
    questions: int = Field(default=4, gt=0)
    kinds: dict[str, float] = Field(dict(KINDS), description="weights of the kinds of questions")
    own: float = Field(default=0.5, ge=0, le=1)
    kl: float = Field(default=1.0, ge=0)
    share: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _possible(self) -> DocumentsConfig:
        if self.least > self.most:
            raise ValueError(f"documents.least = {self.least} is more than documents.most = {self.most}")
        if unknown := sorted(self.kinds.keys() - KINDS.keys()):
            raise ValueError(f"unknown kind of question {unknown[0]!r}; known: {', '.join(KINDS)}")
        if not sum(self.kinds.values()) > 0 or min(self.kinds.values()) < 0:
            raise ValueError("the weights in documents.kinds must not be negative, and one of them above 0")
        return self

    def options(self) -> RetrievalOptions:
        """What the samples of cross-file retrieval are made by."""
        return RetrievalOptions(self.least, self.most, self.chars, self.questions, self.kinds)


class OptimConfig(Section):
    """AdamW with decoupled weight decay; the schedule is linear warm-up, a plateau, and a decay to zero. The schedule
    runs on max(tokens / `tokens`, elapsed / `max_minutes`), so a run ends on time with a decayed learning rate however
    busy the machine is. Without `max_minutes` it depends on tokens alone and the run is reproducible."""

    tokens: int | None = option(None, "padding included; default: all of data.files, or 10 million of a corpus", gt=0)
    max_minutes: float | None = option(None, "the learning rate has decayed by then", gt=0)
    batch: int = option(12, "rows of an optimizer step", gt=0)
    micro_batch: int | None = option(None, "rows computed at once; default: all of a step", gt=0)
    length: int = option(512, "tokens of a row", gt=8)
    packing: Literal["auto", "isolated", "crossing", "none"] = option(
        "auto", "examples share rows and see only themselves, or those before them, too; or each has a row; auto: "
        "isolated where the architecture can, else none",
    )  # fmt: skip
    lr: float = option(2e-3, "learning rate of the plateau", gt=0)
    warmup: float = option(0.02, "share of the run in which the learning rate rises", ge=0, lt=1)
    decay: float = option(0.5, "share of the run in which it falls to 0", gt=0, le=1)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = option(1.0, "largest norm of the gradient", gt=0)
    router_aux: float = option(0.01, "weight of the loss that balances routers with a softmax", ge=0)
    device: str = option("cpu", "torch device, e.g. cuda")
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "compute; auto: the type of the checkpoint")
    lora: LoraConfig | None = option(None, "train adapters (LoRA), not the weights; what is written is the sum")
    activation_checkpointing: bool = option(False, "of a layer keep its input alone, and compute the rest again")
    offload_optimizer: bool = option(False, "master weights and moments are in the host's memory; needs a GPU")
    compile: bool = option(False, "torch.compile; needs packing = crossing, whose passes all have one shape")
    threads: int = option(2, "of the CPU", gt=0)
    checkpoint_minutes: float = option(10.0, "between checkpoints", gt=0)
    log_every: int = option(10, "steps between two lines of metrics.jsonl", gt=0)

    @model_validator(mode="after")
    def _possible(self) -> OptimConfig:
        if self.compile and self.packing != "crossing":
            raise ValueError(
                'a compiled step needs passes of one shape: set optim.packing to "crossing", or optim.compile to false'
            )
        if self.compile and self.lora is not None:
            raise ValueError("a compiled step has no adapters: drop optim.compile or optim.lora")
        if self.offload_optimizer and self.device == "cpu":
            raise ValueError('optim.device = "cpu" is the host: drop optim.offload_optimizer')
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise ValueError(f"optim.micro_batch = {self.micro_batch} must divide optim.batch = {self.batch}")
        return self

    @property
    def corpus_tokens(self) -> int:
        """Tokens to make from a corpus, which has no end."""
        return self.tokens or 10_000_000


class DataConfig(Section):
    """Files in place of the corpus: rows of `messages` (OpenAI's format), ATIF trajectories, and, in mid-training, rows
    of `text`. Rows that cannot be used are counted and named in output/data.json."""

    files: tuple[Path, ...] = Field(min_length=1, description=".jsonl and .json files, or folders of them")
    held_out: tuple[Path, ...] = option((), "files whose loss is measured with every checkpoint")
    epochs: int = option(1, "times that every row is seen", gt=0)
    min_reward: float | None = option(None, "of trajectories that are learned from")


class _Stage(Section):
    output: Path
    seed: int = 0
    corpus: CorpusConfig = CorpusConfig()
    optim: OptimConfig = OptimConfig()


class MidtrainConfig(_Stage):
    """Mid-training on code: of the model of a folder, or of a new one (its shape) with a tokenizer of its own. With
    `data`, on its texts and conversations instead, of which every token is learned."""

    stage: Literal["midtrain"] = "midtrain"
    model: ModelFolder | NewModelConfig = NewModelConfig()
    mix: MixConfig = MixConfig()
    data: DataConfig | None = None

    @model_validator(mode="after")
    def _has_a_tokenizer(self) -> MidtrainConfig:
        if self.data is not None and isinstance(self.model, NewModelConfig):
            raise ValueError("a new model's tokenizer is made from the corpus: give a model folder to train on data")
        _refuse_adapters(self.model, self.optim)
        return self


class DistillConfig(Section):
    """`teacher` is a model folder of the same vocabulary; `share` of the loss is the divergence from it."""

    teacher: ModelFolder
    share: float = Field(default=0.5, gt=0, le=1)


class SftConfig(_Stage):
    """`model` is the folder of the model to start from, or the name of a bundled one. It learns from `data`, or from
    repair episodes of the corpus; functions of more than `max_lines` lines are left out of these. With `documents`,
    rows of batch * length tokens hold prompts with documents, too. With `distill` it also learns from a teacher."""

    stage: Literal["sft"] = "sft"
    model: ModelFolder
    data: DataConfig | None = None
    distill: DistillConfig | None = None
    shapes: ShapesConfig = ShapesConfig()
    operators: dict[str, float] = Field(
        WEIGHTS, description="weights of the mutation operators; absent ones are unused"
    )
    max_lines: int = Field(default=30, ge=3)
    documents: DocumentsConfig | None = None

    @field_validator("operators")
    @classmethod
    def _known(cls, operators: dict[str, float]) -> dict[str, float]:
        if unknown := sorted(operators.keys() - WEIGHTS.keys()):
            raise ValueError(f"unknown operator {unknown[0]!r}; known: {', '.join(WEIGHTS)}")
        return operators

    @model_validator(mode="after")
    def _one_kind(self) -> SftConfig:
        if self.documents is None:
            return self
        # Every row has a mask of its own, and each would be compiled.
        if self.optim.compile:
            raise ValueError("prompts with documents are trained without compilation: set optim.compile to false")
        if self.data is not None or self.distill is not None:
            raise ValueError("prompts with documents come from the corpus, without a teacher: drop data and distill")
        return self


class PhaseConfig(Section):
    """A part of a run: its share of the tokens, the most tokens that an example in it may have, and the share of the
    examples whose names are replaced by others, so that they can't be known by heart."""

    share: float = Field(gt=0, le=1)
    longest: int = Field(gt=0)
    renamed: float = Field(default=0.0, ge=0, le=1)


class ApplyConfig(Section):
    """Fine-tuning on applied edits. `model` is the folder to start from, or the shape of a new model, which has the
    teacher's tokenizer; `data` and `held_out` are tables that `etude tasks fast-apply` made; `format` is how edits are
    answered (edits/formats.py); the phases follow each other, and their shares sum to 1."""

    stage: Literal["apply"] = "apply"
    output: Path
    seed: int = 0
    model: ModelFolder | NewModelConfig
    data: Path
    held_out: Path
    format: Literal["rewrite", "search-replace", "udiff"] = "rewrite"
    distill: DistillConfig | None = None
    measured: int = Field(default=64, gt=0, description="held-out edits that are measured with every checkpoint")
    context: int | None = Field(default=None, gt=0, description="max_position_embeddings of the result, if it shrinks")
    phases: tuple[PhaseConfig, ...]
    optim: OptimConfig = OptimConfig()

    @model_validator(mode="after")
    def _fits(self) -> ApplyConfig:
        if abs(sum(phase.share for phase in self.phases) - 1) > 1e-6:
            raise ValueError("the shares of [[phases]] must sum to 1")
        if any(phase.longest > self.optim.length for phase in self.phases):
            raise ValueError("no phase may have longer examples than optim.length")
        if isinstance(self.model, NewModelConfig) and self.distill is None:
            raise ValueError("a new model takes its tokenizer from a teacher: give distill.teacher, or a model folder")
        _refuse_adapters(self.model, self.optim)
        return self


def _refuse_adapters(model: Path | NewModelConfig, optim: OptimConfig) -> None:
    if isinstance(model, NewModelConfig) and optim.lora is not None:
        raise ValueError("adapters are added to what a model has learned: drop optim.lora, or give a model folder")


def load(path: Path) -> MidtrainConfig | SftConfig | ApplyConfig:
    """Read a stage's TOML file. Raises ValueError for an unknown stage, an unknown key or a bad value."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    kinds = {"midtrain": MidtrainConfig, "sft": SftConfig, "apply": ApplyConfig}
    stage = table.get("stage")
    if stage not in kinds:
        raise ValueError(f"{path.name}: stage must be one of {', '.join(kinds)}, not {stage!r}")
    return kinds[stage].model_validate(table)
