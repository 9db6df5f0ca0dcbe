"""Configuration of the stages before reinforcement learning. No torch here."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from etude.config import LoraConfig, MeshConfig, Section, check_device_of_ranks, find_model
from etude.config.sections import NAME, ChatTemplateOrNone, option
from etude.corpus import RETRIEVAL_KINDS, RetrievalOptions
from etude.errors import UserError


def _model_folder(value: Any) -> Any:
    """The folder of a named model; any other path unchanged, since it may be made later. The text decides: `./nano` is
    a folder here, although as a path it would equal the name."""
    try:
        return str(find_model(value)) if isinstance(value, str) else value
    except UserError:
        return value


ModelFolder = Annotated[Path, BeforeValidator(_model_folder)]
LR = 2e-3  # for a new model
FOLDER_LR = 2e-5  # for a trained model; ten times as much for adapters, which begin at zero


class FolderModelConfig(Section):
    """A folder with the model that training continues from."""

    path: ModelFolder = Field(description="HF folder, run folder, GGUF file, or the name of a model such as nano")
    origin: Path | None = option(None, "written by etude: what `path` was made from in the user's cache")
    chat_template: ChatTemplateOrNone = option(None, "in place of the model's own: a Jinja file, or chatml-hermes")


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


def _kind_of_model(model: Any) -> str:
    return "folder" if isinstance(model, FolderModelConfig) or (isinstance(model, dict) and "path" in model) else "new"


AnyModel = Annotated[
    Annotated[FolderModelConfig, Tag("folder")] | Annotated[NewModelConfig, Tag("new")], Discriminator(_kind_of_model)
]


class DocumentsConfig(Section):
    """Prompts with documents, for a `share` of the tokens; the others are rows of `data`. Cross-file retrieval in
    `repositories`, with `least` to `most` excerpts of at most `chars` characters, and up to `questions` prompts that
    see them. In a share `own` of the samples each document sees only itself, as in the engine; their loss includes,
    with weight `kl`, the divergence from the same weights with all documents visible to each other."""

    repositories: tuple[Path, ...] = Field(min_length=1, description="folders of Python files, one for a repository")
    held_out: tuple[Path, ...] = option((), "folders whose questions are measured with every checkpoint")
    least: int = Field(default=4, ge=2)
    most: int = Field(default=10, le=30)
    chars: int = Field(default=320, ge=80)
    questions: int = Field(default=4, gt=0)
    kinds: dict[str, float] = Field(dict(RETRIEVAL_KINDS), description="weights of the kinds of questions")
    own: float = Field(default=0.5, ge=0, le=1)
    kl: float = Field(default=1.0, ge=0)
    share: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _possible(self) -> DocumentsConfig:
        if self.least > self.most:
            raise ValueError(f"documents.least = {self.least} is more than documents.most = {self.most}")
        if unknown := sorted(self.kinds.keys() - RETRIEVAL_KINDS.keys()):
            raise ValueError(f"unknown kind of question {unknown[0]!r}; known: {', '.join(RETRIEVAL_KINDS)}")
        if not sum(self.kinds.values()) > 0 or min(self.kinds.values()) < 0:
            raise ValueError("the weights in documents.kinds must not be negative, and one of them above 0")
        return self

    def options(self) -> RetrievalOptions:
        """The options for samples of cross-file retrieval."""
        return RetrievalOptions(self.least, self.most, self.chars, self.questions, self.kinds)


class OptimConfig(Section):
    """AdamW with decoupled weight decay; the schedule is linear warm-up, a plateau, and a decay to zero. The schedule
    runs on max(tokens / `tokens`, elapsed / `minutes`), so a run ends on time with a decayed learning rate on a machine
    of any speed. Without `minutes` it depends on tokens alone and the run is reproducible."""

    tokens: int | None = option(
        None, "padding included; default: all of the data; of documents and edits 10 million", gt=0
    )
    minutes: float | None = option(None, "the learning rate has decayed by then", gt=0)
    batch: int = option(12, "rows of an optimizer step", gt=0)
    micro_batch: int | None = option(
        None, "rows computed at once; default: all of a step, or a data rank's share", gt=0
    )
    length: int = option(512, "tokens of a row", gt=8)
    packing: Literal["auto", "isolated", "crossing", "none"] = option(
        "auto",
        "examples share rows and see only themselves, or those before them, too; or each has a row; auto: "
        "isolated where the architecture can, else none",
    )
    lr: float = option(FOLDER_LR, "learning rate of the plateau; 2e-4 for adapters, 2e-3 for a new model", gt=0)
    warmup: float = option(0.02, "share of the run in which the learning rate rises", ge=0, lt=1)
    decay: float = option(0.5, "share of the run in which it falls to 0", gt=0, le=1)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    grad_clip: float = option(1.0, "largest norm of the gradient", gt=0)
    router_aux: float = option(0.01, "weight of the loss that balances routers with a softmax", ge=0)
    device: str = option("cpu", "torch device, e.g. cuda")
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "compute; auto: the type of the checkpoint")
    lora: LoraConfig | None = option(None, "train adapters (LoRA), not the weights; what is written is the sum")
    activation_checkpointing: bool = option(False, "of a layer keep its input alone, and compute the rest again")
    offload_optimizer: bool = option(False, "master weights and moments are in the host's memory; needs a GPU")
    compile: bool = option(False, "torch.compile; needs packing = crossing, whose passes all have one shape")
    threads: int = option(2, "of the CPU", gt=0)
    mesh: MeshConfig = option(MeshConfig(), "ranks that train together (docs/ranks.md)")
    collective_seconds: float = option(600.0, "deadline of a rank's wait for the other ranks", gt=0)
    checkpoint_minutes: float = option(10.0, "between checkpoints", gt=0)
    log_every: int = option(10, "steps between two lines of metrics.jsonl", gt=0)

    @model_validator(mode="after")
    def _possible(self) -> OptimConfig:
        if self.compile and self.packing != "crossing":
            raise ValueError(
                'a compiled step needs passes of one shape: set trainer.packing to "crossing", or drop trainer.compile'
            )
        if self.compile and self.lora is not None:
            raise ValueError("a compiled step has no adapters: drop trainer.compile or trainer.lora")
        if self.offload_optimizer and self.device == "cpu":
            raise ValueError('trainer.device = "cpu" is the host: drop trainer.offload_optimizer')
        if self.compile and self.mesh.ranks > 1:
            raise ValueError("trainer.compile is for one rank: drop it, or trainer.mesh")
        check_device_of_ranks(self.device, self.mesh)
        if self.mesh.context > 1 and self.packing in ("crossing", "none"):
            raise ValueError(
                f'ranks compute only isolated rows together: drop trainer.packing = "{self.packing}", or set '
                "trainer.mesh.context to 1"
            )
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise ValueError(f"trainer.micro_batch = {self.micro_batch} must divide trainer.batch = {self.batch}")
        return self

    @property
    def made_tokens(self) -> int:
        """Number of tokens to make of functions or edits, which has no end."""
        return self.tokens or 10_000_000


class DataSourceConfig(Section):
    """A source of rows among others: a file, a folder, or a corpus folder."""

    path: Path = Field(description=".jsonl or .json file, a folder of them, or a corpus folder")
    weight: float = option(1.0, "its share of the tokens is weight / sum of the weights", gt=0)
    epochs: int = option(4, "times that it is read at most", gt=0)
    weights: dict[str, float] = Field({}, description="of a corpus folder's rows, by their `source`; 0 leaves out")

    @field_validator("weights")
    @classmethod
    def _shares(cls, weights: dict[str, float]) -> dict[str, float]:
        if weights and (min(weights.values()) < 0 or not sum(weights.values()) > 0):
            raise ValueError("the weights must not be negative, and one of them above 0")
        return weights


class DataConfig(Section):
    """Files of rows: rows of `messages` (OpenAI's format), ATIF trajectories, and, in mid-training, rows
    of `text` or of `prefix`, `suffix` and `middle`; or `sources` of such rows, mixed by weight. Unusable rows are
    counted and named in data.json of the run folder."""

    files: tuple[Path, ...] = option((), ".jsonl and .json files, or folders of them")
    sources: tuple[DataSourceConfig, ...] = option((), "in place of files: [[data.sources]]")
    held_out: tuple[Path, ...] = option((), "files whose loss is measured with every checkpoint")
    epochs: int = option(1, "times that every row of files is seen", gt=0)
    min_reward: float | None = option(None, "of trajectories that are learned from")
    fim: Literal["tokens", "text", "skip"] = option(
        "tokens", "rows of fill-in-the-middle: in the tokenizer's tokens for it, as plain text, or left out"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> DataConfig:
        if bool(self.files) == bool(self.sources):
            raise ValueError("data has either files or sources ([[data.sources]])")
        if self.sources and self.epochs != 1:
            raise ValueError("data.epochs is that of data.files: give each of data.sources its own epochs")
        if len({source.path for source in self.sources}) < len(self.sources):
            raise ValueError("data.sources has a path twice")
        return self


def _name(default: str) -> Any:
    return option(default, "run folder: outputs/NAME", pattern=NAME)


class _Stage(Section):
    """The common options of the stages."""

    seed: int = 0
    trainer: OptimConfig = OptimConfig()

    @model_validator(mode="before")
    @classmethod
    def _rate_of_the_model(cls, data: Any) -> Any:
        """The default learning rate for the kind of model and training, unless it is configured."""
        if not isinstance(data, dict):
            return data
        table = data.get("trainer", {})
        configured = table.model_dump(exclude_unset=True) if isinstance(table, OptimConfig) else table
        if not isinstance(configured, dict):
            return data
        model = data.get("model", cls.model_fields["model"].get_default())
        rate = LR if _kind_of_model(model) == "new" else FOLDER_LR * (1 if configured.get("lora") is None else 10)
        return data | {"trainer": {"lr": rate} | configured}


class MidtrainConfig(_Stage):
    """Mid-training of a folder's model on the texts and conversations of `data`, of which every token is learned."""

    stage: Literal["midtrain"] = "midtrain"
    name: str = _name("midtrain")
    model: FolderModelConfig
    data: DataConfig


class DistillConfig(Section):
    """`teacher` is a model folder of the same vocabulary; `share` is the weight of the divergence from it in the
    loss."""

    teacher: ModelFolder
    share: float = Field(default=0.5, gt=0, le=1)


class SftConfig(_Stage):
    """`model.path` is the model to start from. It learns from `data`, in rows of their own. With `documents`, rows of
    batch * length tokens hold prompts with documents. With `distill` it also learns from a teacher."""

    stage: Literal["sft"] = "sft"
    name: str = _name("sft")
    model: FolderModelConfig
    data: DataConfig | None = None
    distill: DistillConfig | None = None
    documents: DocumentsConfig | None = None

    @model_validator(mode="after")
    def _possible(self) -> SftConfig:
        if self.documents is None:
            if self.data is None:
                raise ValueError('give the files to learn from: [data] files = ["chats.jsonl"], or [documents]')
            return self
        # Every row has its own mask, and each would be compiled.
        if self.trainer.compile:
            raise ValueError("prompts with documents are trained without compilation: set trainer.compile to false")
        if self.trainer.mesh.ranks > 1:
            raise ValueError("prompts with documents are one row of a step, for one rank: drop trainer.mesh")
        if self.distill is not None:
            raise ValueError("prompts with documents have no teacher: drop distill")
        if (self.documents.share < 1) != (self.data is not None):
            raise ValueError("data is for the tokens without documents: give it with documents.share below 1")
        if self.data is not None and self.data.held_out:
            raise ValueError("held-out prompts are measured, and no rows: give documents.held_out, not data.held_out")
        return self


class PhaseConfig(Section):
    """A phase of a run: its share of the tokens, the largest number of tokens of an example, and the share of examples
    whose names are replaced by others, so that they cannot be memorised."""

    share: float = Field(gt=0, le=1)
    longest: int = Field(gt=0)
    renamed: float = Field(default=0.0, ge=0, le=1)


class ApplyConfig(_Stage):
    """Fine-tuning on applied edits. `model.path` is the model to start from, or `model` the shape of a new one, which
    has the teacher's tokenizer. `data` and `held_out` are tables made by `etude tasks fast-apply`. The phases follow
    each other, and their shares sum to 1."""

    stage: Literal["apply"] = "apply"
    name: str = _name("apply")
    model: AnyModel
    data: Path
    held_out: Path
    distill: DistillConfig | None = None
    measured: int = Field(default=64, gt=0, description="held-out edits that are measured with every checkpoint")
    context: int | None = Field(default=None, gt=0, description="max_position_embeddings of the result, if it shrinks")
    phases: tuple[PhaseConfig, ...]

    @model_validator(mode="after")
    def _fits(self) -> ApplyConfig:
        if abs(sum(phase.share for phase in self.phases) - 1) > 1e-6:
            raise ValueError("the shares of [[phases]] must sum to 1")
        if any(phase.longest > self.trainer.length for phase in self.phases):
            raise ValueError("no phase may have longer examples than trainer.length")
        if isinstance(self.model, NewModelConfig) and self.distill is None:
            raise ValueError("a new model takes its tokenizer from a teacher: give distill.teacher, or model.path")
        _refuse_adapters(self.model, self.trainer)
        return self


def _refuse_adapters(model: FolderModelConfig | NewModelConfig, trainer: OptimConfig) -> None:
    if isinstance(model, NewModelConfig) and trainer.lora is not None:
        raise ValueError("adapters are added to what a model has learned: drop trainer.lora, or give model.path")


def load(path: Path) -> MidtrainConfig | SftConfig | ApplyConfig:
    """Read a stage's TOML file. Raises ValueError for an unknown stage, an unknown key or a bad value."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    kinds = {"midtrain": MidtrainConfig, "sft": SftConfig, "apply": ApplyConfig}
    stage = table.get("stage")
    if stage not in kinds:
        raise ValueError(f"{path.name}: stage must be one of {', '.join(kinds)}, not {stage!r}")
    return kinds[stage].model_validate(table)
